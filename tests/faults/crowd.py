"""Many streams at once, each unlike the next, and what each says when nothing disturbs it.

Owns the requests (greedy and seeded, with penalties, with a stop string that bites), their solo
answers and the comparison: nothing wrong, missing, repeated or changed. Never disturbs anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.faults.drill import Drill, Outcome, prompt_of, until

SEEDED: Final = {"temperature": 0.9, "top_p": 0.95}
PENALTIES: Final = {
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
}
KINDS: Final = ("greedy", "seeded", "greedy-penalties", "seeded-penalties-stop")
STOP_AFTER: Final = 0.6
"""A stop string is taken from behind this part of the answer without one."""

TIMEOUT_S: Final = 240.0
HELD_S: Final = 3.0
"""A step so slow that streams wait for what is under way."""


@dataclass(slots=True, kw_only=True)
class Streamed:
    """One request, its solo answer, and how far its stream in the crowd came."""

    prompt: list[int]
    tokens: int
    sampling: Mapping[str, Any]
    solo: Outcome = field(default_factory=Outcome)
    count: int = 0
    outcome: Outcome | None = None


class Crowd:
    """All requests of one drill."""

    def __init__(self, drill: Drill, streams: list[Streamed]) -> None:
        self._drill = drill
        self.streams = streams

    @classmethod
    async def of(cls, drill: Drill, size: int, *, seed: int, tokens: int) -> Crowd:
        """`size` requests of `tokens` tokens or a few more, with their solo answers."""
        random_ = random.Random(seed)
        # One after the other: alone is what they are compared with.
        return cls(
            drill, [await _drawn(drill, random_, seed + index, tokens) for index in range(size)]
        )

    @property
    def told(self) -> int:
        """Tokens that all clients have so far."""
        return sum(one.count for one in self.streams)

    @property
    def running(self) -> int:
        """Streams that have not ended."""
        return sum(one.outcome is None for one in self.streams)

    @contextlib.asynccontextmanager
    async def streaming(self, pace_s: float) -> AsyncIterator[None]:
        """All of them at once; the block disturbs them, and they have ended after it.

        When it begins all have their first token, and from then on a step takes `pace_s`.
        """
        # Decode all but waits for the last prompt: else the first streams end before.
        await self._drill.pace(HELD_S)
        async with asyncio.TaskGroup() as group:
            for one in self.streams:
                group.create_task(self._stream(one))
            await self._have_begun()
            await self._drill.pace(pace_s)
            yield

    async def _stream(self, one: Streamed) -> None:
        async def on_token(count: int) -> None:
            one.count = count

        one.outcome = await self._drill.ask(
            one.prompt,
            tokens=one.tokens,
            sampling=one.sampling,
            on_token=on_token,
            timeout_s=TIMEOUT_S,
        )

    async def grows(self, tokens: int) -> None:
        """Waits until so many more tokens have come, or too few streams are left to bring them."""
        wanted = self.told + tokens

        async def is_there() -> bool:
            return self.told >= wanted or not self.running

        await until(is_there, 90.0, lambda: f"{wanted} tokens, there are {self.told}")

    async def _have_begun(self) -> None:
        """Waits until every stream has a token."""

        async def is_begun() -> bool:
            return all(one.count for one in self.streams)

        await until(is_begun, 60.0, "a token of every stream")

    def check(self) -> None:
        """Every stream said what it says alone, to its end."""
        for number, one in enumerate(self.streams):
            outcome = one.outcome
            assert outcome is not None
            assert outcome.is_whole, (number, outcome)
            assert outcome.token_ids == one.solo.token_ids, (number, one.sampling)
            assert outcome.text == one.solo.text, (number, one.sampling)
            assert outcome.finish == one.solo.finish, (number, one.sampling)
        stops = [one for one in self.streams if one.solo.finish == "stop"]
        assert len(stops) * 2 * len(KINDS) >= len(self.streams), "stop strings that bite"

    def resumes(self) -> list[int]:
        """How often each stream lost its worker, in order."""
        return sorted(one.outcome.resumed for one in self.streams if one.outcome is not None)


async def _drawn(drill: Drill, random_: random.Random, number: int, tokens: int) -> Streamed:
    kind = KINDS[number % len(KINDS)]
    sampling: dict[str, Any] = {}
    if "seeded" in kind:
        sampling |= {**SEEDED, "seed": random_.randrange(1 << 31)}
    if "penalties" in kind:
        sampling |= PENALTIES
    prompt = prompt_of(number, tokens=random_.randint(40, 72))
    one = Streamed(prompt=prompt, tokens=tokens + random_.randint(0, 8), sampling=sampling)
    one.solo = await _alone(drill, one)
    stop = _stop_string(one.solo.text) if "stop" in kind else None
    if stop is not None:
        one = replace(one, sampling={**sampling, "stop": [stop]})
        one.solo = await _alone(drill, one)
    return one


async def _alone(drill: Drill, one: Streamed) -> Outcome:
    outcome = await drill.ask(
        one.prompt, tokens=one.tokens, sampling=one.sampling, is_streamed=False
    )
    assert outcome.is_whole, outcome
    return outcome


def _stop_string(text: str) -> str | None:
    """Three characters that come late in `text` and not before; None where there are none."""
    for at in range(int(len(text) * STOP_AFTER), len(text) - 3):
        found = text[at : at + 3]
        if "\ufffd" not in found and text.find(found) == at:
            return found
    return None
