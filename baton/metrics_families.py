"""What a metric family is, and the labels, buckets and services that the table is written in.

Owns the shapes and shared values. The families themselves stand in `metrics_table` and
`metrics_store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from baton.errors import Reason
from baton.metrics import (
    OTHER,
    Label,
)


@unique
class Kind(StrEnum):
    """What a family's numbers do."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. Counters are shown with `_total` behind the name. `services` export it."""

    name: str
    kind: Kind
    help_text: str
    services: tuple[str, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """The name in the exposition."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


OK: Final = "ok"
FINISHED: Final = "finished"
ROUTES: Final = ("chat", "completions", "grpc")
OUTCOMES: Final = ("ok", "refused", "failed", "cancelled")
DEVICE_SLOT_STATES: Final = ("free", "loading", "resident", "clearing")
PAGE_STATES: Final = ("free", "granted", "live", "shared", "quarantined")
HAND_OFF_STATES: Final = ("handed_off", "received", "failed", "cancelled")
TRANSPORTS: Final = ("shm", "stream", "ucx")
TRANSPORT_WHYS: Final = ("best", "forced", "peer_lacks", "failed_before", "fell_back")
STEP_KERNELS: Final = ("native", "torch")
REDIS_ASK_OUTCOMES: Final = ("answered", "late", "away")
REDIS_SECONDS_BUCKETS: Final = (0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SERVICES: Final = ("gateway", "prefill", "decode", "kvstore", "merger")

REASONS: Final = tuple(reason.value for reason in Reason)
GATEWAY: Final = ("gateway",)
PREFILL: Final = ("prefill",)
DECODE: Final = ("decode",)
KVSTORE: Final = ("kvstore",)
MERGER: Final = ("merger",)
MOVERS: Final = (*DECODE, *KVSTORE)
SCRUB_LABEL: Final = Label("tier", ("host", "nvme"))
TIER_WAY_LABEL: Final = Label("way", ("promoted", "demoted"))

OVERLOAD_REASONS: Final = (
    Reason.QUEUE_FULL.value,
    Reason.PAGES_EXHAUSTED.value,
    Reason.QUOTA_EXCEEDED.value,
    Reason.DRAINING.value,
    Reason.NO_WORKER.value,
)
"""Refusals that more machines, or waiting, would help."""

FLUSH_BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STEP_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TOKEN_BUCKETS: Final = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0,
)  # fmt: skip
RPC_SECONDS_BUCKETS: Final = (
    0.0001, 0.0003, 0.0006, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.065, 0.13, 0.25, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
"""gRFC A66's latency bounds, every second one: its 40 are many for one series per method."""

RPC_METHODS_MAX: Final = 128
QUOTA_TENANTS_MAX: Final = 512


def a_counter(name: str, text: str, services: Sequence[str], *labels: Label) -> Family:
    """A counter that these services export."""
    return Family(
        name=name, kind=Kind.COUNTER, help_text=text, services=tuple(services), labels=labels
    )


def a_gauge(name: str, text: str, services: Sequence[str], *labels: Label) -> Family:
    """A gauge that these services export."""
    return Family(
        name=name, kind=Kind.GAUGE, help_text=text, services=tuple(services), labels=labels
    )


def a_histogram(
    name: str, text: str, services: Sequence[str], buckets: tuple[float, ...], *labels: Label
) -> Family:
    """A histogram that these services export."""
    return Family(
        name=name,
        kind=Kind.HISTOGRAM,
        help_text=text,
        services=tuple(services),
        labels=labels,
        buckets=buckets,
    )


OUTCOME: Final = Label("outcome", OUTCOMES)
REASON: Final = Label("reason", REASONS)
QUOTA_LABELS: Final = (
    Label("tier", ("host", "nvme", "device")),
    # Tenants that the quota file names, and one for all others.
    Label("tenant", (OTHER,), values_max=QUOTA_TENANTS_MAX),
)
TRANSFER_LABELS: Final = (
    Label("transport", TRANSPORTS),
    Label("source", ("local", "remote")),
    Label("target", ("local",)),
)
