"""The light metrics say exactly what prometheus_client's own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.light_metrics import LightCounter, LightHistogram
from router.metrics import RouterMetrics

BOUNDS = (0.001, 0.5, 1, 30)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.sampled_from([0.0, *BOUNDS]) | st.floats(0, 100), max_size=20))
def test_it_shows_what_the_original_shows(values: list[float]) -> None:
    original, light = CollectorRegistry(), CollectorRegistry()
    theirs = Histogram("wait_seconds", "Waits.", buckets=BOUNDS, registry=original)
    ours = LightHistogram("wait_seconds", "Waits.", BOUNDS, light)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    assert shown(light) == shown(original)


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"', ""]), st.integers(0, 9)), max_size=20))
def test_a_counter_shows_what_the_original_shows(counts: list[tuple[str, int]]) -> None:
    original, light = CollectorRegistry(), CollectorRegistry()
    theirs = Counter("ends", "Ends.", ["how"], registry=original)
    theirs_plain = Counter("all", "All.", registry=original)
    ours = LightCounter("ends", "Ends.", light, ["how"])
    ours_plain = LightCounter("all", "All.", light)
    for how, count in counts:
        theirs.labels(how).inc(count)
        theirs_plain.inc(count)
        ours.add(count, how)
        ours_plain.add(count)
    assert shown(light) == shown(original)
    for how in {how for how, _ in counts}:
        theirs.remove(how)
        ours.remove(how)
    assert shown(light) == shown(original)


def test_counts_that_are_kept_elsewhere_are_read_when_somebody_asks() -> None:
    metrics, counts = RouterMetrics(), {"good": 1}
    metrics.show("trials", "Trials.", "outcome", counts)
    counts["good"] = 3
    assert 'pdserve_router_trials_total{outcome="good"} 3.0' in metrics.text().decode()
