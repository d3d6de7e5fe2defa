"""The node's own HTTP, asked over the loopback."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from common.events import AdminDone, AdminRequest
from common.messages import (
    AbortRequests,
    AdapterInfo,
    AdminVerb,
    Continue,
    Drain,
    FlushCache,
    Heartbeat,
    LoadAdapter,
    NodeState,
    NodeStats,
    Pause,
    UnloadAdapter,
)
from common.modes import PauseMode
from common.stats import StageSample
from tests.unit.node_io.rig import REGISTRATION, Engine, FakeRouter, eventually, prefill


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def ask(
    url: str, body: bytes | None = None, method: str | None = None, key: str | None = None
) -> Answer:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return Answer(response.status, dict(response.headers), response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read().decode())


@contextmanager
def answering(engine: Engine, done: AdminDone) -> Iterator[list[AdminVerb]]:
    """An engine thread that answers one admin request."""
    verbs: list[AdminVerb] = []

    def answer() -> None:
        request = engine.get(AdminRequest)
        verbs.append(request.verb)
        engine.io.send([replace(done, ticket=request.ticket)])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield verbs
    finally:
        thread.join(10)


def test_health_follows_the_engine() -> None:
    with prefill() as engine:
        url = engine.io.url + "/health"
        starting = ask(url)
        assert starting.status == 503
        assert "starting" in starting.json["reason"]
        engine.io.announce(REGISTRATION)
        engine.io.publish(NodeStats())
        eventually(lambda: ask(url).status == 200)
        eventually(lambda: ask(url).status == 503, "an engine that does not turn")
        assert "turn" in ask(url).json["reason"]
        engine.io.publish(NodeStats())
        assert ask(url).status == 200


def test_ready_means_registered_joined_and_not_leaving(router: FakeRouter) -> None:
    with prefill(router.address, stuck_engine_s=30.0) as engine:
        url = engine.io.url + "/health/ready"

        def reason() -> str:
            answer = ask(url)
            assert (answer.status == 503) is ("reason" in answer.json)
            return str(answer.json.get("reason", ""))

        assert ask(engine.io.url + "/health/live").status == 200
        assert "starting" in reason()
        engine.io.announce(REGISTRATION)
        engine.io.publish(NodeStats())
        eventually(lambda: "no router" in reason())
        router.welcome()
        eventually(lambda: reason() == "")
        engine.io.publish(NodeStats(state=NodeState.PAUSED))
        assert reason() == ""
        engine.io.publish(NodeStats(state=NodeState.DRAINING))
        assert "draining" in reason()
        assert ask(engine.io.url + "/health").status == 200
        assert ask(engine.io.url + "/health/live").status == 200


def test_a_new_state_reaches_the_router_before_the_next_heartbeat(router: FakeRouter) -> None:
    with prefill(router.address, heartbeat_s=30.0, router_timeout_s=60.0) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        engine.io.publish(NodeStats(state=NodeState.DRAINING))
        beat = router.await_body(Heartbeat).body
        assert isinstance(beat, Heartbeat)
        assert beat.stats.state is NodeState.DRAINING


def test_a_drain_is_answered_before_the_process_ends() -> None:
    with prefill() as engine, answering(engine, AdminDone(0, True, "draining")) as verbs:
        answer = ask(engine.io.url + "/drain", b"")
        engine.io.close()
    assert (answer.status, answer.json["message"]) == (200, "draining")
    assert verbs == [Drain()]


def test_an_engine_that_waits_for_work_is_not_stuck() -> None:
    with prefill() as engine:
        engine.io.announce(REGISTRATION)
        sleeper = threading.Thread(target=engine.io.wait, args=(30.0,))
        sleeper.start()
        threading.Event().wait(0.6)
        assert ask(engine.io.url + "/health").status == 200
        engine.io.wake()
        sleeper.join(5)
        eventually(lambda: ask(engine.io.url + "/health").status == 503)


@pytest.mark.parametrize(
    ("path", "body", "verb"),
    [
        ("/pause_generation", b'{"mode": "retract"}', Pause(PauseMode.RETRACT)),
        ("/pause_generation", b"", Pause(PauseMode.ABORT)),
        ("/continue_generation", b"{}", Continue()),
        ("/flush_cache", b"", FlushCache()),
        ("/abort_request", b'{"rid": "a"}', AbortRequests("a")),
        ("/abort_request", b'{"abort_all": true, "more": 1}', AbortRequests("")),
    ],
)
def test_admin_verbs_reach_the_engine_and_its_answer_the_client(
    path: str, body: bytes, verb: AdminVerb
) -> None:
    with prefill() as engine, answering(engine, AdminDone(0, True, "done")) as verbs:
        answer = ask(engine.io.url + path, body)
        assert (answer.status, answer.json) == (200, {"success": True, "message": "done"})
        assert verbs == [verb]


LOAD = b'{"lora_name": "a", "lora_path": "/adapters/a"}'


@pytest.mark.parametrize("pinned", [False, True])
def test_a_load_waits_longer_than_other_verbs_and_tells_the_digest(pinned: bool) -> None:
    body = LOAD.replace(b"}", b', "pinned": true}') if pinned else LOAD
    done = AdminDone(0, True, "loaded", digest="d")
    with (
        prefill(admin_timeout_s=0.0) as engine,
        answering(engine, done) as verbs,
    ):
        answer = ask(engine.io.url + "/load_lora_adapter", body)
    assert answer.status == 200
    assert answer.json == {"success": True, "message": "loaded", "digest": "d"}
    assert verbs == [LoadAdapter(name="a", path="/adapters/a", pinned=pinned)]


def test_an_unload_names_the_adapter() -> None:
    with prefill() as engine, answering(engine, AdminDone(0, False, "never loaded")) as verbs:
        answer = ask(engine.io.url + "/unload_lora_adapter", b'{"lora_name": "a"}')
    assert (answer.status, answer.json["error"]["message"]) == (400, "never loaded")
    assert verbs == [UnloadAdapter("a")]


def test_an_adapter_that_takes_too_long_is_a_504() -> None:
    with prefill(adapter_timeout_s=0.05) as engine:
        answer = ask(engine.io.url + "/load_lora_adapter", LOAD)
        assert answer.status == 504
        assert "0.05 s" in answer.json["error"]["message"]


def test_a_client_that_hangs_up_does_not_stop_its_load() -> None:
    with prefill() as engine:
        host, port = engine.io.url.removeprefix("http://").split(":")
        head = f"POST /load_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(LOAD)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(head.encode() + LOAD)
            request = engine.get(AdminRequest)
        engine.io.send([AdminDone(request.ticket, True, "loaded", digest="d")])
        assert ask(engine.io.url + "/health/live").status == 200
        assert engine.quiet(0) == [], "nothing took it back"


def test_server_info_and_metrics_show_the_adapters() -> None:
    adapter = AdapterInfo(name="a", digest="d", path="/adapters/a", rank=8, pinned=True)
    with prefill() as engine:
        engine.io.publish(NodeStats(running_loras={"a": 2}), adapters=(adapter,))
        info = ask(engine.io.url + "/server_info").json
        assert info["adapters"] == [
            {"name": "a", "digest": "d", "path": "/adapters/a", "rank": 8, "pinned": True}
        ]
        shown = ask(engine.io.url + "/metrics").text
        assert 'pdserve_lora_running_requests{adapter="a",role="prefill"} 2.0' in shown
        assert 'pdserve_loras_registered{role="prefill"} 1.0' in shown


def test_what_the_engine_refuses_is_a_400() -> None:
    with prefill() as engine, answering(engine, AdminDone(0, False, "pages are held")):
        answer = ask(engine.io.url + "/flush_cache", b"")
        assert answer.status == 400
        assert answer.json["error"]["message"] == "pages are held"


def test_an_engine_that_does_not_answer_is_a_504_and_a_late_answer_is_no_harm() -> None:
    with prefill() as engine:
        assert ask(engine.io.url + "/continue_generation", b"").status == 504
        request = engine.get(AdminRequest)
        engine.io.send([AdminDone(request.ticket, True), AdminDone(99, True)])
        info = engine.io.url + "/server_info"
        eventually(lambda: ask(info).json["counters"].get("late_admin_answers") == 2)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/pause_generation", b'{"mode": "later"}', 400, "mode"),
        ("/pause_generation", b'{"mode": 3}', 400, "mode"),
        ("/pause_generation", b"{", 400, None),
        ("/pause_generation", b"\xff\xfe", 400, None),
        ("/pause_generation", b'{"mode": "\xff"}', 400, None),
        ("/pause_generation", b"[]", 400, None),
        ("/abort_request", b"{}", 400, "rid"),
        ("/abort_request", b'{"rid": 5}', 400, "rid"),
        ("/abort_request", b'{"rid": "a", "abort_all": true}', 400, "rid"),
        ("/load_lora_adapter", b"", 400, None),
        ("/load_lora_adapter", b"[]", 400, None),
        ("/load_lora_adapter", b'{"lora_name": "a", "lora_path": 3}', 400, "lora_path"),
        ("/load_lora_adapter", b'{"lora_name": "a", "lora_path": ""}', 400, "lora_path"),
        ("/load_lora_adapter", b'{"lora_name": "a", "lora_path": "/\\u0000"}', 400, "lora_path"),
        ("/load_lora_adapter", b'{"lora_name": "a:b", "lora_path": "/a"}', 400, "lora_name"),
        (
            "/load_lora_adapter",
            b'{"lora_name": "a", "lora_path": "/a", "pinned": "yes"}',
            400,
            "pinned",
        ),
        ("/load_lora_adapter", b" " * 100_000, 413, None),
        ("/load_lora_adapter", None, 405, None),
        ("/unload_lora_adapter", b"{}", 400, None),
        ("/unload_lora_adapter", b'{"lora_name": ""}', 400, "lora_name"),
        ("/unload_lora_adapter", b'{"lora_name": "a\\nb"}', 400, "lora_name"),
        ("/flush_cache", b"[" * 50_000, 400, None),
        ("/flush_cache", b" " * 100_000, 413, None),
        ("/nothing", None, 404, None),
        ("/pause_generation", None, 405, None),
    ],
)
def test_bad_requests_get_the_error_body(
    path: str, body: bytes | None, status: int, param: str | None
) -> None:
    with prefill() as engine:
        answer = ask(engine.io.url + path, body)
        assert answer.status == status
        error = answer.json["error"]
        assert (error["param"], error["code"]) == (param, status)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert engine.quiet(0) == [], "nothing of it reaches the engine"


def test_metrics_and_server_info_show_the_newest_snapshot() -> None:
    with prefill() as engine:
        stats = NodeStats(num_pages=8, free_pages=5, counters={"retractions": 2})
        engine.io.publish(stats, samples=[StageSample("prefill", 0.3)], transferred=[(4096, 0.01)])
        metrics = ask(engine.io.url + "/metrics")
        assert metrics.status == 200
        assert metrics.headers["Content-Type"].startswith("text/plain")
        for line in (
            'pdserve_kv_pages{role="prefill",state="free"} 5.0',
            'pdserve_retractions_total{role="prefill"} 2.0',
            'pdserve_stage_seconds_count{role="prefill",stage="prefill"} 1.0',
            'pdserve_transfer_bytes_total{role="prefill"} 4096.0',
        ):
            assert line in metrics.text
        info = ask(engine.io.url + "/server_info").json
        assert (info["name"], info["role"], info["state"]) == ("p1", "prefill", "starting")
        assert info["url"] == engine.io.url
        assert info["side_channel"] == engine.io.side_channel
        assert info["stats"]["free_pages"] == 5
        engine.io.announce(REGISTRATION)
        eventually(lambda: ask(engine.io.url + "/server_info").json["state"] == "ready")


@pytest.mark.parametrize("garbage", [b"\x00\xff\x80\r\n\r\n", b"GET \xff\x00\x01 nothing\r\n\r\n"])
def test_bytes_that_are_not_http_cost_a_line_and_a_count(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with prefill() as node:
        host, port = node.io.url.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(garbage)
                raw.recv(1000)
        counters = ask(node.io.url + "/server_info").json["counters"]
        assert counters["garbage_http"] == 3
    assert not [record for record in caplog.records if record.exc_info]
    assert len([r for r in caplog.records if "garbage_http" in r.getMessage()]) == 1
