"""The lease API's history against a single-owner model: calls and answers as callers saw them.

A write or a renewal that begins after somebody was told of a newer generation must fail; one
generation has one owner. Histories come from the ownership simulation, so that calls overlap, get
lost and are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster import ownership
from tests.cluster.homes import SimHome
from tests.cluster.ownership import Ownership
from tests.cluster.steps import Process, Promise
from tests.cluster.wires import Wires

QUICK_SEEDS = 10
SEEDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One exchange. `given`: a generation the answer tells of; `used`: one it was accepted at."""

    caller: str
    call_s: float
    return_s: float
    log_id: bytes
    given: int | None = None
    used: int | None = None


class RecordingWires(Wires):
    """As `Wires`, and remembers every answered lease call."""

    history: list[Event]

    def call(self, source: Process, home: SimHome, method: str, request: Any) -> Promise[Any]:
        """One exchange, noted when its answer is there."""
        call_s = self.scheduler.now_s
        promise = super().call(source, home, method, request)
        answer: Promise[Any] = Promise()

        def note() -> None:
            value, error = promise.outcome()
            if error is None:
                self._note(source.name, call_s, method, request, value)
            answer.keep(value, error)

        promise.then(note)
        return answer

    def _note(self, caller: str, call_s: float, method: str, request: Any, value: Any) -> None:
        def add(log_id: bytes, *, given: int | None = None, used: int | None = None) -> None:
            self.history.append(
                Event(
                    caller=caller,
                    call_s=call_s,
                    return_s=self.scheduler.now_s,
                    log_id=log_id,
                    given=given,
                    used=used,
                )
            )

        match method:
            case "Take" | "Truncate" | "Cancel":
                add(request.log_id, given=value.generation)
            case "CommitCheckpoint" | "Seal" | "Grant":
                add(request.log_id, used=request.generation)
            case "Append":
                for entry, outcome in zip(request.entries, value.outcomes, strict=True):
                    if not outcome.HasField("error"):
                        add(entry.log_id, used=entry.generation)
            case "RenewLeases":
                lost = set(value.lost_log_ids)
                for one in request.logs:
                    if one.log_id not in lost:
                        add(one.log_id, used=one.generation)


def check(history: list[Event]) -> int:
    """Asserts the model; returns how many accepted calls it looked at."""
    told: dict[bytes, list[tuple[float, int]]] = {}
    for event in history:
        if event.given is not None:
            told.setdefault(event.log_id, []).append((event.return_s, event.given))
    owners: dict[tuple[bytes, int], str] = {}
    used = 0
    for event in history:
        if event.used is None:
            continue
        used += 1
        for return_s, generation in told.get(event.log_id, []):
            is_after = return_s < event.call_s
            assert not (is_after and generation > event.used), ("an old owner", event, generation)
        owner = owners.setdefault((event.log_id, event.used), event.caller)
        assert owner == event.caller, ("two owners of one generation", event, owner)
    return used


def history_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the callers of one run saw."""
    found: list[Event] = []

    class Wired(RecordingWires):
        history = found

    monkeypatch.setattr(ownership, "Wires", Wired)
    Ownership(seed).run()
    return found


@pytest.mark.parametrize(
    "seeds",
    [
        range(QUICK_SEEDS),
        pytest.param(range(QUICK_SEEDS, SEEDS), marks=[pytest.mark.more, pytest.mark.timeout(300)]),
    ],
    ids=["quick", "more"],
)
def test_the_lease_api_has_one_owner_at_a_time(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every accepted call of every run fits a single owner."""
    checked = sum(check(history_of(seed, monkeypatch)) for seed in seeds)
    assert checked > 50 * len(seeds)


def test_the_model_refuses_what_it_must() -> None:
    """A history with an old owner, and one with two, are found."""
    new = Event(caller="b", call_s=1.0, return_s=2.0, log_id=b"l", given=2)
    late = Event(caller="a", call_s=3.0, return_s=4.0, log_id=b"l", used=1)
    with pytest.raises(AssertionError, match="old owner"):
        check([new, late])
    overlapping = Event(caller="a", call_s=1.5, return_s=4.0, log_id=b"l", used=1)
    assert check([new, overlapping]) == 1
    twice = Event(caller="c", call_s=1.0, return_s=4.0, log_id=b"l", used=1)
    with pytest.raises(AssertionError, match="two owners"):
        check([overlapping, twice])
