"""Running a chat template: jinja2 in an immutable sandbox, every run bounded.

Owns the environment and the helpers that Hugging Face templates expect (`tojson`,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks). Knows nothing of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_CHARS_MAX: Final = 1 << 20
OUTPUT_CHARS_MAX: Final = 16 << 20
RANGE_ITEMS_MAX: Final = 1 << 20
"""How many numbers all `range` calls of one run may yield together."""

_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise on input that it does not expect."""


class TemplateFault(Exception):
    """The template failed, or refused with `raise_exception`; the text quotes no input."""


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse to the tag's body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox; besides, no single operation may build a huge value."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product or a power whose result could be huge."""
        if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 16):
            raise SecurityError("the power is too large")
        for one, other in ((left, right), (right, left)):
            is_sequence = isinstance(one, str | list | tuple)
            if is_sequence and isinstance(other, int) and len(one) * other > OUTPUT_CHARS_MAX:
                raise SecurityError("the repetition is too long")
        return super().call_binop(context, operator, left, right)


class CompiledTemplate:
    """A template, compiled once; runs share nothing.

    Raises TemplateFault when `source` is too long or is no template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise TemplateFault(f"is longer than {TEMPLATE_CHARS_MAX} characters")
        self._source = source
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateFault(f"is no jinja2 template ({type(error).__name__})") from error

    def run(self, variables: Mapping[str, Any], when: datetime) -> str:
        """Produce the output for `variables`; `when` is the time that the template is told.

        Raises TemplateFault when the template refuses, fails or passes a bound.
        """
        bound = {**variables, "range": _range_with_budget(), "strftime_now": when.strftime}
        pieces: list[str] = []
        left = OUTPUT_CHARS_MAX
        try:
            for piece in self._template.generate(bound):
                left -= len(piece)
                if left < 0:
                    raise SecurityError("the output is too long")
                pieces.append(piece)
        except _FAULTS as error:
            raise TemplateFault(self._explain(error)) from error
        return "".join(pieces)

    def _explain(self, error: Exception) -> str:
        """The template's own words, if they stand in it literally; never what users wrote."""
        message = str(error)
        if isinstance(error, _Refusal) and message and message in self._source:
            return f"the chat template refuses them: {message[:200]}"
        if isinstance(error, SecurityError):
            return "the chat template passes a bound of its sandbox"
        return f"the chat template fails on them ({type(error).__name__})"


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _range_with_budget() -> Callable[..., range]:
    left = RANGE_ITEMS_MAX

    def bounded_range(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise SecurityError("range yields too many numbers")
        return numbers

    return bounded_range


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it: no escaping for HTML, non-ASCII text as it is."""
    # Templates pass these by position or name, as they do to transformers' filter.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
