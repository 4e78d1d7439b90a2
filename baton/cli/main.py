"""The `baton` command and how its parts are found.

Owns: the list of built-in commands, the entry point group `baton.cli`, and turning an exception
into one line and an exit code. Never does: any command's work.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from baton.cli import chat, demo, doctor, health, kv, models, prefix, session, trace, tune, up
from baton.cli.console import CommandFailed, ExitCode, output, show_error
from baton.errors import ServiceError

DISTRIBUTION = "baton-serving"
ENTRY_POINT_GROUP = "baton.cli"

EPILOG = (
    "Exit codes: 0 done, 1 refused or failed, 2 wrong command line, 3 gateway unreachable, "
    "130 interrupted."
)


def version_text() -> str:
    """The installed version, or `unknown` in a tree that was never installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def show_version() -> None:
    """Print the version.

    Example: baton version
    """
    output().print(version_text(), markup=False)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        show_version()
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve large language models with prefill and decode apart.

    Example: baton models pull smollm2 && baton up
    """


def add(app: typer.Typer, name: str, command: typer.Typer | Callable[..., Any]) -> None:
    """Add a group of commands (a Typer) or one command (a function) under `name`."""
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, epilog=EPILOG)(command)


def add_entry_points(app: typer.Typer, found: Iterable[importlib.metadata.EntryPoint]) -> list[str]:
    """Add what services and other packages offer; returns one line for each that cannot load."""
    problems = []
    for entry in sorted(found, key=lambda entry: entry.name):
        try:
            add(app, entry.name, entry.load())
        except (ImportError, AttributeError) as problem:
            problems.append(f"the command '{entry.name}' ({entry.value}) is left out: {problem}")
    return problems


def build_app() -> typer.Typer:
    """The whole command line, built-in commands first."""
    app = typer.Typer(
        name="baton",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog=EPILOG,
    )
    app.callback()(_root)
    add(app, "up", up.up)
    add(app, "down", up.down)
    add(app, "demo", demo.demo)
    add(app, "chat", chat.chat)
    add(app, "models", models.app)
    add(app, "prefix", prefix.app)
    add(app, "session", session.app)
    add(app, "doctor", doctor.doctor)
    add(app, "health", health.health)
    add(app, "trace", trace.trace)
    add(app, "kv", kv.app)
    add(app, "tune", tune.app)
    add(app, "version", show_version)
    for problem in add_entry_points(app, importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        show_error(problem)
    return app


def main() -> None:
    """Entry point of the console script `baton`; leaves with an `ExitCode`."""
    try:
        build_app()()
    except CommandFailed as problem:
        show_error(problem.one_line())
        sys.exit(problem.exit_code)
    except ServiceError as problem:
        show_error(CommandFailed(problem.message).one_line())
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
