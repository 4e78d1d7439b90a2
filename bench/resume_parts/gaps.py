"""The longest gap that clients see when their worker is killed, frozen, drained, or its host lost.

Owns the streams, read over HTTP, and the disturbances. Only streams that went on at another worker
count. Whatever comes is whole: an answer that is not ends the measurement.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from google.protobuf.duration_pb2 import Duration

from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.rpc.channel import open_channel
from tests.faults.drill import Drill, Outcome, until

STREAMS: Final = 4
TOKENS: Final = 160
DISTURBED_AT: Final = 24
HOST: Final = ("decode-1", "kvstore-0", "prefill-0")
"""What sits on the first node of a cluster of two nodes and two decode workers."""

Disturb = Callable[[Drill], Awaitable[None]]


async def gaps_ms(
    drill: Drill, disturb: Disturb, *, context: int, rounds: int, seed: int
) -> list[float]:
    """The longest gap of each stream that lost its worker, over `rounds` disturbances."""
    random_ = random.Random(seed)
    found: list[float] = []
    for _ in range(rounds):
        outcomes = await _round(drill, disturb, random_, context)
        assert all(one.is_whole for one in outcomes), [one.error for one in outcomes]
        found += [one.longest_gap_s * 1e3 for one in outcomes if one.resumed]
        drill.thaw_all()
        await drill.is_whole()
        await drill.settles(60.0)
    return found


async def _round(
    drill: Drill, disturb: Disturb, random_: random.Random, context: int
) -> list[Outcome]:
    counts = [0] * STREAMS

    async def ask(number: int) -> Outcome:
        async def on_token(count: int) -> None:
            counts[number] = count

        prompt = [random_.randrange(1000, 40_000) for _ in range(context)]
        sampling = {"model": "smollm2"}
        return await drill.ask(prompt, tokens=TOKENS, on_token=on_token, sampling=sampling)

    async def are_there() -> bool:
        return min(counts) >= DISTURBED_AT

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(number)) for number in range(STREAMS)]
        await until(are_there, 60.0, "every stream under way")
        await disturb(drill)
    return [one.result() for one in asking]


async def kill(drill: Drill) -> None:
    """SIGKILL to a decode worker that has streams."""
    drill.kill(await drill.running_decode())


async def freeze(drill: Drill) -> None:
    """SIGSTOP to a decode worker that has streams."""
    drill.freeze(await drill.running_decode())


async def lose_host(drill: Drill) -> None:
    """Everything of the first node at once."""
    for name in HOST:
        drill.kill(name)


async def lose_silent_host(drill: Drill) -> None:
    """Everything of the first node stands still at once: nothing refuses, nothing answers."""
    for name in HOST:
        drill.freeze(name)


async def drain(drill: Drill) -> None:
    """A planned stop of a decode worker that has streams."""
    name = await drill.running_decode()
    channel = open_channel(f"127.0.0.1:{drill.flag(name, '--port')}")
    try:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        await stub.Drain(decode_pb2.DrainRequest(timeout=Duration(seconds=30)), timeout=60.0)
    finally:
        await channel.close()
