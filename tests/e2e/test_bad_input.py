"""Bad input at the running cluster: a clear error that names the field, and everybody alive."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def still_serves(client_f32: httpx.Client) -> Any:
    """After each bad request a good one is answered."""
    yield
    answer = client_f32.post(
        CHAT, json={"model": "smollm2", "messages": USER, "max_tokens": 1, "temperature": 0}
    )
    assert answer.status_code == 200, answer.text


CASES: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"messages": USER, "model": "nope"}, 404, "model", "model_not_found"),
    ({"messages": []}, 400, "messages", "invalid_request"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "invalid_request"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "invalid_request"),
    ({"messages": USER, "temperature": 3}, 400, "temperature", "invalid_request"),
    ({"messages": USER, "temperature": "hot"}, 400, "temperature", "invalid_request"),
    ({"messages": USER, "top_p": 0}, 400, "top_p", "invalid_request"),
    ({"messages": USER, "max_tokens": 0}, 400, "max_tokens", "invalid_request"),
    ({"messages": USER, "n": 0}, 400, "n", "invalid_request"),
    ({"messages": USER, "stop": [""]}, 400, "stop", "invalid_request"),
    (
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), CASES)
def test_a_bad_field_is_named(
    client_f32: httpx.Client, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    """Status, code and the field's path, in OpenAI's error body."""
    answer = client_f32.post(CHAT, json={"model": "smollm2", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_over_the_context_is_refused_before_any_stream(
    client_f32: httpx.Client, stream: bool
) -> None:
    """Never a 200 that turns into an error."""
    body = {"model": "smollm2", "prompt": [5] * 8193, "max_tokens": 1, "stream": stream}
    answer = client_f32.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "raw", [b"{", b"", b"[]", b'{"model": "smollm2", "messages": NaN}', b"\xff\xfe", b"[" * 100_000]
)
def test_malformed_json_is_refused(client_f32: httpx.Client, raw: bytes) -> None:
    """Whatever the bytes, the answer is a 400 with the error body."""
    answer = client_f32.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_answer_in_the_same_form(client_f32: httpx.Client) -> None:
    """No HTML page, no bare text."""
    missing = client_f32.get("/v1/embeddings/none")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"]
    wrong = client_f32.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"]


def test_a_lone_surrogate_is_refused(client_f32: httpx.Client) -> None:
    r"""JSON may carry \ud800; no tokenizer can."""
    raw = b'{"model": "smollm2", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = client_f32.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"
