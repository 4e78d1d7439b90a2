"""What workers need of an engine, and what belongs to one worker process.

Owns the `Engine` protocol and the bundle of parts that start-up makes. Never imports torch: logits
leave an engine as tensors and are turned into arrays by `Engine`'s adapter in the engine thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.arena.client import KVStoreClient, WorkerIdentity
from baton.arena.mapping import MappedArena
from baton.engine.finish import EndRule
from baton.engine.golden_check import GoldenCheck
from baton.engine.prompt_chunk import PromptChunk
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import NumericClass
from baton.text.stream import TokenBytes
from baton.worker.config import STORE_PATIENCE_S
from baton.worker.held_logs import HeldLogs
from baton.worker.kv_stages import InPlace, KvStages
from baton.worker.threads import Progress, WorkThread
from baton.worker.unvouched import Unvouched

EXACT: Final = "exact"
EQUIVALENT: Final = "equivalent"
APPROXIMATE: Final = "approximate"


class PromptEngine(Protocol):
    """What computes prompts. Called from one thread at a time."""

    def prefill_kv(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> None:
        """Write the KV of a chunk; raises ComputeCancelled between layers."""
        ...

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        first_position: int,
        page_table: Sequence[int],
        should_cancel: Callable[[], bool] | None = None,
    ) -> NDArray[np.float32]:
        """As `prefill_kv`, and the logits after the chunk's last token, f32 [vocabulary]."""
        ...


class Engine(PromptEngine, Protocol):
    """A forward pass over the arena's pages. Steps and all else are called from one thread at a
    time; prompts may be from another beside it.
    """

    @property
    def steps_by(self) -> str:
        """What computes decode steps: `native` or `torch`."""
        ...

    @property
    def checks(self) -> tuple[GoldenCheck, ...]:
        """The golden checks of everything it computes with, the torch forward last."""
        ...

    def fall_back(self) -> NumericClass:
        """Compute steps by the torch forward from now on; the class that they are of then."""
        ...

    def prefill_batch(self, chunks: Sequence[PromptChunk]) -> list[NDArray[np.float32] | None]:
        """Chunks of different prompts in one pass; for each its logits, where it wants them.

        ServiceError before anything is computed; ComputeCancelled once every chunk is cancelled.
        """
        ...

    def remap(self, arena: MappedArena) -> None:
        """Compute over another arena's pages from now on; the old one is not referred to."""
        ...

    def decode_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        page_tables: Sequence[Sequence[int]],
    ) -> NDArray[np.float32]:
        """One token for each of several sequences; logits f32 [batch, vocabulary]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLane:
    """What computes prompts and the one thread that calls it."""

    thread: WorkThread
    engine: PromptEngine


@dataclass(slots=True, kw_only=True)
class WorkerParts:
    """Everything a worker's service code uses. Made once, at start-up.

    `compute` runs the engine, `packing` checksums pages, once `stages` has brought KV there.
    `context_max` bounds a sequence's tokens.
    `prefill_rate`: prompt tokens a second, measured at the start; 0 where nobody measured.
    `store_patience_s`: how long work waits for a kvstore that died before its clients are told.
    Only a failed golden check changes something here: the identity's numeric class, and
    `is_degraded`.
    """

    identity: WorkerIdentity
    model: str
    engine: Engine
    tokenizer: TokenBytes
    rule: EndRule
    vocabulary: int
    arena: MappedArena
    store: KVStoreClient
    node_id: str
    lease_s: float
    compute: WorkThread
    packing: WorkThread
    progress: Progress
    held: HeldLogs
    prefill_rate: float = 0.0
    store_patience_s: float = STORE_PATIENCE_S
    unvouched: Unvouched = field(default_factory=Unvouched)
    stages: KvStages = field(default_factory=InPlace)
    is_degraded: bool = False
    # Threads that compute beside `compute`: one of them busy is no idle worker.
    beside: list[WorkThread] = field(default_factory=list)
    # Called before the arena's mapping goes: whoever reads it has stopped when they return.
    before_unmap: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        """Stable name of this worker."""
        return self.identity.worker_id

    @property
    def label(self) -> PairLabel:
        """What its KV is compatible with."""
        return self.identity.label

    @property
    def geometry(self) -> KvGeometry:
        """The page shape."""
        return self.identity.geometry

    @property
    def context_max(self) -> int:
        """The most tokens, prompt and output together, that a sequence may have."""
        return self.rule.max_context

    def exactness(self, base_numeric_class: str | None) -> str:
        """The exactness class of answers that start from KV of `base_numeric_class` (None: ours).

        Float32 throughout gives the tokens of a fresh computation; everything else the same up to
        rounding. Int8 KV is neither.
        """
        if self.geometry.dtype.has_scales:
            return APPROXIMATE
        is_own = base_numeric_class in (None, self.label.numeric_class.text)
        return EXACT if self.geometry.dtype is KvDtype.F32 and is_own else EQUIVALENT
