"""Text at its edges, through the whole path: bytes, stop strings, lengths, control tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a streamed answer; strict UTF-8, [DONE] last."""
    with client.stream("POST", path, json={"model": "smollm2", **body, "stream": True}) as answer:
        raw = b"".join(answer.iter_bytes())
        assert answer.status_code == 200, raw
    blocks = [block for block in raw.decode("utf-8").split("\n\n") if block]
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def pieces(events: list[dict[str, Any]]) -> list[str]:
    """The text pieces of a completion stream, empty ones left out."""
    found = [choice["text"] for event in events for choice in event["choices"]]
    return [text for text in found if text]


def test_an_emoji_of_three_tokens_arrives_whole(client_f32: httpx.Client) -> None:
    """The model's tokens cut 😀 into three; no chunk carries a piece of it."""
    prompt = "smile 😀 smile 😀 smile 😀 smile 😀 smile"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    got = pieces(stream(client_f32, COMPLETIONS, body))
    assert "".join(got).startswith(" 😀 smile")
    assert all("�" not in piece for piece in got)


def test_a_cut_character_at_the_end_is_replaced_once(client_f32: httpx.Client) -> None:
    """max_tokens may end inside a character: what a whole decode gives comes out."""
    prompt = "smile 😀 smile 😀 smile 😀 smile 😀 smile"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    streamed = "".join(pieces(stream(client_f32, COMPLETIONS, body)))
    whole = client_f32.post(COMPLETIONS, json={"model": "smollm2", **body}).json()
    assert streamed == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stop", ["15", "4 1", " 14 15"])
def test_a_stop_string_across_tokens_never_leaks(client_f32: httpx.Client, stop: str) -> None:
    """Every digit is a token of its own, so each of these spans several."""
    prompt = "1 2 3 4 5 6 7 8 9 10 11 12"
    whole = " 13 14 15 16"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "stop": [stop]}
    events = stream(client_f32, COMPLETIONS, body)
    assert "".join(pieces(events)) == whole[: whole.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_half_stop_string_is_released_at_the_end(client_f32: httpx.Client) -> None:
    """What was held back as the beginning of a stop string is text once the answer ends."""
    body = {
        "prompt": "1 2 3 4 5 6 7 8 9 10 11 12",
        "temperature": 0,
        "max_tokens": 12,
        "stop": ["16 18"],
    }
    events = stream(client_f32, COMPLETIONS, body)
    assert "".join(pieces(events)) == " 13 14 15 16"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_one_token_answers(client_f32: httpx.Client) -> None:
    """max_tokens 1 ends with prefill's own token; decode is never asked."""
    body = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0}
    answer = client_f32.post(COMPLETIONS, json={**body, "max_tokens": 1}).json()
    assert answer["choices"][0]["text"] == " Paris"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


def test_the_end_token_may_be_token_one(client_f32: httpx.Client) -> None:
    """This prompt's first greedy token is the end token: an empty answer, finished by `stop`."""
    prompt = "Why is the sky blue? Explain in one sentence."
    body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    answer = client_f32.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_control_tokens_in_content_are_plain_text(client_f32: httpx.Client) -> None:
    """A user who writes a turn marker has written characters, not a turn."""
    marker = "<|im_end|>"
    plain = client_f32.post(
        "/tokenize", json={"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
    ).json()
    marked = client_f32.post(
        "/tokenize",
        json={"model": "smollm2", "messages": [{"role": "user", "content": f"hi{marker}"}]},
    ).json()
    assert plain["count"] == 31
    # As one control token it would add one; as text it is several.
    assert marked["count"] > plain["count"] + 3


def test_prompt_counts_match_the_template(client_f32: httpx.Client) -> None:
    """Usage counts the rendered prompt, the default system turn included."""
    messages = [{"role": "user", "content": "hi" + " a" * 9}]
    answer = client_f32.post(
        CHAT, json={"model": "smollm2", "messages": messages, "max_tokens": 1}
    ).json()
    assert answer["usage"]["prompt_tokens"] == 31 + 9


def test_many_scripts_in_one_conversation(client_f32: httpx.Client) -> None:
    """Any script goes in and comes out as text, never as broken bytes."""
    content = "Repeat: 你好 مرحبا नमस्ते 👩‍👩‍👧‍👦 שלום"
    events = stream(
        client_f32,
        CHAT,
        {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 24,
        },
    )
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    assert text
