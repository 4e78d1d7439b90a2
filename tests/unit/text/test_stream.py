"""The text stream: whole characters only, nothing of a stop string leaks, deltas join exactly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.sampling_parameters import SamplingParameters
from baton.text.bundle import TextBundle
from baton.text.stream import TextDelta, TextOptions, TextStream, token_texts
from baton.text.tokenizer import Tokenizer

SPECIAL = 256


class ByteTokens:
    """A vocabulary of the 256 bytes, one control token, and whatever pieces a test adds."""

    def __init__(self, *pieces: bytes) -> None:
        self.table = [bytes([byte]) for byte in range(256)] + [b"<|end|>", *pieces]

    def decode_bytes(self, token_id: int) -> bytes:
        return self.table[token_id] if token_id < len(self.table) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


def deltas(stream: TextStream, ids: list[int]) -> list[TextDelta]:
    found: list[TextDelta] = []
    for token_id in ids:
        found.append(stream.feed(token_id))
        if found[-1].stopped:
            return found
    return [*found, stream.finish()]


def joined(found: list[TextDelta]) -> str:
    return "".join(delta.text for delta in found)


def run(text: str, *stops: str, cut: int = 1, include: bool = False) -> tuple[str, str | None]:
    """Feed `text` in pieces of `cut` bytes; the text that came out and the stop string."""
    raw = text.encode()
    tokenizer = ByteTokens(*(raw[at : at + cut] for at in range(0, len(raw), cut)))
    ids = list(range(257, len(tokenizer.table)))
    options = TextOptions(stop_strings=stops, include_stop_string=include)
    found = deltas(TextStream(tokenizer, options), ids)
    return joined(found), found[-1].stop_string


def test_characters_are_never_split_across_deltas() -> None:
    """😀 is four bytes here: nothing, nothing, nothing, then the whole character."""
    stream = TextStream(ByteTokens())
    assert [stream.feed(byte).text for byte in "😀".encode()] == ["", "", "", "😀"]
    assert stream.finish().text == ""


def test_bytes_that_cannot_become_a_character_are_replaced_as_soon_as_that_is_sure() -> None:
    """f0 9f may go on, but not with an `a`: one replacement character, then the letter."""
    stream = TextStream(ByteTokens())
    assert [stream.feed(byte).text for byte in b"\xf0\x9fa\xff"] == ["", "", "\ufffda", "\ufffd"]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    """The stream ends at a token limit inside a character: as decoding the whole would show it."""
    stream = TextStream(ByteTokens())
    assert [stream.feed(byte).text for byte in b"a\xe6\x97"] == ["a", "", ""]
    assert stream.finish().text == "\ufffd"


def test_the_bundled_tokens_of_split_characters_join(bundle: TextBundle) -> None:
    """The byte splits of the real vocabulary: an emoji, a family emoji's start, a Czech letter."""
    cases = (
        ([10813, 242, 218], "😀"),
        ([10813, 235, 119, 321, 231], "👩\u200d"),
        ([143, 233], "ď"),
    )
    for ids, text in cases:
        found = deltas(bundle.stream(), list(ids))
        assert joined(found) == text == bundle.tokenizer.decode(ids)
        assert "\ufffd" not in joined(found)


@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), hidden=st.booleans())
@settings(max_examples=300)
def test_deltas_of_random_tokens_join_to_the_full_decode(ids: list[int], hidden: bool) -> None:
    """Random ids make every kind of broken UTF-8."""
    tokenizer = _bundled()
    stream = TextStream(tokenizer, TextOptions(skip_special=hidden))
    assert joined(deltas(stream, ids)) == tokenizer.decode(ids, skip_special=hidden)


SCRIPTS = "😀👨\u200d👩\u200d👧🏽日本語中文مرحباשלוםée\u0301क्षि한국ĞЖ aA1\n\u202b\ufeff"


@given(
    text=st.text(alphabet=SCRIPTS, max_size=40),
    cut=st.integers(1, 7),
    stops=st.lists(st.text(alphabet=SCRIPTS, min_size=1, max_size=4), max_size=4),
)
@settings(max_examples=400)
def test_the_result_does_not_depend_on_how_tokens_cut_the_text(
    text: str, cut: int, stops: list[str]
) -> None:
    """Stop matching is defined on the text: the first completed match, the longest there."""
    ends = [
        (at, stop)
        for at in range(1, len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:at].endswith(stop)
    ]
    kept, stop = (text, None) if not ends else (text[: ends[0][0] - len(ends[0][1])], ends[0][1])
    assert run(text, *stops, cut=cut) == (kept, stop)


