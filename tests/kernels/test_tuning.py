"""Defaults fit every card, and measured choices outlive the process that measured them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.attention.choice import make_attention
from common.engine.attention.measuring import Bench, attention_tuning
from common.engine.attention.triton_backend import TritonAttention
from common.engine.kernels import tuning
from common.engine.kernels.tuning import (
    SHARED_MEMORY,
    AttentionTuning,
    Card,
    ChoiceFile,
    DecodeConfig,
    PrefillConfig,
    choice_key,
    default_decode,
    default_prefill,
    fastest,
)
from common.kv_cache.storage import PagedKVCache
from tests.kernels.precision import DEVICE

CARDS = [Card("a card", capability, 100) for capability in (*SHARED_MEMORY, (7, 5), (13, 0))]
CHOICE = DecodeConfig(64, 4, 3, 256, 3)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.capability))
@pytest.mark.parametrize("block_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_defaults_fit_into_shared_memory(card: Card, block_dim: int, itemsize: int) -> None:
    """Queries, and a buffer for each stage of keys and of values (compilers take one less)."""
    prefill = default_prefill(card, block_dim, itemsize)
    row = block_dim * itemsize
    buffers = prefill.num_stages if card.capability[0] in (9, 10) else prefill.num_stages - 1
    needed = row * (prefill.block_rows + 2 * buffers * prefill.block_keys)
    assert needed <= card.shared_memory
    decode = default_decode(card, block_dim, itemsize)
    needed = row * (16 + 2 * (decode.num_stages - 1) * decode.block_keys)
    assert decode.resident * needed <= card.shared_memory
    assert decode.block_keys >= 16


def test_more_heads_in_a_group_than_rows_in_a_tile() -> None:
    card = CARDS[0]
    chosen = AttentionTuning.default(card, 256, 71, torch.float32)
    assert chosen.prefill.tokens(71) == 1
    with pytest.raises(AssertionError, match="do not fit"):
        PrefillConfig(16, 16, 4, 2).tokens(17)


class TestChoiceFile:
    def test_a_choice_is_found_again(self, tmp_path: Path) -> None:
        path = tmp_path / "new folder" / "kernels.json"
        ChoiceFile(path).put("a", CHOICE)
        ChoiceFile(path).put("b", PrefillConfig(64, 32, 4, 2))
        file = ChoiceFile(path)
        assert file.get("a", DecodeConfig) == CHOICE
        assert file.get("b", PrefillConfig) == PrefillConfig(64, 32, 4, 2)
        assert file.get("c", DecodeConfig) is None
        assert [p.name for p in path.parent.iterdir()] == ["kernels.json"], "nothing is left over"

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[1]", "null", '{"a": 3}', '{"a": {"block_keys": 64}}', "\x00"]
        + [
            json.dumps({"a": dict(zip(vars(CHOICE), values, strict=True))})
            for values in ([64, 4, 3, 256, 0], [64, 4, 3, 256, "2"], [64, 4, 3, 256, True])
        ],
    )
    def test_what_is_no_choice_is_none(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "kernels.json"
        path.write_text(text)
        assert ChoiceFile(path).get("a", DecodeConfig) is None
        ChoiceFile(path).put("a", CHOICE)
        assert ChoiceFile(path).get("a", DecodeConfig) == CHOICE

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.json"
        path.write_bytes(b"\xff\xfe")
        assert ChoiceFile(path).get("a", DecodeConfig) is None

    def test_a_place_that_cannot_be_written_costs_only_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        ChoiceFile(tmp_path / "file" / "kernels.json").put("a", CHOICE)
        assert "cannot be kept" in caplog.text


def test_the_fastest_that_runs() -> None:
    times = {16: None, 32: 2.0, 64: 1.0, 128: 1.5}
    candidates = [DecodeConfig(keys, 4, 3, 256, 3) for keys in times]
    assert fastest(candidates, lambda config: times[config.block_keys]) == candidates[2]
    assert fastest(candidates[:1], lambda config: None) is None


def make_cache() -> PagedKVCache:
    return PagedKVCache(
        num_pages=16, num_layers=2, num_kv_heads=1, page_size=4, head_dim=16,
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip


class TestAttentionTuning:
    card = Card.of(torch.device(DEVICE))

    def test_defaults_without_a_file(self) -> None:
        chosen = attention_tuning(make_cache(), 2, None, measure=True)
        assert chosen == AttentionTuning.default(self.card, 16, 2, torch.float32)

    def test_nothing_is_measured_under_the_interpreter(self, tmp_path: Path) -> None:
        if not tuning.INTERPRETED:
            pytest.skip("kernels are compiled here")
        path = tmp_path / "kernels.json"
        chosen = attention_tuning(make_cache(), 2, path, measure=True)
        assert chosen == AttentionTuning.default(self.card, 16, 2, torch.float32)
        assert not path.exists()

    def test_choices_of_the_file_are_taken_for_this_model_only(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.json"
        key = choice_key(self.card, "decode", 16, 2, 4, torch.float32)
        ChoiceFile(path).put(key, CHOICE)
        cache = make_cache()
        default = AttentionTuning.default(self.card, 16, 2, torch.float32)
        chosen = attention_tuning(cache, 2, path, measure=False)
        assert (chosen.decode, chosen.prefill) == (CHOICE, default.prefill)
        assert attention_tuning(cache, 1, path, measure=False).decode == default.decode
        windows = (None,) * cache.num_layers
        backend = make_attention("triton", cache, 2, windows, cache.dtype, path)
        assert isinstance(backend, TritonAttention)
        assert backend.tuning == chosen

    def test_candidates_are_run_and_the_fastest_is_taken(self) -> None:
        """With a stopwatch of our own: the third thing it is given is the fastest."""
        times = iter([3.0, 2.0, 1.0, *[5.0] * 500])

        def stopwatch(call: Callable[[], None]) -> float:
            taken = next(times)
            if taken < 5:
                call()
            return taken

        default = AttentionTuning.default(self.card, 16, 2, torch.float32)
        bench = Bench(make_cache(), 2, default, stopwatch)
        assert bench.decode() != default.decode
        times = iter([1.0, *[5.0] * 500])
        assert bench.prefill() == default.prefill
