"""Simulated runs log for thousands of simulated hours: only what is an error is shown."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """The services' own warnings are expected here."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture
def leftovers() -> Iterator[None]:
    """For runs that stop in their middle: their coroutines go here, not in the next test, which
    would be blamed for them.
    """
    yield
    gc.collect()
