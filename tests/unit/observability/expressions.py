"""Which metrics a PromQL expression names; enough of the language for our own rules."""

from __future__ import annotations

import re

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTORS = re.compile(r"\{[^}]*\}")
_GROUPINGS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_DURATIONS = re.compile(r"\[[^\]]*\]")
_NAMES = re.compile(r"(?<![\w.])[a-zA-Z_][\w:]*(?!\w)(?!\s*\()")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset"})


def metric_names(expression: str) -> set[str]:
    """The names that are neither functions, nor labels, nor words of the language."""
    text = _STRINGS.sub('""', expression)
    for pattern in (_SELECTORS, _GROUPINGS, _DURATIONS):
        text = pattern.sub(" ", text)
    return {name for name in _NAMES.findall(text) if name not in _WORDS}
