"""The step kernel at a worker's start: used when it passes its check, and what is said when not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine import step_kernel
from baton.engine.golden_check import GoldenCheck, GoldenReference, TorchPath, own_reference
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel_abi import load
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.errors import StartupError
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory
from baton.worker.kernel_choice import KernelChoice, KernelWish
from baton.worker.kernel_engine import KernelEngine, open_kernel
from tests.unit.step_kernel.kernels import require_library

AUTO = KernelWish(choice=KernelChoice.AUTO)
NATIVE = KernelWish(choice=KernelChoice.NATIVE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_library()
    return write_directory(tmp_path_factory.mktemp("model"), GQA_TIED)


@pytest.fixture(scope="module")
def transformer(path: Path) -> Transformer:
    weights = load_weights(path, ComputeDtype.FLOAT32)
    return Transformer(weights, KvPages.allocate(weights.config.kv_geometry(16, KvDtype.F32), 8))


@pytest.fixture(scope="module")
def reference(transformer: Transformer) -> GoldenReference:
    """What torch computes, as if it had been shipped."""
    own = own_reference((), transformer.config.vocabulary)
    found = [s for s in TorchPath(transformer, own).slices(own) if s is not None]
    return replace(own, sketches=np.stack(found))


def opened(
    path: Path, transformer: Transformer, reference: GoldenReference, wish: KernelWish
) -> Any:
    return open_kernel(path, transformer.pages.geometry, reference, wish, None)


def test_a_kernel_that_passes_computes_the_steps(path, transformer, reference) -> None:
    """And torch the chunks; each of the two has its check."""
    found = opened(path, transformer, reference, AUTO)
    assert not found.has_failed
    check = GoldenCheck(TorchPath(transformer, reference), reference)
    engine = KernelEngine(transformer, found.checked, check)
    assert engine.steps_by == "native"
    assert [one.path.name for one in engine.checks] == ["native", "torch"]
    assert all(one.run().is_passed for one in engine.checks)
    native = engine.decode_step([5], [0], [[0]])
    numeric_class = engine.fall_back()
    assert (engine.steps_by, len(engine.checks)) == ("torch", 1)
    assert numeric_class.text == transformer.numeric_class()
    np.testing.assert_allclose(engine.decode_step([5], [0], [[0]]), native, rtol=1e-4, atol=1e-4)
    assert engine.fall_back() == numeric_class


def test_a_kernel_that_fails_at_the_start_leaves_a_degraded_worker(
    path, transformer, reference
) -> None:
    """Torch serves instead, and that is worth an alert."""
    assert reference.sketches is not None
    other = replace(reference, sketches=reference.sketches * np.float32(1.01))
    found = opened(path, transformer, other, AUTO)
    assert (found.checked, found.has_failed) == (None, True)
    with pytest.raises(StartupError, match="no native step kernel"):
        opened(path, transformer, other, NATIVE)


def test_no_library_is_no_degradation(path, transformer, reference, monkeypatch) -> None:
    """A machine without a compiler serves by torch from its first day on."""
    monkeypatch.setattr(step_kernel, "load", lambda: load(path=path / "absent.so"))
    found = opened(path, transformer, reference, AUTO)
    assert (found.checked, found.has_failed) == (None, False)


def test_one_damaged_byte_of_the_weights_is_seen(path, transformer, reference) -> None:
    """Any byte: low bits of a number too, whose effect is far below the bound of a class."""
    found = opened(path, transformer, reference, AUTO).checked
    view = found.check.path.weights_view()
    random = np.random.default_rng(8)
    missed = 0
    for _ in range(12):
        # The lowest byte of a float32 may vanish in the rounding of a sum; the others do not.
        offset = int(random.integers(0, len(view) // 4)) * 4 + int(random.integers(1, 4))
        before = view[offset]
        view[offset] = before ^ 0xFF
        missed += found.check.run().is_passed
        view[offset] = before
        assert found.check.run().is_passed
    # Every row of the embedding is seen as a row of the head; the padding of a tile is not.
    assert missed <= 2
    found.kernel.close()
