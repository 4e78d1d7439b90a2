"""Random lives of sessions among those of logs: what they name is there, after a restart too.

The model keeps what each session was last set to. A change under another generation is refused and
changes nothing; a session ends with its head and never before.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from baton.errors import Reason, ServiceError
from services.kvstore.session_keeper import Head, SetOrder
from services.kvstore.sessions import Owner
from tests.unit.kvstore.cores import NOW, recovered_from
from tests.unit.kvstore.test_store_machine import LogLives, require_expected

Names = dict[str, tuple[int, bytes, int]]

names = st.sampled_from(["a", "b", "c"])


class SessionLives(LogLives):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Names = {}

    def living(self) -> Names:
        """The sessions whose heads are there."""
        return {name: head for name, head in self.names.items() if self.alive(head[1])}

    def stored(self) -> Names:
        """As the store has them."""
        return {
            one.session_id: (one.generation, one.log_id, one.position)
            for one in self.store.core.sessions.all()
        }

    @rule(name=names, log_id=LogLives.logs, position=st.integers(1, 40), behind=st.integers(0, 2))
    def name_log(self, name: str, log_id: bytes, position: int, behind: int) -> None:
        """A new session, or an edit of one that read it `behind` changes ago."""
        self.names = self.living()
        known = self.names.get(name)
        expected = None if known is None else known[0] - behind
        order = SetOrder(
            session_id=name,
            owner=Owner("acme"),
            expected=expected,
            head=Head(log_id=log_id, position=position),
        )
        try:
            session, _ = self.store.session_keeper.set(order, NOW.wall_s)
        except ServiceError as error:
            if known is None or not behind:
                require_expected(error, Reason.LOG_NOT_FOUND)
            elif error.reason is not Reason.STALE_GENERATION:
                raise AssertionError(f"a stale change was refused as {error}") from error
            self.sessions_agree()
            return
        assert not behind or known is None
        assert session.generation == (1 if known is None else known[0] + 1)
        self.names[name] = (session.generation, log_id, position)

    @rule(name=names)
    def forget(self, name: str) -> None:
        """The name ends; its log stays."""
        known = self.living().get(name)
        if known is not None:
            self.store.session_keeper.delete(name, Owner("acme"), None)
            self.names.pop(name)
            assert self.alive(known[1])

    @rule()
    def sessions_agree(self) -> None:
        """With the model, whatever became of the logs."""
        self.names = self.living()
        assert self.stored() == self.names

    @rule(log_id=LogLives.logs)
    def nobody_drops_a_head(self, log_id: bytes) -> None:
        """Whoever gives up what a session names has not heard of that."""
        if self.alive(log_id) and any(head[1] == log_id for head in self.living().values()):
            self.store.keeper.close(log_id, is_dropped=True, wall_s=NOW.wall_s)
            assert self.alive(log_id)

    def teardown(self) -> None:
        """A restart finds the same sessions."""
        super().teardown()
        recovered = recovered_from(self.sink.records, bytes(16))
        found = {
            one.session_id: (one.generation, one.log_id, one.position) for one in recovered.sessions
        }
        assert found == self.stored() == self.living()


SessionLives.TestCase.settings = settings(LogLives.TestCase.settings, max_examples=40)
TestSessionLives = SessionLives.TestCase
