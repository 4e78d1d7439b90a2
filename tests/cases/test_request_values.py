"""Request edge values: what cannot be served is refused by name before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.door import Answer
from tests.cases.replay import (
    CHAT,
    COMPLETIONS,
    CONTEXT_TOKENS,
    LETTER_A,
    MODEL,
    VOCABULARY,
    Replay,
    chat,
    completion,
)
from tests.cases.waiting import together

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def assert_refused(answer: Answer, param: str | None = None) -> None:
    """400 in OpenAI's form, nothing of our insides."""
    assert answer.status == 400, answer
    assert answer.headers["content-type"] == "application/json"
    error = answer.body["error"]
    assert error["type"] == "invalid_request_error"
    assert "TypeError" not in error["message"]
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param


MISSHAPEN: list[tuple[str, dict[str, Any], str]] = [
    ("empty", {"messages": []}, "messages"),
    ("null", {"messages": None}, "messages"),
    ("object", {"messages": {}}, "messages"),
    ("missing", {}, "messages"),
    ("empty turn", {"messages": [{}]}, "messages[0].role"),
    ("role", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("no content", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("name", "body", "param"), MISSHAPEN, ids=[one[0] for one in MISSHAPEN])
def test_c08_misshapen_messages_are_refused(
    calm: Replay, name: str, body: dict[str, Any], param: str, is_stream: bool
) -> None:
    """Request values: an empty list renders to a prompt of nothing; it is refused, not served.

    meridian#466, meridian#450: code behind the check assumed one element.
    """
    asked = {"model": MODEL, "max_tokens": 8, "stream": is_stream, **body}
    assert_refused(calm.call(CHAT, asked), param)


SURROGATES = [b"\\ud83d", b"\\udc00x", b"a\\ud800", b"\\ud83d\\ud83d"]
PLACES = [
    b'"messages":[{"role":"user","content":"%s"}]',
    b'"messages":[{"role":"user","content":"x"}],"stop":["%s"]',
    b'"messages":[{"role":"user","content":"x"}],"user":"%s"',
    b'"messages":[{"role":"user","name":"%s","content":"x"}]',
]


@pytest.mark.parametrize("place", PLACES, ids=["content", "stop", "user", "name"])
def test_c10_lone_surrogates_are_refused(calm: Replay, place: bytes) -> None:
    """Request values: legal JSON syntax that is no text, wherever it stands, streamed or not.

    Rapid-MLX#730: a 500, or a 200 stream with the text of a Python exception.
    """
    for escape in SURROGATES:
        for stream in (b"false", b"true"):
            raw = b'{"model":"smollm2","max_tokens":1,"stream":%s,%s}' % (stream, place % escape)
            assert_refused(calm.call(CHAT, raw))
    raw = b'{"model":"smollm2","prompt":"%s","max_tokens":1}' % SURROGATES[0]
    assert_refused(calm.call(COMPLETIONS, raw))


def test_c10_a_proper_pair_is_fine_and_bad_bytes_are_not(calm: Replay) -> None:
    """Request values: the escape of a whole character is text; bytes that are no UTF-8 are not."""
    raw = b'{"model":"smollm2","max_tokens":1,%s}' % (PLACES[0] % b"\\ud83d\\ude00")
    assert calm.call(CHAT, raw).status == 200
    assert_refused(calm.call(CHAT, raw.replace(b"\\ud83d\\ude00", b"\xff")))


BAD_IDS: list[dict[str, Any]] = [
    {"logit_bias": {str(VOCABULARY): 5}},
    {"logit_bias": {"-1": 5}},
    {"logit_bias": {"x": 5}},
    {"logit_bias": {"5": 1e9}},
    {"stop_token_ids": [151_645]},
]


@pytest.mark.parametrize("extra", BAD_IDS, ids=json.dumps)
def test_c12_token_ids_outside_the_vocabulary_are_refused(
    calm: Replay, extra: dict[str, Any]
) -> None:
    """Request values: an id is an index somewhere; it is checked against the vocabulary first.

    vllm#6866, vllm#54195, vllm#16529: one request took the whole engine down.
    """
    assert_refused(calm.call(CHAT, chat("hi", max_tokens=2, **extra)))


@pytest.mark.parametrize("token_id", [VOCABULARY, -1, 5_279_552_648_203_111_001, 1.5, True])
def test_c12_prompt_ids_outside_the_vocabulary_are_refused(calm: Replay, token_id: Any) -> None:
    """Request values: the same for prompts of token ids."""
    assert_refused(calm.call(COMPLETIONS, completion([token_id], max_tokens=2)), "prompt[0]")


def test_c12_a_bad_neighbour_changes_nothing(calm: Replay) -> None:
    """Request values: a refused request beside a good one leaves the good one as it is alone."""
    body = chat("Count from 1 to 20.", max_tokens=12)
    alone = calm.call(CHAT, body).text
    bad = chat("hi", logit_bias={str(VOCABULARY): -100})
    good, refused = together(lambda: calm.call(CHAT, body), lambda: calm.call(CHAT, bad))
    assert good.text == alone
    assert_refused(refused)


@pytest.mark.parametrize(
    ("tokens", "limit"),
    [(CONTEXT_TOKENS + 1, 1), (CONTEXT_TOKENS, 1), (8000, CONTEXT_TOKENS - 8000 + 1)],
)
def test_c14_prompts_over_the_context_are_refused_by_code(
    calm: Replay, tokens: int, limit: int
) -> None:
    """Request values: never cut, never an empty 200; clients key on the code.

    ollama#17944, ollama#17889, vllm#3851.
    """
    for stream in (False, True):
        body = completion([LETTER_A] * tokens, max_tokens=limit, stream=stream)
        answer = calm.call(COMPLETIONS, body)
        assert_refused(answer)
        assert answer.body["error"]["code"] == "context_length_exceeded"
    answer = calm.call(CHAT, chat("word " * 9000))
    assert_refused(answer, "messages")
    assert answer.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.more
@pytest.mark.timeout(900)
def test_c14_the_longest_prompt_is_read_whole(drill: Replay) -> None:
    """Request values: one token of room is enough, and without a limit the room is the limit."""
    body = completion([LETTER_A] * (CONTEXT_TOKENS - 1), ignore_eos=True)
    answer = drill.call(COMPLETIONS, {**body, "max_tokens": 1}, timeout_s=800)
    assert answer.usage["prompt_tokens"] == CONTEXT_TOKENS - 1
    unbounded = drill.call(COMPLETIONS, body, timeout_s=800)
    assert unbounded.finish == "length"
    assert unbounded.usage["completion_tokens"] == 1
