"""W-golden: directories written by the first version of the format read as they did, for ever.

The files of tests/data/log are committed byte for byte: left by a clean stop, by a kill, by a power
cut, and with a flipped bit. What a start said of them when they were written stands beside them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.data.log.make_golden import told
from tests.durability.engine import start

GOLDEN: Final = Path(__file__).parents[1] / "data" / "log"
FOLDERS: Final = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_committed_log_reads_as_it_did(folder: Path, memory_path: Path) -> None:
    """Logs, tokens, generations, what is damaged: a later reader says the same."""
    expected = json.loads((folder.parent / "expected.json").read_text("utf-8"))
    shutil.copytree(folder, memory_path, dirs_exist_ok=True)
    assert told(start(memory_path)) == expected[folder.name]


def test_golden_logs_are_there() -> None:
    """A clean one, a killed one, a torn one and a damaged one, of every version."""
    names = {path.name for path in FOLDERS}
    assert names == {"clean", "killed", "torn", "damaged"}
