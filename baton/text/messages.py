"""Chat messages as clients send them, checked and made plain for a template.

Owns the shape rules: roles, content as text, null or text parts, tool calls. Every refusal is an
INVALID_REQUEST that names the path (`messages[2].content[0].type`). Pure; knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from baton.errors import Reason, ServiceError

Message = dict[str, Any]

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MESSAGES_MAX: Final = 4096
DEPTH_MAX: Final = 32
NODES_MAX: Final = 100_000
"""Values inside one request's messages, tools or template arguments, all levels together."""

_TEXT_PARTS: Final = frozenset({"text"})


def normalise_messages(messages: object) -> list[Message]:
    """Check `messages` and return a deep copy in which every content is a string.

    Null content becomes "", text parts are joined without a separator, and tool-call arguments
    that are the text of a JSON object become that object, as templates expect.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise refuse("messages", "must be a list with at least one message")
    if len(messages) > MESSAGES_MAX:
        raise refuse("messages", f"may hold at most {MESSAGES_MAX} messages")
    plain = plain_value(messages, "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(plain)]


def _message(message: object, path: str) -> Message:
    if not isinstance(message, dict):
        raise refuse(path, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{path}.role", f"must be one of {', '.join(sorted(ROLES))}")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise refuse(f"{path}.content", "is missing; give text, or null beside tool_calls")
    copy = {**message, "content": _content(message.get("content"), f"{path}.content")}
    if calls is None:
        copy.pop("tool_calls", None)
    else:
        copy["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return copy


def _content(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(path, "must be a string, null or a list of text parts")
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise refuse(path, 'must be an object such as {"type": "text", "text": "..."}')
    if part.get("type") not in _TEXT_PARTS:
        raise refuse(f"{path}.type", 'must be "text"; this model reads no other parts')
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{path}.text", "must be a string")
    return text


def _tool_calls(calls: object, path: str) -> list[Message]:
    if not isinstance(calls, list):
        raise refuse(path, "must be a list")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> Message:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise refuse(path, "must be an object with a function")
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise refuse(f"{path}.function.name", "must be a string")
    function["arguments"] = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": function}


def _arguments(arguments: object, path: str) -> object:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    # The text of the arguments may nest deeper, or hold escapes that are no Unicode text.
    return plain_value(parsed, path) if isinstance(parsed, dict) else arguments


def plain_value(value: object, path: str) -> Any:
    """Deep-copy a JSON-like value into dict, list and scalars, checking every string and bound."""
    return _Copy().copy(value, path, 0)


class _Copy:
    """Counts the values of one deep copy, so that a wide or deep body cannot be unbounded."""

    def __init__(self) -> None:
        self._nodes = 0

    def copy(self, value: object, path: str, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise refuse(path, f"holds more than {NODES_MAX} values")
        if depth > DEPTH_MAX:
            raise refuse(path, f"nests deeper than {DEPTH_MAX} levels")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return _checked(value, path)
        if isinstance(value, Mapping):
            return {
                self._key(key, path): self.copy(item, f"{path}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [
                self.copy(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
        raise refuse(path, "must be a JSON value")

    def _key(self, key: object, path: str) -> str:
        if not isinstance(key, str):
            raise refuse(path, "must have strings as keys")
        return _checked(key, path)


def _checked(text: str, path: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(
            path, "holds an unpaired surrogate, which is no Unicode text; send whole characters"
        ) from error
    return text


def refuse(field: str, remedy: str) -> ServiceError:
    """An INVALID_REQUEST that names `field`."""
    name = field.encode("utf-8", "replace").decode("utf-8")
    return ServiceError(Reason.INVALID_REQUEST, f"{name} {remedy}", field=name)
