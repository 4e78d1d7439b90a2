"""One set of processes for all worker tests; a fresh gateway for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.workers.harness import (
    Addresses,
    Direct,
    Gateway,
    gateway_to,
    running_workers,
)


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The running processes."""
    run_dir: Path = tmp_path_factory.mktemp("workers")
    with running_workers(run_dir) as running:
        yield running.addresses


@pytest.fixture(scope="session")
def direct(addresses: Addresses) -> Direct:
    """The same model in this process."""
    return Direct(addresses.model)


@pytest.fixture
async def gateway(addresses: Addresses, direct: Direct) -> AsyncIterator[Gateway]:
    """A gateway's side."""
    async with gateway_to(addresses, direct) as side:
        yield side
