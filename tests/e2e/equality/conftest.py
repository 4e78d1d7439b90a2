"""The two nodes of the equality matrix, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.equality.nodes import two_nodes
from tests.integration.workers.harness import Direct, Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two nodes and a merger."""
    with two_nodes(tmp_path_factory.mktemp("equality")) as running:
        yield running


@pytest.fixture(scope="session")
def direct(processes: Processes) -> Direct:
    """The same model in this process: what a fresh computation answers."""
    return Direct(processes.addresses.model)
