"""How the command line speaks: results on stdout, one line with a remedy on stderr, exit codes.

Owns: exit codes and the form of an error. Never does: decide what an error means.

Exit codes: 0 done; 1 refused or failed; 2 wrong command line; 3 the gateway cannot be reached;
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import sys
from enum import IntEnum

from rich.console import Console


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


def output() -> Console:
    """Where results go. Made anew each time, so that it follows a redirected stdout."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def errors() -> Console:
    """Where problems and progress go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def show_error(text: str) -> None:
    """One line on stderr, as it is: no markup is read out of it."""
    errors().print(f"baton: {text}", style="red", markup=False)
