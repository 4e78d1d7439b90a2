"""What a worker's memory is made of, said once at its start.

Owns the sums and the line in the log. Never limits anything: everything here but a pass of prompts
is taken at the start and stays as it is, and a step takes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import structlog

from baton.arena.mapping import MappedArena
from baton.engine.packed_linear import place
from baton.engine.prefill_plan import pass_bytes
from baton.engine.weights import ModelWeights
from baton.worker.kernel_engine import CheckedKernel

_log = structlog.stdlib.get_logger("baton.worker")
_CGROUP = Path("/sys/fs/cgroup")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes. `arena` is shared with the node's other processes and counted once there;
    `resident` is what this process has of its own, the interpreter and torch included; `headroom`
    is what is left on the machine or in its control group, None where that is not said. `prompts`
    is what a pass of prompts takes while it is computed, at the longest context there may be.
    """

    torch_weights: int
    kernel_weights: int
    kernel_buffers: int
    prompts: int
    arena: int
    resident: int
    headroom: int | None


def state_memory(
    weights: ModelWeights, checked: CheckedKernel | None, arena: MappedArena, pass_tokens: int = 0
) -> MemoryBudget:
    """The budget, and one line that says it; `pass_tokens` are computed in one go at most."""
    use = None if checked is None else checked.kernel.memory
    budget = MemoryBudget(
        torch_weights=weight_bytes(weights),
        kernel_weights=0 if use is None else use.weight_bytes,
        kernel_buffers=0 if use is None else use.buffer_bytes,
        prompts=_prompt_bytes(weights, arena, pass_tokens) if pass_tokens else 0,
        arena=arena.shape.page_count * arena.shape.slot_bytes,
        resident=resident_bytes(),
        headroom=headroom_bytes(),
    )
    _log.info(
        "memory_budget",
        torch_weight_bytes=budget.torch_weights,
        kernel_weight_bytes=budget.kernel_weights,
        kernel_buffer_bytes=budget.kernel_buffers,
        prompt_buffer_bytes=budget.prompts,
        arena_bytes=budget.arena,
        resident_bytes=budget.resident,
        headroom_bytes=budget.headroom,
    )
    return budget


def _prompt_bytes(weights: ModelWeights, arena: MappedArena, pass_tokens: int) -> int:
    geometry = arena.shape.geometry
    itemsize = weights.dtype.kv_dtype.itemsize
    context = min(weights.max_context, arena.shape.page_count * geometry.block_tokens)
    return pass_bytes(weights.config, geometry.dtype, itemsize, pass_tokens, context)


def weight_bytes(weights: ModelWeights) -> int:
    """Memory of all tensors; one that is there twice, such as a tied head, counts once."""
    rope = weights.rope
    tensors = [weights.embedding, weights.final_norm, weights.head, rope.cosine, rope.sine]
    for layer in weights.layers:
        tensors += [getattr(layer, field.name) for field in fields(layer)]
    return sum(
        {
            place(tensor): tensor.numel() * tensor.element_size()
            for tensor in tensors
            if tensor is not None
        }.values()
    )


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Memory that is this process's own: resident without what it shares."""
    fields = statm.read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def headroom_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """What can still be had: of the machine, or of the control group where that is less."""
    found = [value for value in (_available(meminfo), _cgroup_left(cgroup)) if value is not None]
    return min(found, default=None)


def _available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup_left(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = (cgroup / "memory.current").read_text(encoding="ascii").strip()
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
