"""Scrub: stored bytes are compared with their CRCs again and again; what is damaged is given up.

Owns the passes over each tier and what is told of them. A damaged page is out of use for this life
of the store, nothing finds it, and every log that refers to it keeps the KV before it only; the
next use computes it again, or loads it from another tier. Never judges a page that is still
written, never logs content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from baton.metrics import Metrics
from baton.metrics_table import counter_following, gauge
from services.kvstore.quotas import Tier
from services.kvstore.runtime import Runtime
from services.kvstore.scrub import Due, Pace, Pass, batch_pages
from services.kvstore.scrub_targets import ArenaTarget, ScrubTarget
from services.kvstore.state import LogState
from services.kvstore.walking import all_logs

TURN_S: Final = 0.5
"""Between two looks at what is due; a quarter of the period where that is less."""

HOLDERS_TOLD_MAX: Final = 32

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(slots=True, kw_only=True)
class Progress:
    """What was done in one tier since the start."""

    passes: int = 0
    checked_pages: int = 0
    damaged_pages: int = 0
    last_wall_s: float | None = None
    last_took_s: float = 0.0
    last_pages: int = 0
    begun_s: float | None = None
    current: Pass | None = None


class Scrubber:
    """Scrubs the tiers of one store. `pace` None: never."""

    def __init__(
        self, runtime: Runtime, arena: ArenaTarget, others: Sequence[ScrubTarget], pace: Pace | None
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._arena = arena
        self._targets: tuple[ScrubTarget, ...] = (arena, *others)
        self.pace = pace
        self._began_wall_s = runtime.clock.wall_s()
        self._progress = {target.tier: Progress() for target in self._targets}

    def progress(self, tier: Tier) -> Progress:
        """What was done in one tier that there is."""
        return self._progress[tier]

    def tiers(self) -> dict[Tier, tuple[Progress, int]]:
        """What was done in each tier, and how many pages that has."""
        return {
            target.tier: (self._progress[target.tier], target.page_count)
            for target in self._targets
        }

    @property
    def turn_s(self) -> float:
        """Between two turns."""
        return TURN_S if self.pace is None else min(TURN_S, self.pace.period_s / 4)

    def say(self) -> None:
        """States at the start what will be done."""
        if self.pace is None:
            _log.warning("scrub_off", hint="give --scrub-period-s")
            return
        page_bytes = self._runtime.arena.slot_bytes
        _log.info(
            "scrub",
            period_s=self.pace.period_s,
            bytes_per_s_max=self.pace.bytes_per_s,
            full_pass_takes_s={
                target.tier.value: round(self.pace.needs_s(target.page_count, page_bytes), 1)
                for target in self._targets
            },
        )

    async def turn(self) -> None:
        """Checks what is due now; the clock calls it every `turn_s`."""
        if self.pace is not None:
            for target in self._targets:
                await self._turn(target, self._progress[target.tier], self.pace)

    async def _turn(self, target: ScrubTarget, progress: Progress, pace: Pace) -> None:
        now_s = self._runtime.clock.monotonic_s()
        if progress.current is None:
            if progress.begun_s is not None and now_s < progress.begun_s + pace.period_s:
                return
            progress.begun_s = now_s
            progress.current = await self._gather(target)
        current = progress.current
        page_bytes = self._runtime.arena.slot_bytes
        assert progress.begun_s is not None
        due = pace.due(current.pages, page_bytes, now_s - progress.begun_s)
        due = min(due, current.done + pace.most(page_bytes, self.turn_s))
        while current.done < due:
            count = min(batch_pages(page_bytes), due - current.done)
            await self._check(target, progress, current.take(count))
        if current.is_over:
            self._end(target, progress, current)

    async def _gather(self, target: ScrubTarget) -> Pass:
        """All pages that logs and published prefixes refer to now."""
        found = Pass(target.page_count, self._core.block_tokens, has_partial=target.has_partial)
        for prefix in self._core.prefixes.all():
            found.add(target.rows_of(prefix))
        async for logs in all_logs(self._core):
            for log in logs:
                found.add(target.rows_of(log))
        found.begin()
        return found

    async def _check(self, target: ScrubTarget, progress: Progress, due: Due) -> None:
        checked = due.only([at for at in range(len(due)) if target.is_standing(due, at)])
        bad = await target.check(checked)
        progress.checked_pages += len(checked)
        damaged = [int(checked.pages[at]) for at in bad if target.is_standing(checked, at)]
        if damaged:
            self._give_up(target, progress, damaged)

    def _give_up(self, target: ScrubTarget, progress: Progress, pages: list[int]) -> None:
        progress.damaged_pages += len(pages)
        damaged = set(pages)
        holders = [
            log.log_id.hex()
            for log in self._core.logs.values()
            if not damaged.isdisjoint(self._pages_of(target, log))
        ]
        owners = target.give_up(pages, self._runtime.now().wall_s)
        self._runtime.order_work()
        _log.error(
            "scrub_found_damage",
            tier=target.tier.value,
            pages=pages,
            logs=holders[:HOLDERS_TOLD_MAX],
            owners=owners,
        )

    def _pages_of(self, target: ScrubTarget, log: LogState) -> list[int]:
        found: list[int] = target.rows_of(log).pages().tolist()
        return found

    def _end(self, target: ScrubTarget, progress: Progress, current: Pass) -> None:
        now = self._runtime.now()
        assert progress.begun_s is not None
        progress.current = None
        progress.passes += 1
        progress.last_wall_s = now.wall_s
        progress.last_took_s = now.monotonic_s - progress.begun_s
        progress.last_pages = current.pages
        _log.debug(
            "scrub_pass",
            tier=target.tier.value,
            pages=current.pages,
            seconds=round(progress.last_took_s, 3),
        )

    # --- metrics ----------------------------------------------------------------------------

    def follow(self, metrics: Metrics) -> None:
        """Shows the same as metrics."""
        for name in ("checked_pages", "damaged_pages", "passes"):
            reads = {tier.value: _reader(done, name) for tier, done in self._progress.items()}
            counter_following(metrics, f"baton_kvstore_scrub_{name}", reads)
        last = gauge(metrics, "baton_kvstore_scrub_last_pass_timestamp_seconds")
        for tier, done in self._progress.items():
            last.follow(self._last_reader(done), tier=tier.value)
        period = gauge(metrics, "baton_kvstore_scrub_period_seconds")
        period.follow(lambda: 0.0 if self.pace is None else self.pace.period_s)
        quarantined = gauge(metrics, "baton_kvstore_scrub_quarantined_pages")
        quarantined.follow(lambda: self._arena.quarantined)

    def _last_reader(self, done: Progress) -> Callable[[], float]:
        return lambda: done.last_wall_s or self._began_wall_s


def _reader(done: Progress, name: str) -> Callable[[], int]:
    return lambda: int(getattr(done, name))
