"""The types a setting may have: how each is read from text or file, and shown.

Owns str, int, float, bool, Path, tuple[str, ...], enums, bytes (secrets, as hex or `file:PATH`) and
None beside any of them. Raises ValueError with a remedy; never guesses. The values of secrets are
in no message.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import stat
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REDACTED: Final = '"[secret]"'
SECRET_FILE_BYTES_MAX: Final = 4096
NONE_TEXT: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A type that settings have. `text` says it to a person."""

    base: type[Any]
    is_optional: bool
    text: str

    @property
    def is_switch(self) -> bool:
        """True for booleans, whose flag takes no value."""
        return self.base is bool

    @property
    def is_list(self) -> bool:
        """True for lists of texts, whose flag may be repeated."""
        return self.base is tuple


_TEXTS: Final[dict[type[Any], str]] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    tuple: "comma-separated list",
    bytes: "hex or file:PATH",
}


def kind_of(config_type: type[Any], name: str) -> Kind:
    """The kind of a dataclass's field; a type outside the list is our own mistake."""
    hint = typing.get_type_hints(config_type)[name]
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    inner = [option for option in options if option is not type(None)]
    assert len(inner) == 1, f"{config_type.__name__}.{name}: a union of several types"
    base = tuple if typing.get_origin(inner[0]) is tuple else inner[0]
    if base is tuple:
        assert typing.get_args(inner[0]) == (str, ...), f"{name}: only tuple[str, ...]"
    is_enum = isinstance(base, type) and issubclass(base, enum.Enum)
    assert is_enum or base in _TEXTS, f"{config_type.__name__}.{name}: {hint} is not supported"
    if is_enum:
        members = typing.cast("type[enum.Enum]", base)
        text = " | ".join(str(item.value) for item in members)
    else:
        text = _TEXTS[base]
    is_optional = len(options) > 1
    return Kind(
        base=base, is_optional=is_optional, text=f"{text}, or none" if is_optional else text
    )


def is_secret(field: dataclasses.Field[Any]) -> bool:
    """True where the value must not be shown: by metadata, and always for bytes."""
    return bool(field.metadata.get("is_secret")) or "bytes" in str(field.type)


def parse_text(kind: Kind, text: str) -> Any:
    """The value of a flag or an environment variable."""
    if kind.is_optional and text == NONE_TEXT:
        return None
    if kind.base is bool:
        return _switch(text)
    if kind.base is int:
        return _whole(text)
    if kind.base is float:
        return _number(text)
    if kind.base is tuple:
        return _list([part.strip() for part in text.split(",")] if text.strip() else [])
    return _from_string(kind, text)


def parse_value(kind: Kind, raw: Any) -> Any:
    """The value of a key in a file, whose format has types of its own; no type is bent."""
    if raw is None or (kind.is_optional and raw == NONE_TEXT):
        if kind.is_optional:
            return None
        raise ValueError("has no value; remove the key or give one")
    if kind.base is tuple:
        if isinstance(raw, list) and all(isinstance(item, str) for item in raw):
            return _list(raw)
        raise ValueError("must be a list of texts")
    if kind.base is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return _finite(float(raw))
    if kind.base in (int, bool) and type(raw) is kind.base:
        return raw
    if kind.base in (int, float, bool) or not isinstance(raw, str):
        raise ValueError(f"must be a {kind.text}, not {type(raw).__name__}")
    return _from_string(kind, raw)


def show_value(value: Any) -> str:
    """A value as TOML writes it; None, which TOML lacks, as "none"."""
    if value is None:
        return f'"{NONE_TEXT}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    if isinstance(value, enum.Enum):
        return json.dumps(str(value.value))
    return json.dumps(str(value), ensure_ascii=False)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _from_string(kind: Kind, text: str) -> Any:
    """Types that a file also writes as text."""
    if kind.base is bytes:
        return _secret(text)
    if not text:
        raise ValueError("is empty; leave it out to get the default")
    if kind.base is Path:
        return Path(text).expanduser()
    if issubclass(kind.base, enum.Enum):
        for item in kind.base:
            if str(item.value) == text:
                return item
        raise ValueError(f"{text!r} is none of {kind.text}")
    return text


def _switch(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    return _finite(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


def _list(items: list[str]) -> tuple[str, ...]:
    if not all(items):
        raise ValueError("has an empty item")
    return tuple(items)


def _secret(text: str) -> bytes:
    """Bytes from hex digits, or from a file that only its owner can read."""
    if text.startswith("file:"):
        return _secret_file(Path(text.removeprefix("file:")).expanduser())
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise ValueError("a secret is hex digits or file:PATH") from None
    if not secret:
        raise ValueError("is empty; leave it out to get the default")
    return secret


def _secret_file(path: Path) -> bytes:
    try:
        status = path.stat()
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{path} can be read by others; chmod 600 it")
        if status.st_size > SECRET_FILE_BYTES_MAX:
            raise ValueError(f"{path} is larger than {SECRET_FILE_BYTES_MAX} bytes")
        secret = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not secret:
        raise ValueError(f"{path} is empty")
    return secret
