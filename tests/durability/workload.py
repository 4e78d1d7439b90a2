"""What the durability tests write: a seeded script of records, and a list model of what it means.

Owns the records' plausible bodies and the expected logs after each of them. Tokens are numbered
through, so that a reader can tell which records it got. Never touches a file.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from baton.sampling_parameters import SamplingParameters
from services.kvstore.log.fields import AckLevel as RecordAckLevel
from services.kvstore.log.fields import LogIdentity, PageRef
from services.kvstore.log.format import Record, RecordAddress
from services.kvstore.log.living import SESSION_MARK, session_key
from services.kvstore.log.records import Append, Seal, Take, Truncate
from services.kvstore.log.session_records import Session
from services.kvstore.log.state import Open, Parent, Snapshot
from services.kvstore.log.store_records import Close, CloseReason

BLOCK_TOKENS: Final = 16
_SAMPLING: Final = SamplingParameters(seed=1).to_canonical_bytes()


@dataclass(frozen=True, slots=True)
class Seen:
    """One log as a reader sees it."""

    generation: int
    tokens: tuple[int, ...]
    is_sealed: bool = True


State = Mapping[bytes, Seen]
"""Log id to log; closed logs are not in it. A session stands under its key (`session_view`)."""


class LostAckError(AssertionError):
    """What was acked is not there; the negative controls look for it."""


def identity() -> LogIdentity:
    """Whose the logs are; the same for all."""
    return LogIdentity(
        scope=Scope(tenant="acme"),
        request_id="r",
        body_hash=bytes(32),
        sampling=_SAMPLING,
        label_digest=bytes(16),
        kv_digest=bytes(16),
        tokenizer_hash=bytes(8),
        numeric_class_id=TORCH_F32.id,
        block_tokens=BLOCK_TOKENS,
        ttl_s=60,
        opened_wall_ms=1,
        is_stored=True,
        is_cacheable=False,
        ack_level=RecordAckLevel.DISK,
    )


def session_view(
    session_id: str, generation: int, log_id: bytes, position: int
) -> tuple[bytes, Seen]:
    """A session as a reader sees it: its head's log and position in the place of tokens."""
    return session_key(session_id), Seen(generation, (int.from_bytes(log_id, "big"), position))


def log_id_of(number: int) -> bytes:
    """The id of the script's nth log; a guest's logs count from GUEST on."""
    return number.to_bytes(16, "big")


GUEST: Final = 1000
"""Where the numbers of another store's logs begin."""


@dataclass(frozen=True, slots=True)
class Step:
    """One record, and the logs as they are once it counts."""

    record: Record
    address: RecordAddress
    after: State


