"""`POST /v1/chat/completions`: a JSON object to a checked chat request.

Owns the shape of messages and the chat-only fields. Pure; paths in errors read like
`messages[2].content`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from services.gateway.request import ID_CHARS_MAX, ChatPrompt, ChatTurn, Continues, Role
from services.gateway.rest.json_body import invalid
from services.gateway.rest.reader import ObjectReader, checked_text
from services.gateway.rest.sampling_fields import CommonFields, read_common

MESSAGES_MAX: Final = 4096
PARTS_MAX: Final = 1024
CONTENT_CHARS_MAX: Final = 8 << 20
TOP_LOGPROBS_MAX: Final = 20

_ROLES: Final = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a chat completion asks for; `ignored` are the paths nobody read."""

    prompt: ChatPrompt
    common: CommonFields
    continues: Continues | None
    ignored: tuple[str, ...]


def read_chat_request(body: dict[str, Any], *, answers_max: int) -> ChatRequest:
    """Check a parsed body; raises INVALID_REQUEST naming the path at fault."""
    reader = ObjectReader(body)
    _refuse_tools(reader)
    continues = _continues(reader)
    turns: tuple[ChatTurn, ...] = ()
    ignored: tuple[str, ...] = ()
    if continues is None or reader.items("messages", count_max=MESSAGES_MAX):
        turns, ignored = read_messages(reader)
    for name in ("chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs"):
        if reader.take(name):
            raise invalid(f"{name} is not accepted from requests; leave it out", name)
    if reader.flag("continue_final_message"):
        raise invalid(
            "continue_final_message is not supported; send a user turn last",
            "continue_final_message",
        )
    has_header = reader.flag("add_generation_prompt", default=True)
    common = read_common(reader, _logprobs(reader), answers_max)
    if continues is not None and continues.field == "session" and common.is_dropped_at_end:
        raise invalid("store must not be false in a session: it names what is kept", "store")
    return ChatRequest(
        prompt=ChatPrompt(turns=turns, has_assistant_header=has_header),
        common=common,
        continues=continues,
        ignored=(*reader.ignored(), *ignored),
    )


def _continues(reader: ObjectReader) -> Continues | None:
    """What the chat goes on from: then `messages` are the new ones, and may be left out."""
    found = [
        Continues(wanted=wanted, field=name)
        for name in ("session", "previous_response_id")
        if (wanted := reader.text(name, chars_max=ID_CHARS_MAX)) is not None
    ]
    if len(found) > 1:
        raise invalid("give session or previous_response_id, not both", "previous_response_id")
    return found[0] if found else None


def read_messages(reader: ObjectReader) -> tuple[tuple[ChatTurn, ...], tuple[str, ...]]:
    """The turns of `messages`, and the paths in them that were ignored."""
    messages = reader.items("messages", count_max=MESSAGES_MAX)
    if not messages:
        raise invalid("messages must hold at least one message", "messages")
    turns: list[ChatTurn] = []
    ignored: list[str] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(f"{path} must be an object with role and content", path)
        one = ObjectReader(message, path)
        turns.append(_turn(one))
        ignored += one.ignored()
    return tuple(turns), tuple(ignored)


def _turn(reader: ObjectReader) -> ChatTurn:
    path = reader.at("role")
    role = reader.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise invalid(f"{path} must be one of {known}", path)
    for name in ("tool_calls", "function_call", "audio"):
        if reader.take(name):
            at = reader.at(name)
            raise invalid(f"{at} is not supported; this model takes text turns only", at)
    # `refusal` comes back in the SDK's own message objects, always null here.
    reader.note("refusal", "annotations")
    reader.text("name", chars_max=256)
    return ChatTurn(role=_ROLES[role], content=_content(reader))


def _content(reader: ObjectReader) -> str:
    path = reader.at("content")
    value = reader.take("content")
    if isinstance(value, str):
        return checked_text(value, path, CONTENT_CHARS_MAX)
    if not isinstance(value, list):
        raise invalid(f"{path} must be a string or a list of text parts", path)
    if not 0 < len(value) <= PARTS_MAX:
        raise invalid(f"{path} must hold 1 to {PARTS_MAX} parts", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object with type and text", path)
    if part.get("type") != "text":
        raise invalid(f"{path}.type must be text; this model reads text only", f"{path}.type")
    return checked_text(part.get("text"), f"{path}.text", CONTENT_CHARS_MAX)


def _refuse_tools(reader: ObjectReader) -> None:
    """Tools change what the model sees; only an explicit `none` makes them harmless."""
    tools, choice = reader.take("tools"), reader.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise invalid("tool_choice other than none is not supported", "tool_choice")
    if tools and choice != "none":
        raise invalid("tools are not supported for this model; leave them out", "tools")


def _logprobs(reader: ObjectReader) -> tuple[bool, int]:
    is_wanted = reader.flag("logprobs")
    top = reader.whole("top_logprobs", low=0, high=TOP_LOGPROBS_MAX) or 0
    if top and not is_wanted:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return is_wanted, top
