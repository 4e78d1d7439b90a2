"""A move with either side killed at every crash point: afterwards exactly one store has the log.

The victim ends itself at the point, as if killed, and is started again. What must hold then: the
gateway's repeated request succeeds, all tokens are there, committed KV reads as it was written,
nobody can take the log at the old home, and both stores' pages add up with none held twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import ServiceError
from baton.ids import new_request_id
from tests.integration.kvstore.harness import FakeLog, Site, connected
from tests.netns.lab import NodeStore
from tests.netns.moves import (
    CLOCK,
    FIRST_TOKEN,
    adopt_request,
    check_kv,
    is_taker_refused,
    outcome,
    prefill,
    prompt_of,
    take,
    until_empty,
)

pytestmark = [pytest.mark.more, pytest.mark.timeout(120)]

_log = logging.getLogger("netns")
TOKENS: Final = 300
ADOPT_WITHIN_S: Final = 30.0
OLD: Final = (
    "move.before_fence",
    "move.after_fence",
    "move.mid_send",
    "move.before_drop",
    "move.after_drop",
)
NEW: Final = (
    "adopt.before_move",
    "adopt.after_move",
    "adopt.mid_fetch",
    "adopt.before_open",
    "adopt.after_open",
    "adopt.before_done",
)
POINTS: Final = [*(("old", point) for point in OLD), *(("new", point) for point in NEW)]


@pytest.mark.parametrize(("side", "point"), POINTS, ids=[f"{s}-{p}" for s, p in POINTS])
def test_one_home_after_a_crash(stores: tuple[NodeStore, NodeStore], side: str, point: str) -> None:
    """See the module."""
    old, new = stores
    victim = old if side == "old" else new
    victim.kill()
    victim.faults = f"{point}:exit:once"
    victim.start()
    prompt = prompt_of(TOKENS, seed=len(point))
    generation = asyncio.run(_crashed(old, new, victim, prompt))
    _log.info("%s at %s: opened at generation %d", side, point, generation)


async def _crashed(old: NodeStore, new: NodeStore, victim: NodeStore, prompt: list[int]) -> int:
    """The move, the crash, the restart, the move again, and everything that must hold."""
    async with connected(old) as a, connected(new) as b:
        writer = await a.attach("w-old")
        log = await a.open(writer, prompt)
        await prefill(writer, log)
        request_id = new_request_id()
        answer = await _moved_over_a_crash((old, new), b, victim, log, request_id)
        assert answer.position == len(prompt) + 1
        reader = await b.attach("w-new")
        here = await take(reader, log, answer.generation)
        committed = await check_kv(reader, here, [*prompt, FIRST_TOKEN])
        assert committed <= len(prompt)
        stranger = await a.attach("w-other")
        assert await is_taker_refused(stranger, log, log.generation + 1)
        stranger.leave()
        writer.leave()
        a.workers.clear()
        await until_empty(a, "the old home")
        await b.counts()
        await b.close(here, drop=True)
        reader.leave()
        b.workers.clear()
        await until_empty(b, "the new home")
        return here.generation


async def _moved_over_a_crash(
    stores: tuple[NodeStore, NodeStore],
    new: Site,
    victim: NodeStore,
    log: FakeLog,
    request_id: str,
) -> kvstore_pb2.AdoptLogResponse:
    """Asks until the log is at its new home, as a gateway with patience does; the victim crashes
    meanwhile and comes back.
    """
    deadline_s = time.monotonic() + ADOPT_WITHIN_S
    answer: Any = None
    async with asyncio.TaskGroup() as group:
        restarting = group.create_task(asyncio.to_thread(_restarted, victim))
        while True:
            request = adopt_request(stores[0], log, 10.0, request_id)
            answer = await outcome(new.stub.AdoptLog(request, timeout=15.0))
            if not isinstance(answer, ServiceError):
                break
            assert time.monotonic() < deadline_s, answer
            await CLOCK.wait(asyncio.Event(), 0.2)
        await restarting
    assert isinstance(answer, kvstore_pb2.AdoptLogResponse)
    return answer


def _restarted(victim: NodeStore) -> None:
    """The victim ended itself at its point; a new run of it serves."""
    code = victim.wait_dead(ADOPT_WITHIN_S)
    assert code == 70, f"exit code {code}: {victim.text()[-2000:]}"
    victim.start()
