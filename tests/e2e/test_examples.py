"""The examples in the repository run as they stand, against the running cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from baton.testing.cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    """Run an example to its end; its output."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_grpc_example_needs_nothing_but_stubs(cluster_f32: RunningCluster) -> None:
    """It generates, describes, fetches and stores a blob; the bytes come back equal."""
    source = (EXAMPLES / "grpc_client.py").read_text(encoding="utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    ours = [line for line in imports if "baton" in line or "services" in line]
    assert ours
    assert all("baton.api." in line for line in ours), ours
    told = run("grpc_client.py", cluster_f32.grpc_address)
    assert "bytes equal: True" in told


def test_the_openai_example_runs(cluster_f32: RunningCluster) -> None:
    """Streaming and not, with the official client."""
    assert run("openai_client.py", cluster_f32.url).strip()


def test_the_documented_curl_works(cluster_f32: RunningCluster) -> None:
    """What README shows is a valid request."""
    body = (
        '{"model": "smollm2", "stream": true, "max_tokens": 100, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    answer = httpx.post(
        f"{cluster_f32.url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=60.0,
        trust_env=False,
    )
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
