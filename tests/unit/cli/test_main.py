"""The `baton` command as a whole."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
import typer

from baton.cli import main as cli
from tests.unit.cli.conftest import Run

COMMANDS = (
    ["up"], ["down"], ["demo"],
    ["chat"], ["doctor"], ["health"], ["version"], ["models", "pull"], ["models", "list"],
    ["models", "verify"], ["prefix", "publish"], ["prefix", "list"], ["prefix", "delete"],
    ["session", "ls"], ["session", "show"], ["session", "edit"], ["session", "fork"],
    ["session", "truncate"], ["session", "rm"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_shows_an_example(run: Run, command: list[str]) -> None:
    """A usage line alone teaches nobody."""
    ran = run(*command, "--help")
    assert ran.code == 0
    assert "Example: " in ran.out


def test_version_is_one_line(run: Run) -> None:
    """Both ways to ask."""
    assert run("version").out == run("--version").out
    assert run("version").out.count("\n") == 1


def test_an_unknown_command_is_a_wrong_command_line(run: Run) -> None:
    """2, as everywhere."""
    assert run("frobnicate").code == 2


def test_a_service_adds_a_command_by_entry_point() -> None:
    """A function becomes a command, a Typer a group."""
    app = typer.Typer()
    entry = EntryPoint(name="extra", value="baton.cli.main:show_version", group="baton.cli")
    assert cli.add_entry_points(app, [entry]) == []
    assert [command.name for command in app.registered_commands] == ["extra"]
    group = EntryPoint(name="more", value="baton.cli.prefix:app", group="baton.cli")
    assert cli.add_entry_points(app, [group]) == []
    assert [group.name for group in app.registered_groups] == ["more"]


def test_a_broken_entry_point_is_named_and_the_rest_still_works() -> None:
    """One bad plug-in does not take the command line down, nor is it hidden."""
    entry = EntryPoint(name="bad", value="baton.cli.nowhere:command", group="baton.cli")
    problems = cli.add_entry_points(typer.Typer(), [entry])
    assert len(problems) == 1
    assert "'bad'" in problems[0]


def test_doctor_reports_as_json(run: Run) -> None:
    """A program can read every check, and the exit code says the same as `ok`."""
    ran = run("doctor", "--quick", "--json")
    report = json.loads(ran.out)
    assert report["ok"] is (ran.code == 0)
    names = {check["name"] for check in report["checks"]}
    assert {"python", "grpcio", "numpy", "port 8080", "shared memory", "open files"} <= names
    assert {"compiler", "transport shm", "transport stream", "transport ucx"} <= names
    assert {"model smollm2", "capability key", "bind addresses"} <= names


def test_doctor_fails_for_an_arena_that_cannot_fit(run: Run) -> None:
    """With a remedy below the line."""
    ran = run("doctor", "--quick", "--arena-mib", "1000000000")
    assert ran.code == 1
    assert "shared memory" in ran.out
    assert "-> " in ran.out
