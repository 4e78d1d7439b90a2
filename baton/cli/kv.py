"""`baton kv`: kvstores and their files, for operators.

Owns the group and `verify`. Never does: read a log; the kvstore's own code does, in a process of
its own, and its exit code is handed on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import kv_files, kv_look, kv_usage

VERIFY_MODULE = "services.kvstore.verify"

EPILOG = (
    "Exit codes: 0 done, 1 refused or failed, 2 wrong command line, 3 no kvstore answers, "
    "130 interrupted."
)

app = typer.Typer(no_args_is_help=True, help="Look into kvstores, and at their files.")


@app.callback()
def _root() -> None:
    """Look into kvstores, and at their files."""


@app.command(
    epilog="Exit codes: 0 fine, 1 cannot be read, 2 wrong command line, 4 torn tail, 5 damage."
)
def verify(
    directory: Annotated[Path, typer.Argument(help="The kvstore's --log-dir, or a copy of it.")],
    is_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a log directory: segments, records, logs, torn tails, damage. Changes nothing.

    Example: baton kv verify ~/.baton/log
    """
    argv = [sys.executable, "-m", VERIFY_MODULE, str(directory), *(["--json"] * is_json)]
    raise typer.Exit(subprocess.run(argv, check=False).returncode)


for _name, _command in (
    ("ls", kv_look.ls),
    ("show", kv_look.show),
    ("lineage", kv_look.lineage),
    ("du", kv_usage.du),
    ("evict", kv_files.evict),
    ("export", kv_files.export),
    ("import", kv_files.import_),
):
    app.command(_name, epilog=EPILOG)(_command)
