"""The bounds of what prefill and decode are told."""

from __future__ import annotations

import pytest

from baton.config import ConfigError, load_config
from baton.engine.golden_check import (
    FORCED_TOKENS,
    OWN_PROMPT_TOKENS,
    REFERENCES,
    read_reference,
)
from baton.worker.config import WorkerConfig

NEEDED = ("--worker-id=w", "--model=m", "--kvstore=here:1")


def loaded(context_max: int) -> WorkerConfig:
    """A configuration with this limit."""
    argv = (*NEEDED, f"--context-max={context_max}")
    return load_config(WorkerConfig, "decode", argv, {})


def test_every_context_that_may_be_set_holds_the_golden_check() -> None:
    """A worker with less would fail its own start, with words about positions."""
    wanted = [OWN_PROMPT_TOKENS + FORCED_TOKENS]
    for path in REFERENCES.glob("*.npz"):
        reference = read_reference(path)
        wanted.append(len(reference.prompt_ids) + len(reference.forced_ids))
    assert loaded(32).context_max == 32
    for tokens in (16, max(wanted) - 1):
        with pytest.raises(ConfigError):
            loaded(tokens)
