"""The simulated cluster's kvstore: the real cores and servicers over pages and a log in memory.

Owns its wiring. Never runs anything: the simulation spawns what must run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from baton.capability import DEV_KEY, CapabilityVerifier
from baton.kv.blocks import scope_secret
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype
from baton.kv.numeric import TORCH_F32
from baton.metrics import Metrics
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.core import Core, Limits
from services.kvstore.identity import Identity
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.log_rpc import LogCalls
from services.kvstore.measures import StoreMeasures
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool
from services.kvstore.park_rpc import ParkCalls
from services.kvstore.prefix_rpc import PrefixCalls
from services.kvstore.runtime import Runtime
from services.kvstore.servicer import Calls, KVStoreServicer
from services.kvstore.store import Store
from services.kvstore.worker_rpc import WorkerCalls
from tests.cluster.engine import BLOCK, GEOMETRY, VOCABULARY, Pages
from tests.cluster.loop import LoopClock
from tests.cluster.parts import Inline, MemoryLog, watch_generations

PAGES: Final = 72
LEASE_S: Final = 4.0
TOKENIZER: Final = bytes(8)
LABEL: Final = PairLabel(
    model=bytes(16),
    rope=bytes(16),
    dtype=KvDtype.F32,
    block_tokens=BLOCK,
    tokenizer=TOKENIZER,
    numeric_class=TORCH_F32,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStore:
    """A store that nobody runs yet."""

    runtime: Runtime
    page_worker: PageWorker
    servicer: KVStoreServicer


def simulated_store(clock: LoopClock, random_: random.Random, pages: Pages) -> SimulatedStore:
    """A store over `pages` whose log is in memory."""
    limits = Limits(
        block_tokens=BLOCK,
        kv_digest=LABEL.kv_digest(),
        tokenizer_hash=TOKENIZER,
        vocabulary_size=VOCABULARY,
    )
    log: Any = MemoryLog(clock, random_)
    journal = LogJournal(log, limits, bytes(16), LEASE_S)
    core = Core(limits=limits, pool=PagePool(PAGES), leases=LeaseTable(LEASE_S), journal=journal)
    store = Store(core, lambda scope: scope_secret(bytes(32), 1, scope))
    watch_generations(store)
    arena: Any = pages
    page_worker = PageWorker(
        arena, Inline(), lambda work: runtime.damaged(work), lambda work: runtime.filled(work)
    )
    runtime = Runtime(
        store=store,
        journal=journal,
        writer=log,
        arena=arena,
        pages=page_worker,
        clock=clock,
        segments_max=16,
    )
    access = Access(CapabilityVerifier(DEV_KEY, clock), core)
    identity = Identity(label=LABEL, geometry=GEOMETRY, model="sim", node_id="node-0")
    nobody: Any = None
    calls = Calls(
        logs=LogCalls(runtime, access, identity),
        appends=AppendCalls(runtime, access, StoreMeasures(Metrics("kvstore"))),
        blobs=nobody,
        prefixes=PrefixCalls(runtime, access, identity),
        workers=WorkerCalls(runtime, access, identity, nobody),
        parking=ParkCalls(runtime, access),
    )
    servicer = KVStoreServicer(runtime, access, calls)
    return SimulatedStore(runtime=runtime, page_worker=page_worker, servicer=servicer)
