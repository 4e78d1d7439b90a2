"""The step kernel over shuffled pages of random KV, and what memory allows.

Owns the kernels that are measured. Never compares.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from baton.engine.config import ModelConfig, read_config
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.engine.step_kernel_abi import Activation, load
from baton.kv.layout import KvDtype
from bench.decode_parts.cases import Case

BLOCK_TOKENS: Final = 16
CONTEXT_MAX: Final = 2048
PROMPT_TOKEN: Final = 500
READ_BYTES: Final = 512 << 20
READ_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to hold weights, by the name in the table."""

    name: str
    weights: WeightMode
    activation: Activation
    threads: int
    prefetch_pages: int = 1


class KernelRun:
    """A step kernel over shuffled pages of random KV."""

    def __init__(self, path: Path, mode: Mode, pages: int) -> None:
        self.config: ModelConfig = read_config(path)
        geometry = self.config.kv_geometry(BLOCK_TOKENS, KvDtype.BF16)
        self.mode = mode
        self.token_bytes = geometry.token_bytes
        store = KvPages.allocate(geometry, pages)
        for layer in range(geometry.layers):
            store.layer(layer).normal_()
        options = KernelOptions(
            weight_mode=mode.weights,
            activation=mode.activation,
            threads=mode.threads,
            prefetch_pages=mode.prefetch_pages,
            max_context=CONTEXT_MAX,
        )
        self.kernel = StepKernel(path, store, options)
        self.order = np.random.default_rng(0).permutation(pages).tolist()

    def case(self, context: int, batch: int) -> Case:
        """A case that steps `batch` sequences of `context` tokens."""
        per = context // BLOCK_TOKENS + 1
        tables = [self.order[index * per : (index + 1) * per] for index in range(batch)]
        tokens, positions = [PROMPT_TOKEN] * batch, [context] * batch
        shares: list[float] = []

        def step() -> float:
            began = time.perf_counter()
            self.kernel.decode_step(tokens, positions, tables)
            elapsed_s = time.perf_counter() - began
            native_s = self.kernel.take_profile()["total"] / 1e9
            shares.append(1.0 - native_s / elapsed_s)
            return elapsed_s * 1e3

        return Case(
            name=self.mode.name,
            context=context,
            batch=batch,
            step=step,
            floor_bytes=self.kernel.memory.weight_bytes + batch * context * self.token_bytes,
            threads=self.mode.threads,
            python_shares=shares,
        )


def read_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory, the best of a few passes."""
    ffi, library = load()
    data = np.ones(READ_BYTES, dtype=np.uint8)
    part = READ_BYTES // threads
    views = [ffi.from_buffer(data[index * part : (index + 1) * part]) for index in range(threads)]
    rates = []
    for _ in range(READ_ROUNDS):
        readers = [
            threading.Thread(target=library.bt_read_all, args=(view, part)) for view in views
        ]
        began = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        rates.append(part * threads / (time.perf_counter() - began))
    return max(rates)
