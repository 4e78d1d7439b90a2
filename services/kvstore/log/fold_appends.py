"""APPENDs in bulk: the tokens that follow each other in one log, as arrays.

Owns the columns of an APPEND's fixed struct. Pure. Most records are APPENDs; no object is made for
one, unless it has log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.kvstore.log.fields import ARENA_ID_BYTES, EndReason, Logprobs, end_reason_of
from services.kvstore.log.format import RecordAddress
from services.kvstore.log.kv_rows import SlotRun
from services.kvstore.log.records import Append
from services.kvstore.state import LogState

APPEND: Final = np.dtype(
    [
        ("token_id", "<u4"),
        ("end_code", "u1"),
        ("flags", "u1"),
        ("top_count", "<u2"),
        ("arena_id", "<u8", (2,)),
        ("page_generation", "<u8"),
        ("page", "<u4"),
        ("slot_crc", "<u4"),
        ("logprob", "<f4"),
        ("page_crc", "<u4"),
        ("slot", "<u2"),
        ("zero", "u1", (14,)),
    ]
)
"""The body of an APPEND, docs/formats.md 7.2."""
APPEND_BYTES: Final = 64
TOP_BYTES: Final = 8
HAS_LOGPROBS: Final = 1
HAS_PAGE_CRC: Final = 2
assert APPEND.itemsize == APPEND_BYTES

Bodies = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRun:
    """Consecutive APPENDs of one log. `logprobs`: (index, value) of those that have them."""

    position: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint64]
    token_id: npt.NDArray[np.uint32]
    end_code: npt.NDArray[np.uint8]
    kv: SlotRun
    logprobs: Sequence[tuple[int, Logprobs]] = field(default=())

    @classmethod
    def of(
        cls,
        position: npt.NDArray[np.uint32],
        generation: npt.NDArray[np.uint64],
        bodies: Bodies,
        arena_id: bytes | None,
        logprobs: Sequence[tuple[int, Logprobs]] = (),
    ) -> AppendRun:
        """From the headers' columns and the bodies, an array of `APPEND`."""
        return cls(
            position=position,
            generation=generation,
            token_id=bodies["token_id"],
            end_code=bodies["end_code"],
            kv=SlotRun(
                page=bodies["page"],
                page_generation=bodies["page_generation"],
                slot=bodies["slot"],
                slot_crc=bodies["slot_crc"],
                page_crc=bodies["page_crc"],
                fills=(bodies["flags"] & HAS_PAGE_CRC) != 0,
                is_ours=_is_arena(bodies, arena_id),
            ),
            logprobs=logprobs,
        )

    @classmethod
    def of_one(cls, at: RecordAddress, record: Append, arena_id: bytes | None) -> AppendRun:
        """A single record that was decoded by itself."""
        bodies: Bodies = np.frombuffer(record.encode()[:APPEND_BYTES], dtype=APPEND)
        return cls.of(
            np.array([at.position], dtype=np.uint32),
            np.array([at.generation], dtype=np.uint64),
            bodies,
            arena_id,
            () if record.logprobs is None else ((0, record.logprobs),),
        )

    def follows(self, state: LogState) -> bool:
        """Whether these are the log's next tokens, at its generation, one after the other."""
        count = len(self.position)
        expected = np.arange(state.position, state.position + count, dtype=np.uint64)
        return bool(
            (self.position == expected).all()
            and (self.generation == state.generation).all()
            and not self.end_code[:-1].any()
        )

    @property
    def newest_generation(self) -> int:
        """The highest generation of the run."""
        return int(self.generation.max())

    @property
    def end_reason(self) -> EndReason | None:
        """Whether the last token ended the answer, and why."""
        return end_reason_of(int(self.end_code[-1]))


def _is_arena(bodies: Bodies, arena_id: bytes | None) -> npt.NDArray[np.bool_]:
    if arena_id is None:
        return np.zeros(len(bodies), dtype=bool)
    assert len(arena_id) == ARENA_ID_BYTES
    halves: Any = np.frombuffer(arena_id, dtype="<u8")
    is_same: npt.NDArray[np.bool_] = (bodies["arena_id"] == halves).all(axis=1)
    return is_same


def are_readable(bodies: Bodies, payload_bytes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which bodies are whole and have no unknown flags or codes."""
    has_logprobs = (bodies["flags"] & HAS_LOGPROBS) != 0
    tops = np.where(has_logprobs, bodies["top_count"].astype(np.uint32) * TOP_BYTES, 0)
    is_readable: npt.NDArray[np.bool_] = (
        ((bodies["flags"] & ~np.uint8(HAS_LOGPROBS | HAS_PAGE_CRC)) == 0)
        & (bodies["end_code"] <= max(EndReason))
        & (payload_bytes == APPEND_BYTES + tops)
    )
    return is_readable
