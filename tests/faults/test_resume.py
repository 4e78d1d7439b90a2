"""No stream loses a token: workers killed, frozen and drained under a crowd (hosts: `test_moves`).

Each answer is compared with the one that the same request gets alone: tokens, text and end. What a
client has is never sent again and never changes.
"""

from __future__ import annotations

import logging
import random
from typing import Final

import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.rpc.channel import open_channel
from tests.faults.crowd import HELD_S, Crowd
from tests.faults.drill import Drill, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

_log = logging.getLogger("drill")
SLOW_S: Final = 0.25
"""So slow that no stream ends before its worker is killed, however long this process is kept from
its next look."""

LEAVING_S: Final = 3.0
"""No stream could come to its end while its worker drains: what leaves has moved."""

QUICK_S: Final = 0.001
KILLS: Final = 5
DRAIN_S: Final = 60.0


async def busiest(drill: Drill) -> str:
    """The decode worker with the most sequences."""
    active = {
        name: await drill.metric(name, "baton_decode_active_sequences") for name in drill.decodes()
    }
    return max(active, key=lambda name: active[name])


async def until_replaced(drill: Drill, name: str, pid: int) -> None:
    """Waits until the launcher has started another and everything could serve again."""

    async def is_another() -> bool:
        try:
            return drill.pid(name) != pid
        except (OSError, ValueError):
            return False

    await until(is_another, 60.0, f"another {name}")
    await drill.is_whole()


async def test_64_streams_lose_their_worker_up_to_five_times(drill: Drill) -> None:
    """0 wrong, 0 missing, 0 repeated, 0 changed tokens: greedy and seeded, with penalties and stop
    strings, each killed one to five times at whatever token it had come to.
    """
    crowd = await Crowd.of(drill, 64, seed=4000, tokens=52)
    random_ = random.Random(7)
    async with crowd.streaming(SLOW_S):
        for _ in range(KILLS):
            await crowd.grows(len(crowd.streams) * random_.randint(2, 4))
            name = await busiest(drill)
            # Whoever is left all but waits, until there is somebody to lose its streams to.
            await drill.pace(HELD_S, [one for one in drill.decodes() if one != name])
            pid = drill.kill(name)
            await until_replaced(drill, name, pid)
            await drill.pace(SLOW_S)
        await drill.pace(QUICK_S)
    crowd.check()
    resumes = crowd.resumes()
    _log.info("64 streams, workers lost per stream: %s", resumes)
    missed = [one for one in crowd.streams if one.outcome is not None and not one.outcome.resumed]
    assert not missed, [(one.sampling, len(one.solo.token_ids)) for one in missed]
    assert resumes[-1] <= KILLS
    assert sum(resumes) >= 2 * len(resumes)


async def test_frozen_and_thawed_workers_change_nothing(drill: Drill) -> None:
    """SIGSTOP in the middle of whatever; another goes on, and what wakes is fenced."""
    crowd = await Crowd.of(drill, 16, seed=5000, tokens=40)
    random_ = random.Random(8)
    async with crowd.streaming(SLOW_S):
        for _ in range(2):
            await crowd.grows(len(crowd.streams) * random_.randint(2, 4))
            pid = drill.freeze(await busiest(drill))
            # More than who is not frozen can bring alone: the others' streams have gone on, too.
            await until_resumed(crowd)
            drill.thaw(pid)
            await drill.is_whole()
        await drill.pace(QUICK_S)
    crowd.check()
    assert sum(crowd.resumes()) >= 8


async def until_resumed(crowd: Crowd) -> None:
    """Waits until every stream has a token more than now, or has ended."""
    before = [one.count for one in crowd.streams]

    async def has_grown() -> bool:
        return all(
            one.count > count or one.outcome is not None
            for one, count in zip(crowd.streams, before, strict=True)
        )

    await until(has_grown, 60.0, "a further token of every stream")


async def test_a_drained_worker_hands_its_streams_over(drill: Drill) -> None:
    """They move to another at the next token, with no fault to be noticed first; when the call
    returns they still run, and the process ends.
    """
    crowd = await Crowd.of(drill, 16, seed=6000, tokens=48)
    async with crowd.streaming(LEAVING_S):
        name = await busiest(drill)
        pid = drill.pid(name)
        moving = await drill.metric(name, "baton_decode_active_sequences")
        channel = open_channel(f"127.0.0.1:{drill.flag(name, '--port')}")
        try:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            drain = decode_pb2.DrainRequest(
                timeout=Duration(seconds=int(DRAIN_S)), capability=drill.operator()
            )
            answer = await stub.Drain(drain, timeout=90.0)
        finally:
            await channel.close()
        assert answer.remaining == 0
        assert crowd.running == len(crowd.streams), "moved, not waited for"
        await until_replaced(drill, name, pid)
        await drill.pace(QUICK_S)
    crowd.check()
    assert moving >= 1
    assert sum(crowd.resumes()) == moving
    assert '"event": "worker_drained"' in drill.cluster.log(name)
