"""From records back to logs: the fold that a restarted kvstore begins with.

Owns how each record changes a log's tokens and metadata. Pure; reads no files. KV is not recovered:
the arena of a restarted store is new, so every log comes back with its tokens and without pages.

Invariants: a record is applied once, by LSN; a log one of whose records may be missing (damage) is
reported and not given back: its tokens could be wrong.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from baton.errors import ServiceError
from baton.kv.manifest import Manifest
from baton.sampling_parameters import SamplingParameters
from services.kvstore.log.fields import EndReason, LogIdentity, Logprobs
from services.kvstore.log.format import RecordHeader, SkippedRecord
from services.kvstore.log.reader import LogScan
from services.kvstore.log.records import Append, Seal, Take, Truncate
from services.kvstore.log.state import Arrival, Open, Parent, Snapshot
from services.kvstore.log.store_records import Close
from services.kvstore.state import (
    TOKEN_TYPECODE,
    AckLevel,
    LogprobEntry,
    LogState,
    Phase,
)

END_WORDS = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CANCELLED: "cancelled",
    EndReason.ERROR: "error",
}
END_REASONS = {word: reason for reason, word in END_WORDS.items()}


@dataclass(slots=True, kw_only=True)
class Recovered:
    """What a scan came to. `dropped` are generations of logs that are gone; `damaged` are logs not
    given back; `living` says which segments hold records of which logs.
    """

    logs: dict[bytes, LogState] = field(default_factory=dict)
    writers: dict[bytes, str] = field(default_factory=dict)
    dropped: dict[bytes, int] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)
    living: dict[int, set[bytes]] = field(default_factory=dict)


def recover(scan: LogScan) -> Recovered:
    """Applies every record of a scan, oldest first."""
    fold = _Fold()
    applied_lsn = 0
    for segment in scan.segments:
        living = fold.out.living.setdefault(segment.sequence, set())
        for item in segment.records:
            header = item.header
            living.add(header.log_id)
            if header.lsn <= applied_lsn:
                continue
            if scan.damaged_from is not None and applied_lsn < scan.damaged_from <= header.lsn:
                fold.damage_all()
            applied_lsn = header.lsn
            if not isinstance(item.record, SkippedRecord):
                fold.apply(header, item.record)
    if scan.damaged_from is not None and applied_lsn < scan.damaged_from:
        fold.damage_all()
    return fold.result()


class _Fold:
    def __init__(self) -> None:
        self.out = Recovered()
        # Bases that are not here any more; the SNAPSHOT behind the OPEN has everything.
        self._unresolved: set[bytes] = set()

    def result(self) -> Recovered:
        for log_id in self._unresolved:
            self.out.logs.pop(log_id, None)
            self.out.damaged.add(log_id)
        return self.out

    def damage_all(self) -> None:
        """Records are missing here: any log known so far may have lost some."""
        self.out.damaged |= set(self.out.logs)
        self.out.logs.clear()
        self.out.writers.clear()

    def apply(self, header: RecordHeader, record: object) -> None:
        log_id = header.log_id
        match record:
            case Open():
                self._open(header, record)
            case Snapshot():
                self._unresolved.discard(log_id)
                self._keep(header, log_of_snapshot(header, record))
                if record.worker_id is not None:
                    self.out.writers[log_id] = record.worker_id
            case Close():
                log = self.out.logs.pop(log_id, None)
                self.out.writers.pop(log_id, None)
                self._unresolved.discard(log_id)
                self.out.dropped[log_id] = header.generation if log is None else log.generation
            case _:
                log = self.out.logs.get(log_id)
                if log is not None and not self._apply_to(log, header, record):
                    del self.out.logs[log_id]
                    self.out.damaged.add(log_id)

    def _open(self, header: RecordHeader, record: Open) -> None:
        if isinstance(record.base, Arrival):
            self._keep(header, log_of_snapshot(header, record.base.snapshot))
            return
        tokens = array(TOKEN_TYPECODE)
        if record.base is not None:
            base = self._base_tokens(record.base)
            if base is None:
                self._unresolved.add(header.log_id)
                base = array(TOKEN_TYPECODE, bytes(4 * record.base_tokens))
            tokens.extend(base)
        tokens.extend(record.token_ids)
        self._keep(header, _log_of(header, record.identity, tokens, len(tokens)))

    def _base_tokens(self, base: Parent | Manifest) -> array[int] | None:
        if isinstance(base, Manifest):
            return None
        parent = self.out.logs.get(base.log_id)
        if parent is None or parent.position < base.position:
            return None
        return parent.tokens[: base.position]

    def _keep(self, header: RecordHeader, log: LogState | None) -> None:
        if log is None:
            self.out.damaged.add(header.log_id)
            return
        self.out.damaged.discard(header.log_id)
        self.out.logs[header.log_id] = log

    def _apply_to(self, log: LogState, header: RecordHeader, record: object) -> bool:
        """False when the record does not follow from the log's state."""
        match record:
            case Seal():
                log.chunk_list_digest = record.chunk_list_digest
                log.phase = Phase.DECODE
                if record.token_id is not None:
                    _add_token(log, record.token_id, record.logprobs)
                _end(log, record.end_reason, is_end=record.token_id is None)
            case Append():
                if header.position != log.position or header.generation != log.generation:
                    return False
                _add_token(log, record.token_id, record.logprobs)
                _end(log, record.end_reason)
            case Take():
                if header.generation <= log.generation:
                    return False
                log.generation = header.generation
                self.out.writers.pop(log.log_id, None)
                if record.worker_id:
                    self.out.writers[log.log_id] = record.worker_id
            case Truncate():
                if header.generation <= log.generation or header.position > log.position:
                    return False
                _truncate(log, header)
        return True


