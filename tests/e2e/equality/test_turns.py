"""Conversations: what decode wrote is the next turn's prefix, to the last token that has KV.

The bundled model in float32 behind the front door. An answer's last token has no KV: nothing was
computed behind it. Everything before it is reused, partial page included, as long as the client
sends back what it was told. Where the history is tokenised otherwise when it comes back as text,
the tokens that are still the same are reused, and `cached_tokens` says how many that were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TURNS: Final = 8
GAP_MIN: Final = 1e-3
QUESTIONS: Final = (
    "Name a river in France.",
    "And one in Spain?",
    "Which of the two is longer?",
    "What do people grow along it?",
    "Is it cold there in winter?",
    "What would you wear?",
    "Thank you. Say that again in one word.",
    "Goodbye!",
)


def chat(client: httpx.Client, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A greedy answer with its ids and its two likeliest tokens at each step."""
    body = {
        "model": "smollm2",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    headers = more.pop("headers", {})
    answer = client.post("/v1/chat/completions", json={**body, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def cached(told: dict[str, Any]) -> int:
    """Prompt tokens that were not computed."""
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def safe_tokens(told: dict[str, Any]) -> int:
    """Tokens before the first near tie: behind it both continuations are right."""
    steps = told["choices"][0]["logprobs"]["content"]
    gaps = [
        step["top_logprobs"][0]["logprob"] - step["top_logprobs"][1]["logprob"] for step in steps
    ]
    return next((i for i, gap in enumerate(gaps) if gap <= GAP_MIN), len(gaps))


def test_each_turn_reuses_everything_up_to_the_last_token_with_kv(
    client_f32: httpx.Client,
) -> None:
    """Eight turns, each sent at once after the answer: the reuse is exact, not to a page; now and
    then the same turn without any reuse gives the same tokens.
    """
    system = "You are a terse geography teacher. Conversation 71."
    messages = [{"role": "system", "content": system}]
    before: list[int] = []
    finishes, compared = set[str](), 0
    for turn, question in enumerate(QUESTIONS[:TURNS]):
        messages.append({"role": "user", "content": question})
        told = chat(client_f32, messages)
        prompt, choice = told["prompt_token_ids"], told["choices"][0]
        if turn:
            shared = common(before, prompt)
            assert cached(told) == shared, turn
            # What was said is most of it: text that comes back is tokenised nearly the same.
            assert shared >= 0.9 * len(before), turn
        if turn in (1, 4, 7):
            fresh = chat(client_f32, messages, headers={"X-Cache": "off"})
            assert cached(fresh) == 0
            safe = min(safe_tokens(told), safe_tokens(fresh))
            assert choice["token_ids"][:safe] == fresh["choices"][0]["token_ids"][:safe], turn
            compared += safe
        before = [*prompt, *choice["token_ids"][:-1]]
        finishes.add(choice["finish_reason"])
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    assert compared > 10


def test_tokens_that_come_back_as_they_were_are_all_reused(client_f32: httpx.Client) -> None:
    """As ids nothing is tokenised again: all but the last token of prompt and answer, whatever the
    length of the answer; one token more than that is computed at least.
    """
    history = [1000 + (index * 31) % 20_000 for index in range(37)]
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for tokens in (1, 2, 9, 16, 17):
        ask = {**body, "prompt": history, "max_tokens": tokens}
        told = client_f32.post("/v1/completions", json=ask).raise_for_status().json()
        history += told["choices"][0]["token_ids"]
        # The next turn begins with all of it, and adds a token.
        ask = {**body, "prompt": [*history, 77], "max_tokens": 1}
        again = client_f32.post("/v1/completions", json=ask).raise_for_status().json()
        assert cached(again) == len(history) - 1, tokens
        history.append(77)


def test_the_whole_prompt_again_computes_its_last_token_only(client_f32: httpx.Client) -> None:
    """No new token: the first token's probabilities are those of the first time."""
    ids = [2000 + (index * 17) % 20_000 for index in range(50)]
    body = {
        "model": "smollm2",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    first = client_f32.post("/v1/completions", json=body).raise_for_status().json()
    again = client_f32.post("/v1/completions", json=body).raise_for_status().json()
    assert (cached(first), cached(again)) == (0, len(ids) - 1)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    one, two = (told["choices"][0]["logprobs"]["token_logprobs"] for told in (first, again))
    assert two == pytest.approx(one, abs=1e-3)
