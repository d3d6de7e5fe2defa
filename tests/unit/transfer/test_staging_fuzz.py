"""Any mix of staging nodes, faults and commands keeps the contract."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.plan import AddPeer, RemovePeer, RenewLease, WriteDone
from tests.unit.transfer.rig import write
from tests.unit.transfer.staged_net import LEASE_S, STEP_S, Net, Node, pages_equal
from transfer.landing import GRANT_S
from transfer.memory import Faults
from transfer.slots import Direction

OUT, IN = Direction.OUTGOING, Direction.INCOMING


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_any_mix_of_faults_keeps_the_contract(seed: int, staged: tuple[bool, bool, bool]) -> None:
    """One end for each write; done and notified only with the right bytes, failed and nothing
    comes any more; no slot is lost."""
    draw = random.Random(seed)
    rate = draw.choice([0.0, 0.02, 0.1])
    net = Net(Faults(delay=(0, draw.randrange(6)), failure=rate, lost_acknowledgement=rate), seed)
    source = net.add("source", staged=staged[0])
    targets = [net.add("target-0", staged=staged[1]), net.add("target-1", staged=staged[2])]
    free = {target.name: list(range(64)) for target in targets}
    placed: dict[int, tuple[Node, tuple[int, ...], tuple[int, ...]]] = {}
    settled: dict[int, bytes] = {}

    def check() -> None:
        for target in targets:
            for payload in target.notified:
                node, here, there = placed[int(payload.split(b"/")[0])]
                assert node is target
                assert pages_equal(source, here, target, there)
        for room, end in source.ends.items():
            node, here, there = placed[room]
            content = node.pool[list(there)].tobytes()
            if isinstance(end, WriteDone):
                assert pages_equal(source, here, node, there)
            assert settled.setdefault(room, content) == content, "touched after its end"

    for _ in range(draw.randrange(5, 60)):
        target = draw.choice(targets)
        match draw.randrange(6):
            case 0:
                source.transfer.submit([AddPeer(target.name, target.transfer.memories)])
                source.transfer.submit([RenewLease(target.name, LEASE_S)])
            case 1:
                source.transfer.submit([RemovePeer(target.name)])
            case 2 | 3:
                count = min(draw.choice([1, 3, 9]), len(free[target.name]))
                there = tuple(free[target.name].pop() for _ in range(count))
                here = tuple(draw.sample(range(64), count))
                if count:
                    room = len(placed)
                    placed[room] = target, here, there
                    source.transfer.submit([write(room, target.name, here, there)])
            case _:
                for _ in range(draw.randrange(40)):
                    net.step()
                    check()
    net.fabric.faults = Faults()
    for _ in range(20):
        source.transfer.submit([RenewLease(target.name, LEASE_S) for target in targets])
        net.step(20)
        check()
    net.now += GRANT_S + STEP_S  # slots of writes whose peer was lost come back
    net.until_quiet()
    check()
    assert set(source.ends) == set(placed)
    done = [room for room, end in source.ends.items() if isinstance(end, WriteDone)]
    assert all(f"{room}/0".encode() in placed[room][0].notified for room in done)
    net.now += GRANT_S + STEP_S
    net.step(3)
    for node in net.nodes:
        assert node.stage is None or node.held(OUT) == node.held(IN) == 0
