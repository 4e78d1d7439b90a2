"""The gateway's metrics, and the one canonical log line of each request.

Owns the families and the line's fields. Labels come from bounded sets only: routes, outcomes,
reasons; never from what a client sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from baton.errors import Reason
from baton.ids import log_id_text
from baton.metrics import (
    REQUEST_SECONDS_BUCKETS,
    STAGE_SECONDS_BUCKETS,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    Label,
    Metrics,
)
from services.gateway.events import Completed, FinishReason, KvSource, ServingMode

_log = structlog.stdlib.get_logger("baton.gateway.request")

ROUTES: Final = ("chat", "completions", "grpc")
OUTCOMES: Final = ("ok", "refused", "failed", "cancelled")
STAGES: Final = (
    "request_queue_wait",
    "prefill_compute",
    "kv_pack",
    "kv_transfer",
    "per_token_decode",
)


class GatewayMeasures:
    """Counts and times of requests."""

    def __init__(self, metrics: Metrics) -> None:
        modes = tuple(mode.value for mode in ServingMode)
        sources = tuple(source.value for source in KvSource)
        finishes = (FinishReason.STOP.value, FinishReason.LENGTH.value)
        self._metrics = metrics
        self._requests = metrics.counter(
            "baton_requests",
            "Requests by route and outcome.",
            labels=(Label("route", ROUTES), Label("outcome", OUTCOMES)),
        )
        self._errors = metrics.counter(
            "baton_request_errors",
            "Requests that ended in an error, by reason.",
            labels=(Label("reason", tuple(reason.value for reason in Reason)),),
        )
        self._answers = metrics.counter(
            "baton_answers",
            "Finished answers by serving mode, source of the prompt's KV and finish reason.",
            labels=(
                Label("mode", modes),
                Label("kv_source", sources),
                Label("finish_reason", finishes),
            ),
        )
        self._ttft = metrics.histogram(
            "baton_time_to_first_token_seconds",
            "From receipt to the first token.",
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._tpot = metrics.histogram(
            "baton_request_time_per_output_token_seconds",
            "Mean time between the tokens of one answer.",
            buckets=TIME_PER_OUTPUT_TOKEN_BUCKETS,
        )
        self._e2e = metrics.histogram(
            "baton_e2e_request_latency_seconds",
            "From receipt to the last token.",
            buckets=REQUEST_SECONDS_BUCKETS,
        )
        self._stages = metrics.histogram(
            "baton_stage_seconds",
            "Seconds of one stage of one answer.",
            labels=(Label("stage", STAGES),),
            buckets=STAGE_SECONDS_BUCKETS,
        )
        self._prompt_tokens = metrics.counter("baton_prompt_tokens", "Prompt tokens.")
        self._cached_tokens = metrics.counter(
            "baton_cached_prompt_tokens", "Prompt tokens whose KV was found."
        )
        self._output_tokens = metrics.counter("baton_output_tokens", "Tokens produced.")
        self._resumes = metrics.counter(
            "baton_stream_resumes", "Answers that went on at another decode worker."
        )
        self._fallbacks = metrics.counter(
            "baton_prefill_fallbacks", "Answers prefilled by the decode worker against the policy."
        )

    def follow_running(self, read: Callable[[], float], pending: Callable[[], float]) -> None:
        """Gauges of answers under way and of clean-ups not yet done."""
        running = self._metrics.gauge("baton_requests_in_flight", "Answers under way.")
        running.follow(read)
        cleanups = self._metrics.gauge("baton_cleanups_pending", "Ended logs not yet closed.")
        cleanups.follow(pending)

    def negotiated(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics' text and its content type."""
        return self._metrics.negotiated(accept)

    def count(self, line: RequestLine) -> None:
        """Count a finished request and write its line."""
        self._requests.add(route=line.route, outcome=line.outcome)
        if line.error is not None:
            self._errors.add(reason=line.error.value)
        for answer in line.answers:
            self._count_answer(answer)
        line.write()

    def _count_answer(self, answer: Completed) -> None:
        usage = answer.usage
        self._answers.add(
            mode=answer.mode.value,
            kv_source=answer.kv_source.value,
            finish_reason=answer.finish.value,
        )
        self._ttft.observe(answer.time_to_first_token_s)
        self._e2e.observe(answer.elapsed_s)
        if "per_token_decode" in answer.stage_seconds:
            self._tpot.observe(answer.stage_seconds["per_token_decode"])
        for stage, seconds in answer.stage_seconds.items():
            self._stages.observe(seconds, stage=stage)
        self._prompt_tokens.add(usage.prompt_tokens)
        self._cached_tokens.add(usage.cached_tokens)
        self._output_tokens.add(usage.completion_tokens)
        if answer.resumed:
            self._resumes.add(answer.resumed)
        if answer.is_fallback:
            self._fallbacks.add()


@dataclass(slots=True, kw_only=True)
class RequestLine:
    """What one request leaves in the log."""

    route: str
    request_id: str
    tenant: str
    model: str
    client_request_id: str | None = None
    answers: list[Completed] = field(default_factory=list)
    outcome: str = "cancelled"
    error: Reason | None = None
    elapsed_s: float = 0.0

    def write(self) -> None:
        """One line, whatever happened."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "tenant": self.tenant,
            "model": self.model,
            "route": self.route,
            "outcome": self.outcome,
            "error_code": None if self.error is None else self.error.value,
            "e2e_ms": round(self.elapsed_s * 1000, 1),
        }
        if self.answers:
            fields |= _answer_fields(self.answers)
        _log.info("request_finished", **fields)


def _answer_fields(answers: list[Completed]) -> dict[str, object]:
    first = answers[0]
    tpot_s = first.stage_seconds.get("per_token_decode")
    return {
        "log_id": log_id_text(first.log_id),
        "prefill": first.prefill_worker_id,
        "decode": first.decode_worker_id,
        "serving_mode": first.mode.value,
        "routing": first.routing,
        "is_fallback": first.is_fallback,
        "kv_source": first.kv_source.value,
        "exactness": first.exactness.value,
        "prompt_tokens": first.usage.prompt_tokens,
        "cached_tokens": first.usage.cached_tokens,
        "output_tokens": sum(one.usage.completion_tokens for one in answers),
        "answers": len(answers),
        "ttft_ms": round(first.time_to_first_token_s * 1000, 1),
        "tpot_ms": None if tpot_s is None else round(tpot_s * 1000, 2),
        "transfer_ms": round(first.stage_seconds.get("kv_transfer", 0.0) * 1000, 2),
        "prefix_id": first.prefix_id,
        "resumed": first.resumed,
    }
