"""Running the command line inside the test process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from baton.cli.main import main
from tests.unit.cli.fake_gateway import FakeGateway, serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one command left behind."""

    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """A stdin that is a terminal; tests replace `input` beside it."""

    def isatty(self) -> bool:
        """Yes."""
        return True


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `baton ARGUMENTS` with `stdin`, as the console script does."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run_command(*arguments: str, stdin: str = "", is_terminal: bool = False) -> Ran:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        monkeypatch.setattr(sys, "stdin", Terminal() if is_terminal else io.StringIO(stdin))
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        captured = capsys.readouterr()
        return Ran(code=code, out=captured.out, err=captured.err)

    return run_command


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A fake gateway over a real socket."""
    with serving() as fake:
        yield fake
