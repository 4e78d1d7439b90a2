"""Who runs and who waits: slots, a bounded queue, classes, tenants, preemption. Pure.

Owns the order. Time is passed in; what a decision takes (a log parked, a log taken again) is the
runner's, who tells when it is done.

A sequence *waits* until it is admitted to a slot, and is *active* until it leaves or is preempted:
then it waits again, and is not admitted before it is `settled` (its log given up). Of what waits
the highest level, (class, priority), goes first; within it the tenant served least of late, by
weight (`baton.scheduling.fairness`); of a tenant's own what was preempted, then what came first.

Invariants: active never exceeds `active_max`; active, waiting and reserved together never exceed
`active_max + queue_max`, but for at most `queue_max` more of tenants that have less than their part
of these places; nothing preempts a higher level, and the oldest of the highest level is never
preempted for pages while another can be: so somebody always gets to its end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim, Level, ServiceClass
from baton.scheduling.fairness import ServiceLedger, is_below_share

HOLD_MAX_S: Final = 120.0
RETRY_AFTER_S: Final = 0.5
QUEUE_FACTOR: Final = 4
"""Places in the queue for each slot, unless told otherwise."""

TURN_TOKENS: Final = 256.0
"""So many tokens more than another tenant one is served before it gives up a slot that is no more
than its share."""

BACK_OFF_S: Final = 1.0
BACK_OFF_MAX_S: Final = 8.0
HOLD_BACK_S: Final = 10.0
"""So long what waits for pages keeps later ones of its level from taking them."""


SHORT_S: Final = 0.5
"""So long after a join found no pages nobody else of its level tries, unless somebody left."""

SHORT_FOR_S: Final = 5.0
"""And so long after that they try one at a time."""


@unique
class Cause(StrEnum):
    """What a sequence was preempted for."""

    PAGES = "pages"
    CLASS = "class"
    TENANT = "tenant"


@dataclass(slots=True)
class _Gate:
    """Pages were refused: it is tried again after somebody left, or when the time is up."""

    since_s: float
    releases: int
    until_s: float
    is_tenants: bool
    """Only its own tenant's leaving helps: the tenant's quota is used up."""
    victim: str | None = None
    """Who gives its pages up for it; once it has, they are its."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A join found no pages in the arena."""

    level: Level
    releases: int
    until_s: float


@dataclass(slots=True, eq=False)
class _Entry:
    claim: Claim
    number: int
    """Order of arrival: what is preempted keeps its age."""
    waits_s: float
    is_active: bool = False
    is_settled: bool = True
    """Waiting: it may be admitted. Active: it has joined and steps."""
    is_preempted: bool = False
    gate: _Gate | None = None
    is_starved: bool = False
    """Active, and without the page for its next token."""
    is_over_quota: bool = False
    """Starved, and only its own tenant's pages help."""
    refusals: int = 0
    last_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """`request_id` is to give up its slot, for a reason."""

    request_id: str
    cause: Cause


