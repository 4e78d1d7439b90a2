"""What is due is found by heaps: the same as by looking at every log and lease, at a flat cost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.sampling_parameters import SamplingParameters
from services.kvstore.idle import LogTable, eviction_rank
from services.kvstore.lease import LeaseTable
from services.kvstore.state import LogState, PageRow, Phase, Rows, Tokens, Writer
from tests.unit.kvstore.cores import SCOPE

LEASE_S = 5.0
WRITER = Writer(worker_id="w", slot=0, incarnation=1)
LOGS = 4

lease_steps = st.lists(
    st.tuples(
        st.sampled_from(["renew", "end", "look"]),
        st.integers(0, LOGS - 1),
        st.floats(0.0, 30.0, allow_nan=False),
    ),
    max_size=40,
)


@given(lease_steps)
@settings(deadline=None)
def test_expired_leases_are_those_a_walk_over_all_would_find(
    script: list[tuple[str, int, float]],
) -> None:
    """Renewals in any order of time, also backwards; a lease stays due until it ends."""
    table = LeaseTable(LEASE_S)
    model: dict[bytes, float] = {}
    for step, number, now_s in script:
        log_id = bytes([number])
        if step == "renew":
            table.renew(log_id, now_s)
            model[log_id] = now_s + LEASE_S
        elif step == "end":
            table.end(log_id)
            model.pop(log_id, None)
        expected = {name for name, deadline in model.items() if deadline <= now_s}
        assert set(table.expired(now_s)) == expected
        assert len(table) == len(model)
        assert set(table) == set(model)


def log_of(number: int) -> LogState:
    """A kept log with one page."""
    return LogState(
        log_id=bytes([number]),
        tenant="acme",
        scope=SCOPE,
        tokens=Tokens([1]),
        prompt_tokens=1,
        numeric_class="",
        numeric_class_id=0,
        sampling=SamplingParameters(),
        generation=1,
        phase=Phase.KEPT,
        rows=Rows([PageRow(page=number, page_generation=1, tokens=1, slot_crcs=[1])]),
    )


log_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "write", "idle", "use", "expire", "open", "drop", "due", "evict"]),
        st.integers(0, LOGS - 1),
        st.integers(0, 20),
    ),
    max_size=60,
)


@given(log_steps)
@settings(deadline=None, max_examples=200)
def test_logs_that_are_over_and_evicted_are_those_a_walk_over_all_would_find(
    script: list[tuple[str, int, int]],
) -> None:
    """Writers come and go, times and ranks change, logs end: the heaps follow."""
    table = LogTable()
    for step, number, value in script:
        log = table.get(bytes([number]))
        if log is None:
            if step == "add":
                table[bytes([number])] = log_of(number)
            continue
        change(table, log, step, value)
        if step == "due":
            for endless in table.take_endless():
                if endless.expires_wall_s is None:
                    endless.expires_wall_s = value + 5.0
                table.add(endless)
            idle = [one for one in table.values() if one.writer is None]
            expected = {one.log_id for one in idle if (one.expires_wall_s or 0.0) <= value}
            over = table.take_over(float(value))
            assert {one.log_id for one in over} == expected
            for one in over:
                del table[one.log_id]
        elif step == "evict":
            idle = [one for one in table.values() if one.writer is None and one.rows]
            ranks = sorted(eviction_rank(one) for one in idle)
            found = []
            for one in table.evictable():
                found.append(eviction_rank(one))
                one.rows.clear()
                if len(found) > value % 3:
                    break
            assert found == ranks[: len(found)]
            assert len(found) == min(len(ranks), value % 3 + 1)
        assert all(one.writer or table.is_registered(one.log_id) for one in table.values())


def change(table: LogTable, log: LogState, step: str, value: int) -> None:
    """What the cores do to a log, and say of it as they do."""
    if step == "write":
        log.writer, log.expires_wall_s = WRITER, None
        if not log.rows:
            log.rows = log_of(log.log_id[0]).rows
    elif step == "idle":
        log.writer = None
        log.last_used_s = float(value)
        table.add(log)
    elif step == "use" and log.writer is not None:
        log.last_used_s = float(value)
    elif step == "expire" and log.writer is None:
        log.expires_wall_s = float(value)
        table.add(log)
    elif step == "open" and log.writer is None:
        log.phase = Phase.DECODE if value % 2 else Phase.KEPT
        table.add(log)
    elif step == "drop":
        del table[log.log_id]
