"""One drilled cluster for the tests here: two decode workers, fault points enabled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, drill_on, drilled_cluster


@pytest.fixture(scope="session")
def two_decodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill worker, two decode workers."""
    with drilled_cluster(tmp_path_factory.mktemp("drill"), "--decode", "2") as cluster:
        yield cluster


@pytest.fixture
async def drill(two_decodes: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster, whole and at rest before and after."""
    async with drill_on(two_decodes) as drill:
        yield drill
