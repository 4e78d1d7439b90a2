"""Where a text may be cut without splitting what people see as one character. Pure.

Owns the rules of Unicode's extended grapheme clusters as far as cutting needs them: combining and
spacing marks, joined emoji, flags, Hangul, conjuncts, CR LF. Where the full rules need tables that
Python does not have, it errs on the safe side: every place named here is a cluster boundary, not
every boundary is named.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from typing import Final

_FLAG_LETTERS: Final = re.compile("[\U0001f1e6-\U0001f1ff]+")
_ZERO_WIDTH_JOINER: Final = "\u200d"
_VIRAMA: Final = 9
"""The combining class of marks that may join two consonants into one."""
_MARKS_SEEN_MAX: Final = 8
"""How far back a virama is looked for behind other marks: a place with more is cut at none."""
_EXTENDING: Final = re.compile(
    # Not marks by their category, yet never apart from what stands before them: joiners, Thai and
    # Lao AM, half-width voicing marks, skin tones, tags.
    "[\u200c\u200d\u0e33\u0eb3\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
)
_PREPENDED: Final = re.compile(
    "[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46\U00011f02]"
)
_LEADING_JAMO: Final = re.compile("[\u1100-\u115f\ua960-\ua97c]")
_OTHER_JAMO: Final = re.compile("[\u1160-\u11ff\ud7b0-\ud7c6\ud7cb-\ud7fb]")
_SYLLABLE: Final = re.compile("[\uac00-\ud7a3]")
_KIRAT_VOWELS: Final = re.compile("[\U00016d63\U00016d67-\U00016d6a]")


class Graphemes:
    """The places of one text. Constant time a question."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_plain = text.isascii()
        self._flag_runs = [] if self._is_plain else [m.span() for m in _FLAG_LETTERS.finditer(text)]
        self._flag_starts = [start for start, _ in self._flag_runs]

    def breaks_at(self, index: int) -> bool:
        """Whether the text may be cut before `index` (0 and its length: yes)."""
        text = self._text
        if not 0 < index < len(text):
            return True
        before, after = text[index - 1], text[index]
        if after == "\n" and before == "\r":
            return False
        if self._is_plain or (before < "\u0300" and after < "\u0300"):
            return True
        if before in "\r\n" or after in "\r\n":
            return True
        return not (
            _extends(after)
            or before == _ZERO_WIDTH_JOINER
            or _PREPENDED.match(before)
            or _is_inside_hangul(before, after)
            or self._is_inside_flag(index)
            or self._joins_consonants(index)
        )

    def _is_inside_flag(self, index: int) -> bool:
        """Two letters make a flag: an odd number of them before `index` in their run."""
        at = bisect_right(self._flag_starts, index - 1) - 1
        if at < 0:
            return False
        start, end = self._flag_runs[at]
        return index < end and (index - start) % 2 == 1

    def _joins_consonants(self, index: int) -> bool:
        """A virama before `index`, perhaps behind other marks, and a letter after it."""
        text = self._text
        if not text[index].isalpha():
            return False
        for back in range(1, min(index, _MARKS_SEEN_MAX) + 1):
            mark = text[index - back]
            if unicodedata.combining(mark) == _VIRAMA:
                return True
            if not _extends(mark):
                return False
        return index > _MARKS_SEEN_MAX


def _extends(char: str) -> bool:
    """Belongs to what stands before it."""
    if char < "\u0300":
        return False
    return unicodedata.category(char)[0] == "M" or bool(
        _EXTENDING.match(char) or _KIRAT_VOWELS.match(char)
    )


def _is_inside_hangul(before: str, after: str) -> bool:
    if _OTHER_JAMO.match(after):
        return bool(
            _LEADING_JAMO.match(before) or _OTHER_JAMO.match(before) or _SYLLABLE.match(before)
        )
    is_start = _LEADING_JAMO.match(after) or _SYLLABLE.match(after)
    return bool(is_start and _LEADING_JAMO.match(before))
