"""What a restarted kvstore is given: everything its log says, folded.

Owns the data only. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.kvstore.log.fold_grants import OpenGrant
from services.kvstore.log.folded import MovedTo
from services.kvstore.log.living import LivingSegments
from services.kvstore.prefixes import Prefix
from services.kvstore.sessions import SessionState
from services.kvstore.state import LogState, Writer


@dataclass(slots=True, kw_only=True)
class Recovered:
    """What a scan came to.

    `logs`: with their rows (of the arena asked for; `committed` is what these cover), without
    writer and granted pages. `writers`: who wrote a log last, where nobody ended it. `grants`:
    pages that a writer may still write, of any log, also one that is gone. `moved`: logs whose home
    is elsewhere. `dropped`: generations of logs that are gone or given up, the newest last.
    `damaged`: logs given up because records of them are, or may be, missing. `living`: which
    segments are needed, for whom. `page_generations`: the highest that any record has of a page;
    `slot_generations`: of a slot of the NVMe file asked for, whose copies are the `cold` rows.
    `may_lack_grants`: a GRANT of the arena asked for may be missing, so who writes its pages is
    not known. `sessions`: as their last records have them, whether or not their
    heads are among the logs.
    """

    logs: dict[bytes, LogState] = field(default_factory=dict)
    writers: dict[bytes, Writer] = field(default_factory=dict)
    grants: list[OpenGrant] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    sessions: list[SessionState] = field(default_factory=list)
    moved: dict[bytes, MovedTo] = field(default_factory=dict)
    dropped: dict[bytes, int] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)
    living: LivingSegments = field(default_factory=LivingSegments)
    page_generations: dict[int, int] = field(default_factory=dict)
    slot_generations: dict[int, int] = field(default_factory=dict)
    arena_ids: set[bytes] = field(default_factory=set)
    may_lack_grants: bool = False
    records: int = 0
    appends: int = 0

    @property
    def newest_page_generation(self) -> int:
        """The highest page generation in any record of the arena asked for; 0: none."""
        return max(self.page_generations.values(), default=0)
