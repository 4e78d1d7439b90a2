"""What a worker says of its memory, and that steps take none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.golden_check import GoldenCheck, own_reference
from baton.engine.kernel_golden import KernelPath
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import GQA_TIED, write_directory
from baton.worker.kernel_engine import CheckedKernel, KernelEngine
from baton.worker.memory import headroom_bytes, resident_bytes, state_memory, weight_bytes
from tests.unit.step_kernel.kernels import require_library

PAGES = 64
STEPS = 10_000


def checked_kernel(path: Path, pages: KvPages) -> CheckedKernel:
    options = KernelOptions(weight_mode=WeightMode.FLOAT32, batch_max=8)
    kernel = StepKernel(path, pages, options)
    reference = own_reference((), kernel.config.vocabulary)
    return CheckedKernel(kernel, GoldenCheck(KernelPath(kernel, reference), reference))


def test_resident_memory_is_without_what_is_shared(tmp_path: Path) -> None:
    """The arena is counted at the kvstore, once."""
    statm = tmp_path / "statm"
    statm.write_text("1000 300 100 5 0 200 0\n")
    assert resident_bytes(statm) == 200 * 4096
    assert resident_bytes() > 1 << 20


def test_headroom_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    """A container's limit counts where it is less than the machine's memory; no word, no number."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\n")
    absent = tmp_path / "absent"
    assert headroom_bytes(meminfo, absent) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert headroom_bytes(meminfo, tmp_path) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert headroom_bytes(meminfo, tmp_path) == 5000 * 1024
    assert headroom_bytes(absent, absent) is None


def test_the_budget_names_every_part(tmp_path: Path) -> None:
    """Weights of both paths, the kernel's buffers, the arena, what is left."""
    require_library()
    path = write_directory(tmp_path / "model", GQA_TIED)
    weights = load_weights(path, ComputeDtype.FLOAT32)
    pages = KvPages.allocate(weights.config.kv_geometry(16, KvDtype.F32), PAGES)
    checked = checked_kernel(path, pages)

    class Shape:
        page_count = PAGES
        slot_bytes = pages.geometry.slot_bytes

    class Arena:
        shape = Shape

    arena: Any = Arena
    budget = state_memory(weights, checked, arena)
    assert budget.torch_weights == weight_bytes(weights) > 0
    assert budget.kernel_weights > 0
    assert budget.kernel_buffers > 0
    assert budget.arena == PAGES * pages.geometry.slot_bytes
    assert budget.headroom is not None
    checked.kernel.close()


@pytest.mark.more
def test_ten_thousand_steps_take_no_memory(tmp_path: Path) -> None:
    """Resident memory stays within one percent, whatever the batch, the context, and a golden check
    between the steps.
    """
    require_library()
    path = write_directory(tmp_path / "model", GQA_TIED)
    weights = load_weights(path, ComputeDtype.FLOAT32)
    pages = KvPages.allocate(weights.config.kv_geometry(16, KvDtype.F32), PAGES)
    checked = checked_kernel(path, pages)
    engine = KernelEngine(Transformer(weights, pages), checked)
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(8)]
    random = np.random.default_rng(4)

    def steps(count: int) -> None:
        for number in range(count):
            batch = 1 + number % 8
            positions = random.integers(0, 128, batch).tolist()
            tokens = random.integers(0, 256, batch).tolist()
            engine.decode_step(tokens, positions, tables[:batch])
            if number % 500 == 0:
                assert engine.checks[0].run().is_passed

    steps(1000)
    before = resident_bytes()
    steps(STEPS)
    assert abs(resident_bytes() - before) <= 0.01 * before
    checked.kernel.close()
