"""Chunks end where a text pauses, and never inside a character, whatever the script."""

from __future__ import annotations

import itertools
import time
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.text.boundaries import ChunkBounds, chunk_ends
from baton.text.edges import Strength, edges
from baton.text.graphemes import Graphemes

ALPHABET = (
    # Latin, combining marks, CR and LF, a joiner, a variation selector, emoji, a skin tone, flags.
    *"ab .!?\n\r\t#-`<>/|é\u0301\u0327\u200d\ufe0f👩🏽🇫🇷🇩👨",
    # CJK, kana with a half-width voicing mark, Hangul as syllables and as jamo.
    *"漢字。！？」ｶ\uff9e한글\u1112\u1161\u11ab",
    # Arabic, Hebrew points, Devanagari and Khmer with viramas, Thai with AM, Tibetan.
    *"سلام؟۔\u0651א\u05b8क\u094dष।ក\u17d2ខ។กำ\u0e49\u0f0d",
)
texts = st.text(st.sampled_from(ALPHABET), min_size=60, max_size=300)
targets = st.integers(4, 24)


@st.composite
def cut_bytes(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes in tokens, as a byte-level vocabulary cuts them: inside characters too."""
    whole = draw(source)
    sizes = itertools.cycle(draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)))
    pieces = []
    while whole:
        size = next(sizes)
        pieces.append(whole[:size])
        whole = whole[size:]
    return pieces


def joined(pieces: Sequence[bytes], ends: Sequence[int]) -> list[bytes]:
    """The bytes of each chunk."""
    return [b"".join(pieces[first:end]) for first, end in pairwise([0, *ends])]


def chunks_of(text: str, target: int, size: int = 3) -> list[str]:
    """A text in tokens of `size` characters, and its chunks."""
    pieces = [text[at : at + size].encode() for at in range(0, len(text), size)]
    return [chunk.decode() for chunk in joined(pieces, chunk_ends(pieces, around(target)))]


def around(target: int) -> ChunkBounds:
    """The bounds that workers use."""
    return ChunkBounds.around(target)


# --- what holds whatever the tokens are ----------------------------------------------------------


@given(
    st.one_of(
        cut_bytes(texts.map(str.encode)),
        cut_bytes(st.binary(max_size=400)),
        st.lists(st.sampled_from([b"", b" ", b"\xe6", b"\xbc\xa2", b"a."]), max_size=90),
    ),
    targets,
    st.integers(0, 200),
)
def test_chunks_cover_all_tokens_within_the_bounds(
    pieces: list[bytes], target: int, first: int
) -> None:
    """Every token once, in order; none too long; none but an only one too short; also of bytes
    that are no text.
    """
    first = min(first, len(pieces))
    bounds = around(target)
    ends = chunk_ends(pieces, bounds, first)
    sizes = [end - begin for begin, end in pairwise([first, *ends])]
    assert sum(sizes) == len(pieces) - first
    assert all(0 < size <= bounds.most for size in sizes)
    assert len(sizes) < 2 or all(size >= bounds.least for size in sizes)
    assert ends == chunk_ends(pieces, bounds, first)


def require_good(ends: Sequence[int], bounds: ChunkBounds, good: set[int]) -> None:
    """Every cut is at a good position, unless the bounds hold none."""
    for start, end in pairwise([0, *ends[:-1]]):
        low, high = start + bounds.least, min(start + bounds.most, ends[-1] - bounds.least)
        assert low <= end <= high
        assert end in good or good.isdisjoint(range(low, high + 1))


@given(cut_bytes(texts.map(str.encode)), targets)
def test_no_chunk_ends_inside_a_character(pieces: list[bytes], target: int) -> None:
    """Wherever tokens begin and end, as long as one within the bounds ends with a character."""
    raw = b"".join(pieces)
    whole = {0, *itertools.accumulate(len(char.encode()) for char in raw.decode())}
    at = [0, *itertools.accumulate(map(len, pieces))]
    good = {position for position, offset in enumerate(at) if offset in whole}
    require_good(chunk_ends(pieces, around(target)), around(target), good)


@given(texts, targets)
@example("👨\u200d👩\u200d👧" * 12 + "🇫🇷🇩🇪" * 12 + "e\u0301" * 40, 6)
def test_no_chunk_ends_inside_what_people_see_as_one(text: str, target: int) -> None:
    """Joined emoji, flags, marks, syllables and conjuncts stay whole."""
    places = Graphemes(text)
    good = {index for index in range(len(text) + 1) if places.breaks_at(index)}
    pieces = [char.encode() for char in text]
    require_good(chunk_ends(pieces, around(target)), around(target), good)


@pytest.mark.parametrize(
    "cluster",
    [
        "e\u0301\u0327",
        "\r\n",
        "👨\u200d👩\u200d👧",
        "👍🏽",
        "❤\ufe0f",
        "🇫🇷",
        "\u1112\u1161\u11ab",
        "한\u11ab",
        "क\u094dष",
        "ក\u17d2ខ",
        "กำ",
        "ｶ\uff9e",
        "\u0600\u0661",
        "א\u05b8",
    ],
)
def test_one_character_of_several_is_whole(cluster: str) -> None:
    """Wherever it stands; and behind it may be cut."""
    places = Graphemes(f"ab{cluster}{cluster}")
    size = len(cluster)
    inside = range(1, size)
    assert not any(places.breaks_at(first + at) for first in (2, 2 + size) for at in inside)
    assert places.breaks_at(2)
    assert places.breaks_at(2 + size)


@given(texts)
def test_every_place_named_is_a_cluster_boundary(text: str) -> None:
    """By the tables of another implementation; we err on the safe side only."""
    regex = pytest.importorskip("regex")
    at, allowed = 0, {0}
    for cluster in regex.findall(r"\X", text):
        at += len(cluster)
        allowed.add(at)
    places = Graphemes(text)
    named = {index for index in range(len(text) + 1) if places.breaks_at(index)}
    assert named <= allowed


@given(texts)
def test_edges_ascend_and_stand_inside(text: str) -> None:
    """What the choice between them relies on."""
    found = list(edges(text))
    assert all(0 < edge.first <= edge.last <= len(text) for edge in found)
    assert all(one.first <= other.first for one, other in pairwise(found))


@pytest.mark.parametrize(
    "text",
    [
        "The end. " * 15_000,
        "!" * 130_000,
        "```\n" * 30_000,
        "</" * 60_000,
        ">" + " " * 130_000,
        "e" + "\u0301" * 60_000,
        "🇫" * 30_000,
        "漢字。" * 15_000,
        "\n" * 130_000,
        "a\n" * 60_000,
    ],
    ids=["prose", "marks", "fences", "tags", "spaces", "accents", "flags", "cjk", "lines", "words"],
)
def test_time_is_linear_whatever_the_text_is_made_of(text: str) -> None:
    """130 KB in tokens of four bytes, of what breaks naive scanners: seconds would mean that
    something is looked at again and again.
    """
    raw = text.encode()
    pieces = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    began_s = time.process_time()
    chunk_ends(pieces, around(256))
    assert time.process_time() - began_s < 5.0


# --- where it cuts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("The river is cold until July. ", "latin"),
        ("河水在七月之前一直很冷。", "chinese"),
        ("川の水は七月まで冷たい。", "japanese"),
        ("강물은 칠월까지 차갑다. ", "korean"),
        ("هل النهر بارد حتى يوليو؟ ", "arabic"),
        ("دریا جولائی تک ٹھنڈا رہتا ہے۔ ", "urdu"),
        ("नदी जुलाई तक ठंडी रहती है। ", "hindi"),
        ("ទឹកទន្លេត្រជាក់រហូតដល់ខែកក្កដា។ ", "khmer"),
        ("Գետը սառն է մինչև հուլիս։ ", "armenian"),
        ("ወንዙ እስከ ሐምሌ ቀዝቃዛ ነው። ", "amharic"),
        ("မြစ်ရေသည် ဇူလိုင်အထိ အေးသည်။ ", "burmese"),
        ("ཆུ་བོ་ནི་ཟླ་བ་བདུན་པའི་བར་གྲང་མོ་ཡིན།", "tibetan"),
    ],
    ids=lambda value: value if value.isascii() and value.isalpha() else "",
)
def test_sentences_end_chunks_in_every_script(sentence: str, name: str) -> None:
    """Each chunk is a whole number of sentences, its last mark at its end."""
    chunks = chunks_of(sentence * 40, 64, size=1)
    assert len(chunks) > 4, name
    mark = sentence.rstrip()[-1]
    assert all(chunk.rstrip().endswith(mark) for chunk in chunks)


@pytest.mark.parametrize(
    "text",
    [
        "สวัสดีชาวโลกวันนี้อากาศดีมาก" * 40,
        "ສະບາຍດີຊາວໂລກມື້ນີ້ອາກາດດີ" * 40,
    ],
)
def test_scripts_without_spaces_are_cut_between_characters(text: str) -> None:
    """No mark stands at a chunk's beginning, and sizes are those aimed at."""
    chunks = chunks_of(text, 64, size=1)
    assert "".join(chunks) == text
    assert all(unicodedata.category(chunk[0])[0] != "M" for chunk in chunks)
    assert all(chunk[0] not in "\u0e33\u0eb3" for chunk in chunks)
    assert all(62 <= len(chunk) <= 66 for chunk in chunks[:-2])


def test_words_stay_whole_where_nothing_pauses() -> None:
    """A list of words without a mark or a line break: the nearest space."""
    text = "considerable distances between measurements " * 40
    chunks = chunks_of(text, 40, size=1)
    assert all(" " in (chunk[-1], after[0]) for chunk, after in pairwise(chunks))
    assert all(30 <= len(chunk) <= 50 for chunk in chunks[:-1])


def test_paragraphs_come_before_sentences() -> None:
    """A blank line a little further away is the better place."""
    text = ("One two three. " * 3 + "Four five six.\n\n") * 12
    chunks = chunks_of(text, 52, size=1)
    assert all(chunk.endswith("\n\n") for chunk in chunks)


def test_a_heading_goes_with_what_it_heads() -> None:
    """The cut stands before it, not behind it."""
    section = "Some words that say a little about it.\n" * 3
    text = "".join(f"## Part {index}\n{section}" for index in range(20))
    chunks = chunks_of(text, 120, size=1)
    assert len(chunks) > 10
    assert all(chunk.startswith("## Part") for chunk in chunks)


def test_list_items_are_not_torn() -> None:
    """Cuts stand before bullets and numbers."""
    items = [f"{index}. Take {index} spoons. Stir them in slowly.\n" for index in range(10, 60)]
    chunks = chunks_of("".join(items), 120, size=1)
    assert all(chunk.split(".")[0].isdigit() for chunk in chunks)
    assert all(chunk.endswith("\n") for chunk in chunks)


def test_code_is_cut_at_lines_and_its_fences_are_edges() -> None:
    """Inside a fence a full stop is no end of a sentence; the fence's end is better than a line."""
    code = "```python\n" + "print('a. b. c. d')  # e. f\n" * 4 + "```\n"
    text = (code + "And then this is said about it. It goes on. \n") * 12
    chunks = chunks_of(text, 50)
    assert all(chunk.endswith("\n") for chunk in chunks)
    strong = [edge.first for edge in edges(text) if edge.strength is Strength.BLOCK]
    assert text.index("And then") in strong
    assert text.index("print") not in strong


def test_an_open_fence_ends_with_its_message() -> None:
    """What one author left open does not make code of the next one's words."""
    text = "```\nx = 1\n<|im_end|>\n<|im_start|>user\nIt is so. Is it not? Yes.\n"
    kinds = {text[edge.first : edge.first + 4]: edge.strength for edge in edges(text)}
    assert kinds["x = "] is Strength.CODE
    assert kinds[" Is "] is Strength.SENTENCE
    assert kinds["<|im"] is Strength.BLOCK


def test_tags_without_line_breaks_are_edges() -> None:
    """Minified XML is cut between elements."""
    text = "".join(f"<item><name>n{index}</name><size>{index}</size></item>" for index in range(60))
    chunks = chunks_of(text, 40)
    assert all(chunk.startswith("<") and chunk.endswith(">") for chunk in chunks)


@pytest.mark.parametrize(
    "text", ["Ask Dr. Brown, e.g. today.", "It is 3.14 or so.", "1. First one", "J. Smith came."]
)
def test_what_only_looks_like_an_end_is_none(text: str) -> None:
    """Abbreviations, decimals, numbers of items, initials."""
    assert [text[edge.first :] for edge in edges(text)] == []


def test_a_closing_quote_stays_with_its_sentence() -> None:
    """The mark before it ends the sentence, the quote is part of it."""
    text = 'He said "go!" Then he left (at last.) And so on.'
    assert [text[: edge.first] for edge in edges(text)] == [
        'He said "go!"',
        'He said "go!" Then he left (at last.)',
    ]


def test_the_space_after_a_sentence_goes_where_its_token_goes() -> None:
    """Vocabularies put a space before a word: the word begins the chunk, with it."""
    pieces = [word.encode() for word in ["It", " is", " so", "."]] * 40
    pieces = [b" It" if piece == b"It" else piece for piece in pieces]
    chunks = joined(pieces, chunk_ends(pieces, around(16)))
    assert all(chunk.endswith(b".") for chunk in chunks)
    assert all(chunk.startswith(b" It") for chunk in chunks)


def test_a_cached_prefix_does_not_hide_what_it_stands_in() -> None:
    """The first missing token may stand inside a fence."""
    text = "```\n" + "a. b. c. d. e. f\n" * 40
    pieces = [text[at : at + 3].encode() for at in range(0, len(text), 3)]
    ends = chunk_ends(pieces, around(32), 10)
    assert all(b"".join(pieces[:end]).endswith(b"\n") for end in ends[:-1])


@pytest.mark.parametrize(
    ("target", "least", "most"), [(16, 17, 40), (16, 8, 15), (16, 8, 14), (16, 12, 20), (4, 3, 5)]
)
def test_bounds_that_cannot_be_kept_are_our_own_mistake(target: int, least: int, most: int) -> None:
    """What is left behind a chunk must be one or two chunks."""
    with pytest.raises(AssertionError):
        ChunkBounds(target=target, least=least, most=most)
