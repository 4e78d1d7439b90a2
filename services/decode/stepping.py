"""One step over a batch: forward, sample, checksum; and what of it is to be logged.

Owns no state: the loop (`runner`) says who steps and what becomes of the results.
"""

from __future__ import annotations

from typing import TypeAlias

from baton.arena.append import AppendEntry
from baton.arena.checksums import SlotChecksum, slot_checksum
from baton.errors import ServiceError
from baton.worker.engine import WorkerParts
from baton.worker.output import OutputToken
from services.decode.machine import Sequence, StepInput
from services.decode.members import Member, Stepped

Batch: TypeAlias = list[tuple[Member, Sequence, StepInput]]
Entries: TypeAlias = list[tuple[Member, Sequence, AppendEntry]]


def compute(parts: WorkerParts, batch: Batch) -> list[Stepped]:
    """In the compute thread: one token, or an error, for every sequence of the batch."""
    for _, sequence, step in batch:
        parts.unvouched.note(sequence.log.log_id, step.position)
    logits = parts.engine.decode_step(
        [step.token_id for _, _, step in batch],
        [step.position for _, _, step in batch],
        [step.pages for _, _, step in batch],
    )
    stepped = []
    for row, (member, sequence, step) in enumerate(batch):
        outcome: tuple[OutputToken, SlotChecksum] | ServiceError
        try:
            token = sequence.output.choose(logits[row])
            checksum = slot_checksum(parts.arena, sequence.table, step.position)
            outcome = (token, checksum)
        except ServiceError as error:
            outcome = error
        stepped.append(Stepped(member, sequence, outcome))
    parts.progress.worked()
    return stepped


def entries_of(stepped: list[Stepped]) -> Entries:
    """What to log after a step, for the sequences that still may."""
    entries: Entries = []
    for item in stepped:
        if item.member.is_suspended:
            continue
        if isinstance(item.outcome, ServiceError):
            item.sequence.fail(item.outcome)
            continue
        item.sequence.computed(*item.outcome)
        entry = None if item.sequence.failure is not None else item.sequence.entry()
        if entry is not None:
            entries.append((item.member, item.sequence, entry))
    return entries
