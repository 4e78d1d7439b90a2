"""A kvstore and workers as real processes on a tiny model, and a gateway's side of their calls.

Owns the processes' life, the capabilities a gateway would mint, and the direct computation that
everything is compared with.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from baton.api.common.v1 import common_pb2
from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.engine.config import read_config
from baton.engine.finish import EndRule
from baton.engine.kv_pages import KvPages
from baton.engine.label import build_label, torch_numeric_class
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import body_hash
from baton.kv.layout import KvDtype
from baton.launcher.ports import PortReservation
from baton.rpc.channel import Channel, open_channel
from baton.rpc.health import READINESS
from baton.sampling_parameters import SamplingParameters
from baton.testing.tiny_models import GQA_TIED, TinyModel, write_directory
from baton.text.bundle import TextBundle
from baton.wire.label import label_to_proto
from baton.wire.sampling import sampling_to_proto
from baton.worker.output import OutputState, OutputToken

READY_TIMEOUT_S = 60.0
BLOCK_TOKENS = 16
ARENA_BYTES = 24 << 20
DEVICE_BYTES = 1 << 20
RIGHTS = frozenset(
    {Right.OPEN, Right.READ, Right.WRITE, Right.SEAL, Right.TAKE, Right.CANCEL, Right.FORK}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the processes serve. `prefill` by chunk size."""

    model: Path
    kvstore: str
    prefill: dict[int, str]
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The running processes by name, and what starts each of them."""

    addresses: Addresses
    run_dir: Path
    at: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one process; it is not ready yet."""
        argv = [sys.executable, "-m", f"services.{name.rpartition('-')[0]}", *self.flags[name]]
        argv += ["--port", self.at[name].rpartition(":")[2], "--log-level", "info"]
        with (self.run_dir / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                argv, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def kill(self, name: str) -> None:
        """End one process without warning."""
        process = self.running.pop(name)
        process.kill()
        process.wait(5.0)

    def stop(self) -> None:
        """End all, the kvstore last."""
        for process in reversed(self.running.values()):
            process.terminate()
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)


@contextmanager
def running_workers(
    run_dir: Path,
    chunk_sizes: Sequence[int] = (16, 64),
    *,
    tiny: TinyModel = GQA_TIED,
    arena_bytes: int = ARENA_BYTES,
    decode_flags: Sequence[str] = ("--device", "standin", "--device-bytes", str(DEVICE_BYTES)),
    prefill_flags: Sequence[str] = (),
    store_flags: Sequence[str] = (),
) -> Iterator[Processes]:
    """A kvstore, one prefill worker per chunk size and a decode worker, ready."""
    model = write_directory(run_dir / "tiny", tiny)
    ports = PortReservation("127.0.0.1")
    names = ["kvstore-0", "decode-0", *(f"prefill-{size}" for size in chunk_sizes)]
    at = {name: f"127.0.0.1:{ports.next_port()}" for name in names}
    ports.release()
    common = ("--model", str(model), "--dtype", "float32")
    worker = (*common, "--kvstore", at["kvstore-0"], "--threads", "1")
    # A short path on a tmpfs of this run's own: the attach socket lies there too.
    name = f"baton-test-{os.getpid()}-{at['kvstore-0'][-5:]}"
    arena_dir = Path("/dev/shm", name)  # noqa: S108 - made 0700
    flags: dict[str, tuple[str, ...]] = {
        "kvstore-0": (
            *common,
            *("--node-id", f"test-{os.getpid()}", "--block-tokens", str(BLOCK_TOKENS)),
            *("--arena-bytes", str(arena_bytes), "--log-dir", str(run_dir / "log")),
            *("--arena-dir", str(arena_dir), "--run-dir", str(run_dir)),
            *store_flags,
        ),
        "decode-0": (
            *(*worker, "--worker-id", "decode-0", "--chunk-tokens", "32"),
            *decode_flags,
        ),
    }
    for size in chunk_sizes:
        chunk = ("--worker-id", f"prefill-{size}", "--chunk-tokens", str(size))
        flags[f"prefill-{size}"] = (*worker, *chunk, *prefill_flags)
    addresses = Addresses(
        model=model,
        kvstore=at["kvstore-0"],
        prefill={size: at[f"prefill-{size}"] for size in chunk_sizes},
        decode=at["decode-0"],
    )
    processes = Processes(addresses=addresses, run_dir=run_dir, at=at, flags=flags)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, arena_dir, ignore_errors=True)
        stack.callback(processes.stop)
        for name in names:
            processes.start(name)
        asyncio.run(all_ready(at, run_dir))
        yield processes


async def all_ready(at: dict[str, str], run_dir: Path) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S), asyncio.TaskGroup() as group:
            for address in at.values():
                group.create_task(_ready(address))
    except TimeoutError:
        logs = "\n".join(f"--- {n}\n{(run_dir / f'{n}.log').read_text('utf-8')}" for n in at)
        raise AssertionError(f"not ready within {READY_TIMEOUT_S} s\n{logs}") from None


