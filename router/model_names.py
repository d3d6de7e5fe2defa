"""What clients call the model and its adapters. Pure.

    model="base"  "base:adapter"  "adapter"          lora_path="adapter" or the path it came from

`lora_path` is SGLang's; it may be a list with one for each prompt, and null in it says nothing.
What `model` and `lora_path` say must agree.
"""

from collections.abc import Sequence

from common.messages import Adapter
from router.adapters import AdapterCatalogue, AdapterState, Entry
from router.errors import invalid, no_adapter, not_found, unavailable

LoraPath = str | list[str | None] | None


class ModelNames:
    """Names of one model and of the adapters that the cluster has now."""

    def __init__(self, served: str, also: str, adapters: AdapterCatalogue) -> None:
        """`also`: a second name of the model, where it was read from."""
        self.served = served
        self._names = (served, also)
        self._adapters = adapters

    def is_base(self, name: str) -> bool:
        return name in self._names

    def entry(self, model: str | None) -> Entry | None:
        """The adapter that a model's name means; None for the base model itself.

        Raises:
            ApiError: 404; 503 while no node has read it yet.
        """
        if not model or self.is_base(model):
            return None
        name = model
        for base in self._names:
            if model.startswith(f"{base}:"):
                name = model[len(base) + 1 :]
        entry = self._adapters.get(name)
        if entry is None or entry.state not in (AdapterState.READY, AdapterState.WANTED):
            message = f"the model {model[:300]!r} does not exist"
            raise not_found(message, "model", "model_not_found")
        return _readable(entry)

    def adapters_of(
        self, model: str | None, lora_path: LoraPath, num_prompts: int
    ) -> list[Adapter | None]:
        """The adapter of each prompt; None for the base model.

        Raises:
            ApiError: 400, 404 or 503.
        """
        named = self.entry(model)
        wishes: Sequence[str | None]
        if isinstance(lora_path, list):
            wishes = lora_path
            if len(wishes) != num_prompts:
                message = f"lora_path: {len(wishes)} given for {num_prompts} prompts"
                raise invalid(message, "lora_path")
        else:
            wishes = [lora_path] * num_prompts
        return [self._agreed(named, wish) for wish in wishes]

    def _agreed(self, named: Entry | None, wish: str | None) -> Adapter | None:
        entry = self._of_path(wish) if wish else named
        if named is not None and entry is not named:
            message = f"model names the adapter {named.name!r}, lora_path another: {wish!r:.300}"
            raise invalid(message, "lora_path")
        return None if entry is None else entry.adapter

    def _of_path(self, wish: str) -> Entry:
        """By name, or by the path it was loaded from."""
        entry = self._adapters.get(wish)
        found = [entry] if entry is not None else self._adapters.from_path(wish)
        usable = [e for e in found if e.state in (AdapterState.READY, AdapterState.WANTED)]
        if len(usable) > 1:
            names = ", ".join(repr(e.name) for e in usable)
            raise invalid(f"lora_path: {names} were loaded from there; give a name", "lora_path")
        if not usable:
            error = no_adapter(wish)
            error.param = "lora_path"
            raise error
        return _readable(usable[0])


def _readable(entry: Entry) -> Entry:
    if entry.state is AdapterState.WANTED:
        message = f"no node has loaded the adapter {entry.name!r} yet"
        raise unavailable(message, "adapter_unavailable")
    return entry
