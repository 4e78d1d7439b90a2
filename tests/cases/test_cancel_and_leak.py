"""Cancel and leak: whoever leaves, in whatever state the work is, everything it held comes back.

A connection whose sending side is shut counts as gone, streamed or not: HTTP/1.1 clients do not
shut it while they wait, and those that die often do.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.door import reset
from tests.cases.replay import CHAT, COMPLETIONS, LETTER_A, Replay, chat, completion
from tests.cases.waiting import until

pytestmark = pytest.mark.timeout(240)

LONG = chat("Count from 1 to 20.", max_tokens=2000)
SETTLE_S = 5.0
"""Far less than 2000 tokens take."""


@pytest.mark.cluster
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_c34_a_client_that_resets_ends_the_work(calm: Replay, is_stream: bool) -> None:
    """Cancel: plain requests are cancelled on disconnect as streamed ones are, mid decode.

    litellm#37140, vllm#9428, vllm#54947: orphans ran on to their token limit.
    """
    body = {**LONG, "stream": is_stream}
    for _ in range(3):
        calm.drop_after(CHAT, body, 0, when=lambda: calm.gauge("decode-0", ACTIVE) > 0)
    calm.settles(SETTLE_S)


ACTIVE = "baton_decode_active_sequences"


@pytest.mark.cluster
def test_c34_a_client_that_times_out_ends_the_work(calm: Replay) -> None:
    """Cancel: a client's own time-out closes the connection; the work behind it ends."""
    with pytest.raises(TimeoutError):
        calm.call(CHAT, LONG, timeout_s=1.0)
    calm.settles(SETTLE_S)


@pytest.mark.cluster
def test_c34_a_half_closed_connection_counts_as_gone(calm: Replay) -> None:
    """Cancel: the client shuts its sending side; nothing runs on for it."""
    with calm.held(CHAT, LONG) as connection:
        until(calm.is_busy, 10, "the request under way")
        connection.shutdown(socket.SHUT_WR)
        calm.settles(SETTLE_S)


@pytest.mark.cluster
def test_c34_a_deadline_ends_the_work(calm: Replay) -> None:
    """Cancel: the server's own deadline is as good as a client that leaves."""
    answer = calm.call(CHAT, LONG, headers={"X-Request-Timeout": "1"})
    assert answer.status == 504
    calm.settles(SETTLE_S)


@pytest.mark.cluster
def test_c34_cancelled_requests_are_counted_as_such(calm: Replay) -> None:
    """Cancel: one outcome per request, so that the books add up."""

    def cancelled() -> float:
        name = "baton_requests_total"
        return calm.gauge("gateway-0", name, route="chat", outcome="cancelled")

    before = cancelled()
    for _ in range(2):
        calm.drop_after(CHAT, {**LONG, "stream": True}, 2)
    until(lambda: cancelled() == before + 2, SETTLE_S, "both counted")


def computed_tokens(replay: Replay) -> float:
    """Prompt tokens that prefill has computed so far."""
    return replay.gauge("prefill-0", "baton_prefill_computed_tokens_total")


def moments(replay: Replay) -> dict[str, Callable[[], bool]]:
    """States in which the client of a long prompt leaves."""
    start = computed_tokens(replay)
    pending = "baton_prefill_pending_requests"
    return {
        "at once": lambda: True,
        "admitted": lambda: replay.gauge("prefill-0", pending) > 0,
        "pages granted": lambda: replay.pages()["granted"] > 0,
        "between chunks": lambda: computed_tokens(replay) >= start + 256,
        "later chunks": lambda: computed_tokens(replay) >= start + 700,
    }


@pytest.mark.cluster
@pytest.mark.parametrize(
    "moment", ["at once", "admitted", "pages granted", "between chunks", "later chunks"]
)
def test_c36_an_abort_in_the_middle_of_prefill_gives_all_back(calm: Replay, moment: str) -> None:
    """Cancel: a prompt of many chunks, left before, during and between them.

    sglang#1858, #1787, #1797: a request between two chunks stood in no queue that abort looked at.
    """
    salt = 1000 + len(moment)
    body = completion([salt, *[LETTER_A] * 6000], max_tokens=4, stream=True)
    when = moments(calm)[moment]
    with calm.held(COMPLETIONS, body) as connection:
        until(when, 60, moment)
        reset(connection)
    calm.settles()
    assert sum(calm.pages().values()) == calm.pages_total()


@pytest.mark.cluster
def test_c36_pages_add_up_at_idle(calm: Replay) -> None:
    """Leak: free, granted, live, shared and quarantined pages are the arena, always.

    sglang#6888, #11970, #10833: the check that finds this class whenever the engine is idle.
    """
    pages = calm.pages()
    assert set(pages) == {"free", "granted", "live", "shared", "quarantined"}
    assert sum(pages.values()) == calm.pages_total()
    assert pages["granted"] == pages["quarantined"] == 0


@pytest.mark.cluster
def test_c83_slots_come_back_from_bad_and_cancelled_requests(calm: Replay) -> None:
    """Leak: the count of running answers is given back however a request ends.

    litellm#27955, #20256, #1477: it was given back on a normal end only.
    """
    for _ in range(4):
        calm.drop_after(CHAT, {**LONG, "stream": True}, 2)
        assert calm.call(CHAT, {"model": "nope", "messages": []}).status in (400, 404)
        assert calm.call(CHAT, b"{not json").status == 400
        assert calm.call(CHAT, chat("hi", temperature=99)).status == 400
    calm.settles(SETTLE_S)
    assert [calm.call(CHAT, chat("hi", max_tokens=2)).status for _ in range(3)] == [200] * 3


@pytest.mark.more
def leave_in_hand_over(drill: Replay, body: dict[str, Any]) -> None:
    """A client that goes while decode, paused there, fetches its prompt's KV."""

    def hand_overs() -> int:
        return sum(drill.fired(part, "decode.mid_fetch") for part in ("decode-0", "decode-1"))

    before = hand_overs()
    with drill.held(CHAT, body):
        until(lambda: hand_overs() > before, 20, "decode in the middle of a hand-over")


def test_c32_holds_of_aborted_loads_end_with_a_dead_peer(drill: Replay) -> None:
    """Leak: decode hangs over its hand-over, clients leave, prefill dies: no hold outlives it.

    vllm#46283: blocks waited for a message that the dead sender could not send.
    """
    with (
        drill.armed("decode-0", "decode.mid_fetch:pause:3"),
        drill.armed("decode-1", "decode.mid_fetch:pause:3"),
    ):
        for index in range(6):
            body = chat(f"x{index} " + "word " * 100, max_tokens=20, stream=True)
            leave_in_hand_over(drill, body)
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(drill.held(CHAT, chat("y " + "word " * 2000, max_tokens=4)))
            until(lambda: drill.pages()["granted"] > 0, 20, "a prompt being read")
            pid = drill.kill("prefill-0")
    drill.restarted("prefill-0", pid)
    drill.settles(30)


def test_the_client_of_these_cases_sees_a_broken_connection() -> None:
    """The helper itself: a server that closes without an answer is an error, not an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/")
        accepted, _ = server.accept()
        reset(accepted)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            connection.getresponse()
        connection.close()
