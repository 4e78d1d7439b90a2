"""How the command line speaks: results on stdout, one line with a remedy on stderr, exit codes.

Owns: exit codes and the form of an error. Never does: decide what an error means.

Exit codes: 0 done; 1 refused or failed; 2 wrong command line; 3 the gateway cannot be reached;
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Final

from rich.console import Console

PIPED_COLUMNS: Final = 10_000


class ExitCode(IntEnum):
    """What the process leaves with; documented in docs/hacking.md."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


class CommandFailed(Exception):
    """A command cannot do what was asked; `message` says why, `remedy` what to do, if anything."""

    def __init__(
        self, message: str, *, remedy: str | None = None, exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code

    def one_line(self) -> str:
        """The error as people see it: without line breaks, the remedy last."""
        parts = [self.message, self.remedy] if self.remedy else [self.message]
        return " ".join(". ".join(part.strip().rstrip(".") for part in parts).split())


def read_stdin(chars_max: int) -> str:
    """Stdin as text, at most `chars_max` characters of it; refused when it is not UTF-8."""
    try:
        # A C locale lets wrong bytes through as surrogates, a UTF-8 one raises.
        return checked_text(sys.stdin.read(chars_max), "stdin")
    except UnicodeDecodeError as problem:
        raise CommandFailed(
            "stdin is not UTF-8 text", remedy="convert it first", exit_code=ExitCode.USAGE
        ) from problem


def output() -> Console:
    """Where results go. Made anew each time, so that it follows a redirected stdout.

    Where no terminal has a width, a line is as long as it is: programs read it, and `grep`.
    """
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=PIPED_COLUMNS)


def errors() -> Console:
    """Where problems and progress go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def checked_text(text: str, name: str) -> str:
    """`text` itself; refused when it holds bytes that are no UTF-8, which can be sent nowhere."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise CommandFailed(
            f"{name} is not UTF-8 text", remedy="convert it first", exit_code=ExitCode.USAGE
        ) from problem
    return text


def show_error(text: str) -> None:
    """One line on stderr, as it is: no markup is read out of it."""
    errors().print(f"baton: {text}", style="red", markup=False)
