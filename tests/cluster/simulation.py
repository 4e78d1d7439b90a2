"""A whole cluster in one process: the real cores and servicers, scripted compute, faults by seed.

Owns the wiring of one store, prefill and decode workers and a gateway over `network`, the requests,
the faults and what must hold in the end. Real: everything but transport, threads, files and the
engine. One seed, one run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from typing import Any, Final

import pytest

from baton.arena.append_stream import AppendLimits, AppendStream
from baton.arena.client import KVStoreClient, WorkerIdentity
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.engine.finish import EndRule
from baton.errors import Reason, ServiceError
from baton.ids import LOG_ID_BYTES
from baton.kv.numeric import TORCH_F32
from baton.metrics import Metrics
from baton.sampling_parameters import SamplingParameters
from baton.wire.label import label_to_proto
from baton.worker.draining import Draining
from baton.worker.engine import WorkerParts
from baton.worker.held_logs import HeldLogs, renew_once
from baton.worker.threads import Progress
from services.decode.joining import Joiner
from services.decode.local_lane import LocalPrefills, budget_terms
from services.decode.measures import DecodeMeasures
from services.decode.runner import Runner, RunnerTools
from services.decode.scheduler import SlotScheduler
from services.decode.servicer import DecodeServicer
from services.gateway import opening
from services.gateway.cleanup import Cleanup
from services.gateway.client_prefixes import PrefixClient
from services.gateway.clients import DecodeClient, MergerClient, PrefillClient, StoreClient
from services.gateway.decode_streams import WATCH_INTERVAL_S, DecodeStreams
from services.gateway.events import Completed, TokenDelta
from services.gateway.hub import WorkerHub
from services.gateway.legs import CapabilityMint
from services.gateway.opening import SequenceParts
from services.gateway.planner import Planner, PlanRules
from services.gateway.policy import PrefillMode
from services.gateway.prefix_cache import PrefixCache
from services.gateway.recovery import PASSING
from services.gateway.registry import Registry, WorkerLoad, WorkerRecord, WorkerRole
from services.gateway.request import CacheMode, EncodedPrompt, SequenceRequest, Tenant
from services.gateway.sequence import Sequence
from services.kvstore.runtime import SWEEP_INTERVAL_S, Runtime
from services.kvstore.state import Writer
from services.kvstore.workers import AttachedWorker
from services.prefill.measures import PrefillMeasures
from services.prefill.pipeline import Pipeline
from services.prefill.scheduler import PromptScheduler
from services.prefill.servicer import PrefillServicer
from services.prefill.turns import Turns
from tests.cluster.engine import (
    BLOCK,
    GEOMETRY,
    VOCABULARY,
    Pages,
    ScriptedEngine,
    SlowThread,
    answer_to,
)
from tests.cluster.loop import LoopClock
from tests.cluster.network import Network, Node
from tests.cluster.parts import (
    Asked,
    Report,
    Tokenizer,
    Worker,
)
from tests.cluster.store import LABEL, LEASE_S, PAGES, TOKENIZER, simulated_store

CONTEXT_MAX: Final = 256
EXCUSES: Final = PASSING | {Reason.PAGES_EXHAUSTED, Reason.QUEUE_FULL}
"""What a client may be told when things break; anything else is a fault of ours."""

STORE_AT: Final = "kvstore-0"


class Simulation:
    """One run. `loss`: the share of messages that break their call; `leaving`: of clients that do
    not wait for the end; `rest_s`: when nothing may be held any more.
    """

    def __init__(
        self,
        seed: int,
        *,
        loss: float,
        requests: int = 6,
        faults: int = 3,
        leaving: float = 0.3,
        rest_s: float = 30.0,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = LoopClock()
        self.network = Network(self.random, loss)
        self.pages = Pages(PAGES)
        self.report = Report()
        self._requests, self._faults = requests, faults
        self._leaving, self._rest_s = leaving, rest_s
        self._workers: dict[str, Worker] = {}
        self._incarnations = itertools.count(1)
        self._signer = CapabilitySigner(DEV_KEY, self.clock)
        self._over = asyncio.Event()

    async def run(self) -> Report:
        """Everything, from the first request to rest; AssertionError says what does not hold."""
        with pytest.MonkeyPatch.context() as patch:
            # Ids by seed: the order of a set of log ids is part of a run.
            patch.setattr(opening, "new_log_id", lambda: self.random.randbytes(LOG_ID_BYTES))
            return await self._run()

    async def _run(self) -> Report:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self.runtime = self._store()
            for name in ("prefill-0", "prefill-1"):
                self._start(name, WorkerRole.PREFILL)
            for name in ("decode-0", "decode-1"):
                self._start(name, WorkerRole.DECODE)
            self.parts, self.gateway = self._gateway()
            await self.clock.pass_(1.0)
            asked = [self._draw(number) for number in range(self._requests)]
            async with asyncio.TaskGroup() as clients:
                for one in asked:
                    clients.create_task(self._client(one))
                clients.create_task(self._break_things())
            await self._rest()
            self._over.set()
            for node in self.network.nodes.values():
                node.die()
        for one in asked:
            self._judge(one)
        self.report.stale_refused = self.runtime.core.stale_refused
        self.report.cuts = self.network.cuts
        return self.report

    # --- store --------------------------------------------------------------------------------

    def _store(self) -> Runtime:
        node = self._node(STORE_AT)
        made = simulated_store(self.clock, self.random, self.pages)
        node.servicer = made.servicer
        node.spawn(made.page_worker.run())
        node.spawn(self._sweep(node, made.runtime))
        return made.runtime

    async def _sweep(self, node: Node, runtime: Runtime) -> None:
        while True:
            await self.clock.pass_(SWEEP_INTERVAL_S)
            await node.reachable()
            await runtime.sweep()
            runtime.core.check_invariants()

    # --- workers ------------------------------------------------------------------------------

    def _node(self, address: str) -> Node:
        node = Node(address, self._group)
        self.network.nodes[address] = node
        return node

    def _start(self, name: str, role: WorkerRole) -> None:
        """A process of this name, attached; an earlier one of the same name is dead."""
        node = self._node(name)
        incarnation = next(self._incarnations)
        slot = self.runtime.workers.new_slot(name, self.pages.locked_slots.__contains__)
        self.pages.locked_slots.add(slot)
        writer = Writer(worker_id=name, slot=slot, incarnation=incarnation)
        self.runtime.workers.attach(AttachedWorker(writer=writer, numeric_class=TORCH_F32))
        parts = self._parts(node, name, incarnation)
        runner = None
        if role is WorkerRole.PREFILL:
            self._serve_prefill(node, parts)
        else:
            runner = self._serve_decode(node, parts)
        record = WorkerRecord(
            worker_id=name,
            role=role,
            incarnation=incarnation,
            node_id="node-0",
            address=name,
            kvstore_address=STORE_AT,
            model="sim",
            label=LABEL,
            label_bytes=label_to_proto(LABEL, GEOMETRY, "sim").SerializeToString(),
            is_ready=True,
            load=WorkerLoad(active_max=8),
            context_max=CONTEXT_MAX,
        )
        worker = Worker(node, record, parts, runner, slot)
        self._workers[name] = worker
        node.spawn(self._renew(worker))
        node.spawn(self._beat(worker))

    def _parts(self, node: Node, name: str, incarnation: int) -> WorkerParts:
        channel: Any = self.network.pool(node).get(STORE_AT)
        engine: Any = ScriptedEngine(self.pages)
        arena: Any = self.pages
        compute: Any = SlowThread(node, self.clock, lambda: self.random.choice((0.002, 0.01, 0.05)))
        packing: Any = SlowThread(node, self.clock, lambda: self.random.choice((0.0005, 0.01)))
        return WorkerParts(
            identity=WorkerIdentity(
                worker_id=name,
                incarnation=incarnation,
                label=LABEL,
                geometry=GEOMETRY,
                capability=self._own(Right.ATTACH, name),
                software_version="sim",
            ),
            model="sim",
            engine=engine,
            tokenizer=Tokenizer(),
            rule=EndRule(end_token_ids=frozenset(), max_context=CONTEXT_MAX),
            vocabulary=VOCABULARY,
            arena=arena,
            store=KVStoreClient(channel, name, self._own(Right.ATTACH, name)),
            node_id="node-0",
            lease_s=LEASE_S,
            compute=compute,
            packing=packing,
            progress=Progress(),
            held=HeldLogs(),
        )

    def _serve_prefill(self, node: Node, parts: WorkerParts) -> None:
        scheduler = PromptScheduler(queue_depth_max=64, interleave_max=4)
        measures = PrefillMeasures(Metrics("prefill"))
        pipeline = Pipeline(parts, Turns(scheduler), measures, self.clock, BLOCK)
        draining = Draining(pipeline.drain_within, lambda: None, _anybody)
        node.servicer = PrefillServicer(pipeline, parts.tokenizer, draining)

    def _serve_decode(self, node: Node, parts: WorkerParts) -> Runner:
        measures = DecodeMeasures(Metrics("decode"))
        introduction = (parts.worker_id, parts.identity.capability)
        limits = AppendLimits(ack_timeout_s=2.0, give_up_s=LEASE_S)
        tools = RunnerTools(
            parts=parts,
            slots=SlotScheduler(8),
            appends=AppendStream(parts.store.open_append, introduction, self.clock, limits),
            joiner=Joiner(
                parts,
                self.clock,
                measures,
                LocalPrefills(parts, budget_terms(parts, 2.0, BLOCK), self.clock, None),
            ),
            measures=measures,
            clock=self.clock,
        )
        runner = Runner(tools)
        draining = Draining(runner.drain_within, lambda: None, _anybody)
        node.servicer = DecodeServicer(runner, parts, draining)
        node.spawn(runner.run(self._over))
        return runner

    async def _renew(self, worker: Worker) -> None:
        """As the worker's lease loop."""
        parts = worker.parts
        while True:
            parts.progress.idled()
            try:
                await renew_once(
                    parts.held, parts.store, parts.identity.incarnation, parts.progress
                )
            except ServiceError:
                return
            await self.clock.pass_(min(LEASE_S / 4, 1.0))

    async def _beat(self, worker: Worker) -> None:
        while True:
            await worker.node.reachable()
            self.hub.observe(replace(worker.record, progress=next(worker.beats)))
            await self.clock.pass_(0.5)

    # --- gateway ------------------------------------------------------------------------------

    def _gateway(self) -> tuple[SequenceParts, Node]:
        node = self._node("gateway-0")
        pool: Any = self.network.pool(node)
        mint = CapabilityMint(self._signer)
        stores, prefills, decodes = StoreClient(pool), PrefillClient(pool), DecodeClient(pool)
        prefix_client = PrefixClient(pool)

        def spawn(_name: str, work: Any) -> None:
            node.spawn(work)

        streams = DecodeStreams(
            pool, self.hub, clock=self.clock, spawn=spawn, hello=("gateway-0", 1)
        )
        node.spawn(self._watch(streams))
        rules = PlanRules(mode=PrefillMode.AUTO, tokenizer_hash=TOKENIZER)
        return SequenceParts(
            planner=Planner(self.hub, rules),
            stores=stores,
            prefills=prefills,
            decodes=decodes,
            streams=streams,
            prefixes=PrefixCache(
                prefix_client, MergerClient(pool), self.hub, mint=mint, clock=self.clock
            ),
            prefix_client=prefix_client,
            mint=mint,
            cleanup=Cleanup(stores, prefills, decodes, spawn),
            clock=self.clock,
            template_digest=bytes(32),
            until=self.hub.until,
        ), node

    @property
    def hub(self) -> WorkerHub:
        """What the gateway believes of the workers."""
        if not hasattr(self, "_hub"):
            self._hub = WorkerHub(Registry(), self.clock)
        return self._hub

    async def _watch(self, streams: DecodeStreams) -> None:
        while True:
            await self.clock.pass_(WATCH_INTERVAL_S)
            self.hub.expire()
            await streams.watch()

    def _own(self, right: Right, name: str) -> str:
        return self._signer.sign(
            Claims(
                tenant=None,
                scope=None,
                rights=frozenset({right}),
                expiry_wall_s=self._signer.expiry_after(10_000.0),
                request_id=name,
            )
        )

    # --- requests and faults ------------------------------------------------------------------

    def _draw(self, number: int) -> Asked:
        """A request; some share a beginning, some clients leave early."""
        draw = self.random
        beginning = [7] * BLOCK * draw.randint(0, 3) if draw.random() < 0.5 else []
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))]
        return Asked(
            number=number,
            prompt=tuple(beginning + own),
            tokens=draw.randint(1, 24),
            starts_s=draw.uniform(0.0, 3.0),
            leaves_s=draw.uniform(0.0, 2.0) if draw.random() < self._leaving else None,
            is_dropped=draw.random() < 0.3,
        )

    async def _client(self, one: Asked) -> None:
        await self.clock.pass_(one.starts_s)
        now_s = self.clock.monotonic_s()
        request = SequenceRequest(
            request_id=f"r{one.number}",
            tenant=Tenant(name="acme"),
            prompt=EncodedPrompt(token_ids=one.prompt, rendered=b""),
            sampling=SamplingParameters(
                temperature=0.0, max_tokens=one.tokens, ignore_eos=True, seed=1
            ),
            cache_mode=CacheMode.READ_WRITE,
            cache_salt=None,
            is_dropped_at_end=one.is_dropped,
            received_s=now_s,
            deadline_s=now_s + 60.0,
            ready_s=now_s,
        )

        async def emit(event: object) -> None:
            if isinstance(event, TokenDelta):
                assert event.index == len(one.got), "tokens leave in order, each once"
                one.got.append(event.token_id)
            elif isinstance(event, Completed):
                one.completed = event

        try:
            async with asyncio.timeout(one.leaves_s):
                await Sequence(self.parts, request, emit).run()
        except TimeoutError:
            assert one.leaves_s is not None
        except ServiceError as error:
            one.error = error
        one.is_over = True

    async def _break_things(self) -> None:
        for _ in range(self._faults):
            await self.clock.pass_(self.random.uniform(0.0, 2.0))
            name = self.random.choice(sorted(self._workers))
            if self.random.random() < 0.5:
                await self._crash(name)
            else:
                await self._freeze(name)

    async def _crash(self, name: str) -> None:
        """Dies, and is started again a while later."""
        worker = self._workers[name]
        if worker.node.is_dead:
            return
        self.report.crashes += 1
        worker.node.die()
        await self.clock.pass_(0.01)
        self.pages.locked_slots.discard(worker.slot)
        await self.clock.pass_(self.random.uniform(0.1, 2.0))
        self._start(name, worker.record.role)

    async def _freeze(self, name: str) -> None:
        """Stands still for less or more than a lease, then goes on as if nothing had been."""
        worker = self._workers[name]
        if worker.node.is_dead:
            return
        self.report.freezes += 1
        worker.node.freeze()
        await self.clock.pass_(self.random.uniform(0.1, 2.5 * LEASE_S))
        worker.node.thaw()

    # --- what must hold -----------------------------------------------------------------------

    async def _rest(self) -> None:
        """Nothing is held a while after the last request, whatever happened to it."""
        self.network.loss = 0.0
        for node in self.network.nodes.values():
            node.thaw()
        await self.clock.pass_(self._rest_s)
        core = self.runtime.core
        core.check_invariants()
        counts = core.pool.counts()
        is_short = self._rest_s < LEASE_S
        assert counts.granted == 0, counts
        assert is_short or counts.quarantined == 0, counts
        assert len(core.leases) == 0
        assert self.parts.cleanup.pending == 0
        for worker in self._workers.values():
            assert len(worker.parts.held) == 0, worker.record.worker_id
            assert worker.runner is None or worker.runner.active == 0
        self._check_pages()
        handoffs = self.parts.handoffs
        assert handoffs.in_flight == 0

    def _check_pages(self) -> None:
        """Every KV slot that a log refers to holds the log's own token at its own position."""
        for log in self.runtime.core.logs.values():
            for position in range(log.committed):
                row = log.rows[position // BLOCK]
                found = self.pages.slot(row.page, position % BLOCK)
                assert found == (log.tokens[position], position + 1), (log.log_id.hex(), position)

    def _judge(self, one: Asked) -> None:
        expected = answer_to(one.prompt, one.tokens)
        assert one.is_over
        assert one.got == expected[: len(one.got)], one
        if one.completed is not None:
            assert one.got == expected, one
            assert one.completed.usage.completion_tokens == one.tokens
            self.report.completed += 1
            self.report.resumed += one.completed.resumed
            self.report.recomputed += one.completed.kv_source.value == "recomputed"
        elif one.error is not None:
            assert one.error.reason in EXCUSES, one
            self.report.failed += 1
        else:
            self.report.cancelled += 1


async def _anybody(_capability: str) -> None:
    """Nobody drains a worker here."""
