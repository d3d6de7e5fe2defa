"""Runners as a node makes them, on the device where the model is."""

from common.engine.loader import LoadedModel
from common.engine.runner import ModelRunner
from common.kv_cache.storage import PagedKVCache
from common.steps import Runner


def make_runner(
    model: LoadedModel, cache: PagedKVCache, max_slots: int, max_model_len: int
) -> Runner:
    """A warm runner with Triton's attention; the model's `ops` are Triton's too."""
    runner = ModelRunner(model, cache, max_slots, max_model_len, attention="triton")
    runner.warm_up()
    return runner
