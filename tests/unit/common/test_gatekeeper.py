"""What becomes of a connection, put together from the monitor's events."""

import logging
from collections.abc import Callable

import pytest
import zmq

from common import gatekeeper
from common.gatekeeper import CRYPTOGRAPHIC, MECHANISM_MISMATCH, Door, why_refused
from common.tally import Tally

Event = zmq.Event
PEERS = {7: "10.0.0.7:1111", 8: "10.0.0.8:2222"}


class Rig:
    """A door, the clock it uses, and what it has said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.waiting: list[Callable[[], None]] = []
        self.tally = Tally()
        self.door = Door(self.tally, lambda _, call: self.waiting.append(call), secured=True)

    def see(self, *events: tuple[int, int]) -> None:
        for event, value in events:
            self.door.on_event(event, value)

    def said(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def rig(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(gatekeeper, "peer_of", PEERS.get)
    return Rig(caplog)


def refused(descriptor: int) -> tuple[tuple[int, int], ...]:
    failed = (Event.HANDSHAKE_FAILED_PROTOCOL, CRYPTOGRAPHIC)
    return (Event.ACCEPTED, descriptor), failed, (Event.DISCONNECTED, descriptor)


def test_a_refusal_names_address_and_reason_once(rig: Rig) -> None:
    rig.see(*refused(7), *refused(7), *refused(8))
    assert rig.said() == [
        "refused_connections (1 so far) from 10.0.0.7:1111: the other side has another cluster "
        "secret",
        "refused_connections (3 so far) from 10.0.0.8:2222: the other side has another cluster "
        "secret",
    ]
    assert rig.tally.counts == {"refused_connections": 3}


def test_connections_side_by_side_are_not_mixed_up(rig: Rig) -> None:
    rig.see((Event.ACCEPTED, 7), (Event.ACCEPTED, 8), (Event.HANDSHAKE_SUCCEEDED, 0))
    rig.see((Event.HANDSHAKE_FAILED_AUTH, 400), (Event.DISCONNECTED, 8))
    (line,) = rig.said()
    assert "10.0.0.8:2222" in line
    rig.see((Event.DISCONNECTED, 7))
    assert rig.tally.counts == {"refused_connections": 1, "closed_connections": 1}


def test_who_speaks_another_protocol_is_refused(rig: Rig) -> None:
    rig.see((Event.ACCEPTED, 7), (Event.DISCONNECTED, 7))
    assert "what it sends is no ZMTP" in rig.said()[0]


def test_a_probe_is_counted_apart_and_warns_nobody(rig: Rig) -> None:
    left = (Event.HANDSHAKE_FAILED_NO_DETAIL, 104)
    rig.see((Event.ACCEPTED, 7), left, (Event.DISCONNECTED, 7))
    assert rig.said() == ["broken_handshakes (1 so far) from 10.0.0.7:1111 (ECONNRESET)"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_address_that_is_gone_already_is_told_unless_its_owner_is_named_soon(
    rig: Rig, comes_back: bool
) -> None:
    rig.see(*refused(99), *refused(99))
    assert rig.said() == []
    if comes_back:
        rig.see(*refused(7))
    (tell,) = rig.waiting
    tell()
    (line,) = rig.said()
    assert ("10.0.0.7" in line) is comes_back
    assert ("an unknown address" in line) is not comes_back


@pytest.mark.parametrize(
    ("event", "value", "secured", "why"),
    [
        (Event.HANDSHAKE_FAILED_AUTH, 400, True, "another cluster secret"),
        (Event.HANDSHAKE_FAILED_PROTOCOL, CRYPTOGRAPHIC, True, "another cluster secret"),
        (Event.HANDSHAKE_FAILED_PROTOCOL, MECHANISM_MISMATCH, True, "has no cluster secret"),
        (Event.HANDSHAKE_FAILED_PROTOCOL, MECHANISM_MISMATCH, False, "has a cluster secret"),
        (Event.HANDSHAKE_FAILED_PROTOCOL, 0x10000011, True, "malformed (0x10000011)"),
        (Event.HANDSHAKE_FAILED_NO_DETAIL, 32, True, "broke the handshake off (EPIPE)"),
    ],
)
def test_reasons(event: int, value: int, secured: bool, why: str) -> None:
    assert why in why_refused(event, value, secured=secured)
