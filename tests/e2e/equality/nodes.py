"""Two nodes as real processes on a tiny float32 model, with nothing shared, and the calls to them.

Owns the processes, the capabilities a gateway would mint and the calls that the matrix is made of:
open from any base, prefill, move, decode, splice, materialise, import.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc, operators_pb2, operators_pb2_grpc
from baton.api.merger.v1 import merger_pb2, merger_pb2_grpc
from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import body_hash, history_at
from baton.kv.manifest import Segment
from baton.launcher.ports import PortReservation
from baton.rpc.channel import open_channel
from baton.sampling_parameters import SamplingParameters
from baton.testing.tiny_models import write_directory
from baton.wire.label import label_to_proto
from baton.wire.sampling import sampling_to_proto
from baton.wire.segments import segment_to_proto
from tests.integration.kvstore.harness import capability
from tests.integration.workers.harness import (
    ARENA_BYTES,
    BLOCK_TOKENS,
    Addresses,
    DecodeStream,
    Direct,
    OpenedLog,
    Processes,
    all_ready,
)

SIZES: Final = {"a": (16, 48, 112), "b": (48,)}
"""Tokens of a prefill worker's chunk, whole pages: one block, a few with a rest, the whole prompt.
Every other size is the engine's matter (`test_engine.py`)."""

LOCAL: Final = 0
"""Instead of a size: the decode worker prefills itself, in chunks of 32."""

TIMEOUT_S: Final = 30.0


@contextmanager
def two_nodes(run_dir: Path) -> Iterator[Processes]:
    """A kvstore, prefill workers and a decode worker on each of two nodes, and a merger, ready."""
    model = write_directory(run_dir / "tiny")
    ports = PortReservation("127.0.0.1")
    prefills = [(node, size) for node, sizes in SIZES.items() for size in sizes]
    names = ["kvstore-a", "kvstore-b", "merger-0", "decode-a", "decode-b"]
    names += [f"prefill-{node}{size}" for node, size in prefills]
    at = {name: f"127.0.0.1:{ports.next_port()}" for name in names}
    ports.release()
    common = ("--model", str(model), "--dtype", "float32")
    flags: dict[str, tuple[str, ...]] = {"merger-0": ()}
    arenas: list[Path] = []
    for node in SIZES:
        own = run_dir / node
        own.mkdir()
        # A short path on a tmpfs of this run's own: the attach socket lies there too.
        name = f"baton-eq-{os.getpid()}-{at[f'kvstore-{node}'][-5:]}"
        arenas.append(Path("/dev/shm", name))  # noqa: S108 - made 0700 by the kvstore
        flags[f"kvstore-{node}"] = (
            *(*common, "--node-id", f"equality-{node}", "--block-tokens", str(BLOCK_TOKENS)),
            *("--arena-bytes", str(ARENA_BYTES), "--arena-dir", str(arenas[-1])),
            *("--log-dir", str(own / "log"), "--run-dir", str(own)),
        )
        worker = (*common, "--kvstore", at[f"kvstore-{node}"], "--threads", "1")
        flags[f"decode-{node}"] = (*worker, "--worker-id", f"decode-{node}", "--chunk-tokens", "32")
    for node, size in prefills:
        flags[f"prefill-{node}{size}"] = (
            *(*common, "--kvstore", at[f"kvstore-{node}"], "--threads", "1"),
            *("--worker-id", f"prefill-{node}{size}", "--chunk-tokens", str(size)),
        )
    addresses = Addresses(model=model, kvstore=at["kvstore-a"], prefill={}, decode=at["decode-a"])
    processes = Processes(addresses=addresses, run_dir=run_dir, at=at, flags=flags)
    with ExitStack() as stack:
        for arena in arenas:
            stack.callback(shutil.rmtree, arena, ignore_errors=True)
        stack.callback(processes.stop)
        for name in names:
            processes.start(name)
        asyncio.run(all_ready(at, run_dir))
        yield processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The services of one node, and streams to its decode worker that are this test's own."""

    name: str
    address: str
    store: kvstore_pb2_grpc.KVStoreServiceAsyncStub
    operators: operators_pb2_grpc.OperatorServiceAsyncStub
    prefills: dict[int, prefill_pb2_grpc.PrefillServiceAsyncStub]
    stream: DecodeStream

    def writer(self, size: int) -> str:
        """The id of the worker that prefills in chunks of `size`."""
        return f"decode-{self.name}" if size == LOCAL else f"prefill-{self.name}{size}"


