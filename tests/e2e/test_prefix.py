"""Published system prompts: computed once, spliced by the merger, the same tokens as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton.testing.cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer questions "
    "about science, history and everyday life for curious readers. Keep answers short. 谢谢 🍎"
)
QUESTIONS = ("How do plants make food?", "What is the capital of France?")


def ask(client: httpx.Client, question: str, headers: dict[str, str]) -> dict[str, Any]:
    """A greedy answer behind the system prompt, with its token ids."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 16}
    answer = client.post(
        "/v1/chat/completions", json={**body, "return_token_ids": True}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.fixture
def published(client_f32: httpx.Client) -> Iterator[dict[str, Any]]:
    """The system prompt, published; revoked at the end."""
    body = {"name": "e2e", "messages": [{"role": "system", "content": SYSTEM}]}
    made = client_f32.post("/v1/prefixes", json=body)
    assert made.status_code in (200, 201), made.text
    yield made.json()
    gone = client_f32.delete(f"/v1/prefixes/{made.json()['id']}")
    assert gone.is_success, gone.text


def test_a_spliced_prefix_changes_no_token(
    client_f32: httpx.Client, published: dict[str, Any]
) -> None:
    """KV of a published prefix, joined by the merger, gives what a fresh computation gives."""
    assert published["tokens"] % 16 == 0
    for question in QUESTIONS:
        fresh = ask(client_f32, question, {"X-Cache": "off"})
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        spliced = ask(client_f32, question, {})
        assert spliced["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
        assert spliced["usage"]["prompt_tokens_details"]["cached_tokens"] >= published["tokens"]
        assert spliced["baton"]["prefix_id"] == published["id"]


def test_the_merger_did_the_splice(
    cluster_f32: RunningCluster, client_f32: httpx.Client, published: dict[str, Any]
) -> None:
    """The splice goes through the service, not only through the gateway's own copy."""
    ask(client_f32, QUESTIONS[0], {})
    listed = client_f32.get("/v1/prefixes").json()["data"]
    mine = next(entry for entry in listed if entry["id"] == published["id"])
    assert mine["hits"] >= 1
    assert "clean_up_failed" not in cluster_f32.log("gateway-0")


def test_the_next_turn_starts_from_the_conversation(client_f32: httpx.Client) -> None:
    """A second turn finds the first one's KV, and its tokens are those of a fresh computation."""
    first = [{"role": "user", "content": "Tell me about the city of Lyon, please, in one line."}]
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    one = client_f32.post("/v1/chat/completions", json={**body, "messages": first}).json()
    told = one["choices"][0]["message"]["content"]
    second = [
        *first,
        {"role": "assistant", "content": told},
        {"role": "user", "content": "And its food?"},
    ]
    warm = client_f32.post("/v1/chat/completions", json={**body, "messages": second}).json()
    fresh = client_f32.post(
        "/v1/chat/completions", json={**body, "messages": second}, headers={"X-Cache": "off"}
    ).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
