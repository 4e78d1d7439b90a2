"""Every metric family of every service: name, kind, meaning, labels, buckets.

Owns the names: a service asks for a family by its name and gets what stands here, and nothing else
exists. docs/observability.md, the Prometheus rules and the aliases are checked against this table.
Label values known ahead are shown as 0 from the start; label values never come from what a tenant
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import grpc

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
from baton.metrics_families import (
    DECODE,
    FINISHED,
    GATEWAY,
    HAND_OFF_STATES,
    KVSTORE,
    MERGER,
    MOVERS,
    OK,
    OUTCOME,
    OVERLOAD_REASONS,
    PREFILL,
    REASON,
    REASONS,
    REDIS_ASK_OUTCOMES,
    REDIS_SECONDS_BUCKETS,
    ROUTES,
    RPC_METHODS_MAX,
    RPC_SECONDS_BUCKETS,
    SERVICES,
    STEP_BUCKETS,
    STEP_KERNELS,
    TOKEN_BUCKETS,
    TRANSFER_LABELS,
    TRANSPORT_WHYS,
    TRANSPORTS,
    Family,
    Kind,
    a_counter,
    a_gauge,
    a_histogram,
)
from baton.metrics_store import STORE_FAMILIES
from baton.stages import STAGES

_GATEWAY_FAMILIES: Final = (
    a_counter(
        "baton_requests", "Requests by route and outcome.", GATEWAY,
        Label("route", ROUTES), OUTCOME,
    ),
    a_counter("baton_request_errors", "Requests that ended in an error.", GATEWAY, REASON),
    a_counter(
        "baton_admission_rejections", "Requests turned away for want of room.", GATEWAY,
        Label("reason", OVERLOAD_REASONS),
    ),
    a_counter(
        "baton_answers",
        "Finished answers by serving mode, source of the prompt's KV and finish reason.",
        GATEWAY,
        Label("mode", ("disaggregated", "aggregated")),
        Label("kv_source", ("local", "remote", "recomputed")),
        Label("finish_reason", ("stop", "length")),
    ),
    a_histogram(
        "baton_time_to_first_token_seconds",
        "From receipt to the first token sent; to the end for requests that had none.",
        GATEWAY, TIME_TO_FIRST_TOKEN_BUCKETS, OUTCOME,
    ),
    a_counter(
        "baton_first_tokens",
        "First tokens by class and whether they came within what the class promises; missed are "
        "also requests that failed before theirs.",
        GATEWAY, Label("class", ("interactive", "batch")), Label("slo", ("met", "missed")),
    ),
    a_histogram(
        "baton_e2e_request_latency_seconds", "From receipt to the last byte.", GATEWAY,
        REQUEST_SECONDS_BUCKETS, OUTCOME,
    ),
    a_histogram(
        "baton_request_time_per_output_token_seconds",
        "Mean time between the tokens of one answer.", GATEWAY, TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
    a_histogram(
        "baton_request_queue_time_seconds", "Waiting for a turn to compute, of one answer.",
        GATEWAY, REQUEST_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_request_prefill_time_seconds", "From the first turn to the first token.",
        GATEWAY, REQUEST_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_request_decode_time_seconds", "From the first token to the last.", GATEWAY,
        REQUEST_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_request_prompt_tokens", "Prompt tokens of an answer.", GATEWAY, TOKEN_BUCKETS
    ),
    a_histogram("baton_request_output_tokens", "Tokens of an answer.", GATEWAY, TOKEN_BUCKETS),
    a_histogram(
        "baton_stage_seconds", "Seconds of one stage of one answer.", GATEWAY,
        STAGE_SECONDS_BUCKETS, Label("stage", STAGES),
    ),
    a_counter("baton_prompt_tokens", "Prompt tokens of finished answers.", GATEWAY),
    a_counter("baton_cached_prompt_tokens", "Prompt tokens whose KV was found.", GATEWAY),
    a_counter("baton_computed_prompt_tokens", "Prompt tokens whose KV was computed.", GATEWAY),
    a_counter("baton_output_tokens", "Tokens produced.", GATEWAY),
    a_counter("baton_stream_resumes", "Times an answer went on at another decode worker.", GATEWAY),
    a_counter(
        "baton_prefill_fallbacks",
        "Answers prefilled by the decode worker against the policy.", GATEWAY,
    ),
    a_counter(
        "baton_handoffs",
        "Hand-offs of sealed logs; handed_off = received + failed + cancelled + in flight.",
        GATEWAY, Label("state", HAND_OFF_STATES),
    ),
    a_gauge("baton_handoffs_in_flight", "Hand-offs begun and not ended.", GATEWAY),
    a_gauge("baton_requests_in_flight", "Answers under way.", GATEWAY),
    a_gauge("baton_requests_waiting", "Prompts queued at prefill workers, as last heard.", GATEWAY),
    a_gauge("baton_cleanups_pending", "Ended logs not yet closed.", GATEWAY),
    a_gauge("baton_kv_cache_usage", "Used part of all arenas, 0 to 1, as last heard.", GATEWAY),
    a_gauge("baton_kv_pages", "Pages of all arenas, as last heard.", GATEWAY),
    a_gauge("baton_workers", "Workers heard of, by role and whether they get work.", GATEWAY,
           Label("role", SERVICES[1:]), Label("routable", ("yes", "no"))),
    a_gauge("baton_workers_mismatched",
           "Ready workers without work: their model is not the gateway's.", GATEWAY,
           Label("role", ("prefill", "decode"))),
    a_gauge("baton_redis_up", "1 while the gateway's Redis is connected.", GATEWAY),
    a_counter("baton_redis_asks", "Times a request asked Redis: answered, too late, not asked.",
             GATEWAY, Label("outcome", REDIS_ASK_OUTCOMES)),
    a_histogram("baton_redis_ask_seconds", "What a request waited for Redis, at most 50 ms.",
               GATEWAY, REDIS_SECONDS_BUCKETS),
    a_counter("baton_redis_connections_lost", "Connections to Redis that broke.", GATEWAY),
    a_counter("baton_redis_refusals", "Commands that Redis refused.", GATEWAY),
    a_counter("baton_redis_posts_dropped", "Writes dropped while Redis was away.", GATEWAY),
)  # fmt: skip

_WORKER_FAMILIES: Final = (
    a_gauge("baton_prefill_pending_requests", "Prompts admitted and not yet sealed.", PREFILL),
    a_gauge("baton_prefill_running_requests", "Prompts that had a turn to compute.", PREFILL),
    a_gauge("baton_prefill_waiting_requests", "Prompts that wait for their first turn.", PREFILL),
    a_gauge("baton_prefill_pending_tokens", "Prompt tokens admitted, not yet computed.", PREFILL),
    a_gauge("baton_prefill_free_pages", "Free pages of the node's arena, as last seen.", PREFILL),
    a_histogram(
        "baton_prefill_compute_seconds", "Computation of one prompt.", PREFILL,
        STAGE_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_prefill_queue_wait_seconds", "Waiting for turns to compute, of one prompt.",
        PREFILL, STAGE_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_prefill_kv_pack_seconds", "Checksumming and committing of one prompt's KV.",
        PREFILL, STAGE_SECONDS_BUCKETS,
    ),
    a_counter("baton_prefill_computed_tokens", "Prompt tokens computed.", PREFILL),
    a_counter("baton_prefill_hit_tokens", "Prompt tokens whose KV was found.", PREFILL),
    a_counter("baton_prefill_kv_bytes", "Bytes of KV committed.", PREFILL),
    a_counter("baton_prefill_sealed", "Prompts sealed and handed off.", PREFILL),
    a_counter("baton_prefill_failures", "Runs that ended without a seal.", PREFILL, REASON),
    a_gauge("baton_decode_active_sequences", "Sequences that hold a slot.", DECODE),
    a_gauge("baton_decode_kernel_info", "1 for what computes steps here.", DECODE,
           Label("kernel", STEP_KERNELS)),
    a_gauge("baton_decode_reserved_slots", "Places held for sequences to come.", DECODE),
    a_gauge("baton_decode_used_pages", "Pages in the page tables of running sequences.", DECODE),
    a_histogram("baton_decode_step_tokens", "Tokens of one step.", DECODE, STEP_BUCKETS),
    a_histogram(
        "baton_inter_token_latency_seconds", "From one step's ack to the next, per sequence.",
        DECODE, TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
    a_histogram(
        "baton_decode_kv_transfer_seconds", "From the hand-off's command to its page table.",
        DECODE, STAGE_SECONDS_BUCKETS,
    ),
    a_counter("baton_decode_output_tokens", "Tokens acked.", DECODE),
    a_counter(
        "baton_decode_recomputed_tokens", "Tokens whose KV was computed again after a loss.",
        DECODE,
    ),
    a_counter(
        "baton_decode_preemptions", "Sequences that gave up their slot and go on later: for pages, "
        "for a higher class, for another tenant's share.",
        DECODE, Label("cause", ("pages", "class", "tenant")),
    ),
    a_gauge(
        "baton_decode_gap_seconds", "From one step to the next, recently: with nothing beside "
        "them, or a local prefill.", DECODE, Label("beside", ("nothing", "prompt")),
    ),
    a_gauge(
        "baton_decode_local_prefill_rest_ratio", "Seconds that a local prefill rests for each "
        "that it computes, so that the others' tokens keep coming.", DECODE,
    ),
    a_gauge("baton_decode_waiting_sequences", "Sequences that wait for a slot or pages.", DECODE,
           Label("class", ("interactive", "batch"))),
    a_histogram(
        "baton_decode_queue_wait_seconds", "From a sequence's command to its first slot.",
        DECODE, STAGE_SECONDS_BUCKETS, Label("class", ("interactive", "batch")),
    ),
    a_counter("baton_decode_received", "Sequences that joined.", DECODE),
    a_counter(
        "baton_decode_cancel_reclaims", "Sequences ended by a cancel, their slot free again.",
        DECODE,
    ),
    a_counter(
        "baton_decode_sequences_ended", "Sequences that ended, by outcome.", DECODE,
        Label("outcome", (FINISHED, *REASONS)),
    ),
    a_counter(
        "baton_worker_golden_checks", "Golden checks of the live weights, by path and outcome.",
        (*PREFILL, *DECODE), Label("path", STEP_KERNELS), Label("outcome", ("passed", "failed")),
    ),
    a_gauge(
        "baton_worker_golden_distance",
        "Relative L2 of the last check: from the reference, or from the start if that is more.",
        (*PREFILL, *DECODE), Label("path", STEP_KERNELS),
    ),
    a_gauge("baton_worker_degraded", "1 where the step kernel failed its check and torch serves.",
           (*PREFILL, *DECODE)),
    a_gauge("baton_worker_held_logs", "Logs this worker may write.", (*PREFILL, *DECODE)),
    a_gauge("baton_worker_kv_cache_usage", "Used part of the node's arena, 0 to 1, as last seen.",
           (*PREFILL, *DECODE)),
    a_gauge("baton_worker_arena_info", "1, with the arena's shape as labels.",
           (*PREFILL, *DECODE), Label("block_tokens"), Label("pages")),
)  # fmt: skip

SHARE_BUCKETS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

_MOVE_FAMILIES: Final = (
    a_counter(
        "baton_logs_brought",
        "Logs brought to the decode worker's kvstore from another one, by how: moved, or after a "
        "fault forked or reopened from tokens.", GATEWAY,
        Label("how", ("moved", "forked", "reopened")),
    ),
    a_histogram(
        "baton_hidden_transfer_share",
        "Part of a moved log's bytes that was copied while its prompt was computed.", GATEWAY,
        SHARE_BUCKETS,
    ),
    a_counter(
        "baton_kvstore_moves", "Logs moved here from another kvstore, or not.", KVSTORE,
        Label("outcome", (OK, *REASONS)),
    ),
    a_histogram(
        "baton_kvstore_move_seconds", "From the wish for a log to its opening here.", KVSTORE,
        STAGE_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_kvstore_move_verify_seconds", "Comparing one moved log's bytes with their CRCs.",
        KVSTORE, STAGE_SECONDS_BUCKETS,
    ),
    a_histogram(
        "baton_kvstore_move_hidden_transfer_share",
        "Part of a moved log's bytes that was copied before its move.", KVSTORE, SHARE_BUCKETS,
    ),
    a_gauge(
        "baton_kvstore_moves_unconfirmed",
        "Logs that moved away and whose new home has not confirmed.", KVSTORE,
    ),
    a_histogram(
        "baton_kvstore_transfer_registration_seconds",
        "Making pages known to the transport before one run of them.", KVSTORE,
        STAGE_SECONDS_BUCKETS, Label("transport", TRANSPORTS),
    ),
    a_histogram(
        "baton_kvstore_transfer_sync_seconds",
        "Coming to terms with the other side about one run of pages.", KVSTORE,
        STAGE_SECONDS_BUCKETS, Label("transport", TRANSPORTS),
    ),
    a_counter(
        "baton_kvstore_transfers_broken", "Runs of pages that broke off, by reason.", KVSTORE,
        Label("transport", TRANSPORTS), REASON,
    ),
    a_counter(
        "baton_kvstore_transport_choices", "Transports chosen for a log's pages, and why.",
        KVSTORE, Label("transport", TRANSPORTS), Label("why", TRANSPORT_WHYS),
    ),
    a_gauge("baton_kvstore_replicas", "Logs of other kvstores that are coming here.", KVSTORE),
)  # fmt: skip

_OTHER_FAMILIES: Final = (
    a_counter(
        "baton_splices", "Splices by outcome.", MERGER, Label("outcome", (OK, *REASONS))
    ),
    a_counter("baton_materialised_bytes", "KV bytes passed on.", MERGER),
    a_histogram(
        "baton_transfer_seconds", "Hand-overs of KV: from the wish to the bytes being usable.",
        MOVERS, STAGE_SECONDS_BUCKETS, *TRANSFER_LABELS,
    ),
    a_histogram(
        "baton_transfer_queue_seconds", "Waiting before a hand-over of KV began.", MOVERS,
        STAGE_SECONDS_BUCKETS, *TRANSFER_LABELS,
    ),
    a_counter(
        "baton_transfer_bytes", "Bytes of KV handed over; by reference where transport is shm.",
        MOVERS, *TRANSFER_LABELS,
    ),
    a_gauge(
        "baton_transfer_bytes_per_second", "Bandwidth of the newest hand-over.", MOVERS,
        *TRANSFER_LABELS,
    ),
    a_counter("baton_transfer_retries", "Hand-overs tried again.", MOVERS, *TRANSFER_LABELS),
    a_counter(
        "baton_transfer_checksum_failures", "Hand-overs whose bytes did not verify.", MOVERS,
        *TRANSFER_LABELS,
    ),
    a_gauge("baton_info", "1, with the service's name.", SERVICES, Label("service")),
    a_gauge("baton_spans_kept", "Spans kept for /debug/traces.", SERVICES),
    a_counter(
        "grpc_server_call_started", "Calls begun.", SERVICES,
        Label("grpc_method", values_max=RPC_METHODS_MAX),
    ),
    a_histogram(
        "grpc_server_call_duration_seconds", "From the call's begin to its status.", SERVICES,
        RPC_SECONDS_BUCKETS, Label("grpc_method", values_max=RPC_METHODS_MAX),
        Label("grpc_status", values_max=len(grpc.StatusCode)),
    ),
)  # fmt: skip

FAMILIES: Final = {
    family.name: family
    for family in (
        *_GATEWAY_FAMILIES,
        *_WORKER_FAMILIES,
        *STORE_FAMILIES,
        *_MOVE_FAMILIES,
        *_OTHER_FAMILIES,
    )
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
