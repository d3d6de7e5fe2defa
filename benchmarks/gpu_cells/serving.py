"""One prefill and one decode node on the same card, as processes, with clients in front of them."""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_cells.budget import repetitions
from benchmarks.gpu_cells.figures import Figure, Target
from benchmarks.gpu_cells.parity import WORST_SHORTFALL, Answer, TorchOracle
from benchmarks.gpu_cells.random_checkpoint import fitting, write_checkpoint
from benchmarks.gpu_cells.scale import Cells, Scale, Setting, with_layers
from common.engine.spec import ModelSpec
from deploy.default_model import resolve_model
from deploy.errors import StartupError
from tests.cluster_fixture import Cluster, cluster
from tests.integration.client import client
from tests.tiny_models import VOCAB_SIZE

RANDOM = "random"
START_S = 240.0
SMALL, BIG = "small model", "8B-shaped model"


@dataclass(frozen=True, slots=True)
class Served:
    """A model's folder, and what to say of it."""

    folder: Path
    described: str
    spec: ModelSpec | None = None
    """None where it was not made here."""


def cells(scale: Scale) -> Cells:
    # In a dry run both are the same tiny model.
    small: Cells = {} if scale.dry else {f"1P1D, {SMALL}": _small}
    return {**small, f"1P1D, {BIG}": _big}


