"""FAULT="point:action[:arg][:once][,...]" as data.

Owns the grammar and the list of faults in a specification; pure. Knows the points' table, never
whether fault points are allowed.

- `pause:<seconds>`: go on after so long, or when released
- `fail[:<reason or errno name>]`: raise ServiceError (INTERNAL unless named) or OSError (`EIO`...)
- `exit`: the process ends at once with code 70, as if killed
- `short:<bytes>`: only the first so many bytes of the data are there
- `flip_byte[:<offset>]`: one byte is inverted, the middle one unless named
- `absent`: what is asked for is not there
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError, StartupError
from baton.faults.points import POINTS, Action

SPEC_CHARS_MAX: Final = 4096
PAUSE_S_MAX: Final = 3600.0
ONCE: Final = "once"
_WITHOUT_ARGUMENT: Final = frozenset({Action.EXIT, Action.ABSENT})
_ERRNO_BY_NAME: Final = {name: code for code, name in errno.errorcode.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One armed fault. `seconds` belongs to pause, `size_bytes` to short and flip_byte (offset),
    `error_name` to fail.
    """

    point: str
    action: Action
    seconds: float | None = None
    size_bytes: int | None = None
    error_name: str | None = None
    is_once: bool = False

    def error(self) -> Exception:
        """What a `fail` raises."""
        message = f"fault point {self.point} failed on purpose"
        if self.error_name in _ERRNO_BY_NAME:
            return OSError(_ERRNO_BY_NAME[self.error_name], message)
        reason = Reason(self.error_name or Reason.INTERNAL)
        return ServiceError(reason, message, metadata={"fault_point": self.point})


class FaultSpecError(StartupError):
    """Everything that is wrong with a specification, one fault a line in `faults`."""

    def __init__(self, faults: Sequence[str]) -> None:
        assert faults
        self.faults = tuple(faults)
        lines = "".join(f"\n  {fault}" for fault in faults)
        super().__init__(
            f"FAULT cannot be read:{lines}",
            hint='write FAULT="point:action[:arg][:once][,...]", as decode.step:pause:2:once',
            exit_code=2,
        )


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of a specification, in order; FaultSpecError lists all that is wrong with it."""
    if len(text) > SPEC_CHARS_MAX:
        raise FaultSpecError([f"{len(text)} characters long, at most {SPEC_CHARS_MAX} are read"])
    found: list[Fault] = []
    wrong: list[str] = []
    for entry in text.split(","):
        try:
            fault = _parse_entry(entry.strip())
        except ValueError as error:
            wrong.append(f"{entry.strip()!r}: {error}")
            continue
        if any((other.point, other.action) == (fault.point, fault.action) for other in found):
            wrong.append(f"{entry.strip()!r}: {fault.point} already has a {fault.action}")
        found.append(fault)
    if wrong:
        raise FaultSpecError(wrong)
    return tuple(found)


def _parse_entry(entry: str) -> Fault:
    """One fault; ValueError says what is wrong with it."""
    name, *words = entry.split(":")
    point = POINTS.get(name)
    if point is None:
        raise ValueError(f"no point is named {name!r}; there are {', '.join(sorted(POINTS))}")
    offered = ", ".join(sorted(point.actions))
    if not words:
        raise ValueError(f"names no action; {name} offers {offered}")
    if words[0] not in point.actions:
        raise ValueError(f"{words[0]!r} is no action of {name}; it offers {offered}")
    action = Action(words[0])
    is_once = words[-1] == ONCE and len(words) > 1
    arguments = words[1 : len(words) - is_once]
    if len(arguments) > 1:
        raise ValueError(f"{action} takes one argument at most, then only :{ONCE}")
    argument = arguments[0] if arguments else None
    return Fault(
        point=name,
        action=action,
        seconds=_seconds(argument) if action is Action.PAUSE else None,
        size_bytes=_size(action, argument),
        error_name=_error_name(argument) if action is Action.FAIL else None,
        is_once=is_once,
    )


def _seconds(argument: str | None) -> float:
    try:
        seconds = float(argument or "nan")
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= PAUSE_S_MAX:
        raise ValueError(f"pause needs its seconds, 0 to {PAUSE_S_MAX:g}, as pause:2.5")
    return seconds


def _size(action: Action, argument: str | None) -> int | None:
    if action in _WITHOUT_ARGUMENT and argument is not None:
        raise ValueError(f"{action} takes no argument")
    if action not in (Action.SHORT, Action.FLIP_BYTE):
        return None
    if argument is None and action is Action.FLIP_BYTE:
        return None
    if argument is None or not (argument.isascii() and argument.isdigit()) or len(argument) > 18:
        raise ValueError(f"{action} counts in whole bytes from 0, as {action}:16")
    return int(argument)


def _error_name(argument: str | None) -> str | None:
    if argument is None or argument in Reason.__members__ or argument in _ERRNO_BY_NAME:
        return argument
    raise ValueError(f"{argument!r} is neither a reason (WORKER_LOST) nor an errno name (EIO)")
