"""One kvstore process for the tests that do not kill it; fresh connections for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.kvstore.harness import (
    Model,
    Site,
    StoreProcess,
    connected,
    running_store,
    tiny_model,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A running kvstore with a short lease."""
    directory: Path = tmp_path_factory.mktemp("kvstore")
    with running_store(model, directory, "--lease-s", "2") as running:
        yield running


@pytest.fixture
async def site(store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(store) as one:
        yield one
