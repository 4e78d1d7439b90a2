"""`baton models`: fetch, list and verify model files.

Owns: progress and tables. Never does: download or hash (that is `baton.models`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from baton import models
from baton.cli.console import CommandFailed, ExitCode, errors, output

BUNDLED = "smollm2"

app = typer.Typer(no_args_is_help=True, help="Fetch, list and verify model files.")


class PullProgress:
    """A progress bar over the phases of a pull: the counts begin anew when a phase begins."""

    PHASES = ("downloading", "unpacking")

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._phase = 0
        self._done_bytes = 0
        self._task: TaskID | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes done in this phase, of how many."""
        if self._task is not None and done_bytes < self._done_bytes:
            self._phase = min(self._phase + 1, len(self.PHASES) - 1)
            self._task = None
        self._done_bytes = done_bytes
        if self._task is None:
            self._task = self._bar.add_task(self.PHASES[self._phase], total=total_bytes)
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)


def pull_with_progress(name: str) -> Path:
    """Fetch a known model with a bar on stderr; instant and silent when it is here, intact."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # Without a terminal a bar would be pages of lines: one line per phase says enough.
    with Progress(*columns, console=errors(), transient=True) as bar:
        return models.pull(name, PullProgress(bar))


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A known model; `baton models list` shows them.")],
) -> None:
    """Fetch a known model into the cache and check its SHA-256.

    Example: baton models pull smollm2
    """
    path = pull_with_progress(name)
    known = models.find_known(name)
    assert known is not None, "pull refuses names that are not known"
    output().print(f"{known.name}: {path} (SHA-256 {known.sha256[:16]}… as recorded)", markup=False)


def _row(status: models.ModelStatus) -> dict[str, Any]:
    if status.present_bytes is None:
        state = "not fetched"
    else:
        state = "ready" if status.is_complete else "damaged: pull it again"
    return {
        "name": status.model.name,
        "aliases": list(status.model.aliases),
        "state": state,
        "bytes": status.model.file_bytes,
        "license": status.model.license,
        "path": str(status.path),
    }


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the known models and whether they are here.

    Example: baton models list --json
    """
    rows = [_row(status) for status in models.list_models()]
    if as_json:
        output().print(json.dumps(rows, indent=2, ensure_ascii=False), markup=False)
        return
    table = Table("name", "alias", "state", "size", "license", box=None, pad_edge=False)
    # A path is there to be copied: it is folded rather than cut.
    table.add_column("path", overflow="fold")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.0f} MB"
        alias = ", ".join(row["aliases"])
        table.add_row(row["name"], alias, row["state"], size, row["license"], row["path"])
    output().print(table)


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="A known name, or the path of a model.")] = BUNDLED,
) -> None:
    """Read every byte of a model and compare it with what is recorded.

    Example: baton models verify smollm2
    """
    if not name.strip():
        raise CommandFailed("the name is empty", exit_code=ExitCode.USAGE)
    models.verify(name)
    files = models.resolve(name)
    what = "SHA-256 as recorded" if files.known else "structure as it should be, no SHA-256 known"
    output().print(f"{files.name}: {what} ({files.path})", markup=False)
