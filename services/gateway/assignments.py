"""What this gateway has given workers to do: the part of their load that no heartbeat tells yet.

Owns the counts from the moment a worker is chosen to the end of its part. A heartbeat is up to half
a second old: without these counts all requests of that half second would go to one worker. Pure:
whoever hears a worker says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.gateway.legs import Plan
from services.gateway.registry import WorkerRecord

WORKERS_MAX: Final = 4096


@dataclass(slots=True)
class _Work:
    """Ours at one worker: now, and when it was last heard."""

    sequences: int = 0
    tokens: int = 0
    heard_sequences: int = 0
    heard_tokens: int = 0

    @property
    def is_over(self) -> bool:
        return not (self.sequences or self.tokens or self.heard_sequences or self.heard_tokens)


class Assignments:
    """Counts by worker id."""

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}

    def heard(self, worker_id: str) -> None:
        """A worker said what it has: what it was given until now is in that."""
        work = self._works.get(worker_id)
        if work is None:
            return
        work.heard_sequences, work.heard_tokens = work.sequences, work.tokens
        if work.is_over:
            del self._works[worker_id]

    def sequences(self, record: WorkerRecord) -> int:
        """Sequences of a decode worker: its own word, and ours that came or ended since."""
        said = record.load.active + record.load.queued
        work = self._works.get(record.worker_id)
        if work is None:
            return said
        return max(work.sequences, said + work.sequences - work.heard_sequences)

    def tokens(self, record: WorkerRecord) -> int:
        """Prompt tokens that wait at a prefill worker, likewise."""
        said = record.load.queued_tokens
        work = self._works.get(record.worker_id)
        return said if work is None else max(0, said + work.tokens - work.heard_tokens)

    def add(self, worker_id: str, *, sequences: int = 0, tokens: int = 0) -> None:
        """Give to a worker, or take back where negative."""
        work = self._works.get(worker_id)
        if work is None:
            if len(self._works) >= WORKERS_MAX:
                self._forget_ended()
            work = self._works[worker_id] = _Work()
        work.sequences += sequences
        work.tokens += tokens
        assert work.sequences >= 0, worker_id
        assert work.tokens >= 0, worker_id

    def _forget_ended(self) -> None:
        """Workers that left without another word, and have nothing of ours any more."""
        for worker_id in [
            key for key, work in self._works.items() if not work.sequences and not work.tokens
        ]:
            del self._works[worker_id]


class Assignment:
    """One request's part of the counts: a place at a decode worker, a prompt at a prefill worker.

    Each call replaces what was held before; `end` may be called again.
    """

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._decode: str | None = None
        self._prefill: tuple[str, int] | None = None

    def planned(self, plan: Plan, prompt_tokens: int) -> None:
        """An attempt begins."""
        self.end()
        self.goes_on_at(plan.decode)
        if plan.prefill is not None:
            self._prefill = (plan.prefill.worker_id, prompt_tokens)
            self._assignments.add(plan.prefill.worker_id, tokens=prompt_tokens)

    def prefilled(self) -> None:
        """The prompt is computed."""
        if self._prefill is not None:
            worker_id, tokens = self._prefill
            self._prefill = None
            self._assignments.add(worker_id, tokens=-tokens)

    def goes_on_at(self, decode: WorkerRecord) -> None:
        """The sequence is now this decode worker's."""
        self._leave_decode()
        self._decode = decode.worker_id
        self._assignments.add(decode.worker_id, sequences=1)

    def end(self) -> None:
        """Nothing is held any more."""
        self.prefilled()
        self._leave_decode()

    def _leave_decode(self) -> None:
        if self._decode is not None:
            worker_id, self._decode = self._decode, None
            self._assignments.add(worker_id, sequences=-1)
