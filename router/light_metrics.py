"""Metrics that cost little to write: counted in plain numbers, read when somebody scrapes.

prometheus_client's own take a lock and a context for each value, which is as much as all else that
a router does for a token. Here there is one thread.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class LightHistogram(Collector):
    """Registers itself."""

    def __init__(
        self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`bounds`: upper ends of the buckets, ascending; one for what is larger is added."""
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value: in the first bucket whose bound it does not exceed."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        yield family


class LightCounter(Collector):
    """Registers itself. Without labels it begins at 0, else with the first `add` for some."""

    def __init__(
        self, name: str, help_text: str, registry: CollectorRegistry, labels: Sequence[str] = ()
    ) -> None:
        self._name = name
        self._help = help_text
        self._labels = tuple(labels)
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """`labels`: a value for each."""
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def remove(self, *labels: str) -> None:
        """Forget what was counted for these."""
        self._counts.pop(labels, None)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family
