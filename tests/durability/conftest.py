"""What the durability tests share: a line past the capture, a directory in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.durability.report import Tell, fast_directory


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Prints the group's count."""
    return Tell(capsys)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """As tmp_path, in memory."""
    path = fast_directory()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of recoveries report torn tails; what they report is asserted, not read."""
    with structlog.testing.capture_logs():
        yield
