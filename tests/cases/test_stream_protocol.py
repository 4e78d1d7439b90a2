"""Stream protocol: what a client reads event by event equals what it reads at once, and a failure
never looks like an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import pytest

from tests.cases.door import Stream
from tests.cases.replay import CHAT, COMPLETIONS, Replay, chat, completion

pytestmark = pytest.mark.timeout(180)

FRANCE = "The capital of France is"


def assert_honest(stream: Stream, whole_text: str) -> None:
    """A stream either is the whole answer or says that it is not."""
    if stream.errors or not stream.is_whole:
        assert not stream.finishes, "a finish reason behind a failure"
        assert whole_text.startswith(stream.text)
        assert all(one["message"] and one["code"] for one in stream.errors)
    else:
        assert stream.has_done
        assert stream.text == whole_text
        assert len(stream.finishes) == 1


@pytest.mark.more
def test_c16_a_killed_decode_worker_never_looks_like_an_end(drill: Replay) -> None:
    """Stream protocol: the answer goes on elsewhere in full, or the stream says why it ended.

    lemonade#2826, smg#2382: the proxy closed a broken stream with a cheerful end marker.
    """
    body = chat("Count from 1 to 20.", max_tokens=60)
    want = drill.call(CHAT, body).text
    killed: dict[str, int] = {}

    def kill_server(count: int) -> None:
        if count == 8:
            part = drill.decoding_part()
            killed[part] = drill.kill(part)

    stream = drill.sse(CHAT, body, timeout_s=90, on_event=kill_server)
    assert killed
    assert_honest(stream, want)
    assert stream.text == want, "another decode worker was there to go on"
    for part, pid in killed.items():
        drill.restarted(part, pid)


@pytest.mark.more
def test_c16_with_nobody_to_go_on_the_stream_says_so(drill: Replay) -> None:
    """Stream protocol: with every decode worker gone an error event ends the stream, soon."""
    body = chat("Count from 1 to 20.", max_tokens=120)
    want = drill.call(CHAT, body, timeout_s=90).text
    stopped_s: list[float] = []
    with contextlib.ExitStack() as stopped:

        def stop_all(count: int) -> None:
            if count == 8:
                stopped.enter_context(drill.frozen("decode-0", "decode-1"))
                stopped_s.append(time.monotonic())

        stream = drill.sse(CHAT, body, timeout_s=30, on_event=stop_all)
        told_after_s = time.monotonic() - stopped_s[0]
    # Frozen workers are told by their silence: 1.5 s, and 4 s in which another could come.
    assert told_after_s < 8, told_after_s
    assert len(stream.events) > 8
    assert_honest(stream, want)
    assert [one["code"] for one in stream.errors] == ["worker_lost"]


@pytest.mark.cluster
def test_c16_a_failure_before_the_first_token_is_no_stream(calm: Replay) -> None:
    """Stream protocol: nothing was sent, so the status says it: 504 with a reason, no 200."""
    headers = {"X-Request-Timeout": "0.001"}
    for answer in (
        calm.call(CHAT, chat("hi", max_tokens=4, stream=True), headers=headers),
        calm.call(CHAT, chat("hi", max_tokens=4), headers=headers),
    ):
        assert answer.status == 504, answer
        assert answer.body["error"]["code"] == "deadline_exceeded"


@pytest.mark.cluster
def test_c16_a_deadline_in_the_middle_is_an_error_event(calm: Replay) -> None:
    """Stream protocol: the time is up after some tokens; an error event says so and ends it."""
    body = chat("Count from 1 to 20.", max_tokens=2000)
    stream = calm.sse(CHAT, body, headers={"X-Request-Timeout": "2"})
    assert stream.status == 200
    assert stream.text
    assert [one["code"] for one in stream.errors] == ["deadline_exceeded"]
    assert not stream.finishes


@pytest.mark.cluster
def test_c18_completion_logprobs_agree_streamed_and_whole(calm: Replay) -> None:
    """Stream protocol: completions have their own shape, first token included, in both modes.

    imp#1589: chat-shaped objects, and nothing at all in a stream.
    """
    body = completion(FRANCE, max_tokens=6, logprobs=2)
    plain = calm.call(COMPLETIONS, body).body["choices"][0]["logprobs"]
    assert {"tokens", "token_logprobs", "top_logprobs", "text_offset"} <= set(plain)
    assert len(plain["tokens"]) == 6
    assert all(len(one) >= 2 for one in plain["top_logprobs"])
    streamed = [one["logprobs"] for one in calm.sse(COMPLETIONS, body).choices if one["logprobs"]]
    for key in ("tokens", "text_offset"):
        assert joined(streamed, key) == plain[key]
    pairs = zip(joined(streamed, "token_logprobs"), plain["token_logprobs"], strict=True)
    assert all(abs(one - other) < 1e-4 for one, other in pairs)


def joined(parts: list[dict[str, Any]], key: str) -> list[Any]:
    """The lists of all chunks, one behind the other."""
    return list(itertools.chain.from_iterable(one[key] for one in parts))


EMOJI = "smile 😀 smile 😀 smile 😀 smile 😀 smile"


@pytest.mark.cluster
def test_c18_offsets_stay_right_behind_a_character_of_several_tokens(calm: Replay) -> None:
    """Stream protocol: offsets count the characters of the text, not of the tokens' spellings."""
    choice = calm.call(COMPLETIONS, completion(EMOJI, max_tokens=6, logprobs=0)).body["choices"][0]
    got = dict(zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=False))
    words = {at: token for at, token in got.items() if "smile" in token}
    assert len(words) == 2
    for at, token in words.items():
        assert choice["text"][at : at + len(token)] == token


