"""How pages travel between two kvstores: one interface, chosen per pair, with a reason.

Owns the interface and the choice. Pure: time is passed in. Implementations move bytes only; what a
page must hash to, and what happens when it does not, is the receiver's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final, Protocol

from baton.errors import Reason, ServiceError
from baton.kv.crc import ByteArray
from services.kvstore.state import PageRow

STREAM: Final = "stream"
"""gRPC chunks: always there, so what two kvstores fall back to."""

UCX: Final = "ucx"
AUTO: Final = "auto"
"""As a setting: the best that both sides have."""

AVOID_S: Final = 60.0
"""How long a transport that failed with a peer is not chosen for it again."""

PEERS_MAX: Final = 4096


@unique
class Why(StrEnum):
    """Why a transport was chosen, as counted."""

    BEST = "best"
    FORCED = "forced"
    PEER_LACKS = "peer_lacks"
    FAILED_BEFORE = "failed_before"
    FELL_BACK = "fell_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport of one pair and why: in words, and as counted."""

    name: str
    reason: str
    why: Why = Why.BEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Whose pages: the kvstore's address, the log, and the right to read them."""

    address: str
    log_id: bytes
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds of a transfer that were not copying: waiting for a place at the other side, making
    buffers known to the transport, and coming to terms (a round trip, a connection).
    """

    queue_s: float = 0.0
    registration_s: float = 0.0
    sync_s: float = 0.0


class Sink(Protocol):
    """Where a transport puts what arrives."""

    def begin(self, rows: Sequence[PageRow]) -> None:
        """The other side sends these rows; refused when they are not what is wanted."""
        ...

    async def chunk(self, offset: int, data: bytes, crc: int) -> None:
        """The next bytes; returns when there is room for more."""
        ...

    def place(
        self,
        executor: Executor,
        fill: Callable[[Sequence[ByteArray], Callable[[int], None]], None],
    ) -> asyncio.Future[None]:
        """Begins `fill` in a thread; it puts whole pages where they go and tells of each."""
        ...

    async def flush(self) -> None:
        """Returns when everything handed over is written; raises what was wrong with it."""
        ...

    def when_idle(self, ended: Callable[[], None]) -> None:
        """Calls `ended` once no write is under way; at once if none is."""
        ...

    def sent(self, crcs: Sequence[int]) -> None:
        """CRC-32C of each placed page as it left."""
        ...


class Transport(Protocol):
    """Fetches runs of pages."""

    @property
    def name(self) -> str:
        """As in metrics and answers."""
        ...

    async def fetch(self, source: Source, blocks: range, sink: Sink, timeout_s: float) -> Waits:
        """Fetches the pages of consecutive `blocks`.

        Raises ServiceError when the transfer broke; what the sink took before stays taken.
        """
        ...


class Transports:
    """What one store may use, best first, and what failed with whom.

    `is_forced`: there is one, and no other will do.
    """

    def __init__(self, usable: Sequence[Transport], *, is_forced: bool = False) -> None:
        assert usable, "a store without a transport"
        self._usable: Mapping[str, Transport] = {one.name: one for one in usable}
        self._is_forced = is_forced
        self._avoid_until_s: dict[tuple[str, str], float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(self._usable)

    def of(self, choice: Choice) -> Transport:
        """The one that was chosen."""
        return self._usable[choice.name]

    def choose(self, address: str, theirs: Sequence[str], now_s: float) -> Choice:
        """The best that the kvstore at `address`, which lists `theirs`, has too.

        One that lists none is older than this choice: it has `stream`. UNSUPPORTED when the two
        have none in common, which only forcing one brings about.
        """
        theirs = theirs or (STREAM,)
        lacking: list[str] = []
        avoided: list[str] = []
        for name in self._usable:
            if name not in theirs:
                lacking.append(name)
            elif self._avoid_until_s.get((address, name), now_s) > now_s:
                avoided.append(name)
            else:
                return self._chosen(name, lacking, avoided)
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"this kvstore may use {' or '.join(self._usable)}, the log's home "
            f"{' or '.join(theirs)}: set --transport auto on both, or install what is missing",
            field="transport",
        )

    def _chosen(self, name: str, lacking: list[str], avoided: list[str]) -> Choice:
        if self._is_forced:
            return Choice(name=name, reason=f"set by --transport {name}", why=Why.FORCED)
        reason = "both sides have it"
        if lacking:
            reason += f"; the other side lacks {', '.join(lacking)}"
        if avoided:
            reason += f"; {', '.join(avoided)} failed with it a moment ago"
        why = Why.FAILED_BEFORE if avoided else Why.PEER_LACKS if lacking else Why.BEST
        return Choice(name=name, reason=reason, why=why)

    def failed(self, address: str, choice: Choice, now_s: float) -> Choice:
        """A transfer over `choice` broke: how to go on. `stream` is tried again as it is."""
        if choice.name == STREAM or STREAM not in self._usable:
            return choice
        if len(self._avoid_until_s) >= PEERS_MAX:
            self._avoid_until_s = {
                key: until_s for key, until_s in self._avoid_until_s.items() if until_s > now_s
            }
        if len(self._avoid_until_s) < PEERS_MAX:
            self._avoid_until_s[address, choice.name] = now_s + AVOID_S
        return Choice(name=STREAM, reason=f"{choice.name} failed, fell back", why=Why.FELL_BACK)
