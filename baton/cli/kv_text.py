"""How logs and tiers are shown: short ids, sizes, times, tables for people, objects for programs.

Owns words and units. Never asks anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table
from rich.text import Text

from baton.api.kvstore.v1 import operators_pb2
from baton.cli.console import output
from baton.wire.durations import duration_from_proto, timestamp_from_proto

ID_DIGITS: Final = 12
"""Of a log id in tables: commands take the first digits of one."""

PHASES: Final = {
    operators_pb2.LOG_PHASE_PREFILL: "prefill",
    operators_pb2.LOG_PHASE_DECODE: "decode",
    operators_pb2.LOG_PHASE_ENDED: "ended",
    operators_pb2.LOG_PHASE_KEPT: "kept",
    operators_pb2.LOG_PHASE_MOVED: "moved",
}

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def size(count: float) -> str:
    """Bytes as people read them: `0 B`, `1.5 MiB`."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def time_span(seconds: float) -> str:
    """The two largest units: `4 s`, `12 min`, `3 h 20 min`, `2 d 5 h`."""
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return _two(whole // _HOUR_S, "h", whole % _HOUR_S // _MINUTE_S, "min")
    return _two(whole // _DAY_S, "d", whole % _DAY_S // _HOUR_S, "h")


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")


def moment(stamp: Timestamp) -> str:
    """Local time, to the second."""
    return (
        datetime.fromtimestamp(timestamp_from_proto(stamp), UTC)
        .astimezone()
        .strftime("%Y-%m-%d %H:%M:%S")
    )


def iso(stamp: Timestamp) -> str:
    """UTC for programs."""
    found = datetime.fromtimestamp(timestamp_from_proto(stamp), UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(message: Duration) -> float:
    """For programs."""
    return round(duration_from_proto(message), 3)


def short(log_id: bytes) -> str:
    """An id's first digits."""
    return log_id.hex()[:ID_DIGITS]


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; columns named in `right` hold numbers.

    Where a terminal is too narrow tenants give way first, and ids last.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name != "TENANT",
            overflow="ellipsis" if name == "TENANT" else "fold",
            min_width=ID_DIGITS if name == "LOG" else None,
        )
    return made


def pairs(rows: Mapping[str, str]) -> Table:
    """Names and values, one a line; long values go on below."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(name, Text(value))
    return made


def show_table(made: Table) -> None:
    """Prints a table; where no terminal is, without blanks at the ends of lines."""
    console = output()
    if console.is_terminal:
        console.print(made)
        return
    with console.capture() as captured:
        console.print(made)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.print("\n".join(lines), markup=False)


def show_json(answer: Any) -> None:
    """One object for programs, keys always the same."""
    output().print(json.dumps(answer, ensure_ascii=False, indent=2), markup=False)


def log_object(line: operators_pb2.LogSummary, node: str) -> dict[str, Any]:
    """A log for programs."""
    return {
        "log_id": line.log_id.hex(),
        "node": node,
        "tenant": line.tenant,
        "phase": PHASES.get(line.phase),
        "generation": line.generation,
        "tokens": line.tokens,
        "host_tokens": line.committed_tokens,
        "host_pages": line.host_pages,
        "nvme_tokens": line.cold_tokens,
        "nvme_pages": line.nvme_pages,
        "writer": line.writer_worker_id or None,
        "request_id": line.request_id or None,
        "opened": iso(line.open_time),
        "idle_s": seconds(line.idle),
        "expires": iso(line.expire_time) if line.HasField("expire_time") else None,
        "parent_log_id": line.parent_log_id.hex() or None,
        "parent_position": line.parent_position if line.parent_log_id else None,
    }


def ends_in(line: operators_pb2.LogSummary, now_wall_s: float) -> str:
    """How long it still is kept."""
    if not line.HasField("expire_time"):
        return "-"
    return time_span(max(timestamp_from_proto(line.expire_time) - now_wall_s, 0.0))
