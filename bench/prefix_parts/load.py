"""Two loads that repeat themselves: questions behind shared system prompts, and long chats.

Owns the texts, the requests and their clock, as a client sees them over HTTP. Texts are random
words by seed, so that nothing but what is meant to be shared is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

SYSTEM_PROMPTS: Final = 4
SHARED_SHARE: Final = 0.8
SYSTEM_TOKENS: Final = 400
QUESTION_TOKENS: Final = 60
ANSWER_TOKENS: Final = 16
TURNS: Final = 8
TURN_ANSWER_TOKENS: Final = 48
TIMEOUT_S: Final = 300.0
_WORDS: Final = (
    "river", "stone", "morning", "garden", "silver", "window", "letter", "winter", "market",
    "bridge", "copper", "music", "forest", "paper", "harbour", "candle", "mountain", "summer",
    "engine", "table",
)  # fmt: skip

Message = dict[str, str]


@dataclass(slots=True, kw_only=True)
class Run:
    """What one run of the questions came to. Seconds and tokens; `cpu_s` by process."""

    requests: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def cpu_per_request_s(self) -> float:
        """CPU seconds of the whole cluster for one request."""
        return sum(self.cpu_s.values()) / self.requests

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


@dataclass(slots=True, kw_only=True)
class Chats:
    """What the turns behind the first came to, in tokens: how many had KV from before, were at the
    same place in the new prompt (`reusable`), and were reused; seconds to their first tokens.
    """

    history: int = 0
    reusable: int = 0
    reused: int = 0
    first_token_s: list[float] = field(default_factory=list)


class Texts:
    """Random text of about so many tokens."""

    def __init__(self, client: httpx.Client) -> None:
        sample = " ".join(_WORDS) + "."
        body = {"model": "smollm2", "prompt": sample}
        answer = client.post("/tokenize", json=body).raise_for_status()
        self._words_per_token = len(_WORDS) / int(answer.json()["count"])

    def of(self, tokens: int, seed: str) -> str:
        """The text of that seed."""
        order, words = random.Random(seed), round(tokens * self._words_per_token)
        return " ".join(order.choice(_WORDS) for _ in range(words)) + "."


def questions(texts: Texts, count: int, run: str) -> list[list[Message]]:
    """Chats of a system prompt and a question; of `SHARED_SHARE` of them the system prompt is one
    of a few, of the others their own.
    """
    order, chats = random.Random(run), list[list[Message]]()
    for index in range(count):
        # Exact shares, evenly spread: a run of few requests has no other mix than a long one.
        is_shared = int((index + 1) * SHARED_SHARE) > int(index * SHARED_SHARE)
        which = f"shared {order.randrange(SYSTEM_PROMPTS)}" if is_shared else f"own {run} {index}"
        chats.append(
            [
                {"role": "system", "content": texts.of(SYSTEM_TOKENS, which)},
                {"role": "user", "content": texts.of(QUESTION_TOKENS, f"{run} {index}")},
            ]
        )
    return chats


def warm_questions(texts: Texts, run: str) -> list[list[Message]]:
    """One question behind each of the shared system prompts."""
    return [
        [
            {"role": "system", "content": texts.of(SYSTEM_TOKENS, f"shared {index}")},
            {"role": "user", "content": texts.of(QUESTION_TOKENS, f"{run} warm {index}")},
        ]
        for index in range(SYSTEM_PROMPTS)
    ]


async def asked(url: str, chats: Sequence[list[Message]], clients: int, *, is_shared: bool) -> Run:
    """All of them, by so many clients that each ask the next one when they have an answer."""
    run, waiting = Run(), iter(list(chats))
    headers = {} if is_shared else {"X-Cache": "off"}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def ask_on() -> None:
            for messages in waiting:
                told = await _answered(client, messages, ANSWER_TOKENS, headers, ignore_eos=True)
                usage = told["usage"]
                assert usage["completion_tokens"] == ANSWER_TOKENS, usage
                run.requests += 1
                run.prompt_tokens += usage["prompt_tokens"]
                run.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                run.first_token_s.append(told["baton"]["time_to_first_token_s"])

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(ask_on())
        run.seconds = time.perf_counter() - began_s
    return run


async def chatted(url: str, texts: Texts, chats: int, run: str) -> Chats:
    """Conversations beside each other, each turn sent with all that was said before it."""
    result = Chats()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def talk(number: int) -> None:
            messages: list[Message] = [
                {"role": "system", "content": texts.of(80, f"chat {run} {number}")}
            ]
            before: list[int] = []
            for turn in range(TURNS):
                question = f"Tell me about this: {texts.of(30, f'{run} {number} {turn}')}"
                messages.append({"role": "user", "content": question})
                told = await _answered(client, messages, TURN_ANSWER_TOKENS, {})
                prompt, choice = told["prompt_token_ids"], told["choices"][0]
                if turn:
                    result.history += len(before)
                    result.reusable += common(before, prompt)
                    details = told["usage"]["prompt_tokens_details"]
                    result.reused += details["cached_tokens"]
                    result.first_token_s.append(told["baton"]["time_to_first_token_s"])
                # The last token of an answer has no KV: nothing was computed behind it.
                before = [*prompt, *choice["token_ids"][:-1]]
                messages.append({"role": "assistant", "content": choice["message"]["content"]})

        async with asyncio.TaskGroup() as tasks:
            for number in range(chats):
                tasks.create_task(talk(number))
    return result


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


async def _answered(
    client: httpx.AsyncClient,
    messages: Sequence[Message],
    tokens: int,
    headers: dict[str, str],
    *,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    body = {
        "model": "smollm2",
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "return_token_ids": True,
    }
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    if answer.is_error:
        raise RuntimeError(answer.text)
    told: dict[str, Any] = answer.json()
    return told
