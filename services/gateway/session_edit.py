"""An edit of a history: a range by token, message or text, and what comes there, to new ids.

Owns where anchors point and what is refused of them. Pure. Text is tokenised with the run of text
that it comes to stand in, as the whole new conversation would be; ids outside of the runs that
change stay as they are. Special tokens inside a replacement's text are plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from services.gateway.prompts import ServedModel
from services.gateway.request import ChatPrompt, ChatTurn, Role
from services.gateway.session_text import History, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One end of a range; exactly one kind is given, `byte` belongs to `message`."""

    token: int | None = None
    text: str | None = None
    message: int | None = None
    byte: int | None = None

    @property
    def kind(self) -> str:
        """Which kind it is."""
        if self.token is not None:
            return "token"
        if self.text is not None:
            return "text"
        return "message" if self.byte is None else "byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOrder:
    """Replace [start, end). Of `text`, `token_ids` and `turns` one is given."""

    start: Anchor
    end: Anchor | None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    turns: tuple[ChatTurn, ...] | None = None


def edited(model: ServedModel, token_ids: Sequence[int], order: EditOrder) -> tuple[int, ...]:
    """The new history's ids; INVALID_REQUEST naming `start`, `end` or `replacement`."""
    history = History(model, token_ids)
    kind = order.start.kind
    if order.end is not None and order.end.kind != kind:
        raise refused("end", f"must be of the same kind as start, which is by {kind}")
    if kind == "token":
        return _by_token(model, history, order)
    if order.token_ids is not None:
        raise refused(
            "replacement", "may be token ids only where start and end are token positions"
        )
    if kind == "message" and (order.end is not None or order.turns is not None):
        return _whole_turns(model, history, order)
    if order.text is None:
        raise refused("replacement", "must be a text here")
    turn, first, end = _bytes_of(history, order)
    return _respelled(model, history, turn.run, (first, end), order.text)


# --- by token -----------------------------------------------------------------------------------


def _by_token(model: ServedModel, history: History, order: EditOrder) -> tuple[int, ...]:
    ids, size = history.token_ids, len(history.token_ids)
    start = order.start.token
    end = start if order.end is None else order.end.token
    assert start is not None
    assert end is not None
    for name, position in (("start", start), ("end", end)):
        if position > size:
            raise refused(name, f"is past the end: the history has {size} tokens, give 0 to {size}")
    _require_order(start, end)
    if order.turns is not None:
        raise refused("replacement", "may be messages only where start and end are messages")
    if order.token_ids is not None:
        for index, token_id in enumerate(order.token_ids):
            if not 0 <= token_id < model.tokenizer.vocab_size:
                raise refused(
                    f"replacement.token_ids[{index}]",
                    f"must be a token id below {model.tokenizer.vocab_size}",
                )
        return (*ids[:start], *order.token_ids, *ids[end:])
    return _text_for_tokens(model, history, (start, end), order.text or "")


def _text_for_tokens(
    model: ServedModel, history: History, span: tuple[int, int], text: str
) -> tuple[int, ...]:
    """Text instead of tokens: the runs it touches on either side are tokenised as one."""
    ids, (start, end) = history.token_ids, span
    head, tail = start, end
    if start > 0:
        run = history.runs[history.run_of(start - 1)]
        head = start if run.is_control else run.first
    if end < len(ids):
        run = history.runs[history.run_of(end)]
        tail = end if run.is_control else run.end
    spell = model.tokenizer.decode_bytes
    before = b"".join(map(spell, ids[head:start]))
    after = b"".join(map(spell, ids[end:tail]))
    for name, data in (("start", before), ("end", after)):
        if not _is_text(data):
            raise refused(
                name, "is inside a multi-byte character; move it to the character's edge, or "
                "replace by token_ids",
            )  # fmt: skip
    whole = before.decode() + text + after.decode()
    return (*ids[:head], *_tokens(model, whole), *ids[tail:])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _require_order(start: int, end: int) -> None:
    if start > end:
        raise refused("start", f"must not be behind end: {start} > {end}; swap the two")


# --- by message ---------------------------------------------------------------------------------


def _whole_turns(model: ServedModel, history: History, order: EditOrder) -> tuple[int, ...]:
    """Turns [start, end) become others; without an end one turn does."""
    turns = _turns(history)
    first = order.start.message
    assert first is not None
    end = first + 1 if order.end is None else order.end.message
    assert end is not None
    for name, index in (("start", first), ("end", end)):
        if index > len(turns):
            count = len(turns)
            raise refused(
                name, f"is past the end: the history has {count} messages, give 0 to {count}"
            )
    _require_order(first, end)
    if order.text:
        raise refused(
            "replacement", "must be a list of messages for a range of messages; for the text of "
            "one message leave end out",
        )  # fmt: skip
    size = len(history.token_ids)
    from_id = turns[first].first if first < len(turns) else size
    to_id = turns[end].first if end < len(turns) else size
    before, after = history.token_ids[:from_id], history.token_ids[to_id:]
    return (*before, *_rendered(model, order.turns or ()), *after)


