"""Counts that the groups here print, also where pytest captures what tests write."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest


class Tell:
    """Writes a line past pytest's capture."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, line: str) -> None:
        with self._capture.disabled():
            sys.stdout.write(f"\n{line}\n")
            sys.stdout.flush()


def fast_directory() -> Path:
    """A directory in memory, if there is such: these tests make thousands of small files."""
    memory = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
    return Path(mkdtemp(prefix="baton-d-", dir=memory if os.access(memory, os.W_OK) else None))
