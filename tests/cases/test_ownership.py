"""Ownership: what a dead, slow or abandoned writer leaves behind belongs to nobody else, and is
nobody's obstacle.
"""

from __future__ import annotations

import contextlib
import functools
import http.client

import pytest

from tests.cases.door import reset
from tests.cases.replay import (
    CAPITAL,
    CAPITAL_ANSWER,
    CHAT,
    COMPLETIONS,
    LETTER_A,
    Replay,
    chat,
    completion,
)
from tests.cases.waiting import together, until

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


def test_c37_a_late_write_lands_nowhere(drill: Replay) -> None:
    """Ownership: clients leave while a chunk is being written; whoever comes next reads their own.

    sglang#32564, sglang#35049, vllm#45357: the next request had the pages when the old data came.
    """
    point = "prefill.mid_upload"

    def fired() -> int:
        return drill.fired("prefill-0", point)

    with drill.armed("prefill-0", f"{point}:pause:1"):
        for index in range(4):
            body = chat(f"noise{index} " + "zebra " * 60, max_tokens=4, stream=True)
            writes = fired() + 1
            with drill.held(CHAT, body) as connection:
                until(functools.partial(lambda least: fired() >= least, writes), 30, "a write")
                reset(connection)
            assert drill.call(CHAT, chat(CAPITAL, max_tokens=16)).text == CAPITAL_ANSWER
    drill.settles(30)


def test_c39_a_writer_that_dies_in_the_middle_blocks_nobody(drill: Replay) -> None:
    """Ownership: prefill ends halfway through a chunk; the same prompt is then read and reused.

    Mooncake#849: the unfinished object stayed registered under its key for ever.
    """
    body = chat("unique-849 " + "word " * 60, max_tokens=4)
    old = drill.cluster.pid("prefill-0")
    with (
        drill.armed("prefill-0", "prefill.mid_upload:exit:once"),
        contextlib.suppress(OSError, http.client.HTTPException),
    ):
        drill.call(CHAT, body, timeout_s=30)
    drill.restarted("prefill-0", old)
    drill.is_whole(60)
    answers = [drill.call(CHAT, body) for _ in range(2)]
    assert [one.status for one in answers] == [200, 200]
    assert answers[1].cached_tokens > 0
    assert answers[0].text == answers[1].text


def test_c41_what_was_computed_stays_until_it_is_handed_over(drill: Replay) -> None:
    """Ownership: the hand-over is late and others come between; each gets its answer or a reason.

    TensorRT-LLM#12542: the block was evicted before the sender's turn came, and decode waited.
    """

    def ask(index: int) -> int:
        body = completion([3000 + index, *[LETTER_A] * 200], max_tokens=4, ignore_eos=True)
        return drill.call(COMPLETIONS, body, timeout_s=120).status

    with drill.armed("prefill-0", "prefill.before_send:pause:0.5"):
        statuses = together(*[lambda index=index: ask(index) for index in range(6)])
        assert drill.fired("prefill-0", "prefill.before_send") >= 1
    assert set(statuses) <= {200, 429, 503}
    assert statuses.count(200) >= 2
    drill.settles(20)


@pytest.mark.timeout(600)
def test_c41_nothing_on_its_way_is_evicted_for_others(cramped: Replay) -> None:
    """Ownership: the arena holds three of eight such prompts; what waits to be handed over stays.

    Each is answered as it would be alone, or refused with a reason; nobody waits for ever.
    """

    def ask(index: int) -> tuple[int, str]:
        body = completion([3000 + index, *[LETTER_A] * 330], max_tokens=4, ignore_eos=True)
        answer = cramped.call(COMPLETIONS, body, timeout_s=120)
        return answer.status, answer.text if answer.status == 200 else ""

    alone = [ask(index) for index in range(8)]
    assert {status for status, _ in alone} == {200}
    with cramped.armed("prefill-0", "prefill.before_send:pause:1"):
        found = together(*[lambda index=index: ask(index) for index in range(8)])
        assert cramped.fired("prefill-0", "prefill.before_send") >= 1
    assert {status for status, _ in found} <= {200, 429, 503}
    answered = [index for index, (status, _) in enumerate(found) if status == 200]
    assert len(answered) >= 2
    assert [found[index] for index in answered] == [alone[index] for index in answered]
    cramped.settles(20)


@pytest.mark.timeout(600)
def test_a5_the_answer_is_the_same_after_150_others(drill: Replay) -> None:
    """Incident A5: nothing of 150 requests, some of them broken off, is left in later answers.

    sglang#23020: accuracy fell from 94 % to 50 % after 150 requests, without an error.
    """
    body = chat(CAPITAL, max_tokens=16)
    assert drill.call(CHAT, body).text == CAPITAL_ANSWER

    def ask(index: int) -> int:
        other = completion([1000 + index, *[LETTER_A] * (index % 40)], max_tokens=2)
        if index % 5 == 0:
            with drill.held(COMPLETIONS, {**other, "stream": True}) as connection:
                reset(connection)
            return 200
        return drill.call(COMPLETIONS, other, timeout_s=120).status

    for first in range(0, 150, 6):
        parts = [functools.partial(ask, first + index) for index in range(6)]
        assert set(together(*parts)) <= {200, 429, 503}
    drill.settles(30)
    again = drill.call(CHAT, body, headers={"X-Cache": "off"})
    assert (again.text, again.cached_tokens) == (CAPITAL_ANSWER, 0)
    assert drill.call(CHAT, body).text == CAPITAL_ANSWER
