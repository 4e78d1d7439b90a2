"""`baton models`: what is shown; fetching itself is tested with `baton.models`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from baton import models
from baton.cli.models import PullProgress
from tests.unit.cli.conftest import Run


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it."""
    monkeypatch.setenv("BATON_MODELS_DIR", str(tmp_path))
    return tmp_path


def test_list_says_what_is_not_fetched(run: Run, empty_cache: Path) -> None:
    """As a table and as JSON."""
    assert "not fetched" in run("models", "list").out
    rows = json.loads(run("models", "list", "--json").out)
    assert [row["state"] for row in rows] == ["not fetched"] * len(models.KNOWN_MODELS)


def test_list_tells_a_cut_off_file(run: Run, empty_cache: Path) -> None:
    """A wrong size is told without reading the file."""
    (empty_cache / models.KNOWN_MODELS[0].file_name).write_bytes(b"GGUF")
    assert json.loads(run("models", "list", "--json").out)[0]["state"].startswith("damaged")


def test_verify_without_a_file_says_how_to_fetch_it(run: Run, empty_cache: Path) -> None:
    """One line, exit code 1."""
    ran = run("models", "verify", "smollm2")
    assert ran.code == 1
    assert "baton models pull smollm2" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", ["pull", "verify"])
def test_an_unknown_model_names_the_known_ones(run: Run, command: str) -> None:
    """A typo is not a network problem."""
    ran = run("models", command, "smollm3")
    assert ran.code == 1
    assert "smollm2" in ran.err


def test_the_bar_begins_anew_with_each_phase() -> None:
    """A pull counts twice: the download, then unpacking."""
    bar = Progress(console=Console(file=io.StringIO()))
    progress = PullProgress(bar)
    for done in (0, 50, 100):
        progress(done, 100)
    for done in (40, 80):
        progress(done, 80)
    seen = [(task.description, task.completed, task.total) for task in bar.tasks]
    assert seen == [("downloading", 100, 100), ("unpacking", 80, 80)]
