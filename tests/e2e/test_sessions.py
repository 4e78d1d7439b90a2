"""Sessions through the front door: continue, edit, cut, fork; refusals say how to mend it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SYSTEM = {"role": "system", "content": "You are terse. " + "rule " * 30}
ASK = {"model": "smollm2", "temperature": 0, "max_tokens": 10, "return_token_ids": True}


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A greedy answer with its ids."""
    answer = client.post("/v1/chat/completions", json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def user(text: str) -> dict[str, str]:
    """A user's turn."""
    return {"role": "user", "content": text}


def made(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """A new session."""
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_an_edited_turn_is_answered_as_if_it_had_been_said_so(client_f32: httpx.Client) -> None:
    """The tail is kept and computed again in the call; the answer is a fresh conversation's."""
    first = chat(client_f32, messages=[SYSTEM, user("What is the capital of France?")])
    session = made(client_f32, {"from": first["id"]})
    path = f"/v1/sessions/{session['id']}"
    edit = {"start": {"text": "capital of France?"}, "replacement": "capital of Italy? <|im_end|>"}
    edited = client_f32.post(f"{path}/edit", json=edit).json()
    assert edited["generation"] == session["generation"] + 1
    assert edited["reused_tokens"] + edited["recomputed_tokens"] == edited["tokens"]
    assert 0 < edited["dropped_tokens"] < 10
    shown = client_f32.get(path).json()
    assert shown["messages"][1]["content"] == "What is the capital of Italy? <|im_end|>"
    told = chat(client_f32, session=session["id"], messages=[user("Sure?")])
    fresh = client_f32.post(
        "/v1/chat/completions",
        json={**ASK, "messages": [*shown["messages"], user("Sure?")]},
        headers={"X-Cache": "off"},
    ).json()
    assert told["prompt_token_ids"] == fresh["prompt_token_ids"]
    assert told["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] >= edited["tokens"] - 1
    assert told["baton"]["session"]["generation"] == edited["generation"] + 1


def test_an_edit_leaves_the_shared_system_prompt_alone(client_f32: httpx.Client) -> None:
    """C75: cuts into and up to the shared block change nothing for others that share it."""
    want = chat(client_f32, messages=[SYSTEM, user("What do bees make?")])
    for count in range(1, 21):
        messages = [SYSTEM, user("draft " * count)]
        drafted = client_f32.post(
            "/v1/chat/completions",
            json={**ASK, "messages": messages, "max_tokens": 1},
            headers={"X-Session": "s"},
        )
        assert drafted.status_code == 200, drafted.text
    shared = client_f32.post("/tokenize", json={"messages": [SYSTEM, user("")]}).json()["count"]
    nothing = made(client_f32, {"from": want["id"]})
    cut = client_f32.post(f"/v1/sessions/{nothing['id']}/truncate", json={"position": 0})
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "position")
    for position in (1, shared - 12, shared - 1, shared, shared + 1):
        session = made(client_f32, {"from": want["id"]})
        path = f"/v1/sessions/{session['id']}"
        cut = client_f32.post(f"{path}/truncate", json={"position": position})
        assert cut.status_code == 200, cut.text
        body = {"start": {"token": 0}, "end": {"token": 1}, "replacement": {"token_ids": [900]}}
        assert client_f32.post(f"{path}/edit", json=body).status_code == 200
        assert client_f32.delete(path).status_code == 200
    again = chat(client_f32, messages=[SYSTEM, user("What do bees make?")])
    assert again["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("said", "start", "replacement", "becomes"),
    [
        ("我住在巴黎,喜欢🍎和🍐。", "巴黎", "柏林", "我住在柏林,喜欢🍎和🍐。"),
        ("我住在巴黎,喜欢🍎和🍐。", "🍎和", "", "我住在巴黎,喜欢🍐。"),
        ("Family 👩‍👩‍👧‍👦 of four", "👩‍👩‍👧‍👦", "👨‍👩‍👧", "Family 👨‍👩‍👧 of four"),
        ("flags 🇫🇷🇩🇪", "🇩🇪", "🇮🇹 et é", "flags 🇫🇷🇮🇹 et é"),
    ],
)
def test_an_edit_by_text_holds_in_every_script(
    client_f32: httpx.Client, said: str, start: str, replacement: str, becomes: str
) -> None:
    """The session then reads, and is tokenised, as if it had been said so."""
    session = made(client_f32, {"messages": [SYSTEM, user(said)]})
    path = f"/v1/sessions/{session['id']}"
    edit = {"start": {"text": start}, "replacement": replacement, "generation": 1}
    edited = client_f32.post(f"{path}/edit", json=edit)
    assert edited.status_code == 200, edited.text
    assert client_f32.get(path).json()["messages"][1]["content"] == becomes
    told = chat(client_f32, session=session["id"], max_tokens=4)
    fresh = client_f32.post(
        "/v1/chat/completions",
        json={**ASK, "messages": [SYSTEM, user(becomes)], "max_tokens": 4},
        headers={"X-Cache": "off"},
    ).json()
    assert told["prompt_token_ids"] == fresh["prompt_token_ids"]
    assert told["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]


def test_a_session_changed_meanwhile_is_not_made_to_forget_it(client_f32: httpx.Client) -> None:
    """The answer stands under its id; the mark says why the session does not name it."""
    first = chat(client_f32, messages=[user("Name a river.")])
    session = made(client_f32, {"from": first["id"]})
    path = f"/v1/sessions/{session['id']}"
    body = {**ASK, "session": session["id"], "messages": [user("Another.")], "stream": True}
    body["max_tokens"] = 40
    marks: list[dict[str, Any]] = []
    answers: list[str] = []
    with client_f32.stream("POST", "/v1/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if not answers:
                cut = client_f32.post(f"{path}/truncate", json={"position": 5})
                assert cut.status_code == 200, cut.text
            answers.append(event["id"])
            if "session" in event.get("baton", {}):
                marks.append(event["baton"]["session"])
    assert [mark["refusal"] for mark in marks] == ["STALE_GENERATION"]
    shown = client_f32.get(path).json()
    assert (shown["generation"], shown["tokens"]) == (2, 5)
    told = chat(client_f32, previous_response_id=answers[0], messages=[user("And?")])
    assert told["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_a_history_is_gone_on_with_without_the_cache_too(client_f32: httpx.Client) -> None:
    """X-Cache: off computes all of it; the tokens are the same."""
    first = chat(client_f32, messages=[user("Name a mountain.")])
    body = {**ASK, "previous_response_id": first["id"], "messages": [user("Another.")]}
    off, on = (
        client_f32.post("/v1/chat/completions", json=body, headers=headers).json()
        for headers in ({"X-Cache": "off"}, {})
    )
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (off, on)]
    assert cached[0] == 0
    assert cached[1] >= first["usage"]["prompt_tokens"]
    assert off["prompt_token_ids"] == on["prompt_token_ids"]
    assert off["choices"][0]["token_ids"] == on["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"start": {"token": 9}, "end": {"token": 5}, "replacement": ""}, "start"),
        ({"start": {"token": 5}, "end": {"token": 5000}, "replacement": ""}, "end"),
        ({"start": {"text": "zebra"}, "replacement": ""}, "start"),
        ({"start": {"text": "two"}, "replacement": ""}, "start"),
        ({"start": {"message": 9}, "replacement": "x"}, "start"),
        ({"start": {"message": 0, "byte": 1}, "replacement": "x"}, "start"),
        ({"start": {"token": 1, "text": "a"}, "replacement": "x"}, "start"),
        ({"start": {"token": 1}}, "replacement"),
        ({"start": {"token": 1}, "replacement": {"token_ids": [1 << 20]}}, None),
    ],
)
def test_a_bad_edit_is_refused_naming_its_field(
    client_f32: httpx.Client, body: dict[str, Any], field: str | None
) -> None:
    """And changes nothing: the generation stays."""
    content = "🍎 one two two"
    session = made(client_f32, {"messages": [{"role": "system", "content": content}]})
    path = f"/v1/sessions/{session['id']}"
    answer = client_f32.post(f"{path}/edit", json=body)
    assert answer.status_code == 400, answer.text
    named = answer.json()["error"]["param"]
    assert named == (field or "replacement.token_ids[0]")
    assert client_f32.get(path).json()["generation"] == session["generation"]


def test_unknown_ids_are_not_found_naming_the_field(client_f32: httpx.Client) -> None:
    """A session's or a response's, in a path or in a body."""
    for field, wanted in (("session", "sess-0"), ("previous_response_id", "chatcmpl-0")):
        answer = client_f32.post(
            "/v1/chat/completions", json={**ASK, field: wanted, "messages": [user("Hi")]}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, field)
    assert client_f32.get("/v1/sessions/sess-0").status_code == 404
    assert client_f32.post("/v1/sessions", json={"from": "chatcmpl-0"}).status_code == 404
