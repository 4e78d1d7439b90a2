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
