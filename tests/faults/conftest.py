"""One drilled cluster for the tests here: two decode workers, fault points enabled."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, drill_on, drilled_cluster


@pytest.fixture(scope="session")
def two_decodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill worker, two decode workers, each with a slot for all that the other had."""
    # Children copy the environment when they start.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "BATON_DECODE_ACTIVE_SEQUENCES_MAX", "64")
        with drilled_cluster(tmp_path_factory.mktemp("drill"), "--decode", "2") as cluster:
            yield cluster


@pytest.fixture
async def drill(two_decodes: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster, whole and at rest before and after."""
    async with drill_on(two_decodes) as drill:
        yield drill


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drills kill and freeze real processes for minutes: they belong to `make test-more`."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.more)
