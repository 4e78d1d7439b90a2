"""The native step kernel: `Transformer.decode_step` at the speed of memory, over the same pages.

Owns one kernel instance: its weights, buffers and threads, all taken at the start and stated. It
reads and writes KV in the arena's own bytes and keeps nothing of a sequence between steps. It never
prefills: chunks are the torch path's. Not thread-safe: one thread calls it at a time, and the call
holds no GIL.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from baton.engine.config import ModelConfig
from baton.engine.kernel_weights import (
    KernelWeights,
    WeightMode,
    default_mode,
    kernel_numeric_class,
)
from baton.engine.kv_pages import KvPages
from baton.engine.rope import build_table
from baton.engine.step_kernel_abi import (
    BATCH_LIMIT,
    PHASES,
    THREADS_LIMIT,
    Activation,
    Error,
    Isa,
    load,
    resolved_isa,
    setup_error,
    step_error,
)
from baton.errors import Reason, ServiceError
from baton.kv.numeric import NumericClass

_SHAPE_FIELDS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "rotary_dim",
    "intermediate",
    "vocabulary",
)

_log = structlog.stdlib.get_logger("baton.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """How a kernel computes. `weight_mode` None: packed blocks where the model has them.

    `threads` counts the calling thread. `prefetch_pages` is how many pages ahead KV is fetched, 0
    is off. `max_context` None: the model's own.
    """

    weight_mode: WeightMode | None = None
    activation: Activation = Activation.INT16
    threads: int = 1
    batch_max: int = BATCH_LIMIT
    isa: Isa = Isa.AUTO
    prefetch_pages: int = 1
    max_context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """What an instance holds for its whole life, in bytes."""

    weight_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step. `best_tokens[i]` has sequence i's largest logit, the lowest id on ties.

    `slot_crcs[i]` is the CRC-32C of its new slot (`baton.kv.layout.slot_crc`). `logits` is float32
    [batch, vocabulary], None when not asked for.
    """

    best_tokens: tuple[int, ...]
    slot_crcs: tuple[int, ...]
    logits: NDArray[np.float32] | None


