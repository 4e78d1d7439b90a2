"""Clusters that the end-to-end tests share: one in float32 (class exact), one in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton import models
from baton.errors import ServiceError
from baton.testing.cluster import RunningCluster, running_cluster

GOLDEN = Path(__file__).parent.parent / "oracle" / "golden_float32.json"


def _require_model() -> None:
    try:
        models.locate("smollm2")
    except ServiceError as problem:
        pytest.skip(f"the bundled model is not cached: {problem.message}")


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, Any]]:
    """Greedy outputs of transformers in float32; tests/oracle/make_golden.py wrote them."""
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return cases


@pytest.fixture(scope="session")
def bundled_model() -> None:
    """Skips where the bundled model is not there."""
    _require_model()


@pytest.fixture(scope="session")
def cluster_f32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Prefill and decode apart, float32."""
    _require_model()
    run_dir = tmp_path_factory.mktemp("cluster-f32")
    with running_cluster(run_dir, "--dtype", "float32") as cluster:
        yield cluster


@pytest.fixture
def client_f32(cluster_f32: RunningCluster) -> Iterator[httpx.Client]:
    """An HTTP client of the float32 cluster."""
    with httpx.Client(base_url=cluster_f32.url, timeout=120.0, trust_env=False) as client:
        yield client
