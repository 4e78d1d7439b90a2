"""Two stores and the two halves of a move between them, without bytes. Asserts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.kvstore.log.journal import LogJournal
from services.kvstore.moving.arrival import Arrival, Arrivals
from services.kvstore.moving.departure import Departed, Departures
from services.kvstore.state import LogState, PageRow
from services.kvstore.store import Store
from tests.unit.kvstore.cores import BLOCK, NOW, ListSink, WorkerModel, build_store, open_log

TENANT = "acme"


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeSite:
    """One store with both halves."""

    name: str
    store: Store
    sink: ListSink
    departures: Departures
    arrivals: Arrivals

    def check(self) -> None:
        """Conservation, holders, leases."""
        self.store.core.check_invariants()


def home_site(name: str, pages: int = 32, **limits: Any) -> HomeSite:
    """A store of its own."""
    sink = ListSink()
    store = build_store(pages, sink, **limits)
    journal = store.core.journal
    assert isinstance(journal, LogJournal)
    return HomeSite(
        name=name,
        store=store,
        sink=sink,
        departures=Departures(store.core, store.home, store.keeper, journal.snapshot_of),
        arrivals=Arrivals(store.core, store.home, store.chains, lease_s=10.0),
    )


def sealed_log(site: HomeSite, tokens: int = 3 * BLOCK + 2) -> WorkerModel:
    """A log that prefill has sealed with its first token."""
    model = open_log(site.store, list(range(1, tokens + 1)))
    model.prefill()
    return model


def full_rows(log: LogState) -> list[PageRow]:
    """The rows that a replica may copy early."""
    return [row for row in log.rows if row.crc is not None and row.tokens == BLOCK]


def fetch(site: HomeSite, arrival: Arrival, blocks: list[int]) -> None:
    """Every page came and verified."""
    if blocks:
        site.arrivals.writing(arrival, blocks)
        site.arrivals.written(arrival, blocks)


def told(site: HomeSite, departed: Departed, arrival: Arrival) -> list[int]:
    """The old home's answer reaches the new one; the blocks still to fetch."""
    return site.arrivals.moved(arrival, departed.generation, departed.snapshot, departed.digest)


def move(old: HomeSite, new: HomeSite, log_id: bytes, generation: int) -> LogState:
    """A whole move without faults, but for its confirmation."""
    arrival = new.arrivals.follow(log_id, TENANT, old.name, NOW.monotonic_s)
    moved = old.departures.move(log_id, generation, new.name, NOW.monotonic_s)
    fetch(new, arrival, told(new, old.departures.answer(moved), arrival))
    return new.arrivals.open(arrival, NOW)
