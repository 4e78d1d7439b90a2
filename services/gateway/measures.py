"""The gateway's metrics, and the one canonical log line of each request.

Owns what is observed of a request and the line's fields. Labels come from bounded sets only:
routes, outcomes, reasons; never from what a client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from baton.errors import Reason
from baton.ids import log_id_text
from baton.log import CanonicalLine, log_canonical_line
from baton.metrics import Metrics
from baton.metrics_families import HAND_OFF_STATES, OVERLOAD_REASONS, SERVICES
from baton.metrics_table import counter, counter_following, gauge, histogram
from baton.scheduling.claims import ServiceClass
from baton.stages import KV_TRANSFER, KV_UNPACK, REQUEST_QUEUE_WAIT
from services.gateway.events import Completed
from services.gateway.handoffs import HandOffs
from services.gateway.hub import WorkerHub
from services.gateway.planner import Planner
from services.gateway.registry import WorkerLoad, WorkerRole

OK_OUTCOME = "ok"


class GatewayMeasures:
    """Counts and times of requests."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests = counter(metrics, "baton_requests")
        self._errors = counter(metrics, "baton_request_errors")
        self._rejections = counter(metrics, "baton_admission_rejections")
        self._answers = counter(metrics, "baton_answers")
        self._ttft = histogram(metrics, "baton_time_to_first_token_seconds")
        self._first_tokens = counter(metrics, "baton_first_tokens")
        self._slos: dict[ServiceClass, float] = {}
        self._e2e = histogram(metrics, "baton_e2e_request_latency_seconds")
        self._tpot = histogram(metrics, "baton_request_time_per_output_token_seconds")
        self._queue = histogram(metrics, "baton_request_queue_time_seconds")
        self._prefill = histogram(metrics, "baton_request_prefill_time_seconds")
        self._decode = histogram(metrics, "baton_request_decode_time_seconds")
        self._prompt_sizes = histogram(metrics, "baton_request_prompt_tokens")
        self._output_sizes = histogram(metrics, "baton_request_output_tokens")
        self._stages = histogram(metrics, "baton_stage_seconds")
        self._prompt_tokens = counter(metrics, "baton_prompt_tokens")
        self._cached_tokens = counter(metrics, "baton_cached_prompt_tokens")
        self._computed_tokens = counter(metrics, "baton_computed_prompt_tokens")
        self._output_tokens = counter(metrics, "baton_output_tokens")
        self._resumes = counter(metrics, "baton_stream_resumes")
        self._fallbacks = counter(metrics, "baton_prefill_fallbacks")
        self._brought = counter(metrics, "baton_logs_brought")
        self._hidden = histogram(metrics, "baton_hidden_transfer_share")

    def promise(self, slos: Mapping[ServiceClass, float]) -> None:
        """Seconds to the first token that each class is promised; without, nothing is counted."""
        self._slos = dict(slos)

    def follow_running(self, read: Callable[[], float], pending: Callable[[], float]) -> None:
        """Gauges of answers under way and of clean-ups not yet done."""
        gauge(self._metrics, "baton_requests_in_flight").follow(read)
        gauge(self._metrics, "baton_cleanups_pending").follow(pending)

    def follow_handoffs(self, handoffs: HandOffs) -> None:
        """The conservation of hand-offs."""
        reads = {state: _reader(handoffs, state) for state in HAND_OFF_STATES}
        counter_following(self._metrics, "baton_handoffs", reads)
        gauge(self._metrics, "baton_handoffs_in_flight").follow(lambda: float(handoffs.in_flight))

    def follow_workers(self, hub: WorkerHub) -> None:
        """What heartbeats say of the cluster."""
        cluster = _Cluster(hub)
        gauge(self._metrics, "baton_requests_waiting").follow(cluster.waiting)
        gauge(self._metrics, "baton_kv_cache_usage").follow(cluster.used)
        gauge(self._metrics, "baton_kv_pages").follow(cluster.pages)
        workers = gauge(self._metrics, "baton_workers")
        for role in SERVICES[1:]:
            for routable in ("yes", "no"):
                workers.follow(cluster.counted(role, routable), role=role, routable=routable)

    def follow_mismatched(self, planner: Planner) -> None:
        """Ready workers that get no work because their model is not this gateway's."""
        mismatched = gauge(self._metrics, "baton_workers_mismatched")
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):

            def count(role: WorkerRole = role) -> float:
                return float(len(planner.strangers(role)))

            mismatched.follow(count, role=role.value)

    def negotiated(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics' text and its content type."""
        return self._metrics.negotiated(accept)

    def count(self, line: RequestLine) -> None:
        """Count a finished request and write its line."""
        self._requests.add(route=line.route, outcome=line.outcome)
        if line.error is not None:
            self._errors.add(reason=line.error.value)
            if line.error.value in OVERLOAD_REASONS:
                self._rejections.add(reason=line.error.value)
        self._count_first_token(line)
        for answer in line.answers:
            self._count_answer(answer)
        if not line.answers:
            # A failure is as slow as it was: dropped, it would make the others look better.
            self._ttft.observe(line.first_token_after_s or line.elapsed_s, outcome=line.outcome)
            self._e2e.observe(line.elapsed_s, outcome=line.outcome)
        log_canonical_line(line.canonical())

    def _count_first_token(self, line: RequestLine) -> None:
        """Whether the first token came in time; of refused and cancelled requests nobody knows."""
        slo_s, ttft_s = self._slos.get(line.service_class), line.first_token_after_s
        if line.answers:
            ttft_s = line.answers[0].time_to_first_token_s
        if slo_s is None or (ttft_s is None and line.outcome != "failed"):
            return
        is_met = ttft_s is not None and ttft_s <= slo_s
        labels = {"class": line.service_class.name.lower(), "slo": "met" if is_met else "missed"}
        self._first_tokens.add(1.0, **labels)

    def _count_answer(self, answer: Completed) -> None:
        usage, stages = answer.usage, answer.stage_seconds
        self._answers.add(
            mode=answer.mode.value,
            kv_source=answer.kv_source.value,
            finish_reason=answer.finish.value,
        )
        ttft_s = answer.time_to_first_token_s
        queue_s = stages.get(REQUEST_QUEUE_WAIT, 0.0)
        self._ttft.observe(ttft_s, outcome=OK_OUTCOME)
        self._e2e.observe(answer.elapsed_s, outcome=OK_OUTCOME)
        self._queue.observe(queue_s)
        self._prefill.observe(max(0.0, ttft_s - queue_s))
        self._decode.observe(max(0.0, answer.elapsed_s - ttft_s))
        tpot_s = answer.time_per_output_token_s
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        for stage, seconds in stages.items():
            self._stages.observe(seconds, stage=stage)
        self._prompt_sizes.observe(float(usage.prompt_tokens))
        self._output_sizes.observe(float(usage.completion_tokens))
        self._prompt_tokens.add(usage.prompt_tokens)
        self._cached_tokens.add(usage.cached_tokens)
        self._computed_tokens.add(usage.prompt_tokens - usage.cached_tokens)
        self._output_tokens.add(usage.completion_tokens)
        if answer.resumed:
            self._resumes.add(answer.resumed)
        if answer.is_fallback:
            self._fallbacks.add()
        if answer.brought is not None:
            self._brought.add(how=answer.brought)
        if answer.hidden_transfer_share is not None:
            self._hidden.observe(answer.hidden_transfer_share)


def _reader(handoffs: HandOffs, state: str) -> Callable[[], float]:
    return lambda: float(handoffs.count(state))


class _Cluster:
    """Sums over the workers that are known now."""

    def __init__(self, hub: WorkerHub) -> None:
        self._hub = hub

    def waiting(self) -> float:
        records = [status.record for status in self._hub.statuses()]
        return float(sum(r.load.queued for r in records if r.role is WorkerRole.PREFILL))

    def pages(self) -> float:
        return float(sum(load.pages_total for load in self._stores()))

    def used(self) -> float:
        total = sum(load.pages_total for load in self._stores())
        free = sum(load.pages_free for load in self._stores())
        return 1.0 - free / total if total else 0.0

    def counted(self, role: str, routable: str) -> Callable[[], float]:
        def count() -> float:
            return float(
                sum(
                    status.record.role.value == role
                    and (status.reason is None) == (routable == "yes")
                    for status in self._hub.statuses()
                )
            )

        return count

    def _stores(self) -> list[WorkerLoad]:
        return [
            status.record.load
            for status in self._hub.statuses()
            if status.record.role is WorkerRole.KVSTORE
        ]


@dataclass(slots=True, kw_only=True)
class RequestLine:
    """What one request leaves in the log."""

    route: str
    request_id: str
    tenant: str
    model: str
    client_request_id: str | None = None
    answers: list[Completed] = field(default_factory=list)
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    outcome: str = "cancelled"
    error: Reason | None = None
    elapsed_s: float = 0.0
    first_token_after_s: float | None = None

    def canonical(self) -> CanonicalLine:
        """The line, whatever happened; of several answers the first one's details."""
        line = CanonicalLine(
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            tenant=self.tenant,
            model=self.model,
            route=self.route,
            outcome=self.outcome,
            error_code=None if self.error is None else self.error.value,
            ttft_ms=_ms(self.first_token_after_s),
            e2e_ms=_ms(self.elapsed_s),
        )
        return _with_answers(line, self.answers) if self.answers else line


def _with_answers(line: CanonicalLine, answers: list[Completed]) -> CanonicalLine:
    first = answers[0]
    stages = first.stage_seconds
    return replace(
        line,
        log_id=log_id_text(first.log_id),
        answers=len(answers),
        prefill=first.prefill_worker_id,
        decode=first.decode_worker_id,
        serving_mode=first.mode.value,
        routing=first.routing,
        is_fallback=first.is_fallback,
        kv_source=first.kv_source.value,
        exactness=first.exactness.value,
        finish_reason=first.finish.value,
        prefix_id=first.prefix_id,
        resumed=first.resumed,
        prompt_tokens=first.usage.prompt_tokens,
        cached_tokens=first.usage.cached_tokens,
        output_tokens=sum(one.usage.completion_tokens for one in answers),
        ttft_ms=_ms(first.time_to_first_token_s),
        tpot_ms=_ms(first.time_per_output_token_s),
        transfer_ms=_ms(stages.get(KV_TRANSFER, 0.0) + stages.get(KV_UNPACK, 0.0)),
        transfer_bytes=first.transfer_bytes,
        transport=first.transport,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
