"""Admission: what can never fit is refused at once, with the numbers, and is nobody's obstacle."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

import pytest

from tests.cases.door import KEY_B, KEY_C, Answer
from tests.cases.replay import (
    CHAT,
    COMPLETIONS,
    LETTER_A,
    LIMITED_PER_MINUTE,
    Replay,
    chat,
    completion,
)
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


def left(headers: Mapping[str, str]) -> int:
    """What a response says of the tenant's limit."""
    assert int(headers["x-ratelimit-limit-requests"]) == LIMITED_PER_MINUTE
    assert headers["x-ratelimit-reset-requests"].endswith("s")
    return int(headers["x-ratelimit-remaining-requests"])


def test_c85_a_429_says_when_to_come_back_and_then_it_is_answered(calm: Replay) -> None:
    """Admission: api-gateway#2965, ai#124, go-openai#495: the body knew how long, the headers that
    clients read did not; on streams least of all.

    What is left goes down to nothing and stands on whole answers and streams alike. A request that
    was refused for what it asks counts for nothing.
    """
    ask = functools.partial(calm.call, CHAT, chat("hi", max_tokens=2), key=KEY_C)
    stream = functools.partial(calm.sse, CHAT, chat("hi", max_tokens=2), key=KEY_C)
    assert calm.call(CHAT, chat("hi", temperature=99), key=KEY_C).status == 400
    remaining = []
    for number in range(LIMITED_PER_MINUTE):
        answer = stream() if number % 2 else ask()
        assert answer.status == 200
        remaining.append(left(answer.headers))
    assert remaining == list(range(LIMITED_PER_MINUTE))[::-1]
    wait_s = 0
    for refused in (ask(), stream()):
        assert refused.status == 429
        assert left(refused.headers) == 0
        wait_s = int(refused.headers["retry-after"])
        assert 0 < wait_s <= 60
        error = refused.body["error"] if isinstance(refused, Answer) else refused.errors[0]
        assert error["type"] == "rate_limit_error"
        assert f"{wait_s} s" in error["message"]
    other = calm.call(CHAT, chat("hi", max_tokens=2), key=KEY_B)
    assert other.status == 200
    assert not any(name.startswith("x-ratelimit") for name in other.headers)
    # As a client does that was told to: not a moment longer.
    threading.Event().wait(wait_s)
    assert ask().status == 200
