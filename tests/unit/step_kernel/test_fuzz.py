"""The C interface under AddressSanitizer and UndefinedBehaviorSanitizer, with tables by seed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"
BUILD_TIMEOUT_S = 900
STEPS = 60


def run(*command: str, timeout_s: float = BUILD_TIMEOUT_S) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.more
@pytest.mark.timeout(BUILD_TIMEOUT_S + 300)
def test_wrong_page_tables_never_leave_the_pages(tmp_path):
    """Every instruction set, weight kind and KV type; wrong numbers end in an error code."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("THE SANITIZERS DID NOT RUN: no CMake or no C++ compiler")
    build = str(tmp_path / "build")
    run("cmake", "-S", str(NATIVE), "-B", build, "-DBATON_SANITIZE=ON", "-DBATON_FUZZ=ON")
    run("cmake", "--build", build, "--parallel", "2")
    for seed in (1, 2):
        said = run(f"{build}/fuzz_step", str(STEPS), str(seed), timeout_s=120)
        assert "no fault" in said
