"""Usage accounting: what an answer says it cost is what was computed and what was reused."""

from __future__ import annotations

import uuid

import pytest

from tests.cases.replay import CHAT, SYSTEM_TURN_TOKENS, Replay, chat

FIRST_WORDS_TOKENS = 12
"""What new prompts may share with others of these tests: a turn's head, a word, some digits."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_c22_received_kv_is_not_cached_kv(calm: Replay) -> None:
    """Usage accounting: a new prompt is no hit because its KV came from another worker.

    vllm#43370, vllm#44607: decode counted all that it got from prefill.
    """
    body = chat(f"id {uuid.uuid4().hex} " + "word " * 60, max_tokens=2)
    cold, warm = calm.call(CHAT, body), calm.call(CHAT, body)
    assert cold.headers["x-serving-mode"] == "disaggregated"
    assert cold.cached_tokens <= SYSTEM_TURN_TOKENS + FIRST_WORDS_TOKENS
    assert warm.cached_tokens == warm.usage["prompt_tokens"] - 1
    assert warm.body["baton"]["cached_tokens"] == warm.cached_tokens
    assert int(warm.headers["x-baton-cached-tokens"]) == warm.cached_tokens


def test_c22_counters_of_computed_and_cached_tokens_add_up(calm: Replay) -> None:
    """Usage accounting: computed plus hit at prefill are the prompt and the answer's counts."""
    names = ("baton_prefill_computed_tokens_total", "baton_prefill_hit_tokens_total")
    before = [calm.gauge("prefill-0", name) for name in names]
    answer = calm.call(CHAT, chat(f"id {uuid.uuid4().hex} " + "word " * 20, max_tokens=2))
    computed, hit = (calm.gauge("prefill-0", n) - b for n, b in zip(names, before, strict=True))
    assert hit == answer.cached_tokens
    assert computed + hit == answer.usage["prompt_tokens"]


def test_c22_a_streamed_answer_tells_the_same_usage(calm: Replay) -> None:
    """Usage accounting: streamed or whole, the same counts."""
    body = chat(f"id {uuid.uuid4().hex} " + "word " * 40, max_tokens=3)
    stream = calm.sse(CHAT, {**body, "stream_options": {"include_usage": True}})
    whole = calm.call(CHAT, body)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert stream.usage[name] == whole.usage[name]
    cached = stream.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached <= SYSTEM_TURN_TOKENS + FIRST_WORDS_TOKENS
