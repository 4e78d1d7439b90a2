"""Scrub's alerts fire for what they are for, and for nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("scrub_rules.yml")


def test_alerts_of_scrub_fire_when_they_should() -> None:
    """Prometheus itself evaluates them over series of its own."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("SKIPPED: promtool is not installed (Debian package prometheus)")
    checked = subprocess.run(
        [promtool, "test", "rules", CASES.name],
        cwd=CASES.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
