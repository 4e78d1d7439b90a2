"""First token and length edges of serving with prefill and decode apart: the shortest answers and
prompts, ends on a block's edge, several samples of one prompt.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.replay import BLOCK_TOKENS, CHAT, COMPLETIONS, LETTER_A, Replay, chat, completion
from tests.cases.waiting import together

pytestmark = pytest.mark.timeout(240)

FRANCE = "The capital of France is"


@pytest.mark.cluster
@pytest.mark.parametrize(("limit", "expected"), [(1, " Paris"), (2, " Paris."), (3, " Paris.\n")])
def test_c24_max_tokens_is_an_upper_bound(calm: Replay, limit: int, expected: str) -> None:
    """First token: prefill samples it, and it counts.

    sglang#7147, TensorRT-LLM#16691: decode always added one more.
    """
    body = completion(FRANCE, max_tokens=limit)
    plain = calm.call(COMPLETIONS, body)
    stream = calm.sse(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert plain.text == stream.text == expected
    assert plain.usage["completion_tokens"] == stream.usage["completion_tokens"] == limit
    assert plain.finish == "length"
    assert stream.finishes == [(0, "length")]


@pytest.mark.cluster
def test_c24_answers_of_one_token_hold_nothing(calm: Replay) -> None:
    """First token: when it ends the answer no hand-off happens and everything is given back."""
    received = calm.gauge("decode-0", "baton_decode_received_total")
    body = completion(FRANCE, max_tokens=1)
    answers = together(*[lambda: calm.call(COMPLETIONS, body)] * 8)
    assert [one.text for one in answers] == [" Paris"] * 8
    calm.settles()
    assert calm.gauge("decode-0", "baton_decode_received_total") == received


def assert_answers(replay: Replay, prompt: list[int]) -> None:
    """A prompt of this length is read whole and answered with three tokens."""
    answer = replay.call(COMPLETIONS, completion(prompt, max_tokens=3, ignore_eos=True))
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.usage["completion_tokens"] == 3


SHORT = (1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS)


@pytest.mark.cluster
@pytest.mark.parametrize("length", SHORT)
def test_c26_prompts_around_a_block_are_answered(calm: Replay, length: int) -> None:
    """Length edge: below one full block there is nothing to share, yet everything to hand over.

    LMCache#2459: without a full block the hand-off was never announced. Cold, then warm.
    """
    prompt = [1000 + length, *[LETTER_A] * (length - 1)]
    assert_answers(calm, prompt)
    assert_answers(calm, prompt)


@pytest.mark.more
def test_c26_every_length_up_to_two_blocks(drill: Replay) -> None:
    """Length edge: every length, cold and warm, four at a time."""
    lengths = range(1, 2 * BLOCK_TOKENS + 3)
    for first in range(1, len(lengths) + 1, 4):
        some = [n for n in lengths if first <= n < first + 4]
        for make in (lambda n: [2000 + n, *[LETTER_A] * (n - 1)], lambda n: [LETTER_A] * n):
            together(*[lambda n=n, make=make: assert_answers(drill, make(n)) for n in some])


def tail_answers(replay: Replay, order: list[int], headers: dict[str, str]) -> dict[int, str]:
    """Answers to prompts that share a beginning and differ in the tail's length, in this order."""
    base = "word " * 40
    return {
        k: replay.call(CHAT, chat(base + "x " * k, max_tokens=6), headers=headers).text
        for k in order
    }


@pytest.mark.cluster
def test_c28_a_partial_block_never_changes_an_answer(calm: Replay) -> None:
    """Length edge: tails that end inside a block, found again by longer and shorter prompts.

    LMCache#2206: a stored partial chunk was loaded over positions that were there already.
    """
    order = [0, 12, 3]
    fresh = tail_answers(calm, order, {"X-Cache": "off"})
    assert tail_answers(calm, order, {}) == fresh
    assert tail_answers(calm, order[::-1], {}) == fresh


@pytest.mark.more
def test_c28_every_tail_in_both_orders(drill: Replay) -> None:
    """Length edge: all tails from 0 to 19 words, upwards and downwards."""
    order = list(range(20))
    fresh = tail_answers(drill, order, {"X-Cache": "off"})
    assert tail_answers(drill, order, {}) == fresh
    assert tail_answers(drill, order[::-1], {}) == fresh


def three_samples(**more: Any) -> dict[str, Any]:
    """A request for three random samples of one prompt, repeatable."""
    body = {**chat("Say one word.", max_tokens=6), "n": 3, "temperature": 1, "seed": 7}
    return body | more


@pytest.mark.cluster
def test_c30_samples_share_one_prompt_and_all_come(calm: Replay) -> None:
    """Length edge: n samples, one prompt computed and counted once.

    smg#2482: only one sample had KV to fetch.
    """
    whole = calm.call(CHAT, three_samples())
    stream = calm.sse(CHAT, three_samples(stream_options={"include_usage": True}))
    texts = [one["message"]["content"] for one in whole.body["choices"]]
    assert [one["index"] for one in whole.body["choices"]] == [0, 1, 2]
    assert [stream.text_of(index) for index in range(3)] == texts
    assert all(texts)
    assert whole.usage["prompt_tokens"] == stream.usage["prompt_tokens"] < 60
    assert sorted(index for index, _ in stream.finishes) == [0, 1, 2]


@pytest.mark.cluster
def test_c30_an_aborted_group_leaves_nothing(calm: Replay) -> None:
    """Length edge: all samples of a group are cancelled together.

    vllm#51629: the group's own record stayed in memory.
    """
    for _ in range(4):
        calm.drop_after(CHAT, three_samples(max_tokens=200, stream=True), 3)
    calm.settles()
