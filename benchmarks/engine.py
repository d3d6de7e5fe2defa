"""The engine alone, beside what this machine could do at best.

    python -m benchmarks.engine [--model FOLDER_OR_ID] [--dtype bfloat16] [--threads 1]

Without a model, random weights in the shape of SmolLM2-135M: speed does not depend on the values.
Floors are measured in the same run: the time to read all weights once at the rate one large
bfloat16 (or float32) matrix-vector product reads memory (decode), and the model's multiplications
at the rate of a large float32 (or native bfloat16) matrix product (prefill).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from common.engine.cpu import has_native_bfloat16
from common.engine.decoder import Decoder, Weights
from common.engine.linear import LinearFactory
from common.engine.loader import LoadedModel, load_model, resolve
from common.engine.ops import Ops
from common.engine.rope import RopeFrequencies
from common.engine.runner import ModelRunner
from common.engine.spec import ModelSpec
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, Row, SlotInit

PAGE_SIZE = 16
CONTEXT = 300
PREFILL = 256
MAX_LEN = 1024


def smollm2_shape() -> ModelSpec:
    """SmolLM2-135M without its weights."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rms_norm_eps=1e-5,
        eos_token_ids=(2,),
        windows=(None,) * 30,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=True,
        rope_type="default",
        rope_parameters=(("rope_theta", 1e5), ("rope_type", "default")),
    )


def random_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | None = None,
    ops: Ops | None = None,
) -> LoadedModel:
    """Random weights, small enough that activations stay finite; on the CPU if not told else."""
    weights = Weights.empty(spec, dtype, device)
    for tensor in weights.checkpoint_tensors(spec).values():
        tensor.normal_(0.0, 0.02)
    exponents = torch.arange(0, spec.head_dim, 2) / spec.head_dim
    rope = RopeFrequencies(1.0 / 1e5**exponents, 1.0)
    model = Decoder(spec, weights, rope, LinearFactory(), ops)
    return LoadedModel(spec, model, "random", dtype)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of `run` in ms, after one call that does not count."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def read_rate(dtype: torch.dtype) -> float:
    """Bytes a second at which a matrix-vector product reads a matrix far larger than caches."""
    matrix = torch.ones(32768, 2048, dtype=dtype)
    vector = torch.ones(2048, dtype=dtype)
    return matrix.nbytes / median_ms(lambda: torch.mv(matrix, vector), 15) * 1e3


def product_rate(dtype: torch.dtype) -> float:
    """Multiply-adds count two: FLOP a second of a large product in the faster usable dtype."""
    if not has_native_bfloat16():
        dtype = torch.float32
    left, right = torch.ones(256, 1536, dtype=dtype), torch.ones(1536, 3072, dtype=dtype)
    return 2 * 256 * 1536 * 3072 / median_ms(lambda: left @ right, 25) * 1e3


class Bench:
    """One runner whose slots hold `CONTEXT` tokens each."""

    def __init__(self, loaded: LoadedModel, batch_size: int) -> None:
        spec = loaded.spec
        self._pages_each = MAX_LEN // PAGE_SIZE
        num_pages = self._pages_each * (batch_size + 1)
        self._pages = random.Random(0).sample(range(num_pages), num_pages)
        cache = PagedKVCache(
            num_pages=num_pages,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=PAGE_SIZE,
            head_dim=spec.head_dim,
            dtype=loaded.dtype,
        )
        self._runner = ModelRunner(loaded, cache, batch_size + 1, MAX_LEN)
        self._batch_size = batch_size
        self._position = CONTEXT
        for slot in range(batch_size):
            self.prefill(slot, CONTEXT)

    def prefill(self, slot: int, tokens: int) -> None:
        """A whole prompt in one step, with its first token drawn."""
        prompt = [(7 * i + slot) % 1000 for i in range(tokens)]
        pages = self._pages[slot * self._pages_each : (slot + 1) * self._pages_each]
        init = SlotInit(SamplingParams(max_tokens=1, seed=0, temperature=0.0), prompt, [])
        self._runner.launch(Batch((Row(slot, 0, prompt, pages, 0, init),)))

    def spare_prefill(self) -> None:
        """Prefill the slot that never decodes."""
        self.prefill(self._batch_size, PREFILL)

    def decode(self) -> None:
        """One token for every slot."""
        rows = tuple(Row(slot, self._position, [5], [], 1) for slot in range(self._batch_size))
        self._position += 1
        self._runner.launch(Batch(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or Hugging Face id; random weights if not given")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model:
        loaded = load_model(resolve(options.model), options.dtype)
    else:
        loaded = random_model(smollm2_shape(), getattr(torch, options.dtype))
    report(loaded, options.repeats)


def report(loaded: LoadedModel, repeats: int) -> None:
    """Measure and print."""
    spec = loaded.spec
    layer = spec.hidden_size * (
        2 * spec.head_dim * (spec.num_heads + spec.num_kv_heads) + 3 * spec.intermediate_size
    )
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_layers * layer
    rate, flops = read_rate(loaded.dtype), product_rate(loaded.dtype)
    reading = (body + head) * loaded.dtype.itemsize / rate * 1e3
    print(
        f"{loaded.dtype_name}, {torch.get_num_threads()} thread(s), {(body + head) / 1e6:.0f} M "
        f"weights, reads {rate / 1e9:.1f} GB/s, multiplies {flops / 1e9:.0f} GFLOP/s"
    )
    print(f"{'':32}{'ms':>9}{'floor':>9}{'x':>7}")
    prefill_floor = 2 * (PREFILL * body + head) / flops * 1e3
    for batch_size in (1, 8):
        bench = Bench(loaded, batch_size)
        if batch_size == 1:
            measured = median_ms(bench.spare_prefill, max(3, repeats // 3))
            show(f"prefill {PREFILL} tokens", measured, prefill_floor)
        floor = max(reading, 2 * batch_size * (body + head) / flops * 1e3)
        show(f"decode, batch {batch_size}", median_ms(bench.decode, repeats), floor)


def show(what: str, measured: float, floor: float) -> None:
    """One line of the table."""
    print(f"{what:32}{measured:9.1f}{floor:9.1f}{measured / floor:7.2f}")


if __name__ == "__main__":
    main()
