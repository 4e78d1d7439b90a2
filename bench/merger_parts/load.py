"""The load on a merger, or on a bare server that returns what it gets: a process of its own.

    python -m bench.merger_parts.load PLAN          PLAN is JSON, a `Plan`

Prints one line of JSON. Requests are prepared before the clock starts, each with log ids, digests
and positions of its own; every answer is compared with the one that was checked, field by field,
before the clock started. Latencies count from when a message was due, not from when it was sent.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from baton.api.merger.v1 import merger_pb2
from baton.arena.copying import checksum
from baton.kv.digests import history_start
from baton.kv.manifest import Segment
from baton.kv.splice import splice
from baton.rpc.channel import ChannelOptions, channel_arguments
from baton.wire.blob_chunks import get_response_of
from baton.wire.segments import manifest_from_proto, segment_to_proto

SERVICE: Final = "/baton.api.merger.v1.MergerService"
BODIES: Final = 96
WARM_S: Final = 0.5
_KV: Final = b"k" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do: `mode` is closed, open, unary, materialize or raw (bytes from the bare server).

    `batch`: splices a message; `streams` and `window`: messages under way on each; `rate`: splices
    a second of the open loop; `is_echo`: the server returns what it gets; `request`: a file with
    the message that asks for bytes, `rounds` times and once before.
    """

    target: str
    mode: str
    seconds: float = 2.0
    batch: int = 8
    streams: int = 1
    window: int = 8
    rate: int = 5000
    is_echo: bool = False
    request: str = ""
    rounds: int = 5


@dataclass(slots=True)
class Body:
    """A message of splices without its batch id, and its answer without it."""

    request: bytes
    answer: bytes


def one_splice(draw: random.Random) -> merger_pb2.SpliceRequest:
    """A published prefix of some 400 tokens, and a conversation's own tokens behind it."""
    joint = 400 + draw.randrange(16)
    end = joint + 1 + draw.randrange(600)
    middle, last = draw.randbytes(32), draw.randbytes(32)
    text, ids = draw.randbytes(32), draw.randbytes(32)
    shared: dict[str, Any] = {
        "kv_digest": _KV,
        "tokenizer_hash": b"t" * 8,
        "block_tokens": 16,
        "numeric_class_id": 0xA1B2C3D4,
    }
    prefix = Segment(
        log_id=draw.randbytes(16),
        generation=1 + draw.randrange(300),
        from_position=0,
        to_position=joint,
        history_start=history_start(_KV),
        history_end=middle,
        text_hash=text,
        ids_hash=ids,
        **shared,
    )
    own = Segment(
        log_id=draw.randbytes(16),
        generation=1 + draw.randrange(300),
        from_position=joint,
        to_position=end,
        history_start=middle,
        history_end=last,
        **shared,
    )
    return merger_pb2.SpliceRequest(
        request_id=f"req-{draw.randrange(1 << 40):010x}",
        segments=[segment_to_proto(prefix), segment_to_proto(own)],
        block_tokens=16,
        expected_text_hashes=[text],
        expected_ids_hashes=[ids],
    )


def id_bytes(batch_id: int) -> bytes:
    """A batch id as a message begins with it."""
    raw = bytearray((0x08,))
    while batch_id >= 0x80:
        raw.append(batch_id & 0x7F | 0x80)
        batch_id >>= 7
    raw.append(batch_id)
    return bytes(raw)


def check(request: bytes, answer: bytes) -> None:
    """Every outcome is the manifest of its splice."""
    asked = merger_pb2.SpliceStreamRequest.FromString(request)
    told = merger_pb2.SpliceStreamResponse.FromString(answer)
    assert len(asked.splices) == len(told.outcomes), "an outcome is missing"
    for one, outcome in zip(asked.splices, told.outcomes, strict=True):
        manifest = manifest_from_proto(outcome.manifest)
        assert manifest == splice(manifest.segments)
        logs = [segment.log.log_id for segment in one.segments]
        assert [segment.log_id for segment in manifest.segments] == logs


