"""Which runner computes: on a CPU one that computes at once, on a GPU one that does not wait."""

from common.config import NodeConfig
from common.engine.attention.choice import make_attention
from common.engine.cuda.runner import CudaModelRunner
from common.engine.cuda.sizes import default_sizes
from common.engine.cuda.stream import CudaStream
from common.engine.device import AttentionName, choose_attention
from common.engine.loader import LoadedModel
from common.engine.lora.pool import LoraPool
from common.engine.runner import ModelRunner
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from deploy.default_model import cache_root

EngineRunner = ModelRunner | CudaModelRunner


def make_runner(
    config: NodeConfig,
    model: LoadedModel,
    cache: PagedKVCache,
    max_model_len: int,
    lora: LoraPool,
    grammars: GrammarStore | None,
    *,
    draws: bool,
    profiling: bool = False,
) -> EngineRunner:
    """Over `cache`, on the model's device. `profiling`: it runs one batch and is thrown away."""
    attention = choose_attention(config.attention, model.device)
    most = config.max_running_requests
    if model.device.type != "cuda":
        return ModelRunner(
            model, cache, most, max_model_len, lora, grammars, attention=attention, draws=draws
        )
    spec = model.model.spec
    return CudaModelRunner(
        model,
        cache,
        make_attention(
            attention,
            cache,
            spec.num_heads,
            spec.windows,
            model.dtype,
            cache_root() / "attention-tuning.json",
            measure=config.tune_attention and not profiling,
        ),
        CudaStream(model.device),
        most,
        max_model_len,
        lora,
        grammars,
        draws=draws,
        graph_sizes=() if profiling else graph_sizes(config, attention),
        overlap=config.overlap,
        max_tokens=config.chunk_size + most,
    )


def graph_sizes(config: NodeConfig, attention: AttentionName) -> tuple[int, ...]:
    """Batch sizes for which decode steps are captured; torch's own attention cannot be."""
    if attention == "torch" or not config.cuda_graphs:
        return ()
    return config.cuda_graph_sizes or default_sizes(config.max_running_requests)
