"""What every test shares: a clean environment, repeatable properties, skips for absent hardware.

Owns: process-wide test settings. Never starts a service or loads a model.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

# Kept through the clean-up below: where models lie is a fact of the machine, not of a test.
MACHINE_VARIABLES = frozenset({"BATON_MODELS_DIR"})

# Shared cores make per-example deadlines flaky; a gate must find the same examples every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gate" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No BATON_* variable of the person running the tests changes what a test sees."""
    for name in list(os.environ):
        if name.startswith("BATON_") and name not in MACHINE_VARIABLES:
            monkeypatch.delenv(name)


def has_cuda() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; torch is only imported when one is selected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
