"""The cluster of docker-compose.yml on a real container engine.

The script does everything and prints the time of each step; this makes it part of `make test-more`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500.0
"""A first run makes a base image and two images with torch in one of them."""


def can_have_engine() -> bool:
    """Root can start an engine; others need one that runs."""
    if os.geteuid() == 0 or os.environ.get("DOCKER_HOST"):
        return True
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run(
            [docker, "info"], check=False, timeout=20, capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.more
@pytest.mark.cluster
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_cluster_lives_through_its_day(capfd: pytest.CaptureFixture[str]) -> None:
    """Up, chat, scale, a killed worker, a Redis restart, down: as a user would."""
    if not can_have_engine():
        pytest.skip("NOT RUN: compose on a real engine needs root or a running engine")
    with capfd.disabled():
        sys.stdout.write("\n")
        ran = subprocess.run(
            [str(ROOT / "scripts/compose_test.sh")],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        sys.stdout.write(ran.stdout)
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED")]
    if skipped:
        pytest.skip(skipped[0])
    assert ran.returncode == 0
