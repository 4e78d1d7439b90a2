"""Limits per tenant over all gateways, as far as a shared store can say; else each gateway's own.

Owns places in the shared store. A place is a member of a sorted set with an end as its score, so
that a gateway that dies gives its places back by itself. Answers hold places while they run and
renew them; a request holds one for a minute, which limits requests per minute. A claim adds its
places first and counts afterwards, in one transaction: two gateways never both get the last one.
Sets are only ever counted within the ends that a gateway could have written. Never waits for the
store longer than `ASK_WITHIN_S`, and never refuses for want of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

from baton.clock import WaitingClock
from baton.lifecycle import every
from services.gateway.limits import RATE_WINDOW_S, rate_refused, share_refused
from services.gateway.shared_store import Command, KeySpace, Replies, SharedStore

HOLD_S: Final = 20.0
"""A dead gateway's answers count this long."""

RENEW_S: Final = 5.0
SKEW_S: Final = 5.0
"""How far the gateways' wall clocks may be apart before places end early or are not counted."""

RENEWALS_MAX: Final = 256
COMMANDS: Final = 5
COUNT_AT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Places wanted in one set of at most `places_max`, for `hold_s` seconds."""

    key: str
    members: tuple[str, ...]
    places_max: int
    hold_s: float

    def commands(self, wall_s: float) -> list[Command]:
        """Drop what ended and what nobody could have written, add, count, bound the set's life."""
        now_ms, hold_ms = round(wall_s * 1000), round(self.hold_s * 1000)
        latest_ms = now_ms + hold_ms + round(SKEW_S * 1000)
        return [
            ("ZREMRANGEBYSCORE", self.key, "-inf", now_ms),
            ("ZREMRANGEBYSCORE", self.key, f"({latest_ms}", "+inf"),
            *renewal(self.key, self.members, now_ms + hold_ms)[:1],
            ("ZCARD", self.key),
            ("PEXPIRE", self.key, hold_ms),
        ]

    def is_over(self, replies: Replies) -> bool:
        """Whether the count says no; an answer that makes no sense says nothing."""
        left = self.left(replies)
        return left is not None and left < 0

    def left(self, replies: Replies) -> int | None:
        """Places that nobody has, less than 0 when this claim is one too many; None: not said."""
        found = replies[COUNT_AT] if len(replies) == COMMANDS else None
        return self.places_max - found if isinstance(found, int) else None

    def release(self) -> list[Command]:
        """Give the places back."""
        return [("ZREM", self.key, *self.members)]


def renewal(key: str, members: Sequence[str], end_ms: int) -> list[Command]:
    """Hold places until `end_ms`, whether or not the store still knows them."""
    pairs = [part for member in members for part in (end_ms, member)]
    return [("ZADD", key, *pairs), ("PEXPIRE", key, round(HOLD_S * 1000))]


class SharedLimits:
    """Claims of this gateway. Fits `baton.lifecycle` as a part.

    `holder` tells this run of this gateway from all others.
    """

    def __init__(
        self,
        store: SharedStore,
        keys: KeySpace,
        clock: WaitingClock,
        *,
        tenant_sequences_max: int,
        holder: str,
        spawn: Callable[..., None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._tenant_sequences_max = tenant_sequences_max
        self._holder = holder
        self._spawn = spawn
        self._numbers = count()
        self._held: dict[str, set[str]] = {}
        self._stopping = asyncio.Event()
        store.on_up(self.renew)

    async def start(self) -> None:
        """Begins to renew."""
        beat = every(RENEW_S, self._beat, clock=self._clock, stopping=self._stopping)
        self._spawn("shared_limits", beat)

    async def drain(self) -> None:
        """Nothing: running answers hold their places to their end."""

    async def stop(self) -> None:
        """Places that are still held end by themselves."""
        self._stopping.set()

    @property
    def held(self) -> int:
        """Places of running answers."""
        return sum(len(members) for members in self._held.values())

    @asynccontextmanager
    async def admitted(
        self, tenant: str, sequences: int, requests_per_minute: int | None
    ) -> AsyncIterator[int | None]:
        """Hold places for the block; QUOTA_EXCEEDED when the tenant has none left anywhere. Gives
        how many requests of this minute are left, as far as the store says.
        """
        answers = Claim(
            key=self._keys.key("answers", tenant),
            members=self._members(sequences),
            places_max=self._tenant_sequences_max,
            hold_s=HOLD_S,
        )
        claims = [answers]
        if requests_per_minute is not None:
            claims.append(
                Claim(
                    key=self._keys.key("requests", tenant),
                    members=self._members(1),
                    places_max=requests_per_minute,
                    hold_s=RATE_WINDOW_S,
                )
            )
        self._hold(answers)
        try:
            yield await self._claim(claims)
        finally:
            self._let_go(answers)

    async def _claim(self, claims: list[Claim]) -> int | None:
        wall_s = self._clock.wall_s()
        commands = [command for claim in claims for command in claim.commands(wall_s)]
        replies = await self._store.ask(commands)
        if replies is None:
            return None
        parts = [replies[at : at + COMMANDS] for at in range(0, len(claims) * COMMANDS, COMMANDS)]
        is_over = [claim.is_over(part) for claim, part in zip(claims, parts, strict=True)]
        if not any(is_over):
            return claims[1].left(parts[1]) if len(claims) > 1 else None
        # The places of answers are given back by the block; a refused request is not counted.
        for claim in claims[1:]:
            self._store.post(claim.release())
        if is_over[0]:
            raise share_refused(self._tenant_sequences_max)
        raise rate_refused(claims[1].places_max, RATE_WINDOW_S / claims[1].places_max)

    def renew(self) -> None:
        """Hold every place anew: the store may have lost them, or never have had them."""
        end_ms = round((self._clock.wall_s() + HOLD_S) * 1000)
        for key, held in self._held.items():
            members = sorted(held)
            for begin in range(0, len(members), RENEWALS_MAX):
                self._store.post(renewal(key, members[begin : begin + RENEWALS_MAX], end_ms))

    async def _beat(self) -> None:
        self.renew()

    def _members(self, places: int) -> tuple[str, ...]:
        return tuple(f"{self._holder}:{next(self._numbers)}" for _ in range(places))

    def _hold(self, claim: Claim) -> None:
        self._held.setdefault(claim.key, set()).update(claim.members)

    def _let_go(self, claim: Claim) -> None:
        held = self._held[claim.key]
        held.difference_update(claim.members)
        if not held:
            del self._held[claim.key]
        self._store.post(claim.release())
