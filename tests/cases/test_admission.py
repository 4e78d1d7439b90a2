"""Admission: what can never fit is refused at once, with the numbers, and is nobody's obstacle."""

from __future__ import annotations

import functools

import pytest

from tests.cases.door import Answer
from tests.cases.replay import CHAT, COMPLETIONS, LETTER_A, Replay, chat, completion
from tests.cases.waiting import together

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

HOLDS_TOKENS = 1056
"""66 of the 68 pages of the cramped arena: a log that is taken needs two more."""


def test_c81_a_request_that_can_never_fit_blocks_nobody(cramped: Replay) -> None:
    """Admission: inference-sim#1061: the queue's head was retried for ever, all others starved.

    Prompt and answer together are held against the arena before anything is allocated.
    """

    def ask(tokens: int, most: int) -> Answer:
        body = completion([LETTER_A] * tokens, max_tokens=most, ignore_eos=True)
        return cramped.call(COMPLETIONS, body, timeout_s=120)

    small = functools.partial(cramped.call, CHAT, chat("hi", max_tokens=4), timeout_s=120)
    big = functools.partial(ask, 1500, 4)
    first, *others = together(big, *[small] * 6)
    assert first.status == 400
    why = first.body["error"]["message"]
    assert str(HOLDS_TOKENS) in why
    assert "1500" in why
    assert [one.status for one in others] == [200] * 6
    # The prompt fits, prompt and answer do not; one token less and they do, alone.
    cramped.settles(20)
    assert ask(1000, HOLDS_TOKENS - 1000 + 1).status == 400
    edge = ask(1000, HOLDS_TOKENS - 1000)
    assert edge.status == 200
    assert edge.finish == "length"
    assert edge.usage["completion_tokens"] == HOLDS_TOKENS - 1000
    cramped.settles(20)
    before = cramped.pages()
    assert {big().status for _ in range(20)} == {400}
    assert cramped.pages() == before