class SlotScheduler:
    """The slots and the queue of one decode worker, by request id."""

    def __init__(self, active_max: int, queue_max: int | None = None) -> None:
        assert active_max >= 1
        self.active_max = active_max
        self.queue_max = QUEUE_FACTOR * active_max if queue_max is None else queue_max
        self._entries: dict[str, _Entry] = {}
        # Until when, and for which tenant.
        self._reserved: dict[str, tuple[float, str]] = {}
        self._ledger = ServiceLedger()
        self._arrivals = 0
        self._releases = 0
        self._releases_of: Counter[str] = Counter()
        self._steps = 0
        self._shortage: _Shortage | None = None

    # --- what is told -----------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Sequences that hold a slot."""
        return sum(entry.is_active for entry in self._entries.values())

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, or for pages."""
        return len(self._entries) - self.active

    @property
    def reserved(self) -> int:
        """Places held for sequences to come; some may have expired since the last `expire`."""
        return len(self._reserved)

    def waiting_of(self, service_class: ServiceClass) -> int:
        """Sequences of a class that wait."""
        return sum(entry.claim.service_class is service_class for entry in self._waiting())

    def is_waiting(self, request_id: str) -> bool:
        """Known, and without a slot."""
        entry = self._entries.get(request_id)
        return entry is not None and not entry.is_active

    def is_reserved(self, request_id: str) -> bool:
        """A place is held for it."""
        return request_id in self._reserved

    def pages_wanted_s(self, request_id: str) -> float | None:
        """Since when pages were refused to it without a token in between; None: they were not."""
        gate = self._entries[request_id].gate
        return None if gate is None else gate.since_s

    def is_making_room(self) -> bool:
        """Somebody was preempted for pages and has not given them up yet."""
        return any(one.gate is not None and not one.is_settled for one in self._waiting())

    # --- coming and going -------------------------------------------------------------------

    def reserve(self, request_id: str, now_s: float, hold_s: float, tenant: str = "") -> None:
        """Hold a place for `hold_s` seconds, at most HOLD_MAX_S; again for the same id: anew.

        Raises ServiceError QUEUE_FULL when slots and queue are full, as `enter` does.
        """
        self.expire(now_s)
        if request_id in self._entries:
            return
        if request_id not in self._reserved:
            self._require_room(tenant)
        self._reserved[request_id] = (now_s + min(max(hold_s, 0.0), HOLD_MAX_S), tenant)

    def enter(self, claim: Claim, now_s: float) -> None:
        """Begin to wait, in the reserved place if there is one; `admit` says when it goes on.

        Raises ServiceError QUEUE_FULL when slots and queue are full, unless the tenant has less
        than its part of them; ALREADY_EXISTS for an id that is here.
        """
        self.expire(now_s)
        if claim.request_id in self._entries:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"request {claim.request_id} runs here already",
                field="request_id",
            )
        if self._reserved.pop(claim.request_id, None) is None:
            self._require_room(claim.tenant)
        self._arrivals += 1
        self._entries[claim.request_id] = _Entry(claim, self._arrivals, now_s)

    def leave(self, request_id: str) -> None:
        """Give back slot, place or reservation; an unknown id is ignored."""
        self._reserved.pop(request_id, None)
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.is_active:
            self._release(entry)

    def expire(self, now_s: float) -> None:
        """Forget reservations whose time has come."""
        for request_id in [key for key, held in self._reserved.items() if held[0] <= now_s]:
            del self._reserved[request_id]

    # --- waiting and running ----------------------------------------------------------------

    def admit(self, now_s: float) -> list[str]:
        """Who gets a slot now, in order."""
        admitted: list[str] = []
        free = self.active_max - self.active
        while free > 0 and (entry := self._next(now_s)) is not None:
            entry.is_active, entry.is_settled = True, False
            # So that of tenants who were served nothing yet each gets one in turn.
            self._charge(entry, 1.0, now_s)
            admitted.append(entry.claim.request_id)
            free -= 1
        return admitted

    def unsettle(self, request_id: str) -> None:
        """It waits, and its log is being given up: not admitted before `settle`."""
        entry = self._entries[request_id]
        assert not entry.is_active
        entry.is_settled = False

    def settle(self, request_id: str) -> None:
        """An active one has joined; one that waits has given its log up and may be admitted."""
        entry = self._entries.get(request_id)
        if entry is None or entry.is_settled:
            return
        entry.is_settled = True
        if not entry.is_active:
            for one in self._waiting():
                if one.gate is not None and one.gate.victim == request_id:
                    one.gate.until_s = -math.inf

    def served(self, request_id: str, tokens: int, now_s: float) -> None:
        """It got so many tokens: whatever it waited for has come."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        self._charge(entry, float(tokens), now_s)
        if entry.is_active:
            entry.gate, entry.refusals, entry.is_starved = None, 0, False

    def refused_pages(
        self, request_id: str, now_s: float, *, is_tenants: bool, victim: str | None = None
    ) -> None:
        """An active one could not join for want of pages: it waits again, for those of `victim`,
        who was preempted for it, or a while.
        """
        entry = self._entries[request_id]
        assert entry.is_active
        entry.is_active, entry.is_settled = False, False
        self._close_gate(entry, now_s, is_tenants)
        assert entry.gate is not None
        entry.gate.victim = None if victim == request_id else victim
        if not is_tenants:
            self._shortage = _Shortage(entry.claim.level, self._releases, now_s + SHORT_S)

    def choose_step(self, ready: Sequence[str], tokens_max: int | None) -> list[str]:
        """Whose token is computed now, of those that could step: all, or at most `tokens_max`.

        The higher level first, then the tenant that has fewest in this step by its weight, then
        who has waited for a step longest.
        """
        self._steps += 1
        chosen = list(ready)
        if tokens_max is not None and len(ready) > tokens_max:
            chosen = self._ranked(ready)[:tokens_max]
        for request_id in chosen:
            self._entries[request_id].last_step = self._steps
        return chosen

    def _ranked(self, ready: Sequence[str]) -> list[str]:
        entries = sorted(
            (self._entries[request_id] for request_id in ready),
            key=lambda one: (one.last_step, one.number),
        )
        turns: Counter[tuple[Level, str]] = Counter()
        ranks: dict[str, tuple[int, int, float, int, int]] = {}
        for one in entries:
            group = (one.claim.level, one.claim.tenant)
            service_class, priority = one.claim.level
            turn = turns[group] / one.claim.weight
            rank = (-service_class, -priority, turn, one.last_step, one.number)
            ranks[one.claim.request_id] = rank
            turns[group] += 1
        return sorted(ready, key=ranks.__getitem__)

    # --- preemption -------------------------------------------------------------------------

    def preemption(self, now_s: float) -> Preemption | None:
        """Who has to make room for what waits, when all slots are taken; carry it out by
        `preempt`, and ask again.
        """
        if self.active < self.active_max:
            return None
        wanting = self._next(now_s)
        if wanting is None:
            return None
        lowest = self._youngest_of_lowest(self._stepping())
        if lowest is not None and lowest.claim.level < wanting.claim.level:
            return Preemption(request_id=lowest.claim.request_id, cause=Cause.CLASS)
        return self._fair(wanting, now_s)

    def _fair(self, wanting: _Entry, now_s: float) -> Preemption | None:
        """The youngest of the tenant that has more slots than its share, for one that has less."""
        peers = [one for one in self._stepping() if one.claim.level == wanting.claim.level]
        slots = Counter(one.claim.tenant for one in self._running(wanting.claim.level))
        own, weight = wanting.claim.tenant, wanting.claim.weight
        weights = {one.claim.tenant: one.claim.weight for one in peers} | {own: weight}

        def rank(name: str) -> tuple[float, float, str]:
            """Slots by weight, then tokens of late by weight."""
            return (slots[name] / weights[name], self._ledger.served(name, now_s), name)

        other = max(weights.keys() - {own}, key=rank, default=None)
        if other is None or rank(other)[0] <= rank(own)[0]:
            return None
        # As many slots by weight as it, or fewer, with one more: then its share is owed to it.
        is_owed = (slots[own] + 1) * weights[other] <= (slots[other] - 1) * weight
        is_its_turn = rank(other)[1] - rank(own)[1] >= TURN_TOKENS
        if not (is_owed or is_its_turn):
            return None
        victim = max((one for one in peers if one.claim.tenant == other), key=_number)
        return Preemption(request_id=victim.claim.request_id, cause=Cause.TENANT)

    def victim_for_pages(self, request_id: str, *, is_tenants: bool) -> str:
        """The youngest of the lowest level, the asker among them; of its tenant if only that helps.

        The asker's own id: nobody has to give way to it. Until it gets its token nobody of its
        level joins: what is freed for it is not theirs.
        """
        asker = self._entries[request_id]
        asker.is_starved, asker.is_over_quota = asker.is_settled, is_tenants
        tenant = asker.claim.tenant if is_tenants else None
        found = [one for one in self._stepping() if tenant in (None, one.claim.tenant)]
        victim = self._youngest_of_lowest([asker, *(one for one in found if one is not asker)])
        assert victim is not None
        return victim.claim.request_id

    def preempt(
        self, request_id: str, cause: Cause, now_s: float, *, is_tenants: bool = False
    ) -> None:
        """It gives its slot up now, and waits; `settle` once its log is given up, too.

        `is_tenants`: pages, and only those of its own tenant help.
        """
        entry = self._entries[request_id]
        assert entry.is_active, "only what has a slot is preempted"
        assert entry.is_settled, "what joins is not preempted"
        entry.is_active, entry.is_settled, entry.is_starved = False, False, False
        entry.is_preempted, entry.waits_s = True, now_s
        if cause is Cause.PAGES:
            self._close_gate(entry, now_s, is_tenants)

    def _close_gate(self, entry: _Entry, now_s: float, is_tenants: bool) -> None:
        since_s = now_s if entry.gate is None else entry.gate.since_s
        pause_s = min(BACK_OFF_S * 2.0**entry.refusals, BACK_OFF_MAX_S)
        entry.refusals = min(entry.refusals + 1, 10)
        entry.gate = _Gate(since_s, 0, now_s + pause_s, is_tenants)
        entry.gate.releases = self._released(entry)

    # --- inner ------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        assert self.active <= self.active_max
        assert len(self._entries) + len(self._reserved) <= self.active_max + 2 * self.queue_max
        assert not self._entries.keys() & self._reserved.keys()

    def _waiting(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries.values() if not entry.is_active)

    def _stepping(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.is_active and entry.is_settled]

    def _running(self, level: Level) -> Iterator[_Entry]:
        """What holds a slot at this level."""
        return (one for one in self._entries.values() if one.is_active and one.claim.level == level)

    def _next(self, now_s: float) -> _Entry | None:
        """Who is to go on next."""
        waiting = list(self._waiting())
        shut = [one for one in waiting if self._is_shut(one, now_s)]
        starved = [one for one in self._entries.values() if one.is_starved]
        open_ones = [
            one
            for one in waiting
            if one.is_settled
            and one not in shut
            and not any(_comes_first(lacking, one) for lacking in starved)
            and not self._is_short(one, now_s)
            and not any(_holds_back(before, one, now_s) for before in shut)
        ]
        return min(open_ones, key=lambda one: self._rank(one, now_s), default=None)

    def _rank(self, one: _Entry, now_s: float) -> tuple[int, int, float, bool, int]:
        service_class, priority = one.claim.level
        served = self._ledger.served(one.claim.tenant, now_s)
        return (-service_class, -priority, served, not one.is_preempted, one.number)

    def _is_shut(self, one: _Entry, now_s: float) -> bool:
        gate = one.gate
        if gate is None or one.is_active:
            return False
        return now_s < gate.until_s and self._released(one) == gate.releases

    def _is_short(self, one: _Entry, now_s: float) -> bool:
        """It would find no pages: a moment ago there were none. For a while one at a time tries
        then, the next as soon as one has found some. Who gets a victim's finds those.
        """
        shortage = self._shortage
        if shortage is None or now_s >= shortage.until_s + SHORT_FOR_S:
            return False
        if one.gate is not None and one.gate.victim is not None:
            return False
        if one.claim.level > shortage.level:
            return False
        is_over = now_s >= shortage.until_s or self._releases != shortage.releases
        return not is_over or any(
            other.is_active and not other.is_settled for other in self._entries.values()
        )

    def _charge(self, entry: _Entry, tokens: float, now_s: float) -> None:
        self._ledger.charge(entry.claim.tenant, tokens, now_s, entry.claim.weight)

    def _release(self, entry: _Entry) -> None:
        self._releases += 1
        self._releases_of[entry.claim.tenant] += 1

    def _released(self, entry: _Entry) -> int:
        """How often somebody left whose pages help this one."""
        if entry.gate is not None and entry.gate.is_tenants:
            return self._releases_of[entry.claim.tenant]
        return self._releases

    @staticmethod
    def _youngest_of_lowest(entries: Iterable[_Entry]) -> _Entry | None:
        return min(entries, key=lambda one: (one.claim.level, -one.number), default=None)

    def _require_room(self, tenant: str) -> None:
        places, taken = self.active_max + self.queue_max, len(self._entries) + len(self._reserved)
        if taken < places:
            return
        held = Counter(one.claim.tenant for one in self._entries.values())
        held.update(name for _, name in self._reserved.values())
        tenants = len(held.keys() | {tenant})
        is_full = taken >= places + self.queue_max
        if is_full or not is_below_share(held[tenant], places, tenants):
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"all {self.active_max} slots and {self.queue_max} places in the queue of this "
                "worker are taken",
                metadata={
                    "active_sequences_max": str(self.active_max),
                    "queue_max": str(self.queue_max),
                },
                retry_after_s=RETRY_AFTER_S,
            )


def _number(entry: _Entry) -> int:
    return entry.number


def _comes_first(lacking: _Entry, joining: _Entry) -> bool:
    """What is freed for one that runs is not taken by one that joins."""
    is_same = not lacking.is_over_quota or lacking.claim.tenant == joining.claim.tenant
    return is_same and lacking.claim.level >= joining.claim.level


def _holds_back(shut: _Entry, later: _Entry, now_s: float) -> bool:
    """What waits for pages is not overtaken by later ones that would take them, for a while."""
    gate = shut.gate
    assert gate is not None
    return (
        shut is not later
        and shut.claim.level >= later.claim.level
        and shut.number < later.number
        and now_s < gate.since_s + HOLD_BACK_S
        and (not gate.is_tenants or shut.claim.tenant == later.claim.tenant)
    )