@dataclass(slots=True, kw_only=True)
class Held(OpenedLog):
    """A log as the test knows it, and where its home is."""

    node: Node
    tenant: str


@dataclass(slots=True, kw_only=True)
class Nodes:
    """Both nodes and the merger, as one gateway sees them."""

    direct: Direct
    a: Node
    b: Node
    merger: merger_pb2_grpc.MergerServiceAsyncStub

    async def open(
        self,
        node: Node,
        prompt: Sequence[int],
        sampling: SamplingParameters,
        size: int,
        *,
        tenant: str,
        **base: Any,
    ) -> Held:
        """A log for a worker; looked up in the cache unless `base` says otherwise."""
        log_id, request_id = new_log_id(), new_request_id()
        text = capability(log_id, tenant=tenant)
        request = kvstore_pb2.OpenRequest(
            request_id=request_id,
            body_hash=body_hash(request_id.encode()),
            log_id=log_id,
            capability=text,
            label=label_to_proto(self.direct.label, self.direct.geometry),
            writer_worker_id=node.writer(size),
            sampling=sampling_to_proto(sampling),
            prompt_token_ids=prompt,
            output_pages=1,
            **{"cache_mode": common_pb2.CACHE_MODE_READ_WRITE, **base},
        )
        answer = await node.store.Open(request, timeout=TIMEOUT_S)
        return Held(
            node=node,
            log_id=log_id,
            request_id=request_id,
            capability=text,
            tenant=tenant,
            generation=answer.generation,
            cached_tokens=answer.cached_tokens,
        )

    async def prefill(self, log: Held, size: int, *, kv_only: bool = False) -> prefill_pb2.Sealed:
        """The prompt's missing KV, to the seal."""
        request = prefill_pb2.RunRequest(
            request_id=log.request_id,
            log_id=log.log_id,
            generation=log.generation,
            capability=log.capability,
            tenant=log.tenant,
            kv_only=kv_only,
        )
        sealed: prefill_pb2.Sealed | None = None
        async for message in log.node.prefills[size].Run(request, timeout=TIMEOUT_S):
            if message.HasField("sealed"):
                sealed = message.sealed
        assert sealed is not None, "a stream that ends without sealed has failed"
        return sealed

    async def decode(self, log: Held, next_index: int) -> list[common_pb2.TokenEvent]:
        """Tokens from `next_index` to the last; from 0 the decode worker prefills first."""
        stream = log.node.stream
        await stream.start(
            log, next_index=next_index, local_prefill=next_index == 0, tenant=log.tenant
        )
        answer = await stream.until(log.request_id)
        assert answer.error is None, answer.error
        if next_index == 0:
            assert answer.usage is not None
            assert answer.usage.cached_tokens == log.cached_tokens
        return answer.tokens

    async def expect(self, log: Held, node: Node) -> None:
        """The other node's kvstore follows the log while it is computed."""
        request = kvstore_pb2.ExpectLogRequest(
            log_id=log.log_id,
            from_kvstore_address=log.node.address,
            capability=log.capability,
            request_id=new_request_id(),
        )
        await node.store.ExpectLog(request, timeout=TIMEOUT_S)

    async def move(self, log: Held, node: Node) -> kvstore_pb2.AdoptLogResponse:
        """The other node's kvstore becomes the log's home."""
        request = kvstore_pb2.AdoptLogRequest(
            log_id=log.log_id,
            generation=log.generation,
            from_kvstore_address=log.node.address,
            capability=log.capability,
            request_id=new_request_id(),
        )
        answer: kvstore_pb2.AdoptLogResponse = await node.store.AdoptLog(request, timeout=TIMEOUT_S)
        log.node, log.generation = node, answer.generation
        return answer

    async def close(self, log: Held, *, drop: bool) -> None:
        """The log ends: kept for who comes next, or gone."""
        request = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=drop)
        await log.node.store.Close(request, timeout=TIMEOUT_S)

    def segment(self, log: Held, tokens: Sequence[int], first: int, end: int) -> common_pb2.Segment:
        """Positions [first, end) of a sealed log whose tokens are `tokens`."""
        label, kv = self.direct.label, self.direct.label.kv_digest()
        return segment_to_proto(
            Segment(
                log_id=log.log_id,
                generation=log.generation,
                from_position=first,
                to_position=end,
                history_start=history_at(kv, BLOCK_TOKENS, tokens[:first]),
                history_end=history_at(kv, BLOCK_TOKENS, tokens[:end]),
                kv_digest=kv,
                tokenizer_hash=label.tokenizer,
                block_tokens=BLOCK_TOKENS,
                numeric_class_id=label.numeric_class.id,
            )
        )

    async def splice(self, segments: Sequence[common_pb2.Segment]) -> common_pb2.Manifest:
        """The merger's manifest."""
        request = merger_pb2.SpliceRequest(
            request_id=new_request_id(), segments=segments, block_tokens=BLOCK_TOKENS
        )
        answer = await self.merger.Splice(request, timeout=TIMEOUT_S)
        return answer.manifest

    async def materialise(
        self, manifest: common_pb2.Manifest, sources: Sequence[Held], node: Node, tenant: str
    ) -> Held:
        """A log of its own at `node`, of `tenant`, from the merger's stream of blobs."""
        log_id, request_id = new_log_id(), new_request_id()
        text = capability(log_id, tenant=tenant)
        asked = merger_pb2.MaterializeRequest(
            request_id=new_request_id(),
            manifest=manifest,
            kvstore_address=sources[0].node.address,
            capabilities=[source.capability for source in sources],
        )
        header = operators_pb2.ImportLogHeader(
            request_id=request_id,
            capability=text,
            log_id=log_id,
            total_tokens=manifest.total_tokens,
        )

        async def pieces() -> AsyncIterator[operators_pb2.ImportLogRequest]:
            yield operators_pb2.ImportLogRequest(header=header)
            async for piece in self.merger.Materialize(asked, timeout=TIMEOUT_S):
                if piece.HasField("descriptor"):
                    yield operators_pb2.ImportLogRequest(descriptor=piece.descriptor)
                else:
                    yield operators_pb2.ImportLogRequest(chunk=piece.chunk)

        answer = await node.operators.ImportLog(pieces(), timeout=TIMEOUT_S)
        assert answer.log.position == manifest.total_tokens
        assert answer.history_end == manifest.history_end
        return Held(
            node=node,
            log_id=log_id,
            request_id=request_id,
            capability=text,
            tenant=tenant,
            generation=answer.log.generation,
            cached_tokens=0,
        )


