"""The lab of the namespace tests: one model, one network; skips loudly where it cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kvstore.harness import Model
from tests.netns.lab import Network, NodeStore, kv_model, missing_tools, network, node


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny model with real amounts of KV."""
    return kv_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def lab() -> Iterator[Network]:
    """Two namespaces and their links."""
    why = missing_tools()
    if why is not None:
        pytest.skip(f"NOT RUN, two kvstores in two network namespaces: {why}")
    with network() as net:
        yield net


@pytest.fixture(scope="module")
def stores(
    model: Model, lab: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeStore, NodeStore]]:
    """A kvstore in each; tests that crash one start it again."""
    folders: list[Path] = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
    with node(model, folders[0], lab, "a") as old, node(model, folders[1], lab, "b") as new:
        yield old, new
