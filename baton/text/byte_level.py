"""How a vocabulary spells bytes: the byte-level alphabet and the byte-fallback spelling.

Owns the table from token text to raw bytes. Pure; knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"


def _alphabet() -> dict[int, str]:
    """GPT-2's spelling: a printable byte is itself, the others follow from U+0100 in order."""
    spelling = {byte: chr(byte) for byte in _PRINTABLE}
    others = (byte for byte in range(256) if byte not in spelling)
    spelling.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return spelling


BYTE_TO_CHAR: Final[Mapping[int, str]] = _alphabet()
"""Byte to the character that spells it in a byte-level vocabulary."""

_CHAR_TO_LATIN: Final = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}
_ALPHABET: Final = frozenset(BYTE_TO_CHAR.values())


def is_byte_level(text: str) -> bool:
    """Whether `text` is spelled in the byte-level alphabet alone."""
    return _ALPHABET.issuperset(text)


def to_byte_level(text: str) -> str:
    """Spell ordinary text in the byte-level alphabet."""
    return "".join(BYTE_TO_CHAR[byte] for byte in text.encode("utf-8"))


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    A token with a character outside the alphabet was added as ordinary text.
    """
    if not is_byte_level(token):
        return token.encode("utf-8")
    return token.translate(_CHAR_TO_LATIN).encode("latin-1")


def byte_fallback_bytes(token: str) -> bytes:
    """The bytes of a token of a SentencePiece-like vocabulary (`▁the`, `<0xE2>`)."""
    match = _BYTE_FALLBACK.fullmatch(token)
    if match is not None:
        return bytes([int(match.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8")


SPELLINGS: Final[Mapping[str, Callable[[str], bytes]]] = {
    "byte_level": byte_level_bytes,
    "byte_fallback": byte_fallback_bytes,
}
"""Spelling name to the function from token text to bytes."""
