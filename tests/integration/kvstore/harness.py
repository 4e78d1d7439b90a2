"""A kvstore as a real process, and a fake worker that attaches, maps the arena and writes pages.

Owns the process's life, the capabilities a gateway would mint, and KV bytes that follow from the
token and its position, so that a reader can tell whose bytes it got.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2s
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.checksums import chunk_pages, commit_rows, slot_checksum
from baton.arena.client import (
    ArenaClient,
    AttachedArena,
    KVStoreClient,
    WorkerIdentity,
)
from baton.arena.page_table import PageTable
from baton.arena.replay import HeldLog, LogView
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.engine.sampling import SampledToken
from baton.ids import new_incarnation, new_log_id, new_request_id
from baton.kv.digests import ChunkPage, body_hash, chunk_list_digest
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry, page_view
from baton.rpc.channel import Channel, open_channel
from baton.rpc.health import READINESS
from baton.sampling_parameters import SamplingParameters
from baton.testing.tiny_models import GQA_TIED, TinyModel, write_directory
from baton.text.bundle import TextBundle
from baton.wire.label import label_to_proto
from baton.wire.sampling import sampling_to_proto

BLOCK = 16
ARENA_BYTES = 8 << 20
READY_TIMEOUT_S = 30.0
RIGHTS = frozenset(Right) - {Right.ADMIN, Right.ATTACH, Right.HEARTBEAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The tiny model's files and what follows from them."""

    path: Path
    label: PairLabel
    geometry: KvGeometry


def tiny_model(directory: Path, shape: TinyModel = GQA_TIED) -> Model:
    """Writes the model and reads its label."""
    path = write_directory(directory, shape)
    config = read_config(path)
    geometry = config.kv_geometry(BLOCK, KvDtype.F32)
    label = build_label(
        path,
        config,
        TextBundle.load(path).tokenizer_hash,
        geometry,
        torch_numeric_class(config, KvDtype.F32),
    )
    return Model(path=path, label=label, geometry=geometry)


@dataclass(slots=True, kw_only=True)
class StoreProcess:
    """A kvstore that can be killed and started again on the same log."""

    model: Model
    directory: Path
    flags: tuple[str, ...] = ()
    arena_bytes: int = ARENA_BYTES
    node_id: str = "n0"
    dtype: str = "float32"
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    @property
    def arena_dir(self) -> Path:
        """A tmpfs directory of this run's own; short, for the attach socket."""
        # Of the whole path: two stores that live at once must never share a directory.
        own = blake2s(os.fsencode(self.directory), digest_size=8).hexdigest()
        return Path(f"/dev/shm/kvt-{os.getpid()}-{own}")  # noqa: S108 - 0700, removed at the end

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Starts it."""
        port_file = self.directory / "port"
        port_file.unlink(missing_ok=True)
        port = self._address().rpartition(":")[2]
        argv = [
            *(sys.executable, "-m", "services.kvstore", "--model", str(self.model.path)),
            *("--dtype", self.dtype, "--block-tokens", str(BLOCK), "--node-id", self.node_id),
            *("--arena-bytes", str(self.arena_bytes), "--arena-dir", str(self.arena_dir)),
            *("--log-dir", str(self.directory / "log"), "--port", port),
            *("--port-file", str(port_file), "--log-level", "warning", *self.flags),
        ]
        with (self.directory / "log.txt").open("ab") as log:
            own = {**os.environ, **self.environment}
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=own)

    def await_ready(self) -> None:
        """Returns when it serves."""
        asyncio.run(ready_at(self._address()))

    def _address(self) -> str:
        if not self.address:
            with socket_of_any_port() as port:
                self.address = f"127.0.0.1:{port}"
        return self.address

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10.0)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(20.0)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10.0)

    def text(self) -> str:
        """What it logged."""
        return (self.directory / "log.txt").read_text("utf-8", "replace")


@contextmanager
def socket_of_any_port() -> Iterator[int]:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


@contextmanager
def running_store(
    model: Model,
    directory: Path,
    *flags: str,
    node_id: str = "n0",
    arena_bytes: int = ARENA_BYTES,
    environment: dict[str, str] | None = None,
) -> Iterator[StoreProcess]:
    """A ready kvstore until the block ends."""
    store = StoreProcess(
        model=model,
        directory=directory,
        flags=flags,
        node_id=node_id,
        arena_bytes=arena_bytes,
        environment=environment or {},
    )
    try:
        store.start()
        yield store
    finally:
        if store.process is not None and store.process.poll() is None:
            store.stop()
        shutil.rmtree(store.arena_dir, ignore_errors=True)


async def ready_at(address: str) -> None:
    """Health is watched, so that nothing polls; the watch waits for the server to come up."""
    options = [("grpc.max_reconnect_backoff_ms", 100), ("grpc.initial_reconnect_backoff_ms", 50)]
    async with (
        asyncio.timeout(READY_TIMEOUT_S),
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=READINESS)
        async for answer in watch(request, wait_for_ready=True):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


def capability(
    log_id: bytes | None = None,
    *,
    tenant: str | None = "acme",
    scope: str | None = "",
    rights: frozenset[Right] = RIGHTS,
    key: bytes = DEV_KEY,
) -> str:
    """What a gateway would mint."""
    signer = CapabilitySigner(key, SystemClock())
    claims = Claims(
        tenant=tenant,
        scope=None if tenant is None else scope,
        rights=rights,
        expiry_wall_s=signer.expiry_after(600.0),
        request_id="r",
        log_id=log_id,
    )
    return signer.sign(claims)


WORKER_CAPABILITY_RIGHTS = frozenset({Right.ATTACH, Right.HEARTBEAT})


def worker_capability() -> str:
    """A worker's."""
    return capability(tenant=None, rights=WORKER_CAPABILITY_RIGHTS)


