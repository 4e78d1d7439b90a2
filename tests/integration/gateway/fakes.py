"""A store, a prefill worker and decode workers that answer by rule, over real sockets.

Owns just enough state to see what the gateway does: logs with their fences, scripted failures and
pauses. The answer to any prompt is the words of `WORDS`, one a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.api.common.v1 import common_pb2
from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.capability import DEV_KEY, CapabilitySigner, CapabilityVerifier, Claims, Right
from baton.client import ChannelPool
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import TORCH_F32
from baton.metrics import Metrics
from baton.rpc.server import RpcServer, ServerOptions, build_server
from baton.wire.errors import error_to_proto
from baton.wire.label import label_to_proto
from services.merger.materialise import Materialiser
from services.merger.measures import MergerMeasures
from services.merger.servicer import MergerServicer, add_to_server

WORDS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
BLOCK_TOKENS = 8
GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=32, head_dim_v=32, block_tokens=BLOCK_TOKENS, dtype=KvDtype.F32
)


def label(tokenizer_hash: bytes, model: tuple[bytes, bytes]) -> common_pb2.PairLabel:
    """The label that every fake worker states; `model`: (model digest, RoPE digest)."""
    pair = PairLabel(
        model=model[0],
        rope=model[1],
        dtype=KvDtype.F32,
        block_tokens=BLOCK_TOKENS,
        tokenizer=tokenizer_hash,
        numeric_class=TORCH_F32,
    )
    return label_to_proto(pair, GEOMETRY, "test")


@dataclass(slots=True)
class FakeLog:
    """What the store knows of one log."""

    request: kvstore_pb2.OpenRequest
    tenant: str
    generation: int = 1
    sealed: bool = False
    cancelled: bool = False
    closed: bool = False
    dropped: bool = False
    tokens: int = 0


def word(index: int, limit: int) -> common_pb2.TokenEvent:
    """The index-th token of every answer."""
    event = common_pb2.TokenEvent(
        index=index, token_id=10 + index, text=("" if index == 0 else " ") + WORDS[index % 12]
    )
    if index + 1 >= limit:
        event.finish_reason = common_pb2.FINISH_REASON_LENGTH
    return event


def with_logprob(
    event: common_pb2.TokenEvent, sampling: common_pb2.SamplingParameters
) -> common_pb2.TokenEvent:
    """Adds log probabilities where they were asked for; one of them is minus infinity."""
    if sampling.logprobs:
        event.logprob.token_id = event.token_id
        event.logprob.logprob = -0.5
        event.logprob.token_bytes = event.text.encode()
        for rank in range(sampling.top_logprobs):
            value = -0.5 if rank == 0 else float("-inf")
            event.logprob.top.add(
                token_id=20 + rank, logprob=value, token_bytes=f"alt{rank}".encode()
            )
    return event


class FakeStore(kvstore_pb2_grpc.KVStoreServiceServicer):
    """Logs, fences and published prefixes."""

    def __init__(self) -> None:
        self.logs: dict[bytes, FakeLog] = {}
        self.prefixes: dict[str, kvstore_pb2.PublishedPrefix] = {}
        self.version = 1
        self.changed = asyncio.Event()
        self.open_error: ServiceError | None = None
        self.verifier = CapabilityVerifier(DEV_KEY, SystemClock())

    def note(self) -> None:
        """Wakes whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def Open(
        self, request: kvstore_pb2.OpenRequest, context: Any
    ) -> kvstore_pb2.OpenResponse:
        claims = self.verifier.verify(request.capability, right=Right.OPEN, log_id=request.log_id)
        if self.open_error is not None:
            raise self.open_error
        tenant, _ = claims.tenant_scope()
        offered = {one.segment.log.log_id for one in self.prefixes.values()}
        if any(part.segment.log.log_id not in offered for part in request.manifest.parts):
            raise ServiceError(Reason.BLOCK_NOT_FOUND, "it was revoked", field="manifest")
        self.logs[request.log_id] = FakeLog(request, tenant)
        cached = request.manifest.total_tokens if request.HasField("manifest") else 0
        prefix_id = ""
        for prefix in self.prefixes.values():
            parts = request.manifest.parts
            if parts and parts[0].segment.log.log_id == prefix.segment.log.log_id:
                prefix.hits += 1
                prefix_id = prefix.prefix_id
        self.note()
        return kvstore_pb2.OpenResponse(generation=1, cached_tokens=cached, prefix_id=prefix_id)

    async def Cancel(
        self, request: kvstore_pb2.CancelRequest, context: Any
    ) -> kvstore_pb2.CancelResponse:
        log = self._log(request.log_id, request.capability, Right.CANCEL)
        log.generation += 1
        log.cancelled = True
        self.note()
        return kvstore_pb2.CancelResponse(generation=log.generation)

    async def Close(
        self, request: kvstore_pb2.CloseRequest, context: Any
    ) -> kvstore_pb2.CloseResponse:
        log = self._log(request.log_id, request.capability, Right.WRITE)
        log.closed, log.dropped = True, request.drop
        self.note()
        return kvstore_pb2.CloseResponse()

    async def DescribeLog(
        self, request: kvstore_pb2.DescribeLogRequest, context: Any
    ) -> kvstore_pb2.DescribeLogResponse:
        log = self._log(request.log_id, request.capability, Right.READ)
        head = kvstore_pb2.LogHead(
            log_id=request.log_id, generation=log.generation, sealed=log.sealed
        )
        return kvstore_pb2.DescribeLogResponse(head=head)

    def _log(self, log_id: bytes, capability: str, right: Right) -> FakeLog:
        self.verifier.verify(capability, right=right, log_id=log_id)
        if log_id not in self.logs:
            raise ServiceError(Reason.LOG_NOT_FOUND, "no such log", field="log_id")
        return self.logs[log_id]

    async def Publish(
        self, request: kvstore_pb2.PublishRequest, context: Any
    ) -> kvstore_pb2.PublishResponse:
        self.verifier.verify(request.capability, right=Right.PUBLISH)
        stored = kvstore_pb2.PublishedPrefix()
        stored.CopyFrom(request.prefix)
        stored.prefix_id = request.prefix.prefix_id or f"prefix-{len(self.prefixes)}"
        for old in list(self.prefixes.values()):
            is_older = (old.name, old.owner_tenant) == (stored.name, stored.owner_tenant)
            if is_older and not old.pinned:
                del self.prefixes[old.prefix_id]
        stored.segment.prefix_id = stored.prefix_id
        stored.create_time.GetCurrentTime()
        self.prefixes[stored.prefix_id] = stored
        self.version += 1
        return kvstore_pb2.PublishResponse(prefix=stored)

    async def Revoke(
        self, request: kvstore_pb2.RevokeRequest, context: Any
    ) -> kvstore_pb2.RevokeResponse:
        self.verifier.verify(request.capability, right=Right.PUBLISH)
        del self.prefixes[request.prefix_id]
        self.version += 1
        return kvstore_pb2.RevokeResponse()

    async def ListPrefixes(
        self, request: kvstore_pb2.ListPrefixesRequest, context: Any
    ) -> kvstore_pb2.ListPrefixesResponse:
        self.verifier.verify(request.capability, right=Right.READ)
        if request.known_version == self.version:
            return kvstore_pb2.ListPrefixesResponse(version=self.version, unchanged=True)
        return kvstore_pb2.ListPrefixesResponse(
            version=self.version, prefixes=list(self.prefixes.values())
        )


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Seals at once, or does what `script` says next."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.script: list[str] = []
        self.runs: list[prefill_pb2.RunRequest] = []
        self.cancelled: list[str] = []

    # The stubs type a response stream as an iterator; grpc.aio takes an async one.
    async def Run(  # type: ignore[override]
        self, request: prefill_pb2.RunRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        self.runs.append(request)
        log = self.store.logs[request.log_id]
        step = self.script.pop(0) if self.script else "ok"
        if step == "full":
            raise ServiceError(Reason.QUEUE_FULL, "the queue is full", retry_after_s=2.0)
        if step == "lost":
            raise ServiceError(Reason.WORKER_LOST, "the engine died")
        if step == "refuse":
            raise ServiceError(Reason.PAGES_EXHAUSTED, "no pages left", retry_after_s=3.0)
        if step == "end":
            return
        if step == "hang":
            await asyncio.Event().wait()
        log.sealed = True
        sampling = log.request.sampling
        sealed = prefill_pb2.Sealed(
            usage=common_pb2.Usage(
                prompt_tokens=len(log.request.prompt_token_ids),
                cached_tokens=log.request.manifest.total_tokens,
                completion_tokens=1,
            ),
            exactness=common_pb2.EXACTNESS_CLASS_EXACT,
        )
        if not request.kv_only:
            log.tokens = 1
            sealed.first_token.CopyFrom(with_logprob(word(0, sampling.max_tokens), sampling))
        yield prefill_pb2.RunResponse(sealed=sealed)

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: Any
    ) -> prefill_pb2.CancelResponse:
        self.cancelled.append(request.request_id)
        self.store.note()
        return prefill_pb2.CancelResponse(found=True)


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Continues logs word by word; `pause_at` holds every sequence before that index."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.pause_at: int | None = None
        self.resumed = asyncio.Event()
        self.starts: list[decode_pb2.StartSequence] = []
        self.prepared: list[str] = []
        self.stopped: list[str] = []
        self.cancelled: list[str] = []
        self.break_at: int | None = None
        self.breaks: list[int] = []
        self.break_always_at: int | None = None
        self.error_at: int | None = None
        self._writing = asyncio.Lock()

    async def Prepare(
        self, request: decode_pb2.PrepareRequest, context: Any
    ) -> decode_pb2.PrepareResponse:
        self.prepared.append(request.request_id)
        return decode_pb2.PrepareResponse(active=0)

    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: Any
    ) -> decode_pb2.CancelResponse:
        self.cancelled.append(request.request_id)
        self.store.note()
        return decode_pb2.CancelResponse(found=True)

    # A coroutine that writes: sequences write from tasks of their own.
    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[decode_pb2.RunRequest], context: Any
    ) -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        broken = asyncio.Event()
        async with asyncio.TaskGroup() as group:

            async def read() -> None:
                async for request in request_iterator:
                    if request.WhichOneof("command") == "start":
                        start = request.start
                        self.starts.append(start)
                        work = self._sequence(start, context, broken)
                        tasks[start.request_id] = group.create_task(work)
                    elif request.WhichOneof("command") == "stop":
                        self.stopped.append(request.stop.request_id)
                        task = tasks.pop(request.stop.request_id, None)
                        if task is not None:
                            task.cancel()
                        self.store.note()

            reading = group.create_task(read())
            breaking = group.create_task(broken.wait())
            await asyncio.wait((reading, breaking), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, breaking, *tasks.values()):
                task.cancel()
        raise ServiceError(Reason.WORKER_LOST, "the decode worker is gone")

    async def _sequence(
        self, start: decode_pb2.StartSequence, context: Any, broken: asyncio.Event
    ) -> None:
        log = self.store.logs[start.log_id]
        if start.generation != log.generation:
            detail = error_to_proto(ServiceError(Reason.STALE_GENERATION, "another owner"))
            await self._send(context, start, decode_pb2.SequenceEvent(error=detail))
            return
        if not start.local_prefill:
            log.generation += 1
        log.sealed = True
        started = decode_pb2.SequenceStarted(generation=log.generation, position=log.tokens)
        started.exactness = common_pb2.EXACTNESS_CLASS_EXACT
        await self._send(context, start, decode_pb2.SequenceEvent(started=started))
        sampling = log.request.sampling
        for index in range(start.next_index, sampling.max_tokens):
            if index == self.break_at:
                self.break_at = None
                broken.set()
                return
            if index in self.breaks or index == self.break_always_at:
                if index in self.breaks:
                    self.breaks.remove(index)
                broken.set()
                return
            if index == self.error_at:
                detail = error_to_proto(ServiceError(Reason.CHECKSUM_MISMATCH, "KV is damaged"))
                await self._send(context, start, decode_pb2.SequenceEvent(error=detail))
                return
            if index == self.pause_at:
                await self.resumed.wait()
            token = with_logprob(word(index, sampling.max_tokens), sampling)
            event = decode_pb2.SequenceEvent(token=token)
            if token.finish_reason:
                event.usage.prompt_tokens = len(log.request.prompt_token_ids)
                event.usage.cached_tokens = log.request.manifest.total_tokens
                event.usage.completion_tokens = index + 1
            log.tokens = index + 1
            await self._send(context, start, event)

    async def _send(
        self, context: Any, start: decode_pb2.StartSequence, event: decode_pb2.SequenceEvent
    ) -> None:
        event.request_id = start.request_id
        async with self._writing:
            await context.write(decode_pb2.RunResponse(events=[event]))