def _rendered(model: ServedModel, turns: Sequence[ChatTurn]) -> tuple[int, ...]:
    """What the template writes for turns in the middle of a conversation."""
    if not turns:
        return ()
    assert model.template is not None
    lead = ChatTurn(role=Role.SYSTEM, content="a")
    ids = model.encode_turns(ChatPrompt(turns=(lead, *turns), has_assistant_header=False))
    alone = model.encode_turns(ChatPrompt(turns=(lead,), has_assistant_header=False))
    if ids[: len(alone)] != alone:
        raise refused("replacement", "cannot stand there in the model's chat template")
    return ids[len(alone) :]


def _turns(history: History) -> tuple[Turn, ...]:
    turns = history.turns()
    if not turns:
        raise refused("start", "names a message, but the history has none; give a token or a text")
    return turns


# --- by byte and by text ------------------------------------------------------------------------


def _bytes_of(history: History, order: EditOrder) -> tuple[Turn, int, int]:
    """The turn and the bytes of its content that are replaced."""
    if order.start.kind == "text":
        return _by_text(history, order)
    turns = _turns(history)
    turn = _named(turns, order.start, "start")
    data = history.content(turn)
    if order.start.byte is None:
        return turn, 0, len(data)
    start = _offset(data, order.start, "start")
    if order.end is None:
        return turn, start, start
    if order.end.message != order.start.message:
        raise refused("end.message", "must be start's: a text is edited within one message")
    end = _offset(data, order.end, "end")
    _require_order(start, end)
    return turn, start, end


def _named(turns: Sequence[Turn], anchor: Anchor, name: str) -> Turn:
    assert anchor.message is not None
    if anchor.message >= len(turns):
        count = len(turns)
        raise refused(
            name, f"is past the end: the history has {count} messages, give 0 to {count - 1}"
        )
    return turns[anchor.message]


def _offset(data: bytes, anchor: Anchor, name: str) -> int:
    offset = anchor.byte
    assert offset is not None
    if offset > len(data):
        raise refused(
            name, f"is past the end: the message has {len(data)} bytes, give 0 to {len(data)}"
        )
    before = behind = offset
    while 0 < before < len(data) and _is_inside(data[before]):
        before -= 1
    while behind < len(data) and _is_inside(data[behind]):
        behind += 1
    if before < offset:
        raise refused(
            name,
            "is inside a multi-byte character; move it to the character's edge, "
            f"{before} or {behind}",
        )
    return offset


def _is_inside(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character that began before it."""
    return byte & 0xC0 == 0x80


def _by_text(history: History, order: EditOrder) -> tuple[Turn, int, int]:
    """From the beginning of start's text to the end of end's; each occurs exactly once."""
    turn, start, first_end = _found(history, order.start, "start")
    if order.end is None:
        return turn, start, first_end
    other, last_start, end = _found(history, order.end, "end")
    if other.run != turn.run:
        raise refused("end", "is in another message than start; edit within one message")
    if last_start < start:
        raise refused("start", "must not be behind end: end's text comes first, swap the two")
    return turn, start, end


def _found(history: History, anchor: Anchor, name: str) -> tuple[Turn, int, int]:
    assert anchor.text is not None
    wanted = anchor.text.encode()
    if not wanted:
        raise refused(name, "must not be an empty text; give what stands there")
    found: list[tuple[Turn, int]] = []
    for turn in _turns(history):
        data, at = history.content(turn), -1
        while (at := data.find(wanted, at + 1)) >= 0:
            found.append((turn, at))
            if len(found) > 1:
                raise refused(
                    name, "is a text that occurs more than once; give more of what is around it"
                )
    if not found:
        raise refused(
            name, "is a text that does not occur in any message; give it as reading the session "
            "shows it, to the byte",
        )  # fmt: skip
    ((turn, at),) = found
    return turn, at, at + len(wanted)


def _respelled(
    model: ServedModel, history: History, run_index: int, span: tuple[int, int], text: str
) -> tuple[int, ...]:
    """The run of a turn's content with other bytes at `span` of the content."""
    run = history.runs[run_index]
    turn = next(one for one in history.turns() if one.run == run_index)
    first, end = turn.from_byte + span[0], turn.from_byte + span[1]
    data = run.data[:first] + text.encode() + run.data[end:]
    if not _is_text(data):
        raise refused("start", "is in a text that is not whole characters; edit it by token")
    ids = _tokens(model, data.decode())
    return (*history.token_ids[: run.first], *ids, *history.token_ids[run.end :])


def _tokens(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, field="replacement") if text else []


def refused(field: str, remedy: str) -> ServiceError:
    """INVALID_REQUEST naming a field of the edit."""
    return ServiceError(Reason.INVALID_REQUEST, f"{field} {remedy}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a new history relates to the old one: what both begin and end with."""

    common: int
    dropped: int
    inserted: int


def change_of(old: Sequence[int], new: Sequence[int]) -> Change:
    """The smallest one range that turns `old` into `new`."""
    most = min(len(old), len(new))
    common = 0
    while common < most and old[common] == new[common]:
        common += 1
    same_end = 0
    while same_end < most - common and old[-1 - same_end] == new[-1 - same_end]:
        same_end += 1
    return Change(
        common=common,
        dropped=len(old) - common - same_end,
        inserted=len(new) - common - same_end,
    )
