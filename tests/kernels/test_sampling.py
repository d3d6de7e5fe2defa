"""Draws equal the CPU sampler's token for token, and a float64 reference's also among equals."""

import math
import struct
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.engine.kernels.sampling import (
    COLUMNS,
    DRAW,
    GREEDY,
    SKIP,
    argmax_tokens,
    draw_tokens,
)
from common.engine.philox import uniform
from common.engine.sampler import GREEDY_TEMPERATURE, draw
from common.messages import SamplingParams
from tests.kernels.precision import DEVICE, DTYPES, normal

ROUNDED_OFF = 0.002
"""Of the draws, how many may differ: those whose uniform number is within a few 1e-7 of where one
token ends and the next begins."""


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    index: int

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    def row(self) -> list[int]:
        params = self.params
        top_p = int(params.top_p * 2**64) - 1 if params.top_p < 1 else 0
        min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        mode = GREEDY if self.greedy else DRAW
        signed = [_signed(top_p), _bits(min_p), _signed(params.seed), params.choice, self.index]
        return [mode, _bits(params.temperature), params.top_k, *signed]


def _bits(number: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def cases(count: int, vocab: int, seed: int) -> list[Case]:
    """Every combination of filters comes up, with seeds of all sizes."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def number() -> int:
        word = int(torch.randint(1 << 62, (), generator=generator))
        return int(pick(word % 100, word, word << 1, -word))

    return [
        Case(
            SamplingParams(
                max_tokens=1,
                seed=number(),
                choice=int(pick(0, 1, 7)),
                temperature=pick(0.0, 0.3, 0.7, 1.0, 2.0),
                top_k=int(pick(0, 0, 1, 3, 20, vocab, vocab + 1)),
                top_p=pick(1.0, 1.0, 0.01, 0.3, 0.9, 0.97),
                min_p=pick(0.0, 0.0, 0.01, 0.2, 1.0),
            ),
            int(pick(number() % 9, number() % 5000)),
        )
        for _ in range(count)
    ]


def parameters(rows: list[Case]) -> Tensor:
    return torch.tensor([case.row() for case in rows], device=DEVICE).view(-1, COLUMNS)


def poisoned_tokens(count: int) -> Tensor:
    return torch.full((count,), -7, dtype=torch.int64, device=DEVICE)


def reference(logits: Tensor, case: Case) -> int:
    """In float64 from scaled float32 logits; of equal ones the first comes first."""
    params = case.params
    if case.greedy:
        return int(logits.float().sort(descending=True, stable=True).indices[0])
    scaled = logits.float() / params.temperature
    values, ids = scaled.sort(descending=True, stable=True)
    in_order = params.top_p >= 1.0 and not 0 < params.top_k < len(values)
    if params.top_k > 0:
        values, ids = values[: params.top_k], ids[: params.top_k]
    if params.min_p > 0:
        kept = values >= values[0] + math.log(params.min_p)
        values, ids = values[kept], ids[kept]
    mass = values.double().softmax(0)
    if params.top_p < 1.0:
        before = mass.cumsum(0) - mass
        mass = mass[before < params.top_p]
        ids = ids[: len(mass)]
    if in_order:
        ids, order = ids.sort()
        mass = mass[order]
    total = mass.cumsum(0)
    number = uniform(params.seed, params.choice, case.index) * float(total[-1])
    return int(ids[min(int((total <= number).sum()), len(ids) - 1)])


def check(logits: Tensor, rows: list[Case], got: Tensor) -> None:
    """Against both: ids with the reference, logits of the drawn with the CPU sampler."""
    host, tokens = logits.cpu(), got.tolist()
    assert all(0 <= token < host.shape[1] for token in tokens)
    wrong = 0
    for line, case, token in zip(host, rows, tokens, strict=True):
        cpu = token if case.greedy else _cpu_token(line, case)
        wrong += reference(line, case) != token or float(line[cpu]) != float(line[token])
    assert wrong <= ROUNDED_OFF * len(rows), f"{wrong} of {len(rows)} differ"


def _cpu_token(line: Tensor, case: Case) -> int:
    params = case.params
    number = uniform(params.seed, params.choice, case.index)
    return draw(line.float() / params.temperature, params, number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [60, 130])
def test_draws_equal_the_cpu_samplers(vocab: int, dtype: torch.dtype) -> None:
    rows = cases(1024, vocab, seed=vocab)
    logits = normal(len(rows), vocab, dtype=torch.float32, seed=vocab).mul(3).to(dtype)
    check(logits, rows, draw_tokens(logits, parameters(rows), out=poisoned_tokens(len(rows))))


@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 127])
def test_any_size_of_vocabulary(vocab: int) -> None:
    rows = cases(128, vocab, seed=7)
    logits = normal(len(rows), vocab, dtype=torch.float32, seed=vocab)
    got = draw_tokens(logits, parameters(rows), out=poisoned_tokens(len(rows)), block=64)
    check(logits, rows, got)


def test_a_list_that_is_too_short_gives_way_to_the_whole_row() -> None:
    """Flat rows have more near the best than the list holds, sharp ones less than top_p wants."""
    rows = cases(256, 90, seed=3)
    logits = normal(len(rows), 90, dtype=torch.float32, seed=5)
    logits[::3] *= 20
    logits[1::3] *= 0.01
    for capacity in (4, 40):
        got = draw_tokens(logits, parameters(rows), capacity=capacity, block=64)
        check(logits, rows, got)


def test_one_row_a_program_as_on_a_gpu() -> None:
    rows = cases(4, 70, seed=11)
    logits = normal(len(rows), 100, dtype=torch.bfloat16, seed=1)[:, :70]  # strided rows
    out = poisoned_tokens(len(rows))
    check(logits, rows, draw_tokens(logits, parameters(rows), out=out, rows_a_program=1, block=64))


def test_rows_drawn_elsewhere_are_left_alone() -> None:
    rows = cases(9, 20, seed=2)
    table = parameters(rows)
    table[::2, 0] = SKIP
    logits = normal(9, 20, dtype=torch.float32, seed=1)
    got = draw_tokens(logits, table, out=poisoned_tokens(9))
    assert got[::2].tolist() == [-7] * 5
    check(logits[1::2], rows[1::2], got[1::2])


def test_a_draw_does_not_depend_on_its_batch() -> None:
    rows = cases(64, 50, seed=4)
    logits = normal(64, 50, dtype=torch.float32, seed=1)
    whole = draw_tokens(logits, parameters(rows))
    some = [5, 3, 40]
    picked = draw_tokens(logits[some], parameters([rows[row] for row in some]))
    assert picked.tolist() == whole[some].tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_equal_tokens_are_drawn_equally_often(top_p: float) -> None:
    """Chi-square. Of equal ones a filter keeps the first."""
    kept = 16 if top_p == 1.0 else 8
    rows = [
        Case(SamplingParams(max_tokens=1, seed=9, top_p=top_p, top_k=17), index)
        for index in range(2048)
    ]
    got = draw_tokens(torch.zeros(len(rows), 16, device=DEVICE), parameters(rows))
    counts = torch.bincount(got.cpu(), minlength=16)
    assert counts[kept:].sum() == 0
    expected = len(rows) / kept
    assert float(((counts[:kept] - expected) ** 2 / expected).sum()) < 37.7, "15 degrees, p = 0.001"


def test_logits_that_are_no_numbers_draw_something_in_the_vocabulary() -> None:
    rows = cases(256, 20, seed=6)
    logits = normal(256, 20, dtype=torch.float32, seed=1)
    for start, value in enumerate((math.nan, math.inf, -math.inf)):
        logits[start::4, 7] = value
        logits[start + 128 :: 4] = value
    got = draw_tokens(logits, parameters(rows), out=poisoned_tokens(256), block=16)
    best = argmax_tokens(logits, out=poisoned_tokens(256))
    for tokens in (got, best):
        assert bool(((tokens >= 0) & (tokens < 20)).all())
    sound = list(range(3, 256, 4))
    check(logits[sound], [rows[row] for row in sound], got[sound])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 16, 37, 200])
def test_greedy_in_two_stages(vocab: int, dtype: torch.dtype) -> None:
    logits = normal(5, vocab + 3, dtype=dtype, seed=vocab)[:, :vocab]
    logits[4] = -math.inf
    got = argmax_tokens(logits, out=poisoned_tokens(5), split=64, block=16)
    want = logits.float().cpu().sort(dim=-1, descending=True, stable=True).indices[:, 0]
    assert got.tolist() == want.tolist()
