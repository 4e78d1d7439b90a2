"""Bytes of a request body to plain JSON values, with every surprise refused by name.

Owns: strict UTF-8, no duplicate keys, no NaN or infinity, bounded nesting, no unpaired surrogate.
Pure: never reads a socket and never looks at what the fields mean. Messages quote no values.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from baton.errors import Reason, ServiceError

NESTING_MAX: Final = 32
KEY_CHARS_SHOWN: Final = 64
BYTE_ORDER_MARK: Final = "\ufeff"

_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def invalid(message: str, field: str | None = None) -> ServiceError:
    """An INVALID_REQUEST that names its field."""
    return ServiceError(Reason.INVALID_REQUEST, message, field=field)


def shown(key: str) -> str:
    """A client's key, short and printable, for messages and headers."""
    clean = "".join(char if char.isascii() and char.isprintable() else "?" for char in key)
    return clean if len(clean) <= KEY_CHARS_SHOWN else f"{clean[:KEY_CHARS_SHOWN]}..."


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises INVALID_REQUEST naming the field where one is at fault, else the position.
    """
    value = _loads(raw)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    _check_nesting(value)
    # Only an escape can make a lone surrogate: UTF-8 itself was decoded strictly.
    if _SURROGATE_ESCAPE.search(raw):
        _check_surrogates(value)
    return value


def _loads(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} is malformed") from error
    if text.startswith(BYTE_ORDER_MARK):
        raise invalid("the body begins with a byte order mark (EF BB BF); send UTF-8 without one")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise invalid(f"the body is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        # Python's own bound on the digits of an integer.
        raise invalid("a number in the body has too many digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise invalid(f"the key {shown(key)!r} is given twice in one object", shown(key))
        seen.add(key)
    raise AssertionError("a shorter dict has a duplicate key")


def _refuse_constant(text: str) -> NoReturn:
    raise invalid(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise invalid("a number in the body is out of range")
    return value


def _too_deep() -> ServiceError:
    return invalid(f"the body is nested too deep; at most {NESTING_MAX} levels are read")


def _check_nesting(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(NESTING_MAX):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _check_surrogates(root: dict[str, Any]) -> None:
    """Refuse an unpaired surrogate anywhere, naming the first field in reading order."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if not is_text(value):
                raise invalid(
                    f"{path} holds an unpaired surrogate, which is no Unicode text; "
                    "send whole characters",
                    path,
                )
        elif isinstance(value, dict):
            for key in value:
                if not is_text(key):
                    raise invalid("a key holds an unpaired surrogate", path or None)
            children = [(joined(path, key), child) for key, child in value.items()]
            stack.extend(reversed(children))
        elif isinstance(value, list):
            indexed = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
            stack.extend(reversed(indexed))


def joined(path: str, key: str) -> str:
    """`path.key`, or the key alone at the top."""
    return f"{path}.{shown(key)}" if path else shown(key)


def is_text(text: str) -> bool:
    """Whether `text` is Unicode text: no unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