class Load:
    """One connection to the server."""

    def __init__(self, plan: Plan, channel: grpc.aio.Channel) -> None:
        self._plan = plan
        self._channel = channel
        draw = random.Random(time.time_ns())
        splices = [[one_splice(draw) for _ in range(plan.batch)] for _ in range(BODIES)]
        self._bodies = [
            Body(merger_pb2.SpliceStreamRequest(splices=some).SerializeToString(), b"")
            for some in splices
        ]
        self._alone = [some[0].SerializeToString() for some in splices]
        self.latencies_s: list[float] = []
        self.answered = 0
        self.answered_in_all = 0
        self.seconds = 0.0

    def _stream(self) -> Any:
        return self._channel.stream_stream(f"{SERVICE}/SpliceStream")()

    async def prepare(self) -> None:
        """Sends every body once and looks at the answers."""
        call = self._stream()
        for body in self._bodies:
            await call.write(body.request)
            body.answer = await call.read()
            if self._plan.is_echo:
                assert body.answer == body.request
            else:
                check(body.request, body.answer)
            self.answered_in_all += self._plan.batch
        await call.done_writing()
        gc.collect()
        gc.freeze()

    async def closed(self) -> None:
        """Every stream keeps `window` messages under way."""
        began_s = time.perf_counter()
        end_s = began_s + WARM_S + self._plan.seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.streams):
                tasks.create_task(self._closed_stream(began_s + WARM_S, end_s))
        self.seconds = self._plan.seconds

    async def _closed_stream(self, from_s: float, end_s: float) -> None:
        call, room = self._stream(), asyncio.Semaphore(self._plan.window)
        sent: list[float] = []

        async def send() -> None:
            while (now_s := time.perf_counter()) < end_s:
                await room.acquire()
                number = len(sent)
                sent.append(now_s)
                await call.write(id_bytes(number + 1) + self._bodies[number % BODIES].request)
            await call.done_writing()

        async def receive() -> None:
            number = 0
            while (answer := await call.read()) is not grpc.aio.EOF:
                room.release()
                self._require(answer, number)
                self.answered_in_all += self._plan.batch
                now_s = time.perf_counter()
                if from_s <= now_s < end_s:
                    self.answered += self._plan.batch
                    self.latencies_s.append(now_s - sent[number])
                number += 1
            assert number == len(sent), "an answer is missing"

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            tasks.create_task(receive())

    def _require(self, answer: bytes, number: int) -> None:
        expected = id_bytes(number + 1) + self._bodies[number % BODIES].answer
        assert answer == expected, "an answer differs from the one that was checked"

    async def open(self) -> None:
        """Messages are due at a fixed rate, whoever is late, on one stream."""
        plan, call = self._plan, self._stream()
        gap_s = plan.batch / plan.rate
        count = round((WARM_S + plan.seconds) / gap_s)
        warm = round(WARM_S / gap_s)
        began_s = time.perf_counter() + 0.05

        async def send() -> None:
            for number in range(count):
                wait_s = began_s + number * gap_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)  # noqa: TID251 - pacing an open loop
                await call.write(id_bytes(number + 1) + self._bodies[number % BODIES].request)
            await call.done_writing()

        async def receive() -> None:
            for number in range(count):
                answer = await call.read()
                now_s = time.perf_counter()
                self._require(answer, number)
                if number >= warm:
                    self.latencies_s.append(now_s - (began_s + number * gap_s))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            tasks.create_task(receive())
        self.seconds = time.perf_counter() - began_s - WARM_S
        self.answered = len(self.latencies_s) * plan.batch

    async def unary(self) -> None:
        """`window` calls of one splice each under way."""
        splice_one: Any = self._channel.unary_unary(f"{SERVICE}/Splice")
        began_s = time.perf_counter()
        from_s = began_s + WARM_S
        end_s = from_s + self._plan.seconds

        async def run(first: int) -> None:
            number = first
            while (sent_s := time.perf_counter()) < end_s:
                answer = await splice_one(self._alone[number % BODIES], timeout=10.0)
                now_s = time.perf_counter()
                assert len(answer) > 300, "a manifest of two segments is longer"
                if from_s <= now_s < end_s:
                    self.answered += 1
                    self.latencies_s.append(now_s - sent_s)
                number += 1

        async with asyncio.TaskGroup() as tasks:
            for first in range(self._plan.window):
                tasks.create_task(run(first))
        self.seconds = self._plan.seconds


async def fetched_bytes(plan: Plan, channel: grpc.aio.Channel, request: bytes) -> int:
    """Blobs that come, each byte under a CRC."""
    method = "Materialize" if plan.mode == "materialize" else "Raw"
    call: Any = channel.unary_stream(f"{SERVICE}/{method}")
    size = crc = left = expected_crc = 0
    async for message in call(request, timeout=60.0):
        piece = get_response_of(message)
        if not isinstance(piece, memoryview):
            assert (left, crc) == (0, expected_crc), "a blob is not what its descriptor says"
            left, crc = piece.descriptor.payload_bytes, 0
            expected_crc = piece.descriptor.payload_crc32c
            continue
        crc = checksum(piece, crc)
        left -= piece.nbytes
        size += piece.nbytes
    assert plan.mode == "raw" or (left, crc) == (0, expected_crc), "a blob ended early"
    return size


async def fetched(plan: Plan, channel: grpc.aio.Channel) -> dict[str, float]:
    """The median rate of some fetches, 10^9 bytes a second."""
    request = await asyncio.to_thread(Path(plan.request).read_bytes)
    await fetched_bytes(plan, channel, request)
    rates = []
    for _ in range(plan.rounds):
        began_s = time.perf_counter()
        size = await fetched_bytes(plan, channel, request)
        rates.append(size / (time.perf_counter() - began_s) / 1e9)
    return {"gbps": statistics.median(rates), "best_gbps": max(rates)}


async def run(plan: Plan) -> dict[str, float]:
    """The figures of one plan."""
    arguments = channel_arguments(ChannelOptions())
    async with grpc.aio.insecure_channel(plan.target, options=arguments) as channel:
        await channel.channel_ready()
        if plan.mode in ("materialize", "raw"):
            return await fetched(plan, channel)
        load = Load(plan, channel)
        await load.prepare()
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "closed": load.closed,
            "open": load.open,
            "unary": load.unary,
        }
        own_s = time.process_time()
        await ways[plan.mode]()
        parts = statistics.quantiles(load.latencies_s, n=100)
        return {
            "splices_per_s": load.answered / load.seconds,
            "answered_in_all": load.answered_in_all,
            "p50_ms": parts[49] * 1e3,
            "p99_ms": parts[98] * 1e3,
            "max_ms": max(load.latencies_s) * 1e3,
            "client_cpu_s": time.process_time() - own_s,
        }


def main() -> None:
    """See the module."""
    print(json.dumps(asyncio.run(run(Plan(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
