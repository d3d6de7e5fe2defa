"""A batch as ranks need it that draw nothing: what to compute, and nothing of sampling. Pure."""

import msgspec

from common.messages import SamplingParams
from common.plan import Batch, Row, SlotInit

_UNUSED = SlotInit(SamplingParams(max_tokens=1, seed=0, temperature=0.0), (), ())


class RankRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See `Row`."""

    slot: int
    start: int
    token_ids: list[int]
    new_pages: list[int]
    fresh: bool
    """The slot has a new owner."""
    draws: bool
    """Its last token's logits are wanted."""
    lora_slot: int | None
    num_scored: int
    """Tokens from the first one on whose logits are wanted besides."""
    from_slot: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RankRow]).decode


def encode_batch(batch: Batch) -> bytes:
    return _encode(
        [
            (
                row.slot,
                row.start,
                row.token_ids,
                row.new_pages,
                row.init is not None,
                row.sample_index is not None,
                row.lora_slot,
                0 if row.prompt_logprobs is None else len(row.next_ids),
                row.from_slot,
            )
            for row in batch.rows
        ]
    )


def decode_batch(payload: bytes) -> Batch:
    """The same work for a runner that draws nothing. Raises msgspec.MsgspecError."""
    return Batch(
        tuple(
            Row(
                slot=row.slot,
                start=row.start,
                token_ids=row.token_ids,
                new_pages=row.new_pages,
                sample_index=0 if row.draws else None,
                init=_UNUSED if row.fresh else None,
                lora_slot=row.lora_slot,
                prompt_logprobs=0 if row.num_scored else None,
                next_ids=range(row.num_scored),
                from_slot=row.from_slot,
            )
            for row in _decode(payload)
        )
    )