@asynccontextmanager
async def connected(at: dict[str, str], direct: Direct, lane: str) -> AsyncIterator[Nodes]:
    """Channels and decode streams of one lane of a test; `at`: addresses by process name."""
    async with AsyncExitStack() as stack:
        channels = {
            name: await stack.enter_async_context(open_channel(address))
            for name, address in at.items()
        }

        async def node(name: str) -> Node:
            decode = decode_pb2_grpc.DecodeServiceStub(channels[f"decode-{name}"])
            call = decode.Run(timeout=600.0)
            await call.write(
                decode_pb2.RunRequest(hello=decode_pb2.Hello(gateway_id=f"equality-{lane}"))
            )
            stream = DecodeStream(call)
            stack.callback(stream.cancel)
            return Node(
                name=name,
                address=at[f"kvstore-{name}"],
                store=kvstore_pb2_grpc.KVStoreServiceStub(channels[f"kvstore-{name}"]),
                operators=operators_pb2_grpc.OperatorServiceStub(channels[f"kvstore-{name}"]),
                prefills={
                    size: prefill_pb2_grpc.PrefillServiceStub(channels[f"prefill-{name}{size}"])
                    for size in SIZES[name]
                },
                stream=stream,
            )

        yield Nodes(
            direct=direct,
            a=await node("a"),
            b=await node("b"),
            merger=merger_pb2_grpc.MergerServiceStub(channels["merger-0"]),
        )
