"""Four answers that stream while long prompts come, as clients see them.

Owns the load and its clock. Gaps are taken where a client has them: between two events of one
stream, over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

STREAMS: Final = 4
SETTLED_TOKENS: Final = 24
"""Tokens of each stream before anything is measured."""
TOKENS_MAX: Final = 3000
WORDS: Final = 1100
TIMEOUT_S: Final = 300.0
_VOCABULARY: Final = ("river", "stone", "morning", "garden", "silver", "window", "letter", "winter")


@dataclass(slots=True, kw_only=True)
class Round:
    """Gaps between tokens in seconds, by whether a long prompt was under way; how long it took."""

    quiet_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    first_token_s: float = 0.0


def long_prompt(seed: int) -> str:
    """1,100 words that no other prompt begins with."""
    order = random.Random(seed)
    return " ".join([f"story {seed}", *(order.choice(_VOCABULARY) for _ in range(WORDS))])


async def one_round(url: str, seed: int, quiet_s: float) -> Round:
    """Four streams; quiet for a while, a long prompt, quiet for a while again."""
    result = Round()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        async with _streams(client, seed) as times_s:
            await asyncio.sleep(quiet_s)  # noqa: TID251 - this long is what is measured
            sent_s = time.perf_counter()
            result.first_token_s = await _asked(client, long_prompt(seed))
            answered_s = time.perf_counter()
            await asyncio.sleep(quiet_s)  # noqa: TID251 - this long is what is measured
            end_s = time.perf_counter()
        for times in times_s:
            for before, after in zip(
                times[SETTLED_TOKENS:], times[SETTLED_TOKENS + 1 :], strict=False
            ):
                if after < sent_s or answered_s < before < end_s:
                    result.quiet_s.append(after - before)
                elif after <= answered_s:
                    result.long_s.append(after - before)
    return result


async def alone(url: str, seed: int) -> float:
    """Seconds to the first token of a long prompt with nobody beside it."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        return await _asked(client, long_prompt(seed))


@asynccontextmanager
async def _streams(client: httpx.AsyncClient, seed: int) -> AsyncIterator[list[list[float]]]:
    """The streams, past their first tokens; cancelled in the end."""
    times_s: list[list[float]] = [[] for _ in range(STREAMS)]
    settled = asyncio.Event()

    async def follow(index: int) -> None:
        body = _body(f"Count {seed} {index} and go on: 1 2 3 4 5 6 7 8", TOKENS_MAX, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if '"error"' in line[:12]:
                    raise RuntimeError(json.loads(line[6:])["error"]["message"])
                times_s[index].append(time.perf_counter())
                if all(len(times) > SETTLED_TOKENS for times in times_s):
                    settled.set()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(index)) for index in range(STREAMS)]
        async with asyncio.timeout(TIMEOUT_S):
            await settled.wait()
        yield times_s
        for task in running:
            task.cancel()


async def _asked(client: httpx.AsyncClient, prompt: str) -> float:
    """Seconds until the prompt's one token came."""
    began_s = time.perf_counter()
    answer = await client.post("/v1/completions", json=_body(prompt, 1, stream=False))
    answer.raise_for_status()
    return time.perf_counter() - began_s


def _body(prompt: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "store": False,
    }