async def _ready(address: str) -> None:
    """Health is watched, so that nothing polls; the watch waits for the server to come up."""
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.max_reconnect_backoff_ms", 200)]
    ) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=READINESS)
        async for answer in watch(request, wait_for_ready=True):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


class Direct:
    """The model computed in this process, one sequence at a time, on pages of its own."""

    def __init__(self, model: Path) -> None:
        config = read_config(model)
        weights = load_weights(model, ComputeDtype.FLOAT32)
        geometry = config.kv_geometry(BLOCK_TOKENS, KvDtype.F32)
        self.geometry = geometry
        self.transformer = Transformer(weights, KvPages.allocate(geometry, 40))
        self.bundle = TextBundle.load(model)
        self.rule = EndRule(
            end_token_ids=frozenset(config.end_token_ids), max_context=config.max_context
        )
        self.label = build_label(
            model,
            config,
            self.bundle.tokenizer_hash,
            geometry,
            torch_numeric_class(config, KvDtype.F32),
        )

    def tokens(self, prompt: Sequence[int], sampling: SamplingParameters) -> list[OutputToken]:
        """The whole answer to `prompt`."""
        state = OutputState(prompt, sampling, self.rule, self.bundle.tokenizer)
        table = range(40)
        produced = [state.choose(self.transformer.prefill_chunk(prompt, 0, table).numpy())]
        while produced[-1].finish_reason is None:
            token, at = produced[-1].sampled.token_id, len(prompt) + len(produced) - 1
            logits = self.transformer.decode_step([token], [at], [table])[0]
            produced.append(state.choose(logits.numpy()))
        return produced


def shape(tokens: Sequence[Any]) -> list[tuple[int, int, str, str | None]]:
    """What two answers are compared by: index, token, text, end."""
    return [(t.index, t.sampled.token_id, t.text, t.finish_reason) for t in tokens]


_FINISH = {0: None, 1: "stop", 2: "length", 3: "cancelled", 4: "error"}


def event_shape(event: common_pb2.TokenEvent) -> tuple[int, int, str, str | None]:
    """The same of an event."""
    return (event.index, event.token_id, event.text, _FINISH[event.finish_reason])


@dataclass(slots=True)
class OpenedLog:
    """A log as its gateway knows it."""

    log_id: bytes
    request_id: str
    capability: str
    generation: int
    cached_tokens: int


@dataclass(slots=True)
class Answer:
    """Everything one sequence's stream told."""

    started: decode_pb2.SequenceStarted | None = None
    tokens: list[common_pb2.TokenEvent] = field(default_factory=list)
    usage: common_pb2.Usage | None = None
    error: common_pb2.ErrorDetail | None = None
    waits: int = 0

    @property
    def is_over(self) -> bool:
        """The last event came."""
        is_ended = bool(self.tokens) and self.tokens[-1].finish_reason != 0
        return self.error is not None or is_ended

    def shapes(self) -> list[tuple[int, int, str, str | None]]:
        """The tokens to compare."""
        return [event_shape(event) for event in self.tokens]


