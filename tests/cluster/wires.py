"""Calls between simulated processes: delayed, lost, doubled and overtaken by seed.

Owns what happens to a message. Each direction is drawn alone: where the answer is lost, the call
was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from baton.errors import Reason, ServiceError
from tests.cluster.homes import SimHome
from tests.cluster.steps import Process, Promise, Scheduler

TIMEOUT_S: Final = 1.5
DELAYS_S: Final = (0.0004, 0.001, 0.003, 0.03)


def lost(target: str) -> ServiceError:
    """What a caller sees when nobody answers."""
    return ServiceError(Reason.WORKER_LOST, f"UNAVAILABLE: {target}")


@dataclass(slots=True, kw_only=True)
class Wires:
    """Every message's way. `loss`: share of lost messages; `doubling`: of those that come twice."""

    scheduler: Scheduler
    loss: float
    doubling: float
    cuts: int = 0
    doubled: int = 0
    refused: int = 0

    def call(self, source: Process, home: SimHome, method: str, request: Any) -> Promise[Any]:
        """One exchange; WORKER_LOST when the request or its answer did not come in time."""
        answer: Promise[Any] = Promise()
        self._carry(source, home, method, request, answer)
        if self.scheduler.random.random() < self.doubling:
            self.doubled += 1
            self._carry(source, home, method, request, Promise())
        self.scheduler.later(TIMEOUT_S, lambda: answer.keep(error=lost(home.name)))
        return answer

    def _carry(
        self, source: Process, home: SimHome, method: str, request: Any, answer: Promise[Any]
    ) -> None:
        if self._is_lost():
            return
        self.scheduler.later(self._delay_s(), lambda: self._arrive(home, method, request, answer))

    def _arrive(self, home: SimHome, method: str, request: Any, answer: Promise[Any]) -> None:
        if home.runtime is None:
            answer.keep(error=lost(home.name))
            return
        served = home.serve(method, request)
        served.then(lambda: self._answered(served, answer))

    def _answered(self, served: Promise[Any], answer: Promise[Any]) -> None:
        value, error = served.outcome()
        if error is not None and error.reason is Reason.STALE_GENERATION:
            self.refused += 1
        if not self._is_lost():
            self.scheduler.later(self._delay_s(), lambda: answer.keep(value, error))

    def _is_lost(self) -> bool:
        is_lost = self.scheduler.random.random() < self.loss
        self.cuts += is_lost
        return is_lost

    def _delay_s(self) -> float:
        return self.scheduler.random.choice(DELAYS_S)
