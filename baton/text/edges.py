"""Where a text has edges: ends of sentences, lines, and the blocks of Markdown and XML. Pure.

Owns what counts as an edge and how strong it is, in every script. Reads a text once, line by line;
knows no tokens and no sizes. A reader of prose may disagree here and there ("No. 5"): an edge is a
good place to pause, not a proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final


@unique
class Strength(IntEnum):
    """How good a place is; a higher one is better."""

    CODE = 1
    SENTENCE = 2
    LINE = 3
    BLOCK = 4


@dataclass(frozen=True, slots=True)
class Edge:
    """A cut between the characters `first` and `last`, best at `first`: between them is space."""

    first: int
    last: int
    strength: Strength


# Unicode's sentence terminals outside ASCII (property STerm), and those that end one by custom:
# the Greek question mark, Tibetan shads, U+0085 and the line and paragraph separators. A character
# class is one lookup, however many there are.
_TERMINALS: Final = (
    "\u0085\u037e\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965"
    "\u0f0d\u0f0e\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944"
    "\u1945\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d-\u1b7f\u1c3b\u1c3c\u1c7e\u1c7f"
    "\u2028\u2029\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\u3002\ua4ff\ua60e"
    "\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb"
    "\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
    "\U00010a56\U00010a57\U00010f55-\U00010f59\U00011047\U00011048\U000110be-\U000110c1"
    "\U00011141-\U00011143\U000111c5\U000111c6\U000111cd\U000111de\U000111df\U00011238\U00011239"
    "\U0001123b\U0001123c\U000112a9\U0001144b\U0001144c\U000115c2\U000115c3\U000115c9-\U000115d7"
    "\U00011641\U00011642\U0001173c-\U0001173e\U00011944\U00011946\U00011a42\U00011a43"
    "\U00011a9b\U00011a9c\U00011c41\U00011c42\U00011ef7\U00011ef8\U00016a6e\U00016a6f\U00016af5"
    "\U00016b37\U00016b38\U00016b44\U00016e98\U0001bc9f\U0001da88"
)
_CLOSERS: Final = (
    "\"')\\]}*_`\u2019\u201d\u00bb\u203a\u300d\u300f\uff09\u3011\u3015\u300b\u3009\uff63"
)

# With the empty lines behind it: nobody pauses between those.
_LINE: Final = re.compile(r"[^\n]*\n++|[^\n]+\Z")
_INDENT: Final = re.compile(r"[ \t]*")
# Backticks behind backticks are code inside a line.
_FENCE: Final = re.compile(r"[ \t]*(?P<mark>`{3,}+(?![^\n]*`)|~{3,})")
_TURN: Final = re.compile(r"<\|[^|<>\n]{1,64}\|>")
# A heading, a list item, a quotation, a table's row, a tag, a control token of a chat template.
_OPENS: Final = re.compile(
    r"[ \t]*(?:#{1,6}[ \t]|[-*+\u2022][ \t]|\d{1,9}[.)][ \t]|>|\||</?[A-Za-z!?]|<\||\[/?[A-Z])"
)
_CLOSES: Final = re.compile(r"(?:</[^<>\n]{1,200}>|/>|<\|[^|<>\n]{1,64}\|>)[ \t\r]*\Z")
_LINE_TAIL_CHARS: Final = 220
# Possessive and begun only where a run begins: a line is read once, whatever it is made of. ASCII
# marks end a sentence where space follows; the others need none.
_INSIDE: Final = re.compile(
    rf"(?P<tag>(?<=>)[ \t]*+(?=<[/!?A-Za-z|]))"
    rf"|(?<![.!?\u2026])[.!?\u2026]++[{_CLOSERS}]*+(?P<space>[ \t]++)"
    rf"|[{_TERMINALS}]++[{_TERMINALS}{_CLOSERS}]*+(?P<none>[ \t\u3000]*+)"
)
_ABBREVIATION: Final = re.compile(
    r"(?:^|[\s(\[\"'\u201c])(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|e\.g|i\.e|cf|No|Nos|Fig|Vol"
    r"|pp?|approx|resp)\.\Z"
)
_ABBREVIATION_CHARS: Final = 9
_LIST_NUMBER: Final = re.compile(r"[ \t]{0,8}\d{1,9}[.!?]\Z")


def edges(text: str) -> Iterator[Edge]:
    """All edges of `text`, in order; neither its beginning nor its end is one."""
    fence: str | None = None
    before: Strength | None = None
    for line in _LINE.finditer(text):
        first, end = line.span()
        found = _FENCE.match(text, first, end)
        mark = None if found is None else found.group("mark")
        if before is not None:
            last = _indent_end(text, first, end)
            is_block = before is Strength.BLOCK or mark is not None
            yield Edge(first, last, _before_line(text, (first, end), fence, is_block=is_block))
        if fence is None and mark is None:
            yield from _inside_line(text, first, end)
        # What the next line begins behind.
        before = Strength.LINE
        if fence is None:
            fence = mark
        elif found is not None and _is_closed(fence, found, end):
            fence, before = None, Strength.BLOCK
        if _ends_block(text, first, end):
            before = Strength.BLOCK
        # A message's end closes whatever its author left open.
        if fence is not None and _TURN.search(text, first, end):
            fence = None


def _indent_end(text: str, first: int, end: int) -> int:
    found = _INDENT.match(text, first, end)
    return first if found is None else found.end()


def _is_closed(fence: str, found: re.Match[str], end: int) -> bool:
    """A fence is closed by one of its kind, at least as long, with nothing behind it."""
    return found.group("mark").startswith(fence) and not found.string[found.end() : end].strip()


def _before_line(
    text: str, line: tuple[int, int], fence: str | None, *, is_block: bool
) -> Strength:
    """How strong the edge is that the line begins at; `is_block`: it is between blocks anyway."""
    if fence is not None:
        return Strength.CODE
    return Strength.BLOCK if is_block or _OPENS.match(text, *line) else Strength.LINE


def _ends_block(text: str, first: int, end: int) -> bool:
    """A line with empty ones behind it, a blank one, one that ends with a closing tag or with a
    control token.
    """
    if text.endswith("\n\n", first, end):
        return True
    stop = end - 1 if text[end - 1] == "\n" else end
    tail = text[max(first, stop - _LINE_TAIL_CHARS) : stop]
    return not tail.strip() or _CLOSES.search(tail) is not None


def _inside_line(text: str, first: int, end: int) -> Iterator[Edge]:
    """Sentences that end, and tags that meet, before the line does."""
    for found in _INSIDE.finditer(text, first, end):
        name = found.lastgroup
        assert name is not None, "each way to match has a name"
        start, stop = found.span(name)
        # The line's own end is a better edge than its last sentence's.
        if start <= first or stop >= end or text[stop] in "\r\n":
            continue
        if name == "space" and _is_no_end(text, first, start):
            continue
        yield Edge(start, stop, Strength.LINE if name == "tag" else Strength.SENTENCE)


def _is_no_end(text: str, line_first: int, stop: int) -> bool:
    """What the mark before `stop` ends is an abbreviation, or the number of a list's item."""
    if text[stop - 1] != ".":
        return False
    word = text[max(line_first, stop - _ABBREVIATION_CHARS) : stop]
    if _ABBREVIATION.search(word):
        return True
    return stop - line_first <= 20 and _LIST_NUMBER.fullmatch(text, line_first, stop) is not None
