"""What a prefill node posts for a request: pages computed since the last write, and who shall hear
of them. Pure."""

from common.messages import ChunkLanded, FirstToken, Incarnation, encode
from common.plan import Write
from prefill_node.request import PrefillReq


def next_write(
    req: PrefillReq,
    upto_page: int,
    last: FirstToken | None,
    source: Incarnation,
    weight_version: str,
) -> Write:
    """Its pages from the first that was not posted yet up to (not including) `upto_page`."""
    destination = req.destination
    assert destination is not None
    first = destination.first_page
    targets = tuple(destination.pages[req.pages_written - first : upto_page - first])
    landed = ChunkLanded(
        room=req.room,
        chunk=req.num_chunks,
        source=source,
        target=req.peer,
        pages=list(targets),
        weight_version=weight_version,
        last=last,
    )
    sources = tuple(req.pages[req.pages_written : upto_page])
    return Write(req.room, req.num_chunks, req.peer, sources, targets, encode(landed))
