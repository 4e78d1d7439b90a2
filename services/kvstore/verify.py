"""`python -m services.kvstore.verify DIR`: checks a log directory, offline, and changes nothing.

Owns the command's arguments, exit codes and the question whether a kvstore is running there. Never
writes, and takes no lock: it may look at a directory that is in use.

Exit codes: 0 fine, 1 the directory cannot be read, 2 wrong command line, 4 a torn tail that the
next start cuts off, 5 damage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

from services.kvstore.log.reader import read_directory
from services.kvstore.log.recovery import recover
from services.kvstore.log.verify import State, data_of, lines_of, report_of

LOCK_FILE: Final = "lock"
LOCKS: Final = Path("/proc/locks")


class Exit(IntEnum):
    """What the process leaves with."""

    FINE = 0
    UNREADABLE = 1
    TORN = 4
    DAMAGED = 5


_EXITS: Final = {State.FINE: Exit.FINE, State.TORN: Exit.TORN, State.DAMAGED: Exit.DAMAGED}


def is_in_use(directory: Path, locks: Path = LOCKS) -> bool | None:
    """Whether a running kvstore holds the directory's lock; None where that cannot be known.

    The lock is looked up, not tried: trying it would refuse a kvstore that starts at this moment.
    """
    try:
        status = (directory / LOCK_FILE).stat()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = locks.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    return any("FLOCK" in line and place in line.split() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="baton kv verify",
        description="Check a kvstore's log directory. Nothing is changed.",
        epilog="exit codes: 0 fine, 1 cannot be read, 4 torn tail, 5 damage",
    )
    parser.add_argument("directory", type=Path, help="the kvstore's --log-dir, or a copy of it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    try:
        is_live = is_in_use(directory)
        scan = read_directory(directory)
    except OSError as error:
        why = error.strerror or error
        sys.stderr.write(f"{directory} cannot be read: {why}. Give a kvstore's --log-dir\n")
        return Exit.UNREADABLE
    report = report_of(str(directory), scan, recover(scan), is_live=is_live)
    text = json.dumps(data_of(report), indent=2) if options.json else "\n".join(lines_of(report))
    sys.stdout.write(text + "\n")
    return _EXITS[report.state]


if __name__ == "__main__":
    sys.exit(main())