class StepKernel:
    """One model's native decode over one set of pages."""

    def __init__(self, path: Path, pages: KvPages, options: KernelOptions | None = None) -> None:
        """Load the model at `path` (.gguf or directory); takes all memory and starts the threads.

        Raises ServiceError UNSUPPORTED when there is no library, or the kernel cannot compute this
        model, KV type or weight mode; INVALID_REQUEST for a damaged model or a bad option.
        """
        options = options or KernelOptions()
        self._ffi, self._library = load()
        self._kernel: Any = None
        self._pages: KvPages | None = None
        weights, self._mode = _open_weights(path, options)
        self.config: ModelConfig = weights.config
        self._options = options
        self.max_context = _checked_context(self.config, options)
        self._class = kernel_numeric_class(
            self.config, self._mode, options.activation, pages.geometry.dtype
        )
        self._kernel = self._create(weights, pages)
        self._fill(weights)
        self.pages = pages
        self._check(self._library.bt_seal(self._kernel), "seal")
        self._crcs: tuple[int, ...] = ()
        self._batch_buffers()

    # --- what it is ---

    def numeric_class(self) -> str:
        """The numeric class text, as of `Transformer.numeric_class`."""
        return self._class.text

    @property
    def class_(self) -> NumericClass:
        """The numeric class."""
        return self._class

    @property
    def weight_mode(self) -> WeightMode:
        """How its matrices are kept."""
        return self._mode

    @property
    def activation(self) -> Activation:
        """What the inputs of integer matrices are rounded to."""
        return self._options.activation

    @property
    def threads(self) -> int:
        """Threads of a step, the calling one counted."""
        return self._options.threads

    @property
    def batch_max(self) -> int:
        """The most sequences of one step."""
        return self._options.batch_max

    @property
    def isa(self) -> Isa:
        """The instruction set in use."""
        return resolved_isa(self._options.isa)

    @property
    def memory(self) -> KernelMemory:
        """What it holds; constant from construction on."""
        use = self._ffi.new("bt_memory *")
        self._library.bt_memory_use(self._live(), use)
        return KernelMemory(weight_bytes=use.weight_bytes, buffer_bytes=use.buffer_bytes)

    def weight_bytes_view(self) -> memoryview:
        """The packed matrices, writable: for tests of what one damaged byte does."""
        size = self._ffi.new("uint64_t *")
        base = self._library.bt_weight_memory(self._live(), size)
        return memoryview(self._ffi.buffer(base, size[0]))

    @property
    def pages(self) -> KvPages:
        """The pages it computes over; assigning others takes effect with the next step."""
        assert self._pages is not None, "the kernel was closed"
        return self._pages

    @pages.setter
    def pages(self, pages: KvPages) -> None:
        geometry = self.config.kv_geometry(pages.geometry.block_tokens, pages.geometry.dtype)
        if geometry != pages.geometry or pages.geometry.block_tokens != self._block_tokens:
            raise ServiceError(
                Reason.COMPAT_MISMATCH,
                f"the pages are laid out as {pages.geometry}, the kernel needs {geometry} with "
                f"{self._block_tokens} tokens a page",
                field="kv_geometry",
            )
        base = self._ffi.cast("void *", pages.address)
        code = self._library.bt_set_pages(self._live(), base, geometry.slot_bytes, pages.page_count)
        self._check(code, "pages")
        self._pages = pages

    # --- computing ---

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """As `Transformer.decode_step`: float32 [batch, vocabulary], an array of the caller's own.

        Also keeps the checksums of the written slots; see `slot_crcs`.
        """
        result = self.step(tokens, positions, page_tables)
        assert result.logits is not None
        return result.logits

    def slot_crcs(self) -> tuple[int, ...]:
        """CRC-32C of each slot that the last step wrote, in the step's order."""
        return self._crcs

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        *,
        needs_logits: bool = True,
    ) -> StepResult:
        """One token for each of several sequences, with greedy tokens and checksums.

        `tokens[i]` stands at `positions[i]` of the sequence whose pages are `page_tables[i]`.
        Raises ServiceError INVALID_REQUEST naming the field; then nothing was written.
        """
        batch = len(tokens)
        assert batch == len(positions) == len(page_tables)
        if batch == 0 or batch > self._options.batch_max:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"a step takes 1 to {self._options.batch_max} sequences, got {batch}",
                field="tokens",
            )
        flat, ends = self._flat_tables(positions, page_tables)
        logits: NDArray[np.float32] | None = None
        if needs_logits:
            logits = np.empty((batch, self.config.vocabulary), dtype=np.float32)
        self._run(
            _numbers("i", tokens, "tokens"),
            _numbers("i", positions, "first_position"),
            flat,
            ends,
            logits,
        )
        self._crcs = tuple(self._slot_crcs[0:batch])
        return StepResult(
            best_tokens=tuple(self._best[0:batch]), slot_crcs=self._crcs, logits=logits
        )

    def take_profile(self) -> dict[str, int]:
        """Nanoseconds that the calling thread spent in each phase since the last call."""
        times = self._ffi.new("uint64_t[]", len(PHASES))
        self._library.bt_take_profile(self._live(), times)
        return dict(zip(PHASES, times, strict=True))

    def close(self) -> None:
        """End the threads and free all memory; the kernel is of no use afterwards, and refers to no
        pages.
        """
        if self._kernel is not None:
            self._ffi.release(self._kernel)
            self._kernel = None
            self._pages = None

    # --- inside ---

    def _live(self) -> Any:
        assert self._kernel is not None, "the kernel was closed"
        return self._kernel

    def _check(self, code: int, what: str) -> None:
        if code != Error.OK:
            raise setup_error(code, what)

    def _batch_buffers(self) -> None:
        self._best = self._ffi.new("int32_t[]", self._options.batch_max)
        self._slot_crcs = self._ffi.new("uint32_t[]", self._options.batch_max)
        self._culprit = self._ffi.new("uint32_t *")

    def _flat_tables(
        self, positions: Sequence[int], page_tables: Sequence[Sequence[int]]
    ) -> tuple[array[int], array[int]]:
        """The used part of every table, one after the other, and where each ends."""
        flat, ends = array("i"), array("I")
        try:
            for position, table in zip(positions, page_tables, strict=True):
                flat.extend(table[: max(position, 0) // self._block_tokens + 1])
                ends.append(len(flat))
        except OverflowError as error:
            raise ServiceError(
                Reason.INVALID_REQUEST, "a page number is out of range", field="page_table"
            ) from error
        return flat, ends

    def _run(
        self,
        tokens: array[int],
        positions: array[int],
        flat: array[int],
        ends: array[int],
        logits: NDArray[np.float32] | None,
    ) -> None:
        view, null = self._ffi.from_buffer, self._ffi.NULL
        code = self._library.bt_step(
            self._live(),
            len(tokens),
            view("int32_t[]", tokens),
            view("int32_t[]", positions),
            view("int32_t[]", flat) if flat else null,
            view("uint32_t[]", ends),
            null if logits is None else view("float[]", logits),
            self._best,
            self._slot_crcs,
            self._culprit,
        )
        if code != Error.OK:
            raise step_error(code, self._culprit[0])

    def _create(self, weights: KernelWeights, pages: KvPages) -> Any:
        config, options, geometry = self.config, self._options, pages.geometry
        self._block_tokens = geometry.block_tokens
        shape = self._ffi.new("bt_config *")
        for name in _SHAPE_FIELDS:
            setattr(shape, name, getattr(config, name))
        shape.max_context = self.max_context
        shape.block_tokens = geometry.block_tokens
        shape.kv = geometry.dtype.wire_code
        shape.activation = options.activation.code
        shape.isa = options.isa.code
        shape.batch_max = options.batch_max
        shape.threads = options.threads
        shape.prefetch_pages = options.prefetch_pages
        shape.has_tied_head = config.has_tied_head
        shape.has_qkv_bias = config.traits.has_qkv_bias
        shape.has_qk_norm = config.traits.has_qk_norm
        shape.rms_eps = config.rms_eps
        shape.weight_bytes = self._packed_bytes(weights)
        made = self._ffi.new("bt_kernel **")
        self._check(self._library.bt_create(shape, made), "shape")
        return self._ffi.gc(made[0], self._library.bt_destroy)

    def _packed_bytes(self, weights: KernelWeights) -> int:
        total = 0
        for plan in weights.matrices:
            packed = self._library.bt_packed_bytes(plan.kind, plan.rows, plan.columns)
            if packed == 0:
                raise setup_error(Error.BAD_MATRIX, plan.name)
            total += packed
        return total

    def _fill(self, weights: KernelWeights) -> None:
        for plan in weights.matrices:
            rows = weights.read(plan)
            source = self._ffi.from_buffer(rows)
            code = self._library.bt_set_matrix(
                self._live(), plan.role, plan.layer, plan.kind, source, rows.nbytes
            )
            self._check(code, plan.name)
        for vector in weights.vectors:
            weight = weights.read_vector(vector)
            source = self._ffi.from_buffer("float[]", weight)
            code = self._library.bt_set_vector(
                self._live(), vector.role, vector.layer, source, weight.size
            )
            self._check(code, vector.name)
        self._fill_rope()

    def _fill_rope(self) -> None:
        table, half = build_table(self.config, self.max_context), self.config.rotary_dim // 2
        cosine = table.cosine[:, half:].contiguous()
        sine = table.sine[:, half:].contiguous()
        code = self._library.bt_set_rope(
            self._live(), self._floats(cosine), self._floats(sine), cosine.numel()
        )
        self._check(code, "rope")

    def _floats(self, tensor: torch.Tensor) -> Any:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        return self._ffi.cast("float *", tensor.data_ptr())


def open_step_kernel(
    path: Path, pages: KvPages, options: KernelOptions | None = None
) -> StepKernel | None:
    """A kernel, or None where there is no library or it cannot compute this model.

    Says which in one log line: then the torch path serves. Raises ServiceError for a damaged model
    or a wrong option, as the torch path would.
    """
    try:
        return StepKernel(path, pages, options)
    except ServiceError as error:
        if error.reason is not Reason.UNSUPPORTED:
            raise
        _log.warning("step_kernel_unavailable", cause=error.message, serving="torch")
        return None


def _numbers(typecode: str, values: Sequence[int], field: str) -> array[int]:
    try:
        return array(typecode, values)
    except OverflowError as error:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"{field} holds a number out of range", field=field
        ) from error


def _open_weights(path: Path, options: KernelOptions) -> tuple[KernelWeights, WeightMode]:
    if options.weight_mode is not None:
        return KernelWeights(path, options.weight_mode), options.weight_mode
    weights = KernelWeights(path, WeightMode.BFLOAT16)
    mode = default_mode(weights.config)
    return (weights if mode is WeightMode.BFLOAT16 else KernelWeights(path, mode)), mode


def _checked_context(config: ModelConfig, options: KernelOptions) -> int:
    context = config.max_context if options.max_context is None else options.max_context
    limits = (
        ("max_context", context, 1, config.max_context),
        ("threads", options.threads, 1, THREADS_LIMIT),
        ("batch_max", options.batch_max, 1, BATCH_LIMIT),
        ("prefetch_pages", options.prefetch_pages, 0, 64),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise ServiceError(
                Reason.INVALID_REQUEST, f"{name} {value} must be from {low} to {high}", field=name
            )
    return context
