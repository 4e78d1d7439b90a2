"""What can happen to logs in the model tests, and what each thing draws for itself.

Owns no behaviour.
"""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from services.kvstore.state import Writer
from tests.cluster.memory import BLOCK, PAGES

WORKERS: Final = [Writer(worker_id=f"w{slot}", slot=slot, incarnation=1) for slot in range(3)]

# Few distinct tokens and shared beginnings, so that prefixes are found and blocks shared.
prompts = st.builds(
    lambda head, tail: list(range(head)) + tail,
    st.integers(0, 3 * BLOCK),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
workers = st.sampled_from(WORKERS)
sides = st.sampled_from((0, 0, 0, 1))
cuts = st.integers(1, 40)
seeds = st.integers(0, 1000)

FIELDS: Final[dict[str, dict[str, st.SearchStrategy[Any]]]] = {
    "open": {
        "side": sides, "prompt": prompts, "writer": workers,
        "drop": st.sampled_from((False, False, True)),
    },
    "open_from_parent": {"cut": cuts, "writer": workers},
    "open_from_manifest": {"cut": cuts, "writer": workers},
    "checkpoint": {"part": st.sampled_from((0.3, 0.7, 1.0))},
    "seal": {"token": st.integers(0, 2), "finish": st.sampled_from((None, None, None, "stop"))},
    "append": {
        "new": st.lists(st.integers(0, 2), min_size=1, max_size=9),
        "finish": st.sampled_from((None, None, None, "length")),
    },
    "take": {"writer": workers, "pages": st.integers(0, 2)},
    "truncate": {"position": cuts},
    "cancel": {},
    "close": {"drop": st.sampled_from((False, False, True))},
    "leases_expire": {"side": sides},
    "late_write": {"seed": seeds},
    "worker_dies": {"side": sides, "writer": workers},
    "worker_lets_go": {"side": sides, "seed": seeds},
    "fork": {"position": cuts, "writer": st.none() | workers},
    "publish": {"position": cuts},
    "revoke": {"side": sides, "seed": seeds},
    "evict": {"side": sides, "pages": st.integers(1, PAGES)},
    "times_end": {"side": sides},
    "crash": {
        "side": sides, "is_same_arena": st.sampled_from((True, True, False)),
        "dead": st.sets(st.integers(0, 2)),
    },
    "move": {"early": st.booleans(), "dies": st.sampled_from((False, False, True))},
}  # fmt: skip
"""What each thing that can happen draws for itself, besides the log it is about."""

ANYTIME: Final = [
    "open", "open", "leases_expire", "worker_dies", "worker_lets_go", "revoke", "evict",
    "times_end", "crash",
]  # fmt: skip
ABOUT_A_LOG: Final = [
    "open_from_parent", "open_from_manifest", "take", "take", "truncate", "cancel", "close", "fork",
    "publish", "move",
]  # fmt: skip
ABOUT_A_WRITER: Final = ["append", "seal", "checkpoint", "seal", "append"]
