"""Every metric family of every service: name, kind, meaning, labels, buckets.

Owns the names: a service asks for a family by its name and gets what stands here, and nothing else
exists. docs/observability.md, the Prometheus rules and the aliases are checked against this table.
Label values known ahead are shown as 0 from the start; label values never come from what a tenant
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

import grpc

from baton.errors import Reason
from baton.metrics import (
    REQUEST_SECONDS_BUCKETS,
    STAGE_SECONDS_BUCKETS,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    Counter,
    FollowingCounter,
    Gauge,
    Histogram,
    Label,
    Metrics,
)
from baton.stages import STAGES


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
PAGE_STATES: Final = ("free", "granted", "live", "shared", "quarantined")
HAND_OFF_STATES: Final = ("handed_off", "received", "failed", "cancelled")
TRANSPORTS: Final = ("shm", "stream", "ucx")
SERVICES: Final = ("gateway", "prefill", "decode", "kvstore", "merger")

_REASONS: Final = tuple(reason.value for reason in Reason)
_GATEWAY: Final = ("gateway",)
_PREFILL: Final = ("prefill",)
_DECODE: Final = ("decode",)
_KVSTORE: Final = ("kvstore",)
_MERGER: Final = ("merger",)

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


def _counter(name: str, text: str, services: Sequence[str], *labels: Label) -> Family:
    return Family(
        name=name, kind=Kind.COUNTER, help_text=text, services=tuple(services), labels=labels
    )


def _gauge(name: str, text: str, services: Sequence[str], *labels: Label) -> Family:
    return Family(
        name=name, kind=Kind.GAUGE, help_text=text, services=tuple(services), labels=labels
    )


def _histogram(
    name: str, text: str, services: Sequence[str], buckets: tuple[float, ...], *labels: Label
) -> Family:
    return Family(
        name=name,
        kind=Kind.HISTOGRAM,
        help_text=text,
        services=tuple(services),
        labels=labels,
        buckets=buckets,
    )


_OUTCOME: Final = Label("outcome", OUTCOMES)
_REASON: Final = Label("reason", _REASONS)
_TRANSFER_LABELS: Final = (
    Label("transport", TRANSPORTS),
    Label("source", ("local",)),
    Label("target", ("local",)),
)

_GATEWAY_FAMILIES: Final = (
    _counter(
        "baton_requests", "Requests by route and outcome.", _GATEWAY,
        Label("route", ROUTES), _OUTCOME,
    ),
    _counter("baton_request_errors", "Requests that ended in an error.", _GATEWAY, _REASON),
    _counter(
        "baton_admission_rejections", "Requests turned away for want of room.", _GATEWAY,
        Label("reason", OVERLOAD_REASONS),
    ),
    _counter(
        "baton_answers",
        "Finished answers by serving mode, source of the prompt's KV and finish reason.",
        _GATEWAY,
        Label("mode", ("disaggregated", "aggregated")),
        Label("kv_source", ("local", "remote", "recomputed")),
        Label("finish_reason", ("stop", "length")),
    ),
    _histogram(
        "baton_time_to_first_token_seconds",
        "From receipt to the first token sent; to the end for requests that had none.",
        _GATEWAY, TIME_TO_FIRST_TOKEN_BUCKETS, _OUTCOME,
    ),
    _histogram(
        "baton_e2e_request_latency_seconds", "From receipt to the last byte.", _GATEWAY,
        REQUEST_SECONDS_BUCKETS, _OUTCOME,
    ),
    _histogram(
        "baton_request_time_per_output_token_seconds",
        "Mean time between the tokens of one answer.", _GATEWAY, TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
    _histogram(
        "baton_request_queue_time_seconds", "Waiting for a turn to compute, of one answer.",
        _GATEWAY, REQUEST_SECONDS_BUCKETS,
    ),
    _histogram(
        "baton_request_prefill_time_seconds", "From the first turn to the first token.",
        _GATEWAY, REQUEST_SECONDS_BUCKETS,
    ),
    _histogram(
        "baton_request_decode_time_seconds", "From the first token to the last.", _GATEWAY,
        REQUEST_SECONDS_BUCKETS,
    ),
    _histogram(
        "baton_request_prompt_tokens", "Prompt tokens of an answer.", _GATEWAY, TOKEN_BUCKETS
    ),
    _histogram("baton_request_output_tokens", "Tokens of an answer.", _GATEWAY, TOKEN_BUCKETS),
    _histogram(
        "baton_stage_seconds", "Seconds of one stage of one answer.", _GATEWAY,
        STAGE_SECONDS_BUCKETS, Label("stage", STAGES),
    ),
    _counter("baton_prompt_tokens", "Prompt tokens of finished answers.", _GATEWAY),
    _counter("baton_cached_prompt_tokens", "Prompt tokens whose KV was found.", _GATEWAY),
    _counter("baton_computed_prompt_tokens", "Prompt tokens whose KV was computed.", _GATEWAY),
    _counter("baton_output_tokens", "Tokens produced.", _GATEWAY),
    _counter("baton_stream_resumes", "Times an answer went on at another decode worker.", _GATEWAY),
    _counter(
        "baton_prefill_fallbacks",
        "Answers prefilled by the decode worker against the policy.", _GATEWAY,
    ),
    _counter(
        "baton_handoffs",
        "Hand-offs of sealed logs; handed_off = received + failed + cancelled + in flight.",
        _GATEWAY, Label("state", HAND_OFF_STATES),
    ),
    _gauge("baton_handoffs_in_flight", "Hand-offs begun and not ended.", _GATEWAY),
    _gauge("baton_requests_in_flight", "Answers under way.", _GATEWAY),
    _gauge("baton_requests_waiting", "Prompts queued at prefill workers, as last heard.", _GATEWAY),
    _gauge("baton_cleanups_pending", "Ended logs not yet closed.", _GATEWAY),
    _gauge("baton_kv_cache_usage", "Used part of all arenas, 0 to 1, as last heard.", _GATEWAY),
    _gauge("baton_kv_pages", "Pages of all arenas, as last heard.", _GATEWAY),
    _gauge("baton_workers", "Workers heard of, by role and whether they get work.", _GATEWAY,
           Label("role", SERVICES[1:]), Label("routable", ("yes", "no"))),
)  # fmt: skip

_WORKER_FAMILIES: Final = (
    _gauge("baton_prefill_pending_requests", "Prompts admitted and not yet sealed.", _PREFILL),
    _gauge("baton_prefill_running_requests", "Prompts that had a turn to compute.", _PREFILL),
    _gauge("baton_prefill_waiting_requests", "Prompts that wait for their first turn.", _PREFILL),
    _gauge("baton_prefill_pending_tokens", "Prompt tokens admitted, not yet computed.", _PREFILL),
    _gauge("baton_prefill_free_pages", "Free pages of the node's arena, as last seen.", _PREFILL),
    _histogram(
        "baton_prefill_compute_seconds", "Computation of one prompt.", _PREFILL,
        STAGE_SECONDS_BUCKETS,
    ),
    _histogram(
        "baton_prefill_queue_wait_seconds", "Waiting for turns to compute, of one prompt.",
        _PREFILL, STAGE_SECONDS_BUCKETS,
    ),
    _histogram(
        "baton_prefill_kv_pack_seconds", "Checksumming and committing of one prompt's KV.",
        _PREFILL, STAGE_SECONDS_BUCKETS,
    ),
    _counter("baton_prefill_computed_tokens", "Prompt tokens computed.", _PREFILL),
    _counter("baton_prefill_hit_tokens", "Prompt tokens whose KV was found.", _PREFILL),
    _counter("baton_prefill_kv_bytes", "Bytes of KV committed.", _PREFILL),
    _counter("baton_prefill_sealed", "Prompts sealed and handed off.", _PREFILL),
    _counter("baton_prefill_failures", "Runs that ended without a seal.", _PREFILL, _REASON),
    _gauge("baton_decode_active_sequences", "Sequences that hold a slot.", _DECODE),
    _gauge("baton_decode_reserved_slots", "Slots held for sequences to come.", _DECODE),
    _gauge("baton_decode_used_pages", "Pages in the page tables of running sequences.", _DECODE),
    _histogram("baton_decode_step_tokens", "Tokens of one step.", _DECODE, STEP_BUCKETS),
    _histogram(
        "baton_inter_token_latency_seconds", "From one step's ack to the next, per sequence.",
        _DECODE, TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
    _histogram(
        "baton_decode_kv_transfer_seconds", "From the hand-off's command to its page table.",
        _DECODE, STAGE_SECONDS_BUCKETS,
    ),
    _counter("baton_decode_output_tokens", "Tokens acked.", _DECODE),
    _counter(
        "baton_decode_recomputed_tokens", "Tokens whose KV was computed again after a loss.",
        _DECODE,
    ),
    _counter("baton_decode_preemptions", "Sequences ended for want of a page.", _DECODE),
    _counter("baton_decode_received", "Sequences that joined.", _DECODE),
    _counter(
        "baton_decode_cancel_reclaims", "Sequences ended by a cancel, their slot free again.",
        _DECODE,
    ),
    _counter(
        "baton_decode_sequences_ended", "Sequences that ended, by outcome.", _DECODE,
        Label("outcome", (FINISHED, *_REASONS)),
    ),
    _gauge("baton_worker_held_logs", "Logs this worker may write.", (*_PREFILL, *_DECODE)),
    _gauge("baton_worker_kv_cache_usage", "Used part of the node's arena, 0 to 1, as last seen.",
           (*_PREFILL, *_DECODE)),
    _gauge("baton_worker_arena_info", "1, with the arena's shape as labels.",
           (*_PREFILL, *_DECODE), Label("block_tokens"), Label("pages")),
)  # fmt: skip

_STORE_FAMILIES: Final = (
    _gauge(
        "baton_kvstore_pages", "Arena pages by state; their sum is baton_kvstore_arena_pages.",
        _KVSTORE, Label("state", PAGE_STATES),
    ),
    _gauge("baton_kvstore_arena_pages", "All pages of the arena.", _KVSTORE),
    _gauge("baton_kvstore_logs", "Logs, open and kept.", _KVSTORE),
    _gauge("baton_kvstore_leases", "Logs with a writer.", _KVSTORE),
    _gauge("baton_kvstore_pins", "Holds of pages by transfers under way.", _KVSTORE),
    _gauge("baton_kvstore_transfers_open", "Blob transfers under way.", _KVSTORE),
    _gauge("baton_kvstore_prefixes", "Published prefixes.", _KVSTORE),
    _gauge("baton_kvstore_index_blocks", "Blocks in the prefix index.", _KVSTORE),
    _gauge("baton_kvstore_workers", "Attached workers.", _KVSTORE),
    _gauge("baton_kvstore_log_segments", "Segments on disk.", _KVSTORE),
    _counter("baton_kvstore_log_records", "Log records.", _KVSTORE),
    _counter("baton_kvstore_log_groups", "Group commits.", _KVSTORE),
    _counter("baton_kvstore_stale_writes_refused", "Stale writes refused.", _KVSTORE),
    _counter("baton_kvstore_kv_evicted_logs", "Kept logs whose KV was evicted.", _KVSTORE),
    _counter("baton_kvstore_kv_damaged", "Blocks found damaged: checksum failures.", _KVSTORE),
    _counter("baton_kvstore_lookup_tokens", "Prompt tokens looked for in the cache.", _KVSTORE),
    _counter("baton_kvstore_hit_tokens", "Prompt tokens found in the cache.", _KVSTORE),
    _counter("baton_kvstore_appends", "Append entries received.", _KVSTORE),
    _counter("baton_kvstore_append_messages", "Append messages, a group commit each.", _KVSTORE),
    _counter("baton_kvstore_appends_refused", "Append entries refused.", _KVSTORE, _REASON),
    _histogram(
        "baton_kvstore_log_flush_seconds", "One fdatasync of the log.", _KVSTORE, FLUSH_BUCKETS
    ),
    _counter(
        "baton_kvstore_blob_bytes", "Blob payload bytes moved.", _KVSTORE,
        Label("direction", ("in", "out")),
    ),
)  # fmt: skip

_OTHER_FAMILIES: Final = (
    _counter(
        "baton_splices", "Splices by outcome.", _MERGER, Label("outcome", (OK, *_REASONS))
    ),
    _counter("baton_materialised_bytes", "KV bytes passed on.", _MERGER),
    _histogram(
        "baton_transfer_seconds", "Hand-overs of KV: from the wish to the bytes being usable.",
        _DECODE, STAGE_SECONDS_BUCKETS, *_TRANSFER_LABELS,
    ),
    _histogram(
        "baton_transfer_queue_seconds", "Waiting before a hand-over of KV began.", _DECODE,
        STAGE_SECONDS_BUCKETS, *_TRANSFER_LABELS,
    ),
    _counter(
        "baton_transfer_bytes", "Bytes of KV handed over; by reference where transport is shm.",
        _DECODE, *_TRANSFER_LABELS,
    ),
    _gauge(
        "baton_transfer_bytes_per_second", "Bandwidth of the newest hand-over.", _DECODE,
        *_TRANSFER_LABELS,
    ),
    _counter("baton_transfer_retries", "Hand-overs tried again.", _DECODE, *_TRANSFER_LABELS),
    _counter(
        "baton_transfer_checksum_failures", "Hand-overs whose bytes did not verify.", _DECODE,
        *_TRANSFER_LABELS,
    ),
    _gauge("baton_info", "1, with the service's name.", SERVICES, Label("service")),
    _gauge("baton_spans_kept", "Spans kept for /debug/traces.", SERVICES),
    _counter(
        "grpc_server_call_started", "Calls begun.", SERVICES,
        Label("grpc_method", values_max=RPC_METHODS_MAX),
    ),
    _histogram(
        "grpc_server_call_duration_seconds", "From the call's begin to its status.", SERVICES,
        RPC_SECONDS_BUCKETS, Label("grpc_method", values_max=RPC_METHODS_MAX),
        Label("grpc_status", values_max=len(grpc.StatusCode)),
    ),
)  # fmt: skip

FAMILIES: Final = {
    family.name: family
    for family in (*_GATEWAY_FAMILIES, *_WORKER_FAMILIES, *_STORE_FAMILIES, *_OTHER_FAMILIES)
}
"""By name, without `_total`."""


def families_of(service: str) -> tuple[Family, ...]:
    """What one service exports, aliases apart."""
    return tuple(family for family in FAMILIES.values() if service in family.services)


def counter(metrics: Metrics, name: str) -> Counter:
    """The counter of this name, in a service that exports it."""
    family = _family(metrics, name, Kind.COUNTER)
    return metrics.counter(family.name, family.help_text, labels=family.labels)


def counter_following(
    metrics: Metrics, name: str, reads: Mapping[str, Callable[[], float]]
) -> None:
    """The counter of this name, read when shown: one read per value of its only label, or one under
    "" without labels. What is read must only grow.
    """
    family = _family(metrics, name, Kind.COUNTER)
    label = family.labels[0].name if family.labels else None
    metrics.collect(FollowingCounter(family.name, family.help_text, label, reads))


def gauge(metrics: Metrics, name: str) -> Gauge:
    """The gauge of this name, in a service that exports it."""
    family = _family(metrics, name, Kind.GAUGE)
    return metrics.gauge(family.name, family.help_text, labels=family.labels)


def histogram(metrics: Metrics, name: str) -> Histogram:
    """The histogram of this name, in a service that exports it."""
    family = _family(metrics, name, Kind.HISTOGRAM)
    return metrics.histogram(
        family.name, family.help_text, labels=family.labels, buckets=family.buckets
    )


def _family(metrics: Metrics, name: str, kind: Kind) -> Family:
    family = FAMILIES[name]
    assert family.kind is kind, family
    assert metrics.service in family.services, (metrics.service, family)
    return family