def _small(setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    began = time.monotonic()
    with small_model(setting) as model:
        return _serve(setting, SMALL, model, allowance_s - (time.monotonic() - began))


def _big(setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    began = time.monotonic()
    with big_model(setting) as model:
        return _serve(setting, BIG, model, allowance_s - (time.monotonic() - began))


# ---------------------------------------------------------------- models


@contextmanager
def small_model(setting: Setting) -> Iterator[Served]:
    """The one that was named, or random weights in the default model's shape where it cannot be
    had (no network, and not in the cache)."""
    why = "asked for"
    if setting.model != RANDOM:
        try:
            folder = resolve_model(setting.model)
        except StartupError as error:
            why = str(error)
        else:
            yield Served(folder, setting.model)
            return
    with _written(setting, setting.scale.small) as folder:
        yield Served(folder, f"random weights in SmolLM2's shape ({why})", setting.scale.small)


@contextmanager
def big_model(setting: Setting) -> Iterator[Served]:
    """Random weights in the shape of an 8B model, cut to the layers that are to be served and that
    the disk has room for."""
    whole = setting.scale.big
    spec = fitting(
        with_layers(whole, setting.scale.served_layers), served_dtype(setting),
        Path(setting.scratch),
    )  # fmt: skip
    described = f"random weights, {spec.num_layers} of {whole.num_layers} layers"
    with _written(setting, spec) as folder:
        yield Served(folder, described, spec)


def served_dtype(setting: Setting) -> torch.dtype:
    dtype = getattr(torch, setting.scale.served_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def _written(setting: Setting, spec: ModelSpec) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pdserve-random-", dir=setting.scratch) as name:
        folder = Path(name) / "model"
        write_checkpoint(spec, served_dtype(setting), folder, str(setting.device))
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()  # what serves is another process
        yield folder


# ---------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True)
class Timed:
    """One request's times in ms (`tpot`: the mean between its tokens), and what it was told."""

    ttft: float
    tpot: float
    answer: Answer


@contextmanager
def one_pair(setting: Setting, model: Served, **flags: object) -> Iterator[Cluster]:
    """1P1D on the device; each node's pool has room for what the streams hold, twice."""
    scale = setting.scale
    tokens = 2 * max(scale.streams) * (scale.prompt + scale.output)
    given: dict[str, object] = {
        "dtype": scale.served_dtype,
        "num_pages": -(-tokens // scale.page_size),
        "page_size": scale.page_size,
        "max_model_len": scale.prompt + scale.output + scale.page_size,
        "chunk_size": 2048,
        "start_timeout_s": START_S,
        "restart": False,
        **device_flags(setting),
        **flags,
    }
    with cluster(model.folder, 1, 1, **given) as running:
        yield running


def device_flags(setting: Setting) -> dict[str, object]:
    """Flags of nodes: where they compute."""
    if setting.device.type == "cuda":
        return {"device": "cuda", "attention": "triton"}
    return {"device": "cpu", "attention": "torch"}


def _serve(setting: Setting, name: str, model: Served, allowance_s: float) -> Mapping[str, Figure]:
    until = time.monotonic() + allowance_s
    figures: dict[str, Figure] = {}
    answers: list[Answer] = []
    with one_pair(setting, model) as running:
        for left, streams in zip(
            range(len(setting.scale.streams), 0, -1), setting.scale.streams, strict=True
        ):
            seconds = (until - time.monotonic()) / left
            timed = asyncio.run(_ask(running.url, setting.scale, streams, seconds))
            figures |= _figures(setting, name, model, streams, timed)
            answers += [timed[-1][0].answer]
    # Only now, when the nodes have given the card's memory back.
    return {**figures, **_compare(setting, name, model, answers)}


def _compare(
    setting: Setting, name: str, model: Served, answers: list[Answer]
) -> Mapping[str, Figure]:
    """How much worse than the best, in the torch backend's eyes, were tokens that were served?"""
    scale = setting.scale
    longest = scale.prompt + scale.output
    oracle = TorchOracle(model.folder, scale.served_dtype, setting.device, longest)
    shortfalls = [nats for answer in answers for nats in oracle.shortfalls(answer)]
    best = sum(nats == 0 for nats in shortfalls)
    figure = Figure(
        unit="nats",
        values=[max(shortfalls)],
        bound=WORST_SHORTFALL,
        bound_name="rounding",
        target=Target("at most", 1.0),
        note=f"log probability below the best token's, by the torch backend; {best} of "
        f"{len(shortfalls)} served tokens are its best",
    )
    return {f"1P1D, {name}: worst served token": figure}


async def _ask(url: str, scale: Scale, streams: int, seconds: float) -> list[list[Timed]]:
    """Rounds of `streams` requests at a time; the first round does not count."""
    chance = random.Random(streams)
    async with client(url) as session:

        async def one() -> Timed:
            prompt = [chance.randrange(3, VOCAB_SIZE) for _ in range(scale.prompt)]
            stamps: list[float] = []
            began = time.perf_counter()
            output = await session.stream(
                prompt, scale.output, lambda _: stamps.append(time.perf_counter())
            )
            between = (stamps[-1] - stamps[0]) / max(1, scale.output - 1)
            first = stamps[0] - began
            return Timed(first * 1e3, between * 1e3, Answer(prompt, output))

        async def round_of() -> list[Timed]:
            return list(await asyncio.gather(*(one() for _ in range(streams))))

        began = time.monotonic()
        await round_of()
        one_s = time.monotonic() - began
        wanted = min(scale.repetitions, 8)
        count = repetitions(seconds - one_s, one_s, wanted)
        return [await round_of() for _ in range(count)]


def _figures(
    setting: Setting, name: str, model: Served, streams: int, rounds: list[list[Timed]]
) -> Mapping[str, Figure]:
    scale = setting.scale
    lengths = f"{scale.prompt} in, {scale.output} out"
    note = f"{model.described}, {scale.served_dtype}, {lengths}, both nodes on {setting.device}"
    cell = f"1P1D, {name}, {streams} stream{'s' if streams > 1 else ''}"
    ttft = [statistics.median(timed.ttft for timed in part) for part in rounds]
    tpot = [statistics.median(timed.tpot for timed in part) for part in rounds]
    return {
        f"{cell}: TTFT": Figure(unit="ms", values=ttft, note=note),
        f"{cell}: TPOT": Figure(unit="ms", values=tpot),
    }
