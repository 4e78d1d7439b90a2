"""The times of one sequence in this worker: how long it waited, its steps, its end.

Owns the spans of steps: the first few one by one, the rest as one. Keeps nothing per token, so that
a long answer costs no more than a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from baton.stages import DECODE_QUEUE_WAIT
from baton.tracing import (
    TraceContext,
    current_trace,
    new_trace,
    parse_traceparent,
    record_span,
    request_scope,
)

STEPS_TRACED: Final = 8


class Track:
    """See the module. Times are monotonic seconds; steps are acked in the order they began."""

    def __init__(self, request_id: str, traceparent: str | None, received_s: float) -> None:
        self._request_id = request_id
        self._trace = parse_traceparent(traceparent) or new_trace(is_sampled=False)
        self.received_s = received_s
        self._admitted_s: float | None = None
        self._joined_s = received_s
        self._first_step_s: float | None = None
        self._begun: deque[float] = deque()
        self._steps = 0
        self._rest_began_s: float | None = None
        self._acked_s = received_s

    @contextmanager
    def scope(self) -> Iterator[TraceContext | None]:
        """What is done inside belongs to the sequence's request and trace."""
        with request_scope(self._request_id, self._trace):
            yield current_trace()

    @property
    def is_stepwise(self) -> bool:
        """Its next step to be acked has a span of its own."""
        return self._steps < STEPS_TRACED

    def admitted(self, now_s: float) -> None:
        """It has a slot and begins to join; only the first time counts."""
        if self._admitted_s is None:
            self._admitted_s = now_s
            if now_s > self.received_s:
                record_span("decode_queue", self._trace, (self.received_s, now_s))

    @property
    def waited_s(self) -> float:
        """From the command to a slot."""
        return 0.0 if self._admitted_s is None else self._admitted_s - self.received_s

    def joined(self, now_s: float) -> None:
        """It may step from now on."""
        self._joined_s = now_s

    def step_began(self, now_s: float) -> None:
        """It is in a batch that is being computed."""
        if self._first_step_s is None:
            self._first_step_s = now_s
            record_span(DECODE_QUEUE_WAIT, self._trace, (self._joined_s, now_s))
        self._begun.append(now_s)

    def step_dropped(self) -> None:
        """Steps under way are not acked any more: the sequence goes on from its log."""
        self._begun.clear()

    def step_acked(self, append_began_s: float, now_s: float, batch: int) -> None:
        """The step's token is logged and leaves."""
        began_s = self._begun.popleft() if self._begun else append_began_s
        self._acked_s = now_s
        if self.is_stepwise:
            record_span(
                "decode_step", self._trace, (began_s, now_s), step=self._steps, sequences=batch
            )
        elif self._rest_began_s is None:
            self._rest_began_s = began_s
        self._steps += 1

    def stages(self) -> dict[str, float]:
        """What goes with the last token."""
        waited_until_s = self._acked_s if self._first_step_s is None else self._first_step_s
        return {DECODE_QUEUE_WAIT: self.waited_s + max(0.0, waited_until_s - self._joined_s)}

    def ended(self, now_s: float, reason: str | None) -> None:
        """It left the worker; `reason` is why, if it failed."""
        if self._rest_began_s is not None:
            rest = self._steps - STEPS_TRACED
            record_span(
                "decode_steps", self._trace, (self._rest_began_s, self._acked_s), steps=rest
            )
        if reason is not None:
            record_span(
                "sequence_failed",
                self._trace,
                (self.received_s, now_s),
                failed=reason,
                request_id=self._request_id,
                steps=self._steps,
            )
