"""Text boundaries: a token is not a character and a stop string is not a token.

Whatever the cut, the joined pieces of a stream are the text of the whole answer.
"""

from __future__ import annotations

import pytest

from baton import models
from baton.text.bundle import TextBundle
from baton.text.stream import TextStream
from tests.cases.replay import CHAT, COMPLETIONS, COUNTED, COUNTING, Replay, chat, completion
from tests.cases.waiting import together

pytestmark = pytest.mark.timeout(180)

EMOJI = "smile 😀 smile 😀 smile 😀 smile 😀 smile"
HEBREW = "שלום שלום שלום שלום"
REPLACEMENT = "\ufffd"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(EMOJI, " 😀 smile 😀 smile"), (HEBREW, " שלום")],
    ids=["emoji", "hebrew"],
)
def test_c01_characters_of_several_tokens_stream_whole(
    calm: Replay, prompt: str, expected: str
) -> None:
    """Text boundary: a character that the vocabulary cuts into tokens is sent once it is complete.

    SillyTavern#354, exo#1691, vllm-mlx#109, mlc-llm#1142: tokens were turned into text one by one.
    """
    body = completion(prompt, max_tokens=6)
    streamed, whole = together(
        lambda: calm.sse(COMPLETIONS, body).text, lambda: calm.call(COMPLETIONS, body).text
    )
    assert streamed == whole == expected


@pytest.mark.parametrize(
    ("token_ids", "pieces"),
    [
        ([10813, 242, 218], ["", "", "😀"]),
        ([10813, 235, 119, 321, 231], ["", "", "👩", "", "\u200d"]),
        ([143, 233], ["", "ď"]),
    ],
    ids=["emoji", "family", "caron"],
)
def test_c01_the_detokenizer_holds_bytes_back(token_ids: list[int], pieces: list[str]) -> None:
    """Text boundary: one token at a time, never a replacement character for bytes still to come."""
    stream = TextStream(TextBundle.load(models.locate("smollm2")).tokenizer)
    got = [stream.feed(one).text for one in token_ids]
    assert got == pieces
    assert REPLACEMENT not in stream.finish().text


STOPS = [
    (["15"], " 13 14 "),
    (["4 15"], " 13 1"),
    ([" 13"], ""),
    # Of several, the one whose last character comes first ends the answer, prefixes or not.
    (["15", "15 1", "4 15 16", "16"], " 13 14 "),
]


@pytest.mark.cluster
@pytest.mark.parametrize(("stops", "expected"), STOPS, ids=["15", "4-15", "-13", "four-stops"])
def test_c03_stop_strings_across_tokens_never_leak(
    calm: Replay, stops: list[str], expected: str
) -> None:
    """Text boundary: every digit is a token here, so each stop string spans several.

    text-generation-inference#1254, mlx-knife#68, SwiftLM#126: the check saw one token at a time.
    """
    body = completion(COUNTING, max_tokens=12, stop=stops)
    stream = calm.sse(COMPLETIONS, body)
    assert stream.text == expected == calm.call(COMPLETIONS, body).text
    assert stream.finishes == [(0, "stop")]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["there!"], "Hello "),
        (["o there"], "Hell"),
        (["assist you", "assist", "I as"], "Hello there! How can "),
    ],
)
def test_c03_stop_strings_across_tokens_in_chat(
    calm: Replay, stops: list[str], expected: str
) -> None:
    """Text boundary: the chat route holds text back in the same way."""
    body = chat("hi", max_tokens=16, stop=stops)
    stream = calm.sse(CHAT, body)
    assert stream.text == expected == calm.call(CHAT, body).text
    assert stream.finishes == [(0, "stop")]


@pytest.mark.cluster
def test_c05_near_misses_repeat_nothing(calm: Replay) -> None:
    """Text boundary: text held for a stop string that then does not come is sent once.

    llama.cpp#10914: the next piece carried the held text twice.
    """
    body = completion(COUNTING, max_tokens=12, stop=["1 3", "19", " 14x"])
    stream = calm.sse(COMPLETIONS, body)
    assert stream.text == COUNTED
    assert stream.finishes == [(0, "length")]
