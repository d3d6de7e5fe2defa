import logging

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.logs import REQUESTS, OneLine, log_request_end, setup_logging
from common.messages import NodeState, NodeStats
from common.metrics import NodeMetrics
from common.modes import DisaggregationMode
from common.stats import RequestEnd


def samples(metrics: NodeMetrics) -> dict[str, float]:
    """Every sample as name{labels} -> value, role left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.name.startswith("pdserve_"), family.name
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "role"}
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{text}}}"] = sample.value
    return found


@pytest.fixture
def metrics() -> NodeMetrics:
    return NodeMetrics(DisaggregationMode.DECODE, "d1")


def test_a_snapshot_becomes_gauges_and_counters(metrics: NodeMetrics) -> None:
    stats = NodeStats(
        state=NodeState.PAUSED,
        queues={"waiting": 3, "transfer": 0},
        running=2,
        num_pages=10,
        free_pages=4,
        cached_pages=3,
        quarantined_pages=1,
        queued_tokens=77,
        counters={"retractions": 5, "odd name!": 1},
    )
    metrics.update(stats, {"garbage_peer_frames": 9}, step_age_s=0.5)
    got = samples(metrics)
    expected = {
        "pdserve_node_state{state=paused}": 1,
        "pdserve_node_state{state=ready}": 0,
        "pdserve_queued_requests{queue=waiting}": 3,
        "pdserve_queued_requests{queue=transfer}": 0,
        "pdserve_running_requests{}": 2,
        "pdserve_kv_pages{state=free}": 4,
        "pdserve_kv_pages{state=cached}": 3,
        "pdserve_kv_pages{state=quarantined}": 1,
        "pdserve_kv_pool_pages{}": 10,
        "pdserve_queued_tokens{}": 77,
        "pdserve_retractions_total{}": 5,
        "pdserve_odd_name__total{}": 1,
        "pdserve_garbage_peer_frames_total{}": 9,
        "pdserve_step_age_seconds{}": 0.5,
        "pdserve_node_info{name=d1}": 1,
    }
    assert {name: got[name] for name in expected} == expected


def test_a_queue_that_is_gone_is_not_shown_any_more(metrics: NodeMetrics) -> None:
    metrics.update(NodeStats(queues={"waiting": 3}))
    metrics.update(NodeStats(queues={"transfer": 1}))
    assert "pdserve_queued_requests{queue=waiting}" not in samples(metrics)


def test_adapters_are_shown_by_name_as_long_as_they_are_few(metrics: NodeMetrics) -> None:
    stats = NodeStats(lora_slots=8, lora_slots_used=3, loras_in_memory=5)
    running = {"a": 2, "leaving": 1}
    metrics.update(msgspec.structs.replace(stats, running_loras=running), adapters=["a", "b"])
    got = samples(metrics)
    expected = {
        "pdserve_lora_slots{state=used}": 3,
        "pdserve_lora_slots{state=free}": 5,
        "pdserve_loras_in_memory{}": 5,
        "pdserve_loras_registered{}": 2,
        "pdserve_lora_running_requests{adapter=a}": 2,
        "pdserve_lora_running_requests{adapter=b}": 0,
        "pdserve_lora_running_requests{adapter=leaving}": 1,
    }
    assert {name: got[name] for name in expected} == expected


def test_any_number_of_adapters_makes_few_time_series(metrics: NodeMetrics) -> None:
    names = [f"n{number}" for number in range(500)]
    metrics.update(NodeStats(running_loras=dict.fromkeys(names, 1)), adapters=names)
    shown = {n: v for n, v in samples(metrics).items() if "lora_running_requests" in n}
    assert len(shown) == 33
    assert shown["pdserve_lora_running_requests{adapter=other}"] == 500 - 32
    metrics.update(NodeStats(), adapters=["n400", "n3"])
    shown = {n: v for n, v in samples(metrics).items() if "lora_running_requests" in n}
    assert set(shown) == {f"pdserve_lora_running_requests{{adapter=n{n}}}" for n in (400, 3)}


def test_stages_and_transfers_are_histograms(metrics: NodeMetrics) -> None:
    for seconds in (0.0005, 0.04, 1000.0):
        metrics.observe_stage("inter_token", seconds)
    metrics.observe_transfer(1000, 0.2)
    metrics.observe_transfer(500, 0.1)
    got = samples(metrics)
    assert got["pdserve_stage_seconds_count{stage=inter_token}"] == 3
    assert got["pdserve_stage_seconds_bucket{le=0.001,stage=inter_token}"] == 1
    assert got["pdserve_stage_seconds_bucket{le=0.05,stage=inter_token}"] == 2
    assert got["pdserve_stage_seconds_bucket{le=+Inf,stage=inter_token}"] == 3
    assert got["pdserve_transfer_bytes_total{}"] == 1500
    assert got["pdserve_transfer_write_seconds_count{}"] == 2
    assert got["pdserve_transfer_write_seconds_sum{}"] == pytest.approx(0.3)


def test_two_nodes_in_one_process_do_not_share_a_registry(metrics: NodeMetrics) -> None:
    other = NodeMetrics(DisaggregationMode.PREFILL, "p1")
    other.observe_transfer(5, 0.1)
    assert samples(metrics)["pdserve_transfer_bytes_total{}"] == 0


def test_a_requests_end_is_one_json_line(caplog: pytest.LogCaptureFixture) -> None:
    end = RequestEnd(
        room=7,
        rid='a"\nb',
        attempt=1,
        outcome="finished",
        prompt_tokens=3,
        output_tokens=2,
        stages={"queue": 0.12345678},
        adapter="a",
    )
    with caplog.at_level(logging.INFO, logger=REQUESTS):
        log_request_end(end, DisaggregationMode.DECODE, "d1")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    said = msgspec.json.decode(line)
    assert said["rid"] == 'a"\nb'
    assert said["adapter"] == "a"
    assert said["stages"] == {"queue": 0.123457}
    assert (said["event"], said["role"], said["node"]) == ("request_end", "decode", "d1")


def test_log_messages_cannot_forge_a_line() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\r\nERROR b", (), None)
    assert OneLine("%(levelname)s %(message)s").format(record) == "INFO a\\r\\nERROR b"


def test_setup_names_the_process_and_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging("50%-node", "INFO")
        logging.getLogger("here").info("hello %s", "you")
        logging.getLogger("here").debug("not shown")
        with pytest.raises(ValueError, match="LOUD"):
            setup_logging("x", "LOUD")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    out, err = capsys.readouterr()
    assert out == ""
    assert "INFO 50%-node here: hello you\n" in err
    assert err.count("\n") == 1
