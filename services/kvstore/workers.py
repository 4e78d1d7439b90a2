"""Attached workers: who has the arena mapped, under which slot, and what each has let go of.

Owns names, slots and incarnations, and the rule by which a live worker releases pages by name.
Pure; whether a slot's lock is still held is asked elsewhere and passed in. Slots are persistent:
the log names them, and after a restart they are still whose they were.

Release by name: a fenced writer's pages are free once two renewals of its worker in a row, both
received after the fence, do not name the log at the fenced generation. The first one tells the
worker what it lost; the second was composed after it knew. (One renewal in flight per worker.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.numeric import NumericClass
from services.kvstore.arena import SLOTS_MAX
from services.kvstore.pages import Fence
from services.kvstore.state import Writer

RENEWALS_TO_RELEASE: Final = 2
UNKNOWN_WORKER: Final = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedWorker:
    """A worker that has the arena mapped."""

    writer: Writer
    numeric_class: NumericClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """Who wrote a log, under which generation, before its arena was lost."""

    writer: Writer
    generation: int


class WorkerTable:
    """Workers by name; slots are numbers that never change their worker."""

    def __init__(self) -> None:
        self._attached: dict[str, AttachedWorker] = {}
        self._slot_owner: dict[int, str] = {}
        self._watched: set[int] = set()
        self._unnamed: dict[Fence, int] = {}

    def restore(self, owners: Mapping[int, str], locked: Iterable[int]) -> None:
        """After a restart: whose slots are whose, and which locks somebody still has."""
        self._slot_owner.update(owners)
        self._watched.update(locked)

    def attached(self) -> list[AttachedWorker]:
        """Every attached worker."""
        return list(self._attached.values())

    def find(self, worker_id: str) -> AttachedWorker:
        """The worker; NO_WORKER when it is not attached."""
        worker = self._attached.get(worker_id)
        if worker is None:
            raise ServiceError(
                Reason.NO_WORKER,
                f"worker {worker_id!r} is not attached to this kvstore; attach it first",
                field="worker_id",
            )
        return worker

    def slots_of(self, worker_id: str) -> list[int]:
        """The slots the worker has had, newest first."""
        return sorted(
            (slot for slot, owner in self._slot_owner.items() if owner == worker_id), reverse=True
        )

    def owner_of(self, slot: int) -> str:
        """Whose slot it is; a mark where nobody knows."""
        return self._slot_owner.get(slot, UNKNOWN_WORKER)

    def new_slot(self, worker_id: str, is_locked: Callable[[int], bool]) -> int:
        """A slot nobody has had, nor has now; QUOTA_EXCEEDED when there are too many."""
        for slot in range(SLOTS_MAX):
            if slot not in self._slot_owner and not is_locked(slot):
                self._slot_owner[slot] = worker_id
                return slot
        raise ServiceError(
            Reason.QUOTA_EXCEEDED,
            f"{SLOTS_MAX} workers have attached; start the kvstore with another --arena-dir",
        )

    def attach(self, worker: AttachedWorker) -> None:
        """The worker has its descriptor; from now on its slot's lock tells whether it lives."""
        self._attached[worker.writer.worker_id] = worker
        self._watched.add(worker.writer.slot)

    def watched_slots(self) -> list[int]:
        """Slots whose lock was handed out and not yet seen gone."""
        return sorted(self._watched)

    def gone(self, slot: int) -> str | None:
        """The slot's lock is gone; the worker's name if that was its current slot."""
        self._watched.discard(slot)
        worker_id = self._slot_owner.get(slot)
        current = None if worker_id is None else self._attached.get(worker_id)
        if worker_id is None or current is None or current.writer.slot != slot:
            return None
        del self._attached[worker_id]
        return worker_id

    def released_by(
        self, slot: int, named: set[tuple[bytes, int]], fences: Iterable[Fence]
    ) -> list[Fence]:
        """The fences that this renewal of the slot's worker completes the release of.

        `named` are the (log, generation) pairs it says it writes, `fences` all there are.
        """
        released: list[Fence] = []
        standing: set[Fence] = set()
        for fence in fences:
            standing.add(fence)
            if fence.worker_slot != slot:
                continue
            if (fence.log_id, fence.generation) in named:
                self._unnamed.pop(fence, None)
                continue
            self._unnamed[fence] = self._unnamed.get(fence, 0) + 1
            if self._unnamed[fence] >= RENEWALS_TO_RELEASE:
                released.append(fence)
        for fence in [*released, *(set(self._unnamed) - standing)]:
            self._unnamed.pop(fence, None)
        return released
