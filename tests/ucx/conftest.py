"""Where `ucxx` is: scripts/test_ucx.sh makes such a place. Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.kvstore.harness import Model, tiny_model
from tests.netns.lab import kv_model

collect_ignore_glob = [] if importlib.util.find_spec("ucxx") is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny model with real amounts of KV: 196,608 bytes a page."""
    return kv_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Pages of a few kilobytes, which UCX would send ahead unless told not to."""
    return tiny_model(tmp_path_factory.mktemp("small") / "tiny")
