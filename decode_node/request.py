"""What a decode node knows of a request beside what every node does."""

from dataclasses import dataclass, field
from typing import Any

from common.messages import Destination, FirstToken, Generate, Incarnation
from common.plan import Row
from common.request import Req


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeReq(Req):
    prefill: Incarnation
    """Empty: this node computes the prompt itself."""
    prefill_address: str
    first_page: int = 0
    """Logical pages before this one were in the prefix cache: prefill does not write them."""
    deadline: float = float("inf")
    """When the transfer is given up."""
    landed: set[int] = field(default_factory=set)
    drained: bool = False
    """Prefill has said that it writes no more."""
    first_token: FirstToken | None = None
    unsent_pages: list[int] = field(default_factory=list)
    """Pages that the runner's table does not have yet."""

    @classmethod
    def fields_of(cls, generate: Generate, router: Incarnation, now: float) -> dict[str, Any]:
        return Req.fields_of(generate, router, now) | {
            "prefill": generate.prefill_incarnation,
            "prefill_address": generate.prefill_address,
        }

    @property
    def is_local(self) -> bool:
        """No prefill node takes part."""
        return not self.prefill

    def destination(self, weight_version: str) -> Destination:
        """Where prefill shall write its KV, and what decode goes on with."""
        return Destination(
            room=self.room,
            pages=self.pages[self.first_page :],
            first_page=self.first_page,
            weight_version=weight_version,
            adapter=self.adapter_digest,
        )

    def next_row(self, lora_slot: int | None) -> Row:
        """Its share of the next step; what the runner has not been told goes with it.

        `lora_slot`: where its adapter is.
        """
        assert self.slot is not None
        new_pages, self.unsent_pages = tuple(self.unsent_pages), []
        return Row(
            slot=self.slot,
            start=self.num_tokens + self.drawing - 1,
            token_ids=(0,) if self.drawing else (self.output_ids[-1],),
            new_pages=new_pages,
            sample_index=len(self.output_ids) + self.drawing,
            init=self.take_init(),
            lora_slot=lora_slot,
            from_slot=self.drawing > 0,
        )
