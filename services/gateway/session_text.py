"""A history's token ids as text and turns, and back: where turns are, where anchors point.

Owns the structure of a history: runs of text between control tokens, the turns that the chat
template made, the ids behind which a next turn goes on. Pure. Every run of text is tokenised by
itself, as the tokenizer does with a whole rendered prompt, because control tokens cut it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from baton.text.rendered import RenderedPrompt
from services.gateway.prompts import ServedModel
from services.gateway.request import ChatTurn, Role

_MARK: Final = "qjxBATONMARKxjq"
"""Stands for content when the template is asked what it writes around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Ids [first, end) of a history: one control token, or a run of text between two of them."""

    first: int
    end: int
    data: bytes
    is_control: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: ids [first, end) with all that the template wrote for it; its content is bytes
    [from_byte, to_byte) of run `run`.
    """

    role: Role
    first: int
    end: int
    run: int
    from_byte: int
    to_byte: int


class History:
    """Token ids with their structure."""

    def __init__(self, model: ServedModel, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self._model = model
        self.runs = _runs(model, self.token_ids)

    def content(self, turn: Turn) -> bytes:
        """A turn's content, UTF-8."""
        return self.runs[turn.run].data[turn.from_byte : turn.to_byte]

    def turns(self) -> tuple[Turn, ...]:
        """The turns that the chat template made, in order; empty for other histories."""
        frames = Frames.of(self._model)
        if frames is None:
            return ()
        found: list[Turn] = []
        at = 0
        while at < len(self.runs):
            turn = frames.turn_at(self.runs, at)
            if turn is None:
                at += 1
                continue
            found.append(turn)
            at = turn.run + 1
        return _with_ends(found, len(self.token_ids))

    def chat(self) -> list[ChatTurn]:
        """The turns as applications see them; the open header of an answer to come is none."""
        turns = [
            ChatTurn(role=turn.role, content=self.content(turn).decode("utf-8", "replace"))
            for turn in self.turns()
        ]
        if turns and turns[-1] == ChatTurn(role=Role.ASSISTANT, content=""):
            turns.pop()
        return turns

    def run_of(self, position: int) -> int:
        """The run that holds a token position."""
        for index, run in enumerate(self.runs):
            if run.first <= position < run.end:
                return index
        raise AssertionError(position)


def _with_ends(turns: list[Turn], end: int) -> tuple[Turn, ...]:
    """Each turn reaches to the next one's beginning."""
    if not turns:
        return ()
    ends = [turn.first for turn in turns[1:]] + [end]
    return tuple(
        Turn(
            role=turn.role,
            first=turn.first,
            end=stop,
            run=turn.run,
            from_byte=turn.from_byte,
            to_byte=turn.to_byte,
        )
        for turn, stop in zip(turns, ends, strict=True)
    )


def _runs(model: ServedModel, token_ids: tuple[int, ...]) -> tuple[Run, ...]:
    is_special, spell = model.tokenizer.is_special, model.tokenizer.decode_bytes
    runs: list[Run] = []
    first = 0
    for index, token_id in enumerate(token_ids):
        if not is_special(token_id):
            continue
        if first < index:
            data = b"".join(map(spell, token_ids[first:index]))
            runs.append(Run(first=first, end=index, data=data, is_control=False))
        runs.append(Run(first=index, end=index + 1, data=spell(token_id), is_control=True))
        first = index + 1
    if first < len(token_ids):
        data = b"".join(map(spell, token_ids[first:]))
        runs.append(Run(first=first, end=len(token_ids), data=data, is_control=False))
    return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What the template writes before a role's content: control tokens and text by turns; the last
    text is the beginning of the content's run.
    """

    role: Role
    pieces: tuple[tuple[bool, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """What a chat template writes around turns."""

    headers: tuple[_Header, ...]

    @classmethod
    def of(cls, model: ServedModel) -> Frames | None:
        """The template's; None for models without one, or where it cannot be told."""
        if model.template is None:
            return None
        headers = [_header(model, role) for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT)]
        known = tuple(header for header in headers if header is not None)
        return cls(headers=known) if known else None

    def turn_at(self, runs: Sequence[Run], at: int) -> Turn | None:
        """The turn whose header begins at run `at`; None if none does."""
        for header in self.headers:
            *before, (is_control, text) = header.pieces
            last = at + len(before)
            if last >= len(runs) or is_control:
                continue
            seen = [(run.is_control, run.data) for run in runs[at:last]]
            if seen == before and not runs[last].is_control and runs[last].data.startswith(text):
                return Turn(
                    role=header.role,
                    first=runs[at].first,
                    end=runs[last].end,
                    run=last,
                    from_byte=len(text),
                    to_byte=len(runs[last].data),
                )
        return None


