"""Sessions as a table: whose they are, who may change them, how many, when they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.log.fields import BodyReader
from services.kvstore.log.fold_sessions import SessionFold
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.session_records import Session
from services.kvstore.sessions import Bounds, Owner, SessionState, SessionTable, advanced

LOG, OTHER = bytes(range(16)), bytes(range(1, 17))


def session(name: str = "sess-1", tenant: str = "acme", log_id: bytes = LOG) -> SessionState:
    """A session at its first generation."""
    return SessionState(
        session_id=name,
        owner=Owner(tenant),
        generation=1,
        log_id=log_id,
        log_generation=2,
        position=9,
        created_wall_s=100.0,
        expires_wall_s=200.0,
        ttl_s=100.0,
    )


def moved(one: SessionState, log_id: bytes, wall_s: float = 150.0) -> SessionState:
    """The session naming another head."""
    return advanced(one, log_id=log_id, log_generation=1, position=12, home=None, wall_s=wall_s)


def test_a_change_under_another_generation_is_stale_and_changes_nothing() -> None:
    """Of two edits that read the same session, the second must not win silently."""
    table = SessionTable()
    table.put(session())
    table.put(moved(table.require_current("sess-1", Owner("acme"), 1), OTHER))
    with pytest.raises(ServiceError) as caught:
        table.require_current("sess-1", Owner("acme"), 1)
    assert caught.value.reason is Reason.STALE_GENERATION
    assert table.find("sess-1", Owner("acme")).log_id == OTHER
    table.check_invariants([OTHER])


def test_another_tenants_session_looks_like_none() -> None:
    """Existence is not told either."""
    table = SessionTable()
    table.put(session())
    with pytest.raises(ServiceError) as theirs:
        table.find("sess-1", Owner("beta"))
    with pytest.raises(ServiceError) as nobodys:
        table.find("sess-2", Owner("beta"))
    assert theirs.value.message == nobodys.value.message
    assert table.of_owner(Owner("beta")) == []


def test_teams_of_a_tenant_see_their_own_sessions_and_count_together() -> None:
    """A team's conversations are its own, as its cached KV is; the bound is the tenant's."""
    table = SessionTable(bounds=Bounds(sessions_max=9, per_tenant_max=2))
    red, blue, whole = Owner("acme", "red"), Owner("acme", "blue"), Owner("acme")
    table.put(replace(session("r"), owner=red))
    table.put(session("w"))
    assert [one.session_id for one in table.of_owner(red)] == ["r"]
    assert [one.session_id for one in table.of_owner(whole)] == ["w"]
    assert table.of_owner(blue) == []
    for name, owner in (("r", blue), ("r", whole), ("w", red)):
        with pytest.raises(ServiceError) as caught:
            table.require_current(name, owner, 1)
        assert caught.value.reason is Reason.NOT_FOUND
    with pytest.raises(ServiceError) as full:
        table.require_new("b", "acme")
    assert full.value.reason is Reason.QUOTA_EXCEEDED


def test_a_tenant_has_so_many_sessions_and_no_more() -> None:
    """Names are kept in memory: they are bounded, and another tenant's do not count."""
    table = SessionTable(bounds=Bounds(sessions_max=9, per_tenant_max=2))
    for name in ("a", "b"):
        table.require_new(name, "acme")
        table.put(session(name))
    with pytest.raises(ServiceError) as caught:
        table.require_new("c", "acme")
    assert caught.value.reason is Reason.QUOTA_EXCEEDED
    table.require_new("c", "beta")
    table.remove("a")
    table.require_new("c", "acme")


def test_a_head_is_held_until_the_last_session_that_names_it_ends() -> None:
    """And a change gives the session its time anew."""
    table = SessionTable()
    table.put(session())
    assert table.held_until(LOG) == 200.0
    table.put(moved(session(), OTHER))
    assert table.held_until(LOG) is None
    assert table.take_over(200.0) == []
    assert [one.session_id for one in table.take_over(250.0)] == ["sess-1"]
    assert len(table) == 0
    table.check_invariants([])


@pytest.mark.parametrize("team", [None, "red"])
def test_a_record_tells_whose_a_session_is(team: str | None) -> None:
    """One without a team has the bytes it had before there were teams."""
    told = replace(record(1), team=team)
    body = told.encode()
    assert Session.decode(BodyReader(body)) == told
    assert len(body) == 48 + len("sess-1acme") + len(team or "")
    fold = SessionFold()
    fold.apply(RecordAddress(log_id=LOG, generation=2, position=9), told)
    (found,) = fold.result()
    assert found.owner == Owner("acme", team or "")


def record(generation: int, **fields: bool) -> Session:
    """A SESSION of one id."""
    return Session(
        session_id="sess-1",
        tenant="acme",
        generation=generation,
        created_wall_ms=1000,
        expires_wall_ms=2000,
        ttl_s=1,
        **fields,
    )


def test_the_last_record_of_a_session_counts() -> None:
    """Replaying it twice changes nothing; a deleted one is gone."""
    fold, at = SessionFold(), RecordAddress(log_id=LOG, generation=2, position=9)
    fold.apply(at, record(1))
    fold.apply(RecordAddress(log_id=OTHER, generation=1, position=12), record(2))
    fold.apply(RecordAddress(log_id=OTHER, generation=1, position=12), record(2))
    (found,) = fold.result()
    assert (found.generation, found.log_id, found.position) == (2, OTHER, 12)
    fold.apply(at, record(2, is_deleted=True))
    assert fold.result() == []


@pytest.mark.parametrize(("kind", "count"), [(None, 0), (RecordType.SESSION, 0), (7, 1)])
def test_where_a_session_record_may_be_missing_none_is_believed(
    kind: int | None, count: int
) -> None:
    """An older head must not pass for the last one; other records say nothing of sessions."""
    fold = SessionFold()
    fold.apply(RecordAddress(log_id=LOG, generation=2, position=9), record(1))
    fold.missing(kind)
    assert len(fold.result()) == count