@dataclass(slots=True)
class FakeWorkers:
    """Every fake, and the records that are sent to the gateway."""

    store: FakeStore
    prefill: FakePrefill
    decodes: list[FakeDecode]
    records: dict[str, common_pb2.WorkerRecord] = field(default_factory=dict)

    @property
    def decode(self) -> FakeDecode:
        """The first decode worker."""
        return self.decodes[0]

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        """Waits until `condition()`, looked at after each change at the store."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.store.changed.wait()


def worker_capability() -> str:
    """What lets a worker be heard."""
    signer = CapabilitySigner(DEV_KEY, SystemClock())
    claims = Claims(
        tenant=None,
        scope=None,
        rights=frozenset({Right.HEARTBEAT}),
        expiry_wall_s=signer.expiry_after(600.0),
        request_id="test",
    )
    return signer.sign(claims)


async def beat(gateway_target: str, records: list[common_pb2.WorkerRecord]) -> None:
    """One heartbeat of each record."""
    async with grpc.aio.insecure_channel(gateway_target) as channel:
        stub = gateway_pb2_grpc.RegistryServiceStub(channel)
        for record in records:
            record.progress += 1
            await stub.Heartbeat(
                gateway_pb2.HeartbeatRequest(worker=record, capability=worker_capability()),
                timeout=5.0,
            )


async def _serve(add: Any, servicer: object, name: str, servers: list[RpcServer]) -> str:
    server = build_server(ServerOptions(bind="127.0.0.1:0"))
    server.register(add, servicer, name)
    await server.start()
    servers.append(server)
    return server.target


@asynccontextmanager
async def fake_workers(
    tokenizer_hash: bytes, model: tuple[bytes, bytes], decodes: int = 2
) -> AsyncIterator[FakeWorkers]:
    """Starts the fakes; their records say ready."""
    servers: list[RpcServer] = []
    # The stubs call the base classes abstract; what is not faked here answers UNIMPLEMENTED.
    store = FakeStore()  # type: ignore[abstract]
    # The same.
    prefill = FakePrefill(store)  # type: ignore[abstract]
    # The same.
    decoding = [FakeDecode(store) for _ in range(decodes)]  # type: ignore[abstract]
    fakes = FakeWorkers(store, prefill, decoding)
    pool = ChannelPool()
    store_at = await _serve(
        kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server, store, "kvstore", servers
    )
    prefill_at = await _serve(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server, fakes.prefill, "prefill", servers
    )
    merger_at = await _serve(
        add_to_server,
        MergerServicer(Materialiser(pool), MergerMeasures(Metrics("merger"))),
        "merger",
        servers,
    )

    def record(name: str, role: Any, address: str) -> None:
        fakes.records[name] = common_pb2.WorkerRecord(
            worker_id=name,
            role=role,
            incarnation=1,
            node_id="node-0",
            address=address,
            kvstore_address=store_at,
            label=label(tokenizer_hash, model),
            model="tiny",
            ready=True,
            load=common_pb2.WorkerLoad(active_max=16),
        )

    record("prefill-0", common_pb2.WORKER_ROLE_PREFILL, prefill_at)
    record("merger-0", common_pb2.WORKER_ROLE_MERGER, merger_at)
    for index, decode in enumerate(fakes.decodes):
        at = await _serve(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode, "decode", servers
        )
        record(f"decode-{index}", common_pb2.WORKER_ROLE_DECODE, at)
    try:
        yield fakes
    finally:
        await pool.stop()
        for server in servers:
            await server.stop()