def _header(model: ServedModel, role: Role) -> _Header | None:
    """What stands between the turn before and the content."""
    turns = [ChatTurn(role=Role.USER, content="a"), ChatTurn(role=Role.ASSISTANT, content="b")]
    if role is Role.SYSTEM:
        turns = []
    rendered = _render(model, [*turns, ChatTurn(role=role, content=_MARK)], has_header=False)
    if rendered is None or rendered.text.count(_MARK) != 1:
        return None
    mark = rendered.text.index(_MARK)
    spans = [span for span in rendered.control_spans if span[1] <= mark]
    # Back to the first of the control tokens that no text of a turn before separates.
    start = _header_start(rendered, spans, mark)
    if start is None:
        return None
    pieces: list[tuple[bool, bytes]] = []
    end = start
    for first, stop in (span for span in spans if span[0] >= start):
        if end < first:
            pieces.append((False, rendered.text[end:first].encode()))
        pieces.append((True, rendered.text[first:stop].encode()))
        end = stop
    pieces.append((False, rendered.text[end:mark].encode()))
    return _Header(role=role, pieces=tuple(pieces))


def _header_start(
    rendered: RenderedPrompt, spans: Sequence[tuple[int, int]], mark: int
) -> int | None:
    """Where the header begins: at the last control token that differs from the turn's end before
    it, which the first control token behind the mark names.
    """
    behind = [span for span in rendered.control_spans if span[0] >= mark]
    if not spans:
        return None
    ender = rendered.text[slice(*behind[0])] if behind else None
    start = spans[-1][0]
    for first, stop in reversed(spans):
        if rendered.text[first:stop] == ender:
            break
        start = first
    return start


def _render(
    model: ServedModel, turns: Sequence[ChatTurn], *, has_header: bool
) -> RenderedPrompt | None:
    assert model.template is not None
    messages = [{"role": turn.role.value, "content": turn.content} for turn in turns]
    try:
        return model.template.render(messages, add_generation_prompt=has_header)
    except ServiceError:
        return None


def next_turn(
    model: ServedModel, token_ids: Sequence[int], turns: Sequence[ChatTurn], *, has_header: bool
) -> tuple[int, ...]:
    """All ids of a history that goes on with `turns`, and an answer's header where wanted.

    What is there stays as it is, to the id. UNSUPPORTED for models without a chat template.
    """
    if model.template is None:
        raise ServiceError(
            Reason.UNSUPPORTED, f"{model.name} has no chat template", field="messages"
        )
    marked = [
        ChatTurn(role=Role.USER, content="a"),
        ChatTurn(role=Role.ASSISTANT, content=_MARK),
        *turns,
    ]
    rendered = _render(model, marked, has_header=has_header)
    if rendered is None or rendered.text.count(_MARK) != 1:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            "messages cannot follow this history in the model's chat template",
            field="messages",
        )
    cut = rendered.text.index(_MARK) + len(_MARK)
    spans = tuple((a - cut, b - cut) for a, b in rendered.control_spans if a >= cut)
    tail = RenderedPrompt(text=rendered.text[cut:], control_spans=spans)
    ids = model.tokenizer.encode_rendered(tail)
    return (*token_ids, *ids[_overlap(token_ids, ids, model) :])


def _overlap(history: Sequence[int], tail: Sequence[int], model: ServedModel) -> int:
    """How many first ids of `tail` the history ends with already: an answer's end token, what the
    template writes behind it, and the header of an answer that did not come. 0: none.

    Ids before the first control token behind the turn's end are what may be there.
    """
    if not tail or not model.tokenizer.is_special(tail[0]):
        return 0
    for count in range(min(len(tail), len(history)), 0, -1):
        # One id first: a long history is not copied for each place where it might begin.
        if history[-count] == tail[0] and list(history[-count:]) == list(tail[:count]):
            return count
    return 0
