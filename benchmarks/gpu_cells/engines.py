"""Runners as a node on a GPU makes them; in a dry run over the stream that a CPU has for tests."""

from collections.abc import Sequence

from common.engine.attention.choice import make_attention
from common.engine.cuda.runner import CudaModelRunner
from common.engine.cuda.stream import CudaStream, Stream
from common.engine.loader import LoadedModel
from common.kv_cache.storage import PagedKVCache
from tests.late_stream import LateStream


def make_runner(
    model: LoadedModel,
    cache: PagedKVCache,
    max_slots: int,
    max_model_len: int,
    graph_sizes: Sequence[int],
) -> CudaModelRunner:
    """A warm runner with Triton's attention, which has captured decode steps of `graph_sizes` rows;
    without any it launches all steps piece by piece. The model's `ops` are Triton's, and `cache`
    has a scratch page."""
    spec = model.model.spec
    attention = make_attention("triton", cache, spec.num_heads, spec.windows, model.dtype)
    on_gpu = model.device.type == "cuda"
    stream: Stream = CudaStream(model.device) if on_gpu else LateStream(records=False)
    runner = CudaModelRunner(
        model, cache, attention, stream, max_slots, max_model_len, graph_sizes=graph_sizes
    )
    runner.warm_up()
    return runner
