"""`baton trace`: where the time of one request went, across all processes, without a collector.

Owns: the command line's view of `/debug/traces`. Never does: measure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.cli.console import CommandFailed, errors, output
from baton.cli.gateway_http import (
    DEFAULT_URL,
    GatewayAddress,
    KeyOption,
    UrlOption,
    call,
    path_part,
)
from baton.tracing_tree import TreeSpan, covered_s, in_order, spans_of, steps

PATH = "/debug/traces"
BAR_CELLS_MIN = 20
PIPED_COLUMNS = 140
BLOCKS = " ▏▎▍▌▋▊▉█"
DETAILS = ("tokens", "worker", "pages", "entries", "sequences", "steps", "step", "reason")
"""Attributes that are worth a place in a line."""


def bar(start: float, end: float, cells: int) -> str:
    """A bar from `start` to `end` (parts of the whole, 0 to 1) in `cells` characters.

    Eighths of a cell at its right end; anything shorter still shows.
    """
    first = min(int(start * cells), cells - 1)
    eighths = max(1, round((end - first / cells) * cells * 8))
    full, rest = divmod(min(eighths, (cells - first) * 8), 8)
    return " " * first + BLOCKS[8] * full + (BLOCKS[rest] if rest else "")


def waterfall(spans: Sequence[TreeSpan], cells: int) -> Table:
    """One line per span, parents before children, on one time axis."""
    total_s = max(span.end_s for span in spans) or 1e-9
    table = Table("process", "span", "start", "took", f"0 to {_ms(total_s)}", box=None)
    for column in table.columns:
        column.no_wrap = True
    for timed in table.columns[2:4]:
        timed.justify = "right"
    for depth, span in in_order(spans):
        style = "red" if span.is_error else ""
        name = Text("  " * depth + span.name, style=style)
        details = " ".join(f"{k}={span.attributes[k]}" for k in DETAILS if k in span.attributes)
        if details:
            name.append(f"  {details}", style="dim")
        drawn = bar(span.start_s / total_s, span.end_s / total_s, cells)
        table.add_row(span.process, name, _ms(span.start_s), _ms(span.duration_s), drawn)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def summary(answer: dict[str, Any], spans: Sequence[TreeSpan]) -> str:
    """What the trace is of, and how much of its time the spans explain."""
    first_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    whole_s = max(end_s - first_s, 1e-9)
    explained = covered_s(steps(spans), first_s, end_s) / whole_s
    processes = len({span.process for span in spans})
    return (
        f"trace {answer.get('trace_id')}: {len(spans)} spans of {processes} processes, "
        f"{_ms(whole_s)}, {explained:.1%} of it in named steps"
    )


def trace(
    wanted: Annotated[
        str,
        typer.Argument(metavar="ID", help="x-baton-request-id, answer id or trace id."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the spans as JSON.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Show where the time of one request went.

    Example: baton trace chatcmpl-5f0c... --url http://127.0.0.1:8080
    """
    path = f"{PATH}/{path_part(wanted)}"
    answer = call(GatewayAddress(url=url, api_key=api_key), "GET", path, None)
    try:
        spans = spans_of(answer)
    except (ValueError, AttributeError) as problem:
        raise CommandFailed(
            f"{path} did not answer with a trace", remedy="is it a Baton gateway?"
        ) from problem
    if as_json:
        output().print(json.dumps(answer, ensure_ascii=False, indent=2), markup=False)
        return
    if not spans:
        raise CommandFailed("the trace has no spans", remedy="is tracing switched off?")
    _show(answer, spans)


def _show(answer: dict[str, Any], spans: Sequence[TreeSpan]) -> None:
    console = output()
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_COLUMNS, file=console.file)
    names = max(len("  " * depth + span.name) for depth, span in in_order(spans))
    cells = max(BAR_CELLS_MIN, console.width - names - 75)
    console.print(waterfall(spans, cells))
    console.print(summary(answer, spans), markup=False)
    missing = answer.get("missing") or []
    if missing:
        errors().print(
            f"baton: no answer from {', '.join(map(str, missing))}: its spans are missing",
            markup=False,
        )
