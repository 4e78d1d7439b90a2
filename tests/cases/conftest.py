"""Clusters that the replayed field reports share: a calm one, and one whose parts are broken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from baton import models
from baton.errors import ServiceError
from baton.faults.switchboard import ENABLED_VARIABLE
from baton.testing.cluster import RunningCluster, running_cluster
from tests.cases.replay import TENANTS, Replay

CRAMPED_BYTES: Final = 48 << 20


def tenants_file(folder: Path) -> str:
    """A file of two tenants for a new cluster; skips where the bundled model is not cached."""
    try:
        models.locate("smollm2")
    except ServiceError as problem:
        pytest.skip(f"the bundled model is not cached: {problem.message}")
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="session")
def calm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One worker of each kind, float32, two tenants; nobody breaks anything here."""
    folder = tmp_path_factory.mktemp("cases-calm")
    flags = ("--dtype", "float32", "--tenants-file", tenants_file(folder))
    with running_cluster(folder / "run", *flags) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def drill_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two decode workers, float32, two tenants, fault points enabled and none armed."""
    folder = tmp_path_factory.mktemp("cases-drill")
    shape = ("--dtype", "float32", "--decode", "2")
    flags = (*shape, "--tenants-file", tenants_file(folder))
    with cluster_with_faults(folder, flags) as cluster:
        yield cluster


@contextlib.contextmanager
def cluster_with_faults(folder: Path, flags: Sequence[str]) -> Iterator[RunningCluster]:
    """A cluster whose parts take orders to fail."""
    before = os.environ.get(ENABLED_VARIABLE)
    # The session fixture outlives any monkeypatch; children copy the environment when they start.
    os.environ[ENABLED_VARIABLE] = "1"
    try:
        with running_cluster(folder / "run", *flags) as cluster:
            yield cluster
    finally:
        if before is None:
            os.environ.pop(ENABLED_VARIABLE, None)
        else:
            os.environ[ENABLED_VARIABLE] = before


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[Replay]:
    """A cluster of its own with room for about 1,100 tokens of KV in all, nothing on disk."""
    memory = ("--dtype", "float32", "--arena-bytes", str(CRAMPED_BYTES), "--nvme-bytes", "0")
    with cluster_with_faults(tmp_path, (*memory, "--tenants-file", tenants_file(tmp_path))) as one:
        replay = Replay(one)
        replay.is_whole(60.0)
        yield replay


@pytest.fixture
def calm(calm_cluster: RunningCluster) -> Iterator[Replay]:
    """The calm cluster; a case that leaves something held there fails."""
    replay = Replay(calm_cluster)
    yield replay
    replay.settles()


@pytest.fixture
def drill(drill_cluster: RunningCluster) -> Iterator[Replay]:
    """The cluster whose parts die; whole again before and after each case."""
    replay = Replay(drill_cluster)
    replay.is_whole(60.0)
    yield replay
    replay.is_whole(60.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Field reports run on shared clusters for minutes: they belong to `make test-more`."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.more)
