"""Where the time of one answer goes, by the stage names of `baton.stages`.

Owns the clock readings of one sequence and of its first token's way to the client. Stages that make
up the time to the first token never overlap: what a worker reports of its own is taken out of the
call that brought it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from baton.clock import Clock
from baton.stages import (
    ADMISSION_WAIT,
    FAILED_ATTEMPTS,
    FIRST_TOKEN_EMIT,
    PER_TOKEN_DECODE,
    PREFILL_RPC,
)
from baton.tracing import Attribute, current_trace, record_span, span
from services.gateway.events import Completed


class Timeline:
    """The stages of one sequence. `before`: what its request took until `ready_s`."""

    def __init__(self, clock: Clock, before: Mapping[str, float], ready_s: float) -> None:
        self._clock = clock
        self._stages = dict(before)
        self._ready_s = ready_s
        self._kept = dict(before)
        self._attempt_s = ready_s
        self._arrived_s = ready_s

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage so far."""
        return dict(self._stages)

    def began(self) -> None:
        """The sequence runs: it was admitted, and no sibling's prefill is waited for any more."""
        self._attempt_s = self._clock.monotonic_s()
        record_span(ADMISSION_WAIT, current_trace(), (self._ready_s, self._attempt_s))
        self._add(ADMISSION_WAIT, self._attempt_s - self._ready_s)
        self._kept = dict(self._stages)

    def attempt_failed(self) -> None:
        """What this attempt did is one number from now on; the next one starts over."""
        now_s = self._clock.monotonic_s()
        self._stages = dict(self._kept)
        self._add(FAILED_ATTEMPTS, now_s - self._attempt_s)
        self._kept, self._attempt_s = dict(self._stages), now_s

    @contextmanager
    def stage(self, name: str, **attributes: Attribute | None) -> Iterator[None]:
        """Measures the block as a stage and as a span; nested stages are taken out of it."""
        began_s, inner_s = self._clock.monotonic_s(), sum(self._stages.values())
        try:
            with span(name, **attributes):
                yield
        finally:
            nested_s = sum(self._stages.values()) - inner_s
            self._add(name, self._clock.monotonic_s() - began_s - nested_s)

    def prefilled(
        self, asked_s: float | None, reported: Mapping[str, float], total_s: float
    ) -> None:
        """The prefill's answer is here. `asked_s` None: the call itself was a stage already."""
        self._arrived_s = self._clock.monotonic_s()
        if asked_s is not None:
            self._add(PREFILL_RPC, self._arrived_s - asked_s)
        self._add(PREFILL_RPC, -total_s)
        for name, seconds in reported.items():
            self._add(name, seconds)

    def first_token(self) -> float:
        """The first token leaves the sequence; returns when."""
        now_s = self._clock.monotonic_s()
        self._add(FIRST_TOKEN_EMIT, now_s - self._arrived_s)
        return now_s

    def note(self, reported: Mapping[str, float]) -> None:
        """Stages of the hand-off and after it; the first report of each stays."""
        for name, seconds in reported.items():
            self._stages.setdefault(name, seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._stages[name] = self._stages.get(name, 0.0) + seconds


class FirstSends:
    """When the first token of each of an answer's sequences was given to the client."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent_s: dict[int, float] = {}

    def sent(self, index: int) -> float:
        """A token of the sequence is on its way; returns when the first one was."""
        known = self._sent_s.get(index)
        if known is None:
            known = self._sent_s[index] = self._clock.monotonic_s()
        return known

    def corrected(self, index: int, completed: Completed) -> Completed:
        """The answer's end with the time at which its first token really left."""
        sent_s = self._sent_s.get(index)
        if sent_s is None:
            return completed
        late_s = max(0.0, sent_s - completed.first_token_s)
        stages = dict(completed.stage_seconds)
        stages[FIRST_TOKEN_EMIT] = stages.get(FIRST_TOKEN_EMIT, 0.0) + late_s
        ttft_s = completed.time_to_first_token_s + late_s
        # A client that reads late has the last token before it reads the first.
        elapsed_s = max(completed.elapsed_s, ttft_s)
        tokens = completed.usage.completion_tokens
        if tokens > 1:
            stages[PER_TOKEN_DECODE] = (elapsed_s - ttft_s) / (tokens - 1)
        return replace(
            completed,
            time_to_first_token_s=ttft_s,
            elapsed_s=elapsed_s,
            stage_seconds=stages,
        )