@given(
    ids=st.lists(st.sampled_from([97, 98, 99, 0xC4, 0x8F, SPECIAL]), max_size=25),
    stops=st.lists(st.text(alphabet="abcď", min_size=1, max_size=3), max_size=3),
    at=st.integers(0, 25),
)
@settings(max_examples=300)
def test_replay_gives_the_state_of_the_first_run(ids: list[int], stops: list[str], at: int) -> None:
    """A decode worker that takes over replays the tokens and sends on from there."""
    options = TextOptions(stop_strings=tuple(stops))
    whole = deltas(TextStream(ByteTokens(), options), ids)
    at = min(at, len(whole) - 1)
    again = TextStream.replay(ByteTokens(), options, ids[:at])
    assert again.chars_sent == len(joined(whole[:at]))
    assert joined(deltas(again, ids[at:])) == joined(whole[at:])


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=300)
def test_what_was_sent_never_has_to_be_taken_back(text: str, stops: list[str]) -> None:
    """At every token, the sent text is a prefix of the final text, and all that can be sent is."""
    stream = TextStream(ByteTokens(), TextOptions(stop_strings=tuple(stops)))
    final, _ = run(text, *stops)
    sent = ""
    for index, char in enumerate(text):
        delta = stream.feed(ord(char))
        sent += delta.text
        assert final.startswith(sent)
        if delta.stopped:
            assert sent == final
            return
        held = text[len(sent) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("cut", [1, 2, 3, 50])
def test_a_stop_string_over_several_tokens_never_leaks(cut: int) -> None:
    """The cases of a count that is cut at a stop string, for every cut into tokens."""
    text = " 13 14 15 16"
    assert run(text, "15", cut=cut) == (" 13 14 ", "15")
    assert run(text, "4 15", cut=cut) == (" 13 1", "4 15")
    assert run(text, " 13", cut=cut) == ("", " 13")


def test_near_misses_are_sent_once() -> None:
    """Held text that turns out harmless is released exactly once."""
    assert run(" 13 14 15 16", "1 3", "19", " 14x") == (" 13 14 15 16", None)


def test_a_stop_string_that_begins_another_wins_when_it_completes_first() -> None:
    """Whatever the order of the list."""
    for stops in itertools.permutations(("15", "15 1", "5 16", "99")):
        assert run(" 13 14 15 16", *stops) == (" 13 14 ", "15")


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    """`xab` and `ab` complete at the same character: the text ends before the longer."""
    assert run("..xab", "ab", "xab") == ("..", "xab")


def test_the_stop_string_is_kept_on_request() -> None:
    """The text after it, in the same token, is still dropped."""
    assert run("one END two", "END", cut=11, include=True) == ("one END", "END")


def test_stop_strings_match_across_split_characters() -> None:
    """An emoji in a stop string, its bytes in different tokens."""
    assert run("ok 😀!", "😀!") == ("ok ", "😀!")


def test_held_text_is_flushed_at_the_end() -> None:
    """The answer ends with what looked like the beginning of a stop string."""
    stream = TextStream(ByteTokens(), TextOptions(stop_strings=("###",)))
    assert [stream.feed(ord(char)).text for char in "a##"] == ["a", "", ""]
    assert stream.finish() == TextDelta(text="##")


def test_a_stop_string_can_complete_at_the_end() -> None:
    """The flushed replacement character completes it."""
    stream = TextStream(ByteTokens(), TextOptions(stop_strings=("a\ufffd",)))
    assert stream.feed(97).text == ""
    assert stream.feed(0xF0).text == ""
    assert stream.finish() == TextDelta(text="", stopped=True, stop_string="a\ufffd")


def test_stop_strings_wait_for_min_tokens() -> None:
    """Within the first tokens a stop string is ordinary text, also when it ends later."""
    options = TextOptions(stop_strings=("ab",), min_tokens=3)
    found = deltas(TextStream(ByteTokens(), options), [ord(char) for char in "ababab"])
    assert joined(found) == "abab"
    assert found[-1].stopped
    assert [delta.text for delta in found] == ["a", "b", "a", "b", "", ""]


def test_special_tokens_are_hidden_or_spelled_out() -> None:
    """A hidden one does not break a character that goes on after it."""
    ids = [0xC4, SPECIAL, 0x8F]
    assert joined(deltas(TextStream(ByteTokens()), ids)) == "ď"
    shown = TextStream(ByteTokens(), TextOptions(skip_special=False))
    assert joined(deltas(shown, ids)) == "\ufffd<|end|>\ufffd"


def test_options_come_from_sampling_parameters() -> None:
    """One place maps them, so that prefill and decode cannot disagree."""
    parameters = SamplingParameters(
        stop_strings=("a",), include_stop_string=True, min_tokens=2, max_tokens=5
    )
    assert TextOptions.from_parameters(parameters) == TextOptions(
        stop_strings=("a",), include_stop_string=True, skip_special=True, min_tokens=2
    )


def test_feeding_after_the_end_is_our_bug() -> None:
    """Nothing may follow a stop string or a finish."""
    stopped = TextStream(ByteTokens(), TextOptions(stop_strings=("a",)))
    assert stopped.feed(97).stopped
    assert stopped.finish() == TextDelta(text="")
    for stream in (stopped, TextStream.replay(ByteTokens(), TextOptions(), [])):
        if not stream.is_stopped:
            stream.finish()
        with pytest.raises(AssertionError):
            stream.feed(97)


def test_token_texts_carry_raw_bytes_and_offsets() -> None:
    """A split character: each token shows its own bytes; the offset grows when it is complete."""
    rows = token_texts(ByteTokens(b" hi"), [97, 0xC4, 0x8F, 257], first_offset=10)
    assert [row.utf8 for row in rows] == [b"a", b"\xc4", b"\x8f", b" hi"]
    assert [row.text for row in rows] == ["a", "\ufffd", "\ufffd", " hi"]
    assert [row.offset for row in rows] == [10, 11, 11, 12]
    assert b"".join(row.utf8 for row in rows).decode() == "aď hi"


_LOADED: list[Tokenizer] = []


@pytest.fixture(autouse=True)
def _keep_bundled(request: pytest.FixtureRequest) -> None:
    """Property tests read the bundled tokenizer through a module variable."""
    if "random_tokens" in request.node.name and not _LOADED:
        _LOADED.append(request.getfixturevalue("bundle").tokenizer)


def _bundled() -> Tokenizer:
    return _LOADED[0]
