"""What a node shows to Prometheus. The only file of the nodes that knows its client library.

Gauges and counters are read from the newest `NodeStats` when somebody scrapes, so they cost
nothing in between; only durations are observed one by one. All of it runs in the I/O thread.
"""

import re
from collections import Counter as Tallied
from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from common.label_budget import LabelBudget
from common.messages import NodeState, NodeStats
from common.modes import DisaggregationMode

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of `NodeMetrics.render()`."""

SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600,
)  # fmt: skip
"""Bucket bounds from one fast token to one request that waited as long as it may."""

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class SnapshotCollector(Collector):
    """Turns the newest snapshot into metric families, when asked."""

    def __init__(self, role: str) -> None:
        self._role = role
        self.stats = NodeStats()
        self.counters: Mapping[str, int] = {}
        self.step_age_s = 0.0
        self.adapters: Collection[str] = ()
        self._labels = LabelBudget()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        states = {state.value: int(state is stats.state) for state in NodeState}
        yield self._family("node_state", "1 for the state this node is in", "state", states)
        yield self._family("queued_requests", "Requests in each queue", "queue", stats.queues)
        yield self._gauge("running_requests", "Requests in the running batch", stats.running)
        pages = {
            "free": stats.free_pages,
            "cached": stats.cached_pages,
            "quarantined": stats.quarantined_pages,
        }
        text = (
            "KV pages: free to be given (idle cached ones too), cached (held or not), quarantined"
        )
        yield self._family("kv_pages", text, "state", pages)
        yield self._gauge("kv_pool_pages", "KV pages in the pool", stats.num_pages)
        yield self._gauge("queued_tokens", "Tokens waiting or held", stats.queued_tokens)
        yield self._gauge("step_age_seconds", "Since the engine's last turn", self.step_age_s)
        yield from self._lora(stats)
        for name, value in sorted({**self.counters, **stats.counters}.items()):
            safe = _NOT_IN_NAMES.sub("_", name)
            family = CounterMetricFamily(f"pdserve_{safe}", f"Count of {safe}", labels=["role"])
            family.add_metric([self._role], value)
            yield family

    def _lora(self, stats: NodeStats) -> Iterator[Metric]:
        slots = {
            "used": stats.lora_slots_used,
            "free": stats.lora_slots - stats.lora_slots_used,
        }
        yield self._family("lora_slots", "Places of adapters in a batch", "state", slots)
        yield self._gauge("loras_in_memory", "Adapters in host memory", stats.loras_in_memory)
        yield self._gauge("loras_registered", "Adapters that can be asked for", len(self.adapters))
        names = dict.fromkeys((*self.adapters, *stats.running_loras))
        self._labels.keep(names)
        running: Tallied[str] = Tallied()
        for name in names:
            running[self._labels.label(name)] += stats.running_loras.get(name, 0)
        text = "Unfinished requests of an adapter; all but the first 32 are one"
        yield self._family("lora_running_requests", text, "adapter", running)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"pdserve_{name}", text, labels=["role"])
        family.add_metric([self._role], value)
        return family

    def _family(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(f"pdserve_{name}", text, labels=["role", label])
        for key, value in values.items():
            family.add_metric([self._role, key], value)
        return family


class NodeMetrics:
    """One node's metrics, in a registry of their own. Not thread-safe beyond the client library."""

    def __init__(self, role: DisaggregationMode, name: str) -> None:
        self.registry = CollectorRegistry()
        self._role = role.value
        self._snapshot = SnapshotCollector(self._role)
        self.registry.register(self._snapshot)
        ProcessCollector(namespace="pdserve", registry=self.registry)
        info = GaugeMetricFamily("pdserve_node_info", "Constant 1", labels=["role", "name"])
        info.add_metric([self._role, name], 1)
        self.registry.register(_Constant(info))
        self._stages = Histogram(
            "pdserve_stage_seconds",
            "Time a request (inter_token: a token) spent in a stage",
            ["role", "stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stage_children: dict[str, Histogram] = {}
        self._bytes = Counter(
            "pdserve_transfer_bytes", "KV bytes written", ["role"], registry=self.registry
        ).labels(self._role)
        self._transfers = Histogram(
            "pdserve_transfer_write_seconds",
            "From posting a write to its end",
            ["role"],
            buckets=SECONDS,
            registry=self.registry,
        ).labels(self._role)

    def update(
        self,
        stats: NodeStats,
        counters: Mapping[str, int] | None = None,
        step_age_s: float = 0.0,
        adapters: Collection[str] = (),
    ) -> None:
        """Show this snapshot from now on. `counters` are shown beside `stats.counters`; `adapters`
        are the names of all that can be asked for."""
        self._snapshot.stats = stats
        self._snapshot.counters = counters or {}
        self._snapshot.step_age_s = step_age_s
        self._snapshot.adapters = adapters

    def observe_stage(self, stage: str, seconds: float) -> None:
        """One sample of a stage: queue, bootstrap, prefill, transfer, first_token, ..."""
        child = self._stage_children.get(stage)
        if child is None:
            child = self._stage_children[stage] = self._stages.labels(self._role, stage)
        child.observe(seconds)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """One finished write."""
        self._bytes.inc(num_bytes)
        self._transfers.observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Constant(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)
