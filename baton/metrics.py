"""Metrics of one process: families that exist before their first use, with labels that stay few.

Owns the registry, the bucket bounds and the small typed families; `baton.metrics_server` shows
them. Never takes a label value from a tenant without a bound: what is over it is counted as
"other".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from baton.tracing import current_trace, process_tracing

OTHER: Final = "other"

TIME_TO_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM's bounds, so that one dashboard reads both."""

TIME_PER_OUTPUT_TOKEN_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
"""vLLM's bounds for the time between tokens."""

REQUEST_SECONDS_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""vLLM's bounds for whole requests."""

STAGE_SECONDS_BUCKETS: Final = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
)  # fmt: skip
"""For the stages of one request, from a hand-off by reference to a long prefill."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label name, the values known ahead (shown as 0 from the start) and how many there may
    be.
    """

    name: str
    values: tuple[str, ...] = ()
    values_max: int = 64

    def __post_init__(self) -> None:
        """More known values than allowed is our own contradiction."""
        assert len(self.values) <= self.values_max, self


class _Labels:
    """Keeps the values of a family's labels within their bounds."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = tuple(labels)
        self._seen: dict[str, set[str]] = {label.name: set(label.values) for label in labels}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self._labels)

    def bounded(self, given: dict[str, str]) -> tuple[str, ...]:
        """The values in order; a new one over the bound becomes "other"."""
        assert given.keys() == self._seen.keys(), (sorted(given), sorted(self._seen))
        return tuple(self._value(label, given[label.name]) for label in self._labels)

    def _value(self, label: Label, value: str) -> str:
        seen = self._seen[label.name]
        if value in seen:
            return value
        if len(seen) >= label.values_max:
            return OTHER
        seen.add(value)
        return value

    def known(self) -> Iterable[tuple[str, ...]]:
        """Every combination of values known ahead; none if a label has no such values."""
        return itertools.product(*(label.values for label in self._labels))


class Counter:
    """Only grows."""

    def __init__(self, family: prometheus_client.Counter, labels: _Labels) -> None:
        self._family, self._labels = family, labels

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Adds a non-negative amount."""
        values = self._labels.bounded(labels)
        (self._family.labels(*values) if values else self._family).inc(amount)


class Gauge:
    """Goes up and down."""

    def __init__(self, family: prometheus_client.Gauge, labels: _Labels) -> None:
        self._family, self._labels = family, labels

    def set(self, value: float, **labels: str) -> None:
        """Replaces the value."""
        values = self._labels.bounded(labels)
        (self._family.labels(*values) if values else self._family).set(value)

    def add(self, amount: float, **labels: str) -> None:
        """Changes the value by an amount of either sign."""
        values = self._labels.bounded(labels)
        (self._family.labels(*values) if values else self._family).inc(amount)

    def follow(self, read: Callable[[], float], **labels: str) -> None:
        """Reads the value by `read` whenever the metrics are shown."""
        values = self._labels.bounded(labels)
        (self._family.labels(*values) if values else self._family).set_function(read)


class Histogram:
    """Counts observations by size."""

    def __init__(self, family: prometheus_client.Histogram, labels: _Labels) -> None:
        self._family, self._labels = family, labels

    def observe(self, value: float, **labels: str) -> None:
        """Records one observation; OpenMetrics shows the newest trace of each bucket."""
        values, trace = self._labels.bounded(labels), current_trace()
        exemplar = {"trace_id": trace.trace_id} if trace is not None and trace.is_sampled else None
        (self._family.labels(*values) if values else self._family).observe(value, exemplar)


class FollowingCounter(Collector):
    """A counter that somebody else keeps: read when the metrics are shown."""

    def __init__(
        self,
        name: str,
        help_text: str,
        label: str | None,
        reads: Mapping[str, Callable[[], float]],
    ) -> None:
        self._name, self._help_text, self._label = name, help_text, label
        self._reads = dict(reads)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """The name, so that it is not taken twice."""
        yield CounterMetricFamily(self._name, self._help_text)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What it stands at now."""
        names = () if self._label is None else (self._label,)
        family = CounterMetricFamily(self._name, self._help_text, labels=names)
        for value, read in self._reads.items():
            family.add_metric([value] if names else [], read())
        yield family


class Metrics:
    """The families of one process, in a registry of their own."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self.gauge("baton_info", "1, with the service's name.", labels=(Label("service"),)).set(
            1.0, service=service
        )
        self.gauge("baton_spans_kept", "Spans kept for /debug/traces.").follow(
            lambda: float(process_tracing().kept)
        )
        prometheus_client.ProcessCollector(registry=self.registry)

    def counter(self, name: str, help_text: str, *, labels: Sequence[Label] = ()) -> Counter:
        """A counter; Prometheus appends `_total` to its name."""
        bounded = _Labels(labels)
        family = prometheus_client.Counter(name, help_text, bounded.names, registry=self.registry)
        _show(family, bounded)
        return Counter(family, bounded)

    def gauge(self, name: str, help_text: str, *, labels: Sequence[Label] = ()) -> Gauge:
        """A gauge."""
        bounded = _Labels(labels)
        family = prometheus_client.Gauge(name, help_text, bounded.names, registry=self.registry)
        _show(family, bounded)
        return Gauge(family, bounded)

    def histogram(
        self,
        name: str,
        help_text: str,
        *,
        buckets: Sequence[float],
        labels: Sequence[Label] = (),
    ) -> Histogram:
        """A histogram with these upper bounds."""
        bounded = _Labels(labels)
        family = prometheus_client.Histogram(
            name, help_text, bounded.names, registry=self.registry, buckets=buckets
        )
        _show(family, bounded)
        return Histogram(family, bounded)

    def collect(self, collector: Collector) -> None:
        """Adds a collector that reads its values when asked, as a store with its own counters."""
        self.registry.register(collector)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def negotiated(self, accept: str | None) -> tuple[bytes, str]:
        """The text and its content type; OpenMetrics, which has exemplars, for who accepts it."""
        if accept is not None and "application/openmetrics-text" in accept:
            generate: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest
            return generate(self.registry), openmetrics.CONTENT_TYPE_LATEST
        return self.exposition(), prometheus_client.CONTENT_TYPE_PLAIN_0_0_4


def _show(
    family: prometheus_client.Counter | prometheus_client.Gauge | prometheus_client.Histogram,
    labels: _Labels,
) -> None:
    """Creates the children known ahead, so that a rate over the first event is right."""
    if labels.names:
        for values in labels.known():
            family.labels(*values)