def _truncate(log: LogState, header: RecordHeader) -> None:
    log.generation = header.generation
    del log.tokens[header.position :]
    log.prompt_tokens = min(log.prompt_tokens, header.position)
    del log.logprobs[header.position - log.prompt_tokens :]
    log.phase = Phase.DECODE
    log.finish_reason = None


def _add_token(log: LogState, token_id: int, logprobs: Logprobs | None) -> None:
    log.tokens.append(token_id)
    if logprobs is not None:
        log.logprobs.append(entry_of(token_id, logprobs))


def _end(log: LogState, reason: EndReason | None, *, is_end: bool = False) -> None:
    if reason is not None or is_end:
        log.phase = Phase.ENDED
        log.finish_reason = None if reason is None else END_WORDS[reason]


def entry_of(token_id: int, logprobs: Logprobs) -> LogprobEntry:
    """A stored log probability with the token it belongs to."""
    top = tuple(LogprobEntry(token_id=token, logprob=value) for token, value in logprobs.top)
    return LogprobEntry(token_id=token_id, logprob=logprobs.logprob, top=top)


def log_of_snapshot(header: RecordHeader, record: Snapshot) -> LogState | None:
    """The log a SNAPSHOT is of, without pages; None when its parameters cannot be read."""
    tokens = array(TOKEN_TYPECODE, record.token_ids)
    log = _log_of(header, record.identity, tokens, record.prompt_tokens)
    if log is None:
        return None
    log.chunk_list_digest = record.chunk_list_digest
    log.phase = Phase.DECODE if record.is_sealed else Phase.PREFILL
    log.logprobs = [
        entry_of(tokens[position], value)
        for position, value in record.logprobs
        if position < len(tokens)
    ]
    is_prefix = record.is_sealed and len(tokens) == record.prompt_tokens
    _end(log, record.end_reason, is_end=is_prefix)
    return log


def _log_of(
    header: RecordHeader, identity: LogIdentity, tokens: array[int], prompt_tokens: int
) -> LogState | None:
    try:
        sampling = SamplingParameters.from_canonical_bytes(identity.sampling)
    except ServiceError:
        return None
    return LogState(
        log_id=header.log_id,
        tenant=identity.scope.tenant,
        scope=identity.scope,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        numeric_class="",
        numeric_class_id=identity.numeric_class_id,
        base_class_id=identity.numeric_class_id,
        sampling=sampling,
        generation=header.generation,
        is_cacheable=identity.is_cacheable,
        drop_at_end=not identity.is_stored,
        ack_level=AckLevel(int(identity.ack_level)),
        ttl_s=float(identity.ttl_s),
        request_id=identity.request_id,
        body_hash=identity.body_hash,
        label_digest=identity.label_digest,
        opened_wall_s=identity.opened_wall_ms / 1000.0,
    )