class DecodeStream:
    """One gateway's stream to a decode worker."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.answers: dict[str, Answer] = {}
        self.messages = 0

    async def start(self, log: OpenedLog, **fields: Any) -> None:
        """Hand a log over."""
        self.answers[log.request_id] = Answer()
        start = decode_pb2.StartSequence(
            request_id=log.request_id,
            log_id=log.log_id,
            generation=log.generation,
            capability=log.capability,
            **fields,
        )
        await self._call.write(decode_pb2.RunRequest(start=start))

    async def stop(self, log: OpenedLog) -> None:
        """Cancel a sequence."""
        stop = decode_pb2.StopSequence(request_id=log.request_id)
        await self._call.write(decode_pb2.RunRequest(stop=stop))

    async def until(self, request_id: str, tokens: int | None = None) -> Answer:
        """Read until the answer is over, or has so many tokens."""
        answer = self.answers[request_id]
        async with asyncio.timeout(30.0):
            while not answer.is_over and (tokens is None or len(answer.tokens) < tokens):
                await self._read()
        return answer

    async def all(self) -> dict[str, Answer]:
        """Read until every answer is over."""
        for request_id in self.answers:
            await self.until(request_id)
        return self.answers

    def cancel(self) -> None:
        """The gateway is gone."""
        self._call.cancel()

    async def _read(self) -> None:
        message = await self._call.read()
        assert isinstance(message, decode_pb2.RunResponse), "the stream ended"
        self.messages += 1
        for event in message.events:
            answer = self.answers[event.request_id]
            if event.HasField("started"):
                answer.started = event.started
            elif event.HasField("token"):
                answer.tokens.append(event.token)
            elif event.HasField("waiting"):
                answer.waits += 1
            else:
                answer.error = event.error
            if event.HasField("usage"):
                answer.usage = event.usage


class Gateway:
    """What a gateway does, without routing."""

    def __init__(self, addresses: Addresses, direct: Direct, channels: dict[str, Channel]) -> None:
        self.addresses = addresses
        self.direct = direct
        self._signer = CapabilitySigner(DEV_KEY, SystemClock())
        self.store = kvstore_pb2_grpc.KVStoreServiceStub(channels[addresses.kvstore])
        self.prefills = {
            size: prefill_pb2_grpc.PrefillServiceStub(channels[address])
            for size, address in addresses.prefill.items()
        }
        self.decode = decode_pb2_grpc.DecodeServiceStub(channels[addresses.decode])
        self.label = label_to_proto(direct.label, direct.geometry)

    def capability(self, log_id: bytes, tenant: str = "acme") -> str:
        """Every right on one log."""
        claims = Claims(
            tenant=tenant,
            scope=tenant,
            rights=RIGHTS,
            expiry_wall_s=self._signer.expiry_after(600.0),
            request_id="test",
            log_id=log_id,
        )
        return self._signer.sign(claims)

    def operator(
        self,
        *,
        tenant: str | None = None,
        right: Right = Right.ADMIN,
        ttl_s: float = 600.0,
    ) -> str:
        """An operator's capability, or one that is wrong in some way."""
        claims = Claims(
            tenant=tenant,
            scope=tenant,
            rights=frozenset({right}),
            expiry_wall_s=SystemClock().wall_s() + ttl_s,
            request_id="test",
        )
        return self._signer.sign(claims)

    async def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParameters,
        writer: str,
        *,
        is_cached: bool = False,
        tenant: str = "acme",
    ) -> OpenedLog:
        """Open a log for a worker."""
        log_id, request_id = new_log_id(), new_request_id()
        capability = self.capability(log_id, tenant)
        answer = await self.store.Open(
            kvstore_pb2.OpenRequest(
                request_id=request_id,
                body_hash=body_hash(request_id.encode()),
                log_id=log_id,
                capability=capability,
                label=self.label,
                writer_worker_id=writer,
                sampling=sampling_to_proto(sampling),
                prompt_token_ids=prompt,
                output_pages=1,
                cache_mode=(
                    common_pb2.CACHE_MODE_READ_WRITE if is_cached else common_pb2.CACHE_MODE_OFF
                ),
            ),
            timeout=10.0,
        )
        return OpenedLog(log_id, request_id, capability, answer.generation, answer.cached_tokens)

    async def prefill(
        self, log: OpenedLog, size: int, **fields: Any
    ) -> tuple[list[prefill_pb2.ChunkCommitted], prefill_pb2.Sealed]:
        """Run a prompt to its seal."""
        request = prefill_pb2.RunRequest(
            request_id=log.request_id,
            log_id=log.log_id,
            generation=log.generation,
            capability=log.capability,
            **fields,
        )
        chunks, sealed = [], None
        async for message in self.prefills[size].Run(request, timeout=30.0):
            if message.HasField("sealed"):
                sealed = message.sealed
            else:
                chunks.append(message.chunk_committed)
        assert sealed is not None, "a stream that ends without sealed has failed"
        return chunks, sealed

    @asynccontextmanager
    async def stream(
        self, name: str = "gateway-test", timeout_s: float = 60.0
    ) -> AsyncIterator[DecodeStream]:
        """A stream to the decode worker."""
        call = self.decode.Run(timeout=timeout_s)
        await call.write(decode_pb2.RunRequest(hello=decode_pb2.Hello(gateway_id=name)))
        stream = DecodeStream(call)
        try:
            yield stream
        finally:
            stream.cancel()

    async def answer(
        self, prompt: Sequence[int], sampling: SamplingParameters, size: int
    ) -> list[tuple[int, int, str, str | None]]:
        """The whole disaggregated answer: prefill, hand-off, decode."""
        log = await self.open(prompt, sampling, f"prefill-{size}")
        _, sealed = await self.prefill(log, size)
        first = event_shape(sealed.first_token)
        if first[3] is not None:
            return [first]
        async with self.stream() as stream:
            await stream.start(log, next_index=1)
            rest = await stream.until(log.request_id)
            assert rest.error is None, rest.error
            return [first, *rest.shapes()]

    async def arena(self) -> kvstore_pb2.DescribeArenaResponse:
        """Page counts."""
        return await self.store.DescribeArena(
            kvstore_pb2.DescribeArenaRequest(capability=self.capability(bytes(16))), timeout=5.0
        )


@asynccontextmanager
async def gateway_to(addresses: Addresses, direct: Direct) -> AsyncIterator[Gateway]:
    """A gateway's channels for one test."""
    targets = [addresses.kvstore, addresses.decode, *addresses.prefill.values()]
    channels = {target: open_channel(target) for target in targets}
    try:
        yield Gateway(addresses, direct, channels)
    finally:
        for channel in channels.values():
            await channel.close()
