"""Reading NIXL notifications: bytes that anybody who reaches the data plane may have sent."""

import msgspec

from common.messages import ChunkLanded, decode_notification


def read_notification(payload: bytes, vocab_size: int) -> ChunkLanded | None:
    """What has landed; None if the bytes are no notification, or one with an impossible token.

    A token outside the vocabulary would fail the forward pass of everybody in its batch.
    """
    try:
        chunk = decode_notification(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    if chunk.last is not None and not 0 <= chunk.last.token_id < vocab_size:
        return None
    return chunk
