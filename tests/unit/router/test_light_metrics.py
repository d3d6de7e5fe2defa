"""The light histogram says exactly what prometheus_client's own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.histogram import LightHistogram

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
