"""`baton tune chunk` on a real cluster of a tiny model, and `baton up` with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.testing.cluster import running_cluster
from baton.testing.tiny_models import write_directory
from baton.worker.chunk_profile import read_profile
from tests.e2e.test_commands import baton

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(240)]


def test_a_measured_profile_is_loaded_by_up(tmp_path: Path) -> None:
    """Two sizes are measured with a stream beside, the curve is printed, the profile written; a
    cluster in its run directory takes the size and says so.
    """
    model, run_dir = write_directory(tmp_path / "tiny"), tmp_path / "run"
    path = run_dir / "chunk-profile.json"
    common = ("--model", str(model), "--dtype", "float32")
    done = baton(
        *("tune", "chunk", *common, "--sizes", "16,64", "--rounds", "4", "--quiet-s", "0.1"),
        *("--prompt-tokens", "200", "--out", str(path)),
    )
    assert done.returncode == 0, done.stderr
    profile = read_profile(path)
    found = profile.roles["prefill"]
    assert [point.chunk_tokens for point in found.curve] == [16, 64]
    assert all(point.first_token_ms > 0 and point.gap_ms > 0 for point in found.curve)
    assert found.chunk_tokens in (16, 64)
    assert f"{found.chunk_tokens} tokens: " in done.stdout
    assert "<- chosen" in done.stdout
    assert f"written to {path}" in done.stdout
    with running_cluster(run_dir, *common) as cluster:
        (line,) = [
            json.loads(line)
            for line in cluster.log("prefill-0").splitlines()
            if "chunk_profile_loaded" in line
        ]
        assert line["chunk_tokens"] == found.chunk_tokens
