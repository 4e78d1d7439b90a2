"""Operators' messages <-> what the store counts.

Owns the translation. Never decides or asks anything.
"""

from __future__ import annotations

from typing import Final

from baton.api.kvstore.v1 import operators_pb2
from baton.wire.durations import duration_to_proto, timestamp_to_proto
from services.kvstore.listing import TierShare, covered_tokens
from services.kvstore.quotas import Tier
from services.kvstore.scrub import Pace
from services.kvstore.scrubbing import Progress
from services.kvstore.state import LogState, Phase
from services.kvstore.store import Now
from services.kvstore.usage import TierUse

TENANTS_MAX: Final = 1000

_PHASES: Final = {
    Phase.PREFILL: operators_pb2.LOG_PHASE_PREFILL,
    Phase.DECODE: operators_pb2.LOG_PHASE_DECODE,
    Phase.ENDED: operators_pb2.LOG_PHASE_ENDED,
    Phase.KEPT: operators_pb2.LOG_PHASE_KEPT,
    Phase.MOVED: operators_pb2.LOG_PHASE_MOVED,
}
PHASE_OF: Final = {number: phase for phase, number in _PHASES.items()}


def summary_to_proto(log: LogState, block_tokens: int, now: Now) -> operators_pb2.LogSummary:
    """One line about a log."""
    line = operators_pb2.LogSummary(
        log_id=log.log_id,
        tenant=log.tenant,
        phase=_PHASES[log.phase],
        generation=log.generation,
        tokens=log.position,
        committed_tokens=log.committed,
        cold_tokens=covered_tokens(log.cold, block_tokens),
        host_pages=len(log.rows),
        nvme_pages=len(log.cold),
        writer_worker_id="" if log.writer is None else log.writer.worker_id,
        open_time=timestamp_to_proto(log.opened_wall_s),
        request_id=log.request_id,
        parent_log_id=log.parent_id or b"",
        parent_position=log.parent_position,
        idle=duration_to_proto(max(now.monotonic_s - log.last_used_s, 0.0)),
    )
    if log.expires_wall_s is not None:
        line.expire_time.CopyFrom(timestamp_to_proto(log.expires_wall_s))
    return line


def share_to_proto(tier: Tier, share: TierShare, page_bytes: int) -> operators_pb2.LogTier:
    """What one log has in one tier."""
    return operators_pb2.LogTier(
        tier=tier.value,
        own_pages=share.own_pages,
        shared_pages=share.shared_pages,
        bytes=share.pages * page_bytes,
        tokens=share.tokens,
    )


def use_to_proto(use: TierUse, page_bytes: int) -> operators_pb2.TierUsage:
    """The use of one tier, the largest tenants first."""
    tenants = sorted(use.tenants, key=lambda one: (-one.used_pages, one.tenant))
    return operators_pb2.TierUsage(
        tier=use.tier.value,
        pages_total=use.pages_total,
        page_bytes=page_bytes,
        pages_used=use.pages_used,
        tenants=[
            operators_pb2.TenantTierUsage(
                tenant=one.tenant,
                pages=one.used_pages,
                quota_pages=one.quota_pages,
                named=one.is_named,
                logs=use.logs.get(one.tenant, 0),
            )
            for one in tenants[:TENANTS_MAX]
        ],
        tenant_count=len(tenants),
    )


def scrub_to_proto(
    progress: dict[Tier, tuple[Progress, int]], page_bytes: int, pace: Pace | None
) -> operators_pb2.ReportScrubResponse:
    """What scrub did in each tier of so many pages."""
    answer = operators_pb2.ReportScrubResponse()
    for tier, (done, pages) in progress.items():
        line = answer.tiers.add(
            tier=tier.value,
            passes=done.passes,
            last_pass_pages=done.last_pages,
            pass_pages=0 if done.current is None else done.current.pages,
            pass_pages_done=0 if done.current is None else done.current.done,
            checked_pages=done.checked_pages,
            damaged_pages=done.damaged_pages,
        )
        if done.last_wall_s is not None:
            line.last_pass_time.CopyFrom(timestamp_to_proto(done.last_wall_s))
            line.last_pass.CopyFrom(duration_to_proto(done.last_took_s))
        if pace is not None and pace.needs_s(pages, page_bytes) > pace.period_s:
            line.pass_needs.CopyFrom(duration_to_proto(pace.needs_s(pages, page_bytes)))
    if pace is not None:
        answer.period.CopyFrom(duration_to_proto(pace.period_s))
        answer.bytes_per_s = pace.bytes_per_s
    return answer