def kv_value(token: int, position: int) -> float:
    """What a fake worker writes into every element of a slot."""
    return float(token * 1000 + position)


@dataclass(slots=True)
class FakeLog:
    """A log a fake worker writes."""

    log_id: bytes
    generation: int
    capability: str
    tokens: list[int]
    table: PageTable
    committed: int
    prompt_tokens: int
    chunks: list[Sequence[ChunkPage]] = field(default_factory=list)

    @property
    def held(self) -> HeldLog:
        """Its name and generation."""
        return HeldLog(log_id=self.log_id, generation=self.generation)


class FakeWorker:
    """Attaches, maps and writes as a real worker would, with made-up KV."""

    def __init__(
        self, channel: Channel, model: Model, worker_id: str, attached: AttachedArena
    ) -> None:
        self.store = KVStoreClient(channel, worker_id, worker_capability())
        self.stub: Any = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        self.model = model
        self.worker_id = worker_id
        self.attached = attached
        self.incarnation = 0
        self._append: Any = None
        self._batch = 0

    def write(self, log: FakeLog, first: int, end: int) -> None:
        """Puts KV of positions [first, end) into the log's pages."""
        log.table.require(end)
        for position in range(first, end):
            granted, slot = log.table.slot(position)
            buffer = np.frombuffer(self.attached.arena.page(granted.page), dtype=np.uint8)
            view = page_view(self.model.geometry, buffer)
            view.k[:, :, slot] = kv_value(log.tokens[position], position)
            view.v[:, :, slot] = -kv_value(log.tokens[position], position)

    def read(self, view: LogView, position: int) -> float:
        """The K value at a position of a replayed log."""
        row = view.rows[position // BLOCK]
        buffer = np.frombuffer(self.attached.arena.page(row.page), dtype=np.uint8)
        return float(page_view(self.model.geometry, buffer).k[0, 0, position % BLOCK, 0])

    async def view(self, log: FakeLog) -> LogView:
        """The log as the store has it."""
        return await self.store.replay(log.log_id, log.capability, BLOCK)

    async def follow(self, log_id: bytes, generation: int, capability_text: str) -> FakeLog:
        """Replays a log this worker is the writer of."""
        view = await self.store.replay(log_id, capability_text, BLOCK, generation=generation)
        return FakeLog(
            log_id=log_id,
            generation=generation,
            capability=capability_text,
            tokens=list(view.token_ids),
            table=PageTable.of_view(view, BLOCK),
            committed=view.head.committed_position,
            prompt_tokens=view.head.prompt_tokens,
        )

    async def commit(self, log: FakeLog, end: int) -> None:
        """Writes and commits KV up to `end`."""
        first = log.committed
        self.write(log, first, end)
        rows = commit_rows(self.attached.arena, log.table, first, end)
        await self.store.commit_checkpoint(log.held, (first, end), rows, log.capability)
        log.chunks.append(chunk_pages(rows, first, BLOCK))
        log.committed = end

    async def seal(self, log: FakeLog, token: int | None, finish: str | None = None) -> None:
        """Ends prefill."""
        digest = chunk_list_digest(self.model.label.kv_digest(), log.chunks)
        sampled = None if token is None else SampledToken(token_id=token)
        await self.store.seal(
            log.held, digest, log.capability, first_token=sampled, finish_reason=finish
        )
        if token is not None:
            log.tokens.append(token)

    async def prefill(self, log: FakeLog, token: int | None = 5, finish: str | None = None) -> None:
        """The whole prompt, in chunks of a page and a half, sealed."""
        while log.committed < log.prompt_tokens:
            await self.commit(log, min(log.committed + BLOCK * 3 // 2, log.prompt_tokens))
        await self.seal(log, token, finish)

    def entry(self, log: FakeLog, token: int, finish: str | None = None) -> AppendEntry:
        """The next append of a log; its KV slot is written."""
        position = len(log.tokens)
        self.write(log, position - 1, position)
        granted, _ = log.table.slot(position - 1)
        return AppendEntry(
            log_id=log.log_id,
            generation=log.generation,
            position=position,
            sampled=SampledToken(token_id=token),
            page=granted,
            checksum=slot_checksum(self.attached.arena, log.table, position - 1),
            finish_reason=finish,
            pages_wanted=log.table.missing_pages(position, BLOCK),
        )

    async def send(self, entries: Sequence[AppendEntry]) -> tuple[AppendOutcome, ...]:
        """One group commit."""
        introduction = None
        if self._append is None:
            self._append = self.store.open_append()
            introduction = (self.worker_id, worker_capability())
        self._batch += 1
        await self._append.send(self._batch, entries, introduction=introduction)
        batch, outcomes = await self._append.receive()
        assert batch == self._batch
        return tuple(outcomes)

    async def append(self, log: FakeLog, token: int, finish: str | None = None) -> None:
        """One acked token."""
        (outcome,) = await self.send([self.entry(log, token, finish)])
        if outcome.error is not None:
            raise outcome.error
        log.table.grant(outcome.pages)
        log.tokens.append(token)
        log.committed += 1

    async def take(self, log: FakeLog, *, pages: int = 1) -> FakeLog:
        """Becomes the log's writer."""
        taken = await self.store.take(
            log.held, log.capability, pages=pages, request_id=new_request_id()
        )
        return await self.follow(log.log_id, taken.generation, log.capability)

    def leave_stream(self) -> None:
        """Gives the append stream up; the next append opens another."""
        if self._append is not None:
            self._append.cancel()
        self._append = None

    def leave(self) -> None:
        """Unmaps and closes: what the kernel sees when a worker dies."""
        self.leave_stream()
        self.attached.arena.unmap()


@dataclass(slots=True)
class Site:
    """A test's connections to one store."""

    store: StoreProcess
    model: Model
    channel: Channel
    stub: Any
    workers: list[FakeWorker] = field(default_factory=list)

    async def attach(
        self,
        worker_id: str = "w0",
        held: Sequence[HeldLog] = (),
        label: PairLabel | None = None,
        incarnation: int | None = None,
    ) -> FakeWorker:
        """A fake worker, attached; a fresh run of it unless `incarnation` is given."""
        identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation=new_incarnation() if incarnation is None else incarnation,
            label=label or self.model.label,
            geometry=self.model.geometry,
            capability=worker_capability(),
            software_version="test",
        )
        client = KVStoreClient(self.channel, worker_id)
        attached = await ArenaClient.attach(client, identity, held)
        worker = FakeWorker(self.channel, self.model, worker_id, attached)
        worker.incarnation = identity.incarnation
        self.workers.append(worker)
        return worker

    async def reattach(self, old: FakeWorker, held: Sequence[HeldLog] | None = None) -> FakeWorker:
        """The same run of a worker finds its store again, naming `held`; the old mapping goes."""
        fresh = await self.attach(old.worker_id, held or (), None, old.incarnation)
        old.leave()
        self.workers.remove(old)
        return fresh

    async def restart(self) -> None:
        """SIGKILL, and a new process on the same files, ready."""
        self.store.kill()
        await asyncio.to_thread(self.store.start)

    def open_request(
        self, worker: FakeWorker, tokens: Sequence[int], **fields: Any
    ) -> kvstore_pb2.OpenRequest:
        """What a gateway sends."""
        log_id = fields.pop("log_id", None) or new_log_id()
        text = fields.pop("capability", None) or capability(log_id)
        request = kvstore_pb2.OpenRequest(
            request_id=new_request_id(),
            log_id=log_id,
            capability=text,
            label=label_to_proto(self.model.label, self.model.geometry),
            writer_worker_id=worker.worker_id,
            sampling=sampling_to_proto(SamplingParameters(seed=1)),
            prompt_token_ids=tokens,
            **{"output_pages": 1, **fields},
        )
        request.body_hash = body_hash(log_id)
        return request

    async def open(self, worker: FakeWorker, tokens: Sequence[int], **fields: Any) -> FakeLog:
        """A log with its writer."""
        request = self.open_request(worker, tokens, **fields)
        answer = await self.stub.Open(request)
        return await worker.follow(request.log_id, answer.generation, request.capability)

    async def close(self, log: FakeLog, *, drop: bool = False) -> None:
        """Ends a log."""
        await self.stub.Close(
            kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=drop)
        )

    async def counts(self) -> kvstore_pb2.DescribeArenaResponse:
        """Pages by state; checks conservation."""
        answer = await self.stub.DescribeArena(
            kvstore_pb2.DescribeArenaRequest(capability=worker_capability())
        )
        total = answer.pages_free + answer.pages_granted + answer.pages_live
        total += answer.pages_shared + answer.pages_quarantined
        assert total == answer.arena.page_count
        return answer

    async def until(self, what: str, **wanted: int) -> kvstore_pb2.DescribeArenaResponse:
        """Asks for the page counts until they are as wanted; each answer takes a round trip."""
        deadline_s = SystemClock().monotonic_s() + 30.0
        while True:
            counts = await self.counts()
            if all(getattr(counts, name) == value for name, value in wanted.items()):
                return counts
            assert SystemClock().monotonic_s() < deadline_s, f"{what}: {counts}"


@asynccontextmanager
async def connected(store: StoreProcess) -> AsyncIterator[Site]:
    """Connections to a store; workers are detached at the end."""
    async with open_channel(store.address) as channel:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        site = Site(store=store, model=store.model, channel=channel, stub=stub)
        try:
            yield site
        finally:
            for worker in site.workers:
                worker.leave()
