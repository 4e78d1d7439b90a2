"""The load that `baton tune` measures under: answers that stream while prompts come.

Owns the requests and their clock; times are what a client of the gateway sees. Never starts a
cluster, never decides anything.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import httpx

from baton.cli.chat_stream import DONE, event_data
from baton.cli.console import CommandFailed
from baton.cli.gateway_http import error_text, refuse_errors
from baton.cli.tune_choice import Rounds

SETTLED_TOKENS: Final = 16
"""Tokens of each stream before its gaps count."""
STREAM_PROMPT_TOKENS: Final = 16
STREAM_TOKENS_MAX: Final = 4096
TIMEOUT_S: Final = 300.0
WARM_TIMEOUT_S: Final = 60.0
WARM_PAUSE_S: Final = 0.2

_SENTENCES: Final = (
    "The river rises in the hills and is cold until July.",
    "Nobody had told the keeper that the bridge was closed!",
    "What they found in the cellar was neither old nor valuable.",
    "She counted the boxes twice, wrote the number down and left.\n",
    "- two spoons of salt, stirred in slowly\n",
    "In 1907 the line was extended to the harbour; it carried coal, mail and people.",
    "Why does the second valve open before the first one is shut?",
    "## What remains to be done\n\n",
)


def prompt_text(seed: int, words: int) -> str:
    """Prose of at least so many words that no other seed's begins with."""
    order = random.Random(seed)
    pieces, count = [f"{seed} is the number of this report."], 7
    while count < words:
        pieces.append(order.choice(_SENTENCES))
        count += len(pieces[-1].split())
    return " ".join(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the cluster at `url`.

    `prompts`: token ids, the first one to warm up with; `streams`: the prompts of the answers that
    stream beside them; `quiet_s`: how long nothing but these goes on before each prompt.
    """

    url: str
    model: str
    context_max: int
    prompts: Sequence[Sequence[int]]
    streams: Sequence[Sequence[int]]
    quiet_s: float


async def measure(load: Load) -> Rounds:
    """Stream the answers, ask the prompts one after the other, keep the times.

    Raises CommandFailed for an answer that failed, TimeoutError for one that never came.
    """
    timeout = httpx.Timeout(TIMEOUT_S)
    async with httpx.AsyncClient(base_url=load.url, timeout=timeout, trust_env=False) as client:
        await _warm(client, load)
        under_way: list[tuple[float, float]] = []
        async with _streams(client, load) as answers:
            for prompt in load.prompts[1:]:
                await asyncio.sleep(load.quiet_s)  # noqa: TID251 - this long is what is measured
                began_s = time.perf_counter()
                await _first_token(client, load.model, prompt)
                under_way.append((began_s, time.perf_counter()))
            await asyncio.sleep(load.quiet_s)  # noqa: TID251 - this long is what is measured
    rounds = sorted_out(answers, under_way)
    if not rounds.quiet_s or not rounds.beside_s:
        raise CommandFailed(
            "no token of the streams came beside a prompt, or none without one",
            remedy="give more --rounds, a longer --quiet-s or longer --prompt-tokens",
        )
    return rounds


def sorted_out(
    answers: Sequence[Sequence[float]], under_way: Sequence[tuple[float, float]]
) -> Rounds:
    """Gaps by whether a prompt was under way in them. `answers`: when each one's tokens came."""
    rounds = Rounds(first_token_s=[end_s - began_s for began_s, end_s in under_way])
    for times in answers:
        settled = times[SETTLED_TOKENS:]
        for before_s, after_s in pairwise(settled):
            is_beside = any(after_s > began_s and before_s < end_s for began_s, end_s in under_way)
            (rounds.beside_s if is_beside else rounds.quiet_s).append(after_s - before_s)
    return rounds


async def _warm(client: httpx.AsyncClient, load: Load) -> None:
    """The first prompt, until a worker that was just started has it."""
    deadline_s = time.monotonic() + WARM_TIMEOUT_S
    while True:
        try:
            await _first_token(client, load.model, load.prompts[0])
            return
        except CommandFailed:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(WARM_PAUSE_S)  # noqa: TID251 - a pause between two tries


async def _first_token(client: httpx.AsyncClient, model: str, prompt: Sequence[int]) -> None:
    answer = await client.post("/v1/completions", json=_body(model, prompt, 1))
    refuse_errors(answer)


@dataclass(slots=True)
class _Times:
    """When tokens came, one list an answer; `is_settled` once each stream has had a few."""

    answers: list[list[float]] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def _streams(client: httpx.AsyncClient, load: Load) -> AsyncIterator[list[list[float]]]:
    """The streams, past their first tokens; cancelled in the end."""
    times = _Times()
    waiting = set(range(len(load.streams)))

    def settled(index: int) -> None:
        waiting.discard(index)
        if not waiting:
            times.settled.set()

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_stream(client, load, prompt, times, partial(settled, index)))
            for index, prompt in enumerate(load.streams)
        ]
        async with asyncio.timeout(TIMEOUT_S):
            await times.settled.wait()
        yield times.answers
        for task in running:
            task.cancel()


async def _stream(
    client: httpx.AsyncClient,
    load: Load,
    prompt: Sequence[int],
    times: _Times,
    on_settled: Callable[[], None],
) -> None:
    """One answer after the other: a short context ends them early."""
    tokens = min(STREAM_TOKENS_MAX, load.context_max - len(prompt) - 1)
    while True:
        came_s: list[float] = []
        times.answers.append(came_s)
        body = _body(load.model, prompt, tokens) | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                refuse_errors(answer)
            async for line in answer.aiter_lines():
                _seen(line, came_s)
                if len(came_s) > SETTLED_TOKENS:
                    on_settled()


def _seen(line: str, came_s: list[float]) -> None:
    """One line of a stream; raises CommandFailed for an error event."""
    for data in event_data((line,)):
        if data == DONE:
            # The last event before it says why the answer ended, and has no token.
            del came_s[-1:]
        elif data.startswith('{"error"'):
            raise CommandFailed(f"a stream broke off: {error_text(data[:200])}")
        else:
            came_s.append(time.perf_counter())


def _body(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        # Nothing is kept: a prompt is computed whole each time.
        "store": False,
    }
