"""The table of fault points: every name a call site or a FAULT may use, and what it can do there.

Owns names and capabilities. Never does anything: a point acts where the code calls `faults`.
A new point is one row here and one line at its call site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from types import MappingProxyType
from typing import Final


@unique
class Action(StrEnum):
    """What a fault does, as spelt in FAULT."""

    PAUSE = "pause"
    FAIL = "fail"
    EXIT = "exit"
    SHORT = "short"
    FLIP_BYTE = "flip_byte"
    ABSENT = "absent"


FLOW: Final = frozenset({Action.PAUSE, Action.FAIL, Action.EXIT})
"""What `faults.reach` can do; every point can."""

_DATA: Final = frozenset({Action.SHORT, Action.FLIP_BYTE})
_FLIP: Final = frozenset({Action.FLIP_BYTE})
_ABSENT: Final = frozenset({Action.ABSENT})


@dataclass(frozen=True, slots=True)
class Point:
    """Where the code stands when it gets there, and the actions that its call sites serve."""

    place: str
    actions: frozenset[Action] = FLOW


POINTS: Final[Mapping[str, Point]] = MappingProxyType(
    {
        "gateway.before_open": Point("pair chosen, nothing opened at a kvstore yet"),
        "session.after_read": Point("a session's tokens read for an edit, nothing opened"),
        "session.after_open": Point("a log opened for a session's history, nothing computed"),
        "session.after_seal": Point("a session's new history sealed, named by nobody yet"),
        "session.after_fork": Point("a session's history forked, named by nobody yet"),
        "session.after_set": Point("a session names its new history, its caller not told"),
        "prefill.after_accept": Point("request admitted, nothing computed"),
        "prefill.after_compute": Point("a chunk's KV computed, nothing of it written"),
        "prefill.logits": Point("logits of the last position, before sampling", FLOW | _FLIP),
        "prefill.mid_upload": Point("part of a chunk's pages written", FLOW | _DATA),
        "prefill.before_commit": Point("a chunk's pages written, its commit not sent"),
        "prefill.before_send": Point("token 1 sampled, the seal not sent"),
        "prefill.after_seal": Point("sealed, token 1 not sent to the gateway"),
        "decode.before_accept": Point("hand-off received, log not taken"),
        "decode.mid_fetch": Point("log taken and replayed, nothing computed on its pages"),
        "decode.before_append": Point("a step computed and its KV written, its append not sent"),
        "decode.first_token": Point("first own token appended, not sent"),
        "decode.step": Point("before a step over the running sequences"),
        "kv.get": Point("a lookup or read of KV asked for", FLOW | _ABSENT),
        "kv.read_chunk": Point("a chunk of KV bytes read, not sent", FLOW | _DATA),
        "kv.before_commit": Point("checkpoint checked, its record not written"),
        "kv.after_commit": Point("checkpoint recorded, not acknowledged"),
        "kv.before_append": Point("appends checked, their group commit not written"),
        "kv.before_session": Point("a session's change asked for, its record not written"),
        "kv.after_session": Point("a session's change recorded, not acknowledged"),
        "move.before_fence": Point("old home asked to give a log away, nothing recorded"),
        "move.after_fence": Point("MOVED on disk, its answer not sent"),
        "move.mid_send": Point("a chunk of moved pages read, not sent", FLOW | _DATA),
        "move.before_drop": Point("new home confirmed, the old home's pages not dropped"),
        "move.after_drop": Point("old home's pages dropped, not acknowledged"),
        "adopt.before_move": Point("room made at the new home, the old one not asked"),
        "adopt.after_move": Point("state received at the new home, the missing pages not"),
        "adopt.mid_fetch": Point("a chunk of pages received at the new home, not written"),
        "adopt.before_open": Point("all pages verified, OPEN not recorded"),
        "adopt.after_open": Point("OPEN recorded, not acknowledged"),
        "adopt.before_done": Point("OPEN on disk, the old home not told"),
        "nvme.read": Point("slots of the NVMe tier read, not yet verified", FLOW | _DATA),
        "nvme.write": Point("pages verified, not written to the NVMe tier"),
        "worker.native_weights": Point(
            "a round of golden checks passed; the step kernel's weights", FLOW | _FLIP
        ),
        "worker.torch_weights": Point(
            "a round of golden checks passed; the torch path's embedding", FLOW | _FLIP
        ),
        "pool.alloc": Point("pages asked of an arena", FLOW | _ABSENT),
        "merger.splice": Point("segments validated, not spliced"),
    }
)
"""Name -> point. `absent`: the thing asked for is not there, as after an eviction."""