@pytest.mark.cluster
def test_c18_chat_entries_carry_each_tokens_bytes(calm: Replay) -> None:
    """Stream protocol: one entry a token, though the text of two tokens arrives together."""
    # Its greedy answer is made of emoji and ends inside one.
    body = chat("Reply with 😀 😀 😀 only.", max_tokens=12, logprobs=True, top_logprobs=1)
    stream = calm.sse(CHAT, body)
    entries = [
        entry
        for choice in stream.choices
        for entry in (choice.get("logprobs") or {}).get("content") or []
    ]
    assert len(entries) == 12
    assert len(stream.text) < 12
    plain = calm.call(CHAT, body).body["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in entries] == [one["bytes"] for one in plain]
    raw = bytes(itertools.chain.from_iterable(one["bytes"] for one in entries))
    assert raw.decode("utf-8", "replace") == stream.text


@pytest.mark.cluster
def test_c18_the_bytes_of_a_split_character(calm: Replay) -> None:
    """Stream protocol: ` 😀` is two tokens; entries hold their bytes, which rebuild the text."""
    body = completion(EMOJI, max_tokens=2, logprobs=1, return_token_ids=True)
    choice = calm.call(COMPLETIONS, body).body["choices"][0]
    assert choice["text"] == " 😀"
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 2


@pytest.mark.cluster
@pytest.mark.parametrize(
    "extra",
    [{"top_p": 1e-6, "temperature": 1}, {"logit_bias": {"7042": -100}}],
    ids=["top-p", "logit-bias"],
)
@pytest.mark.parametrize("has_echo", [True, False], ids=["echo", "plain"])
def test_c20_impossible_tokens_are_numbers_in_json(
    calm: Replay, extra: dict[str, Any], has_echo: bool
) -> None:
    """Stream protocol: JSON has no infinities; the reader here refuses them.

    vllm#10234, sglang#5984: minus infinity turned a finished answer into a 500.
    """
    body = {**completion(FRANCE, max_tokens=4, logprobs=5, echo=has_echo), **extra}
    logprobs = calm.call(COMPLETIONS, body).body["choices"][0]["logprobs"]
    if has_echo:
        assert logprobs["token_logprobs"][0] is None
    assert all(one <= 0.0 for one in logprobs["token_logprobs"] if one is not None)
    streamed = calm.sse(COMPLETIONS, body)
    assert streamed.has_done
