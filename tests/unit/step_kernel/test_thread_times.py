"""The measurement behind the doctor's advice, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton.testing.tiny_models import GQA_TIED, write_directory
from tests.unit.step_kernel.kernels import require_library


@pytest.mark.more
def test_one_and_two_threads_are_measured_alone_and_beside_a_busy_process(tmp_path):
    """In a child, as the doctor runs it; a few seconds, whatever the machine does."""
    require_library()
    path = write_directory(tmp_path / "model", GQA_TIED)
    done = subprocess.run(
        [sys.executable, "-m", "baton.engine.thread_times", str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["cpus"] >= 1
    for where in ("alone", "beside"):
        for threads in ("1", "2"):
            assert found[where][threads]["steps"] >= 15
            assert found[where][threads]["p99_ms"] >= found[where][threads]["p50_ms"] > 0.0
