import pytest

from common.ledger import Ledger
from common.messages import Adapter, NodeStats, SamplingParams
from common.request import Req


@pytest.mark.parametrize(("adapter", "named"), [(None, ""), (Adapter(name="a", digest="d"), "a")])
def test_a_requests_end_names_its_adapter(adapter: Adapter | None, named: str) -> None:
    req = Req(
        room=7, rid="r", attempt=0, router="x", prompt_ids=[1, 2], output_ids=[3],
        sampling=SamplingParams(max_tokens=1, seed=0), arrived=1.0, added=2.0, adapter=adapter,
    )  # fmt: skip
    ledger = Ledger()
    ledger.mark(req, "queue", 2.5)
    ledger.ended(req, "finished")
    (end,) = ledger.take(NodeStats()).ends
    assert (end.adapter, end.outcome, end.stages) == (named, "finished", {"queue": 0.5})
