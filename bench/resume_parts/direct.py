"""One log that goes back and forth between two decode workers, as their gateway would send it.

Owns a gateway's side of the calls: what is timed is a worker that takes the log over, with nobody
noticing a fault first, and the prompt's prefill beside it. Never reads what is said.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.capability import CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import body_hash
from baton.kv.layout import KvDtype
from baton.rpc.channel import open_channel
from baton.sampling_parameters import SamplingParameters
from baton.text.bundle import TextBundle
from baton.wire.label import label_to_proto
from baton.wire.sampling import sampling_to_proto
from tests.faults.drill import Drill
from tests.integration.workers.harness import DecodeStream, OpenedLog

BLOCK_TOKENS: Final = 16
TOKENS_A_HOP: Final = 4
RIGHTS: Final = frozenset(
    {Right.OPEN, Right.READ, Right.WRITE, Right.SEAL, Right.TAKE, Right.CANCEL}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Milliseconds: the next token at another worker, and the first one of the same prompt."""

    resume_ms: list[float]
    prefill_ms: list[float]


class _Gateway:
    """Calls to one store, one prefill worker and the decode workers of a running cluster."""

    def __init__(self, drill: Drill, model: Path, channels: dict[str, Any]) -> None:
        key = bytes.fromhex((drill.cluster.run_dir / "cluster.key").read_text().strip())
        self._signer = CapabilitySigner(key, SystemClock())
        config = read_config(model)
        geometry = config.kv_geometry(BLOCK_TOKENS, KvDtype.BF16)
        tokenizer_hash = TextBundle.load(model).tokenizer_hash
        numeric_class = torch_numeric_class(config, KvDtype.BF16)
        label = build_label(model, config, tokenizer_hash, geometry, numeric_class)
        self._label = label_to_proto(label, geometry)
        self._store = kvstore_pb2_grpc.KVStoreServiceStub(channels["kvstore-0"])
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channels["prefill-0"])
        self.decodes = [
            decode_pb2_grpc.DecodeServiceStub(channels[name]) for name in drill.decodes()
        ]
        self.vocabulary = config.vocabulary

    async def sealed(self, prompt: list[int], max_tokens: int) -> tuple[OpenedLog, float]:
        """A new log, nothing cached, its prompt computed; and the milliseconds that took."""
        log_id, request_id = new_log_id(), new_request_id()
        claims = Claims(
            tenant="dev",
            scope="",
            rights=RIGHTS,
            expiry_wall_s=self._signer.expiry_after(600.0),
            request_id="bench",
            log_id=log_id,
        )
        capability = self._signer.sign(claims)
        sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        began_s = time.perf_counter()
        opened = await self._store.Open(
            kvstore_pb2.OpenRequest(
                request_id=request_id,
                body_hash=body_hash(request_id.encode()),
                log_id=log_id,
                capability=capability,
                label=self._label,
                writer_worker_id="prefill-0",
                sampling=sampling_to_proto(sampling),
                prompt_token_ids=prompt,
                output_pages=1,
                cache_mode=common_pb2.CACHE_MODE_OFF,
            ),
            timeout=10.0,
        )
        request = prefill_pb2.RunRequest(
            request_id=request_id,
            log_id=log_id,
            generation=opened.generation,
            capability=capability,
        )
        async for _message in self._prefill.Run(request, timeout=60.0):
            pass
        took_ms = (time.perf_counter() - began_s) * 1e3
        return OpenedLog(log_id, request_id, capability, opened.generation, 0), took_ms

    async def close(self, log: OpenedLog) -> None:
        """The log is not kept."""
        request = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=True)
        await self._store.Close(request, timeout=5.0)


async def measure_direct(
    drill: Drill, model: Path, *, context: int, hops: int, prefills: int
) -> Direct:
    """`hops` take-overs of one log of `context` tokens, and so many prefills of that length."""
    random_ = random.Random(5)
    async with AsyncExitStack() as stack:
        channels = {}
        for name in ("kvstore-0", "prefill-0", *drill.decodes()):
            channels[name] = open_channel(f"127.0.0.1:{drill.flag(name, '--port')}")
            stack.push_async_callback(channels[name].close)
        gateway = _Gateway(drill, model, channels)

        def prompt() -> list[int]:
            return [random_.randrange(1000, gateway.vocabulary) for _ in range(context)]

        prefill_ms = []
        for number in range(prefills + 1):
            log, took_ms = await gateway.sealed(prompt(), max_tokens=2)
            await gateway.close(log)
            prefill_ms += [took_ms] if number else []  # the first one warms
        log, _ = await gateway.sealed(prompt(), max_tokens=(hops + 2) * 4 * TOKENS_A_HOP)
        streams = [await stack.enter_async_context(_stream(one)) for one in gateway.decodes]
        resume_ms = await _hops(log, streams, context, hops)
        await gateway.close(log)
    return Direct(resume_ms=resume_ms, prefill_ms=prefill_ms)


async def _hops(
    log: OpenedLog, streams: list[DecodeStream], context: int, hops: int
) -> list[float]:
    found_ms: list[float] = []
    next_index = 1
    for hop in range(hops + 2):
        stream = streams[hop % len(streams)]
        began_s = time.perf_counter()
        await stream.start(log, next_index=next_index)
        answer = await stream.until(log.request_id, tokens=1)
        assert answer.started is not None, answer.error
        # What the other had logged and not told is only told again; the next one is computed here.
        told = answer.started.position - context - next_index
        await stream.until(log.request_id, tokens=told + 1)
        if hop >= 2:
            found_ms.append((time.perf_counter() - began_s) * 1e3)
        await stream.until(log.request_id, tokens=told + TOKENS_A_HOP)
        log.generation = answer.started.generation
        await stream.stop(log)
        next_index += len((await stream.until(log.request_id)).tokens)
    return found_ms


@asynccontextmanager
async def _stream(stub: Any) -> AsyncIterator[DecodeStream]:
    call = stub.Run(timeout=300.0)
    await call.write(decode_pb2.RunRequest(hello=decode_pb2.Hello(gateway_id="bench")))
    stream = DecodeStream(call)
    try:
        yield stream
    finally:
        stream.cancel()
