"""The router's numbers for Prometheus. Nothing else in the router knows Prometheus.

Counts that pure parts keep are copied when they are read; a histogram is written when it happens.
"""

from collections.abc import Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.label_budget import OTHER, LabelBudget
from router.light_metrics import LightCounter, LightHistogram
from router.requests import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)


class RouterMetrics:
    """Owns a registry of its own, so that several routers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = _counter("requests", "Ended choices.", registry, "outcome")
        self._http = _counter("http_responses", "HTTP answers.", registry, "path", "code")
        self._refusals = _counter("refusals", "Requests refused, by HTTP code.", registry, "code")
        self._replays = _counter("replayed_requests", "Ended choices with replays.", registry)
        self._prompt_tokens = _counter("prompt_tokens", "Of prompts of ended choices.", registry)
        self._cached_tokens = _counter("cached_tokens", "Of these, cached at prefill.", registry)
        self._output_tokens = _counter("output_tokens", "Tokens emitted.", registry)
        self._tokens_uncounted = 0
        """Emitted and not in the counter yet."""
        self._lora_requests = _counter("lora_requests", "Ended choices.", registry, "adapter")
        self._lora_tokens = _counter("lora_output_tokens", "Of them.", registry, "adapter")
        self._lora_labels = LabelBudget()
        self._lora_shown: set[str] = set()
        """Labels that have numbers."""
        self._ttft = _histogram("time_to_first_token", "From acceptance to first token.", registry)
        self._inter_token = _histogram("inter_token", "Between two tokens of a choice.", registry)
        self._e2e = _histogram("request", "From acceptance to the end.", registry)
        self._queue = _histogram("queue", "From acceptance to the first dispatch.", registry)
        self.open_streams = Gauge(
            "pdserve_router_open_streams", "Streaming answers under way.", registry=registry
        )

    def attach(self, collector: Collector) -> None:
        """Add numbers that are read when someone asks."""
        self.registry.register(collector)

    def show(self, name: str, help_text: str, label: str, counts: Mapping[str, int]) -> None:
        """Counts that somebody else keeps, for as long as this lives."""
        self.attach(_Kept(name, help_text, label, counts))

    def on_tokens(self, count: int, waited_s: float, *, first: bool) -> None:
        """Some tokens of a job were accepted after a wait."""
        self._tokens_uncounted += count
        if first:
            self._ttft.observe(waited_s)
        elif count:
            self._inter_token.observe(waited_s / count)

    def on_end(self, job: Job) -> None:
        """A job ended."""
        times = job.times
        self._requests.add(1, job.outcome)
        self._prompt_tokens.add(len(job.prompt_ids))
        self._cached_tokens.add(job.cached_tokens)
        if job.adapter is not None:
            label = self._lora_labels.label(job.adapter.name)
            self._lora_shown.add(label)
            self._lora_requests.add(1, label)
            self._lora_tokens.add(len(job.output_ids), label)
        if job.replays:
            self._replays.add(1)
        if times.dispatched is not None:
            self._queue.observe(times.dispatched - times.accepted)
        if times.ended is not None:
            self._e2e.observe(times.ended - times.accepted)

    def keep_adapters(self, names: Collection[str]) -> None:
        """Forget the numbers of all other adapters, so that the places of their labels are free."""
        for gone in self._lora_shown - set(names) - {OTHER}:
            self._lora_shown.discard(gone)
            self._lora_requests.remove(gone)
            self._lora_tokens.remove(gone)
        self._lora_labels.keep(names)

    def on_response(self, path: str, code: int) -> None:
        """An HTTP answer was begun. `path` is a route, never what a client made up."""
        self._http.add(1, path, str(code))
        if code >= 400:
            self._refusals.add(1, str(code))

    def text(self) -> bytes:
        self._output_tokens.add(self._tokens_uncounted)
        self._tokens_uncounted = 0
        return generate_latest(self.registry)


class _Kept(Collector):
    """A counter whose values are elsewhere."""

    def __init__(self, name: str, help_text: str, label: str, counts: Mapping[str, int]) -> None:
        self._of = (name, help_text, label, counts)

    def collect(self) -> Iterable[Metric]:
        yield counter_family(*self._of)


def _histogram(name: str, help_text: str, registry: CollectorRegistry) -> LightHistogram:
    return LightHistogram(f"pdserve_router_{name}_seconds", help_text, _LATENCY, registry)


def _counter(name: str, help_text: str, registry: CollectorRegistry, *labels: str) -> LightCounter:
    return LightCounter(f"pdserve_router_{name}", help_text, registry, labels)


def counter_family(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """Counts kept elsewhere, one label."""
    family = CounterMetricFamily(f"pdserve_router_{name}", help_text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def gauge_family(
    name: str, help_text: str, labels: list[str], values: Iterable[tuple[list[str], float]]
) -> Metric:
    """Current values kept elsewhere."""
    family = GaugeMetricFamily(f"pdserve_router_{name}", help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
