"""One log while records are folded into it, and what of it is in doubt.

Owns the data of the fold and how an identity becomes a log's state. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.errors import ServiceError
from baton.kv.digests import ChunkPage
from baton.sampling_parameters import SamplingParameters
from services.kvstore.log.fields import EndReason, LogIdentity, Logprobs, PageEntry
from services.kvstore.log.format import RecordAddress, RecordHeader, RecordType
from services.kvstore.log.kv_rows import KvRows
from services.kvstore.log.state import Snapshot
from services.kvstore.state import (
    TOKEN_TYPECODE,
    AckLevel,
    LogprobEntry,
    LogState,
    Phase,
    Tokens,
    Writer,
)

END_WORDS = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CANCELLED: "cancelled",
    EndReason.ERROR: "error",
}
END_REASONS = {word: reason for reason, word in END_WORDS.items()}

HARMLESS_TYPES = frozenset(
    int(kind)
    for kind in (
        RecordType.FLUSH,
        RecordType.PLACE,
        RecordType.GRANT,
        RecordType.RELEASE,
        RecordType.CHECKPOINT,
        RecordType.SNAPSHOT,
        RecordType.PUBLISH,
        RecordType.SESSION,
    )
)
"""Without a record of these the tokens and generation of a log that is known are the same."""


class MovedTo(NamedTuple):
    """Where a log that is not here any more has its home, and under which generation."""

    to_home: str
    generation: int


@dataclass(slots=True, eq=False)
class Doubt:
    """Records are missing that may have been a log's; cleared when it is proven that none was."""

    is_cleared: bool = False


@dataclass(slots=True, kw_only=True)
class Folded:
    """A log on its way: its state without rows, its KV (in the host, and copies on the NVMe tier),
    its writer, and what is doubted of it.
    """

    state: LogState
    kv: KvRows
    cold: KvRows
    writer: Writer | None = None
    doubts: list[Doubt] = field(default_factory=list)
    own_doubt: Doubt | None = None
    is_unresolved: bool = False

    @property
    def is_doubted(self) -> bool:
        """Whether something of its tokens, or of what it began from, may be missing."""
        return self.is_unresolved or any(not doubt.is_cleared for doubt in self.doubts)

    def doubt(self) -> None:
        """Records are missing here, and one may have been this log's."""
        if self.own_doubt is None:
            self.own_doubt = Doubt()
            self.doubts.append(self.own_doubt)

    def prove(self) -> None:
        """A record stated what the fold has: nothing was missing before it."""
        if self.own_doubt is not None:
            self.own_doubt.is_cleared = True
            self.own_doubt = None

    def follows(self, previous_generation: int) -> bool:
        """Whether a record that raises the generation may be applied: it proves that nothing was
        missing before it, or, of a log in doubt, that something is (an edit, a new writer), and
        then what it leads to would prove nothing.
        """
        if previous_generation == self.state.generation:
            self.prove()
            return True
        return self.own_doubt is None


def add_token(state: LogState, token_id: int, logprobs: Logprobs | None) -> None:
    """One more token, with its log probability if it has one."""
    state.tokens.append(token_id)
    if logprobs is not None:
        state.logprobs.append(entry_of(token_id, logprobs))


def entry_of(token_id: int, logprobs: Logprobs) -> LogprobEntry:
    """A stored log probability with the token it belongs to."""
    top = tuple(LogprobEntry(token_id=token, logprob=value) for token, value in logprobs.top)
    return LogprobEntry(token_id=token_id, logprob=logprobs.logprob, top=top)


def log_of_snapshot(at: RecordAddress | RecordHeader, record: Snapshot) -> LogState | None:
    """The log a SNAPSHOT is of, without pages; None when its parameters cannot be read."""
    tokens = array(TOKEN_TYPECODE, record.token_ids)
    state = log_of(at, record.identity, tokens, record.prompt_tokens)
    if state is None:
        return None
    state.chunk_list_digest = record.chunk_list_digest
    state.phase = Phase.DECODE if record.is_sealed else Phase.PREFILL
    state.logprobs = [
        entry_of(tokens[position], value)
        for position, value in record.logprobs
        if position < len(tokens)
    ]
    if record.is_ended or record.end_reason is not None:
        state.phase = Phase.ENDED
        state.finish_reason = None if record.end_reason is None else END_WORDS[record.end_reason]
    return state


def log_of(
    at: RecordAddress | RecordHeader, identity: LogIdentity, tokens: array[int], prompt_tokens: int
) -> LogState | None:
    """A log as its identity describes it; None when its parameters cannot be read."""
    try:
        sampling = SamplingParameters.from_canonical_bytes(identity.sampling)
    except ServiceError:
        return None
    return LogState(
        log_id=at.log_id,
        tenant=identity.scope.tenant,
        scope=identity.scope,
        tokens=Tokens(tokens),
        prompt_tokens=prompt_tokens,
        numeric_class="",
        numeric_class_id=identity.numeric_class_id,
        base_class_id=identity.base_class_id or identity.numeric_class_id,
        sampling=sampling,
        generation=at.generation,
        is_cacheable=identity.is_cacheable,
        drop_at_end=not identity.is_stored,
        ack_level=AckLevel(int(identity.ack_level)),
        ttl_s=float(identity.ttl_s),
        request_id=identity.request_id,
        body_hash=identity.body_hash,
        label_digest=identity.label_digest,
        kv_digest=identity.kv_digest,
        tokenizer_hash=identity.tokenizer_hash,
        opened_wall_s=identity.opened_wall_ms / 1000.0,
    )


def is_unchanged(before: LogState, after: LogState) -> bool:
    """Whether tokens and generation are the same."""
    return before.generation == after.generation and before.tokens == after.tokens


def chunk_of(entries: Sequence[PageEntry], start: int, block_tokens: int) -> list[ChunkPage]:
    """What SEAL's digest covers of a chunk whose first page begins at position `start`."""
    return [
        ChunkPage(
            first_position=start + index * block_tokens, tokens=entry.tokens, crc=entry.ref.crc
        )
        for index, entry in enumerate(entries)
    ]


def continue_from(state: LogState, source: LogState) -> None:
    """A fork goes on where its parent was: sealed, with the parent's log probabilities."""
    state.phase = Phase.DECODE
    state.prompt_tokens = min(source.prompt_tokens, state.position)
    state.logprobs = source.logprobs[: state.position - state.prompt_tokens]
    state.chunk_list_digest = source.chunk_list_digest