@dataclass(slots=True)
class Script:
    """Records in order. `states[k]` is what a reader sees after the first k of them; `tokens`
    counts the tokens, each of which is its own number. With `has_sessions` some records are of
    sessions: by id, their generation, head and position.
    """

    steps: list[Step] = field(default_factory=list)
    state: dict[bytes, Seen] = field(default_factory=dict)
    logs_ever: int = 0
    tokens: int = 0
    base: State = field(default_factory=dict)
    has_sessions: bool = False
    sessions: dict[str, tuple[int, bytes, int]] = field(default_factory=dict)
    sessions_ever: int = 0

    @property
    def states(self) -> list[State]:
        """From before the first record on."""
        return [self.base, *(step.after for step in self.steps)]

    def _next_token(self) -> int:
        self.tokens += 1
        return self.tokens - 1

    def following(self, state: State) -> Script:
        """An empty script that goes on from recovered logs."""
        logs = {key: seen for key, seen in state.items() if not key.startswith(SESSION_MARK)}
        sessions = {
            key.removeprefix(SESSION_MARK).decode(): (
                seen.generation,
                seen.tokens[0].to_bytes(16, "big"),
                seen.tokens[1],
            )
            for key, seen in state.items()
            if key.startswith(SESSION_MARK)
        }
        return Script(
            state=logs,
            logs_ever=self.logs_ever,
            base=dict(state),
            has_sessions=self.has_sessions,
            sessions=sessions,
            sessions_ever=self.sessions_ever,
        )

    def _put(self, record: Record, log_id: bytes, generation: int, position: int) -> None:
        address = RecordAddress(log_id=log_id, generation=generation, position=position)
        named = (session_view(key, *head) for key, head in self.sessions.items())
        self.steps.append(Step(record, address, {**self.state, **dict(named)}))

    # --- the operations -----------------------------------------------------------------------

    def open(self, tokens: Sequence[int]) -> bytes:
        """A new log; its tokens count as one."""
        self.logs_ever += 1
        self.tokens += 1
        log_id = log_id_of(self.logs_ever)
        self.state[log_id] = Seen(1, tuple(tokens), is_sealed=False)
        self._put(Open(identity=identity(), token_ids=tuple(tokens)), log_id, 1, 0)
        return log_id

    def seal(self, log_id: bytes) -> None:
        """Ends the prompt with the first sampled token."""
        seen, token = self.state[log_id], self._next_token()
        self.state[log_id] = Seen(seen.generation, (*seen.tokens, token))
        record = Seal(chunk_list_digest=bytes(32), chunk_count=1, token_id=token)
        self._put(record, log_id, seen.generation, len(seen.tokens))

    def append(self, log_id: bytes) -> None:
        """One more token."""
        seen, token = self.state[log_id], self._next_token()
        position = len(seen.tokens)
        self.state[log_id] = Seen(seen.generation, (*seen.tokens, token))
        page = max(position - 1, 0) // BLOCK_TOKENS
        slot = max(position - 1, 0) % BLOCK_TOKENS
        ref = PageRef(arena_id=bytes(16), page=page, page_generation=1, crc=token)
        page_crc = token if slot == BLOCK_TOKENS - 1 else None
        record = Append(token_id=token, slot_ref=ref, slot=slot, page_crc=page_crc)
        self._put(record, log_id, seen.generation, position)

    def truncate(self, log_id: bytes, position: int) -> None:
        """An edit: the tokens from `position` on are gone, the generation is a new one."""
        seen = self.state[log_id]
        self.state[log_id] = Seen(seen.generation + 1, seen.tokens[:position])
        record = Truncate(previous_generation=seen.generation)
        self._put(record, log_id, seen.generation + 1, position)

    def take(self, log_id: bytes) -> None:
        """A new writer."""
        seen = self.state[log_id]
        self.state[log_id] = Seen(seen.generation + 1, seen.tokens)
        record = Take(
            previous_generation=seen.generation,
            worker_id="w",
            worker_slot=1,
            worker_incarnation=1,
            lease_ms=1000,
        )
        self._put(record, log_id, seen.generation + 1, len(seen.tokens))

    def fork(self, parent_id: bytes, position: int) -> bytes:
        """A new log that goes on from another's tokens."""
        parent = self.state[parent_id]
        self.logs_ever += 1
        log_id = log_id_of(self.logs_ever)
        own = (self._next_token(),)
        base = Parent(log_id=parent_id, generation=parent.generation, position=position)
        self.state[log_id] = Seen(1, (*parent.tokens[:position], *own))
        record = Open(identity=identity(), token_ids=own, base=base, is_fork=True)
        self._put(record, log_id, 1, position)
        return log_id

    def snapshot(self, log_id: bytes) -> None:
        """Compaction: all of the log in one record."""
        seen = self.state[log_id]
        record = Snapshot(
            identity=identity(),
            token_ids=seen.tokens,
            prompt_tokens=1,
            cached_tokens=0,
            entries=(),
            # A log still in its prefill has none: its SEAL is to come.
            chunk_list_digest=bytes(32) if seen.is_sealed else None,
        )
        self._put(record, log_id, seen.generation, len(seen.tokens))

    def compact(self) -> None:
        """Snapshots of all sealed logs: what stood before them is needed no more."""
        for log_id, seen in self.state.items():
            if seen.is_sealed:
                self.snapshot(log_id)

    def name(self, session_id: str, log_id: bytes, position: int) -> None:
        """A new session, or an edit of one: it names another head from here on."""
        generation = self.sessions.get(session_id, (0, b"", 0))[0] + 1
        self.sessions[session_id] = (generation, log_id, position)
        self._tell(session_id)

    def _tell(self, session_id: str, *, is_deleted: bool = False) -> None:
        """A session's record, as it is."""
        generation, log_id, position = self.sessions[session_id]
        if is_deleted:
            del self.sessions[session_id]
        record = Session(
            session_id=session_id,
            tenant="acme",
            generation=generation,
            created_wall_ms=1,
            expires_wall_ms=1_000_000,
            ttl_s=60,
            is_deleted=is_deleted,
        )
        self._put(record, log_id, self.state[log_id].generation, position)

    def _named(self, log_id: bytes) -> dict[str, int]:
        """Sessions whose head is a log, and where."""
        return {key: head[2] for key, head in self.sessions.items() if head[1] == log_id}

    def close(self, log_id: bytes) -> None:
        """The log's end, and before it that of the sessions that name it."""
        for session_id in self._named(log_id):
            self._tell(session_id, is_deleted=True)
        seen = self.state.pop(log_id)
        self._put(Close(reason=CloseReason.DELETED), log_id, seen.generation, len(seen.tokens))

    # --- scripts ------------------------------------------------------------------------------

    def extend(self, rng: random.Random, records: int) -> None:
        """Adds about as many records of all kinds."""
        end = len(self.steps) + records
        while len(self.steps) < end:
            self._extend_by_one(rng)

    def _extend_by_one(self, rng: random.Random) -> None:
        log_ids = list(self.state)
        if not log_ids or rng.random() < 0.12:
            self.open((self.tokens,))
            return
        log_id = rng.choice(log_ids)
        if not self.state[log_id].is_sealed:
            self.seal(log_id)
            return
        if rng.random() < 0.04:
            self.compact()
            return
        if self.has_sessions and rng.random() < 0.4:
            self._change_session(rng, log_id)
            return
        kind, position = rng.random(), rng.randint(2, len(self.state[log_id].tokens))
        # What a session names is not cut away.
        position = max([position, *self._named(log_id).values()])
        if kind < 0.7:
            self.append(log_id)
        elif kind < 0.78:
            self.truncate(log_id, position)
        elif kind < 0.84:
            self.take(log_id)
        elif kind < 0.90:
            self.fork(log_id, position)
        elif kind < 0.95:
            self.snapshot(log_id)
        else:
            self.close(log_id)

    def _change_session(self, rng: random.Random, log_id: bytes) -> None:
        """A session is made, edited, told again (as compaction does) or deleted."""
        kind, names = rng.random(), list(self.sessions)
        position = rng.randint(1, len(self.state[log_id].tokens))
        if not names or kind < 0.25:
            self.sessions_ever += 1
            self.name(f"sess-{self.sessions_ever}", log_id, position)
        elif kind < 0.75:
            self.name(rng.choice(names), log_id, position)
        else:
            self._tell(rng.choice(names), is_deleted=kind > 0.9)


def appends_only(logs: int, records: int) -> Script:
    """Logs that only grow: each state names by itself how many records it comes from."""
    script = Script()
    log_ids = [script.open((index,)) for index in range(logs)]
    for log_id in log_ids:
        script.seal(log_id)
    for index in range(records):
        script.append(log_ids[index % logs])
    return script
