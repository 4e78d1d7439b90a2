"""The chat template: messages to one rendered prompt in which no content writes a control token.

Owns the way to know who wrote what. The prompt is rendered twice: as it is, and with stand-ins
(`standins.py`) for everything users wrote. When both read alike, each control token of the second
render is the template's, exactly. A template that looks into the content (Qwen3 searches it for
`</think>`) may make them differ; then only what could be misread is replaced, and the control
tokens must be the same as with everything replaced, else the request is refused. Never tokenises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from baton.errors import Reason, ServiceError
from baton.kv import digests
from baton.text.messages import Message, normalise_messages, plain_value, refuse
from baton.text.rendered import RenderedPrompt
from baton.text.sandbox import CompiledTemplate, TemplateFault
from baton.text.standins import ControlTexts, StandIns, all_strings, map_messages, map_strings

_RESERVED: Final = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        "range",
    }
)


def _local_now() -> datetime:
    return datetime.now(UTC).astimezone()


class ChatTemplate:
    """One model's chat template, compiled once. Safe to share between threads.

    `control_tokens` are the texts of the tokenizer's special tokens; `variables` the named ones
    (`bos_token`, ...); `now` tells the time to templates that write the date. Raises ServiceError
    UNSUPPORTED when `source` cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = _local_now,
    ) -> None:
        try:
            self._template = CompiledTemplate(source)
        except TemplateFault as error:
            message = f"the model's chat template {error}; give a model directory with another"
            raise ServiceError(Reason.UNSUPPORTED, message, field="chat_template") from error
        self._source = source
        self._controls = ControlTexts(control_tokens)
        self._variables = dict(variables or {})
        self._now = now

    @property
    def source(self) -> str:
        """The template's text."""
        return self._source

    def template_digest(self) -> bytes:
        """16 bytes that name this template; published prefixes depend on it."""
        return digests.template_digest(self._source)

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[object] | None = None,
    ) -> RenderedPrompt:
        """Render a conversation.

        `messages` as in the chat API: role and content (text, null, or text parts).
        `continue_final_message` leaves the last message open so that the answer continues it, and
        excludes `add_generation_prompt`. `template_kwargs` are more variables for the template.
        Raises ServiceError INVALID_REQUEST naming the path in `messages`, `tools` or
        `template_kwargs`; where the template itself fails or refuses it names `messages`.
        """
        if add_generation_prompt and continue_final_message:
            raise refuse("continue_final_message", "excludes add_generation_prompt; set one")
        inputs = _Inputs(
            messages=normalise_messages(messages),
            tools=plain_value(list(tools), "tools") if tools else None,
            extra=self._extra(template_kwargs or {}),
        )
        stand_ins = StandIns(self._controls, [self._source, *inputs.strings()])
        if continue_final_message:
            inputs = inputs.with_end_mark(stand_ins.end_mark)
        when = self._now()

        def run(chosen: _Inputs) -> str:
            variables = {
                **chosen.extra,
                **self._variables,
                "messages": chosen.messages,
                "tools": chosen.tools,
                "add_generation_prompt": add_generation_prompt,
            }
            text = self._template.run({"documents": None, **variables}, when)
            return _cut(text, stand_ins.end_mark) if continue_final_message else text

        try:
            return self._guarded(run, inputs, stand_ins)
        except TemplateFault as error:
            raise refuse("messages", f"cannot be rendered: {error}") from error

    def _guarded(
        self, run: Callable[[_Inputs], str], inputs: _Inputs, stand_ins: StandIns
    ) -> RenderedPrompt:
        plain = run(inputs)
        try:
            masked = run(inputs.mapped(stand_ins.replace_all))
        except TemplateFault as error:
            # It passed on the real content a moment ago: it reads the content, and fails on masks.
            raise TemplateFault("the chat template depends on the content too closely") from error
        if stand_ins.restore(masked) != plain:
            expected = self._controls.pattern.findall(masked)
            masked = run(inputs.mapped(stand_ins.replace_dangerous))
            if self._controls.pattern.findall(masked) != expected:
                raise TemplateFault("the chat template would let content write control tokens")
        spans = tuple(match.span() for match in self._controls.pattern.finditer(masked))
        return RenderedPrompt(text=stand_ins.restore(masked), control_spans=spans)

    def _extra(self, template_kwargs: Mapping[str, object]) -> dict[str, Any]:
        extra: dict[str, Any] = plain_value(template_kwargs, "template_kwargs")
        for name in sorted(extra.keys() & (_RESERVED | self._variables.keys())):
            raise refuse(f"template_kwargs.{name}", "is set by the server; leave it out")
        return extra


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """All that users wrote, as plain values."""

    messages: list[Message]
    tools: list[Any] | None
    extra: dict[str, Any]

    def strings(self) -> list[str]:
        return list(all_strings([self.messages, self.tools, self.extra]))

    def mapped(self, transform: Callable[[str], str]) -> _Inputs:
        """Every string transformed; the names of the template's variables stay."""
        return _Inputs(
            messages=map_messages(self.messages, transform),
            tools=None if self.tools is None else map_strings(self.tools, transform),
            extra={name: map_strings(item, transform) for name, item in self.extra.items()},
        )

    def with_end_mark(self, mark: str) -> _Inputs:
        """The last message's content ends in `mark` and a space, to find where it was written."""
        *before, last = self.messages
        marked = {**last, "content": f"{last['content']}{mark} "}
        return _Inputs(messages=[*before, marked], tools=self.tools, extra=self.extra)


def _cut(text: str, mark: str) -> str:
    """The text up to the end of the last message's content.

    A template that trims the content has trimmed the space behind the mark: then the content is
    trimmed here too, since the mark has shielded it.
    """
    at = text.rfind(mark)
    if at < 0:
        raise TemplateFault("the chat template does not show the last message's content")
    is_spacing_kept = text[at + len(mark) : at + len(mark) + 1] == " "
    return text[:at] if is_spacing_kept else text[:at].rstrip()
