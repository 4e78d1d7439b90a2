"""Each service killed at each moment of a stream: it goes on, or an error event says why in time.

The moment is held by a pause at a fault point, so that the kill always meets it. Whatever came is
compared with the undisturbed greedy answer; afterwards nothing is held and the next request is
served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

import httpx
import pytest

from tests.faults.drill import Drill, Outcome, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

_log = logging.getLogger("drill")
TOKENS: Final = 24
KILL_AT_TOKEN: Final = 6
ERROR_WITHIN_S: Final = 5.0
GOES_ON_WITHIN_S: Final = 15.0
PACE: Final = "decode.step:pause:0.03"


@dataclass(frozen=True, slots=True)
class Moment:
    """`point` is paused at in one of `where`; None: between two tokens of the stream."""

    name: str
    where: tuple[str, ...] = ()
    point: str | None = None


MOMENTS: Final = (
    Moment("before_commit", ("prefill-0",), "prefill.before_commit"),
    Moment("mid_chunk", ("prefill-0",), "prefill.mid_upload"),
    Moment("after_seal", ("prefill-0",), "prefill.after_seal"),
    Moment("first_token", ("decode-0", "decode-1"), "decode.first_token"),
    Moment("mid_decode"),
)
VICTIMS: Final = ("kvstore-0", "prefill-0", "decode", "merger-0", "gateway-0")
CORE: Final = {("decode", "mid_decode"), ("kvstore-0", "mid_decode"), ("prefill-0", "mid_chunk")}
"""The ones that `make test` runs; the rest is `make test-more`."""

MATRIX: Final = [
    pytest.param(
        victim,
        moment,
        id=f"{victim}-{moment.name}",
        marks=() if (victim, moment.name) in CORE else (pytest.mark.more,),
    )
    for moment in MOMENTS
    for victim in VICTIMS
]


@pytest.mark.parametrize(("victim", "moment"), MATRIX)
async def test_stream_outlives_a_killed_service_or_says_why(
    drill: Drill, victim: str, moment: Moment
) -> None:
    """No lost, changed or repeated token, no hang, no silent end; the next request is served."""
    seed = MOMENTS.index(moment) * len(VICTIMS) + VICTIMS.index(victim)
    prompt = prompt_of(seed)
    expected = await drill.ask(prompt, tokens=TOKENS)
    assert expected.is_whole, expected
    killed_s, outcome = await _killed_at(drill, victim, moment, prompt)
    after_kill_s = outcome.ended_s - killed_s
    _log.info(
        "%s at %s: %s, %d tokens, resumed %d, %.2f s after the kill",
        victim,
        moment.name,
        outcome.finish or outcome.error or "broken",
        len(outcome.token_ids),
        outcome.resumed,
        after_kill_s,
    )
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    if victim == "gateway-0":
        assert outcome.is_broken or outcome.is_whole
    elif outcome.is_whole:
        assert outcome.token_ids == expected.token_ids
        assert after_kill_s < GOES_ON_WITHIN_S
    else:
        assert not outcome.is_broken, "a stream never just stops"
        assert outcome.error in {"worker_lost", "no_worker", "draining", "transfer_timeout"}
        assert outcome.has_done or outcome.status != 200
        assert after_kill_s < ERROR_WITHIN_S
    if victim == "merger-0":
        assert outcome.is_whole
    if (victim, moment.name) in {("decode", "mid_decode"), ("decode", "first_token")}:
        assert outcome.is_whole, "another decode worker was there"
        assert outcome.resumed == 1
    await drill.is_whole()
    again = await drill.ask(prompt, tokens=TOKENS)
    assert again.token_ids == expected.token_ids


async def _killed_at(
    drill: Drill, victim: str, moment: Moment, prompt: list[int]
) -> tuple[float, Outcome]:
    """Seconds from the request to the kill, and what the client saw."""
    for name in drill.decodes():
        await drill.arm(name, PACE)
    began_s = time.monotonic()
    killed_s: list[float] = []

    def kill(name: str) -> None:
        killed_s.append(time.monotonic() - began_s)
        drill.kill(name)

    async def on_token(count: int) -> None:
        if moment.point is None and count == KILL_AT_TOKEN:
            kill(await _running(drill) if victim == "decode" else victim)

    held = [await drill.hits(name, moment.point) for name in moment.where if moment.point]
    for name in moment.where:
        await drill.arm(name, f"{moment.point}:pause:30:once")
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(drill.ask(prompt, tokens=TOKENS, on_token=on_token))
        if moment.point is not None:
            paused = await drill.until_hit(moment.where, moment.point, held)
            if victim == "decode":
                kill(paused if paused.startswith("decode") else "decode-0")
            else:
                kill(victim)
            for name in moment.where:
                await drill.disarm(name)
                if name.startswith("decode"):
                    await _pace_again(drill, name)
    return killed_s[0], asking.result()


async def _pace_again(drill: Drill, name: str) -> None:
    """Disarming took the pace too; a killed worker has none to take."""
    try:
        await drill.arm(name, PACE)
    except (OSError, ValueError, AssertionError, httpx.HTTPError):
        return


async def _running(drill: Drill) -> str:
    """The decode worker that has a sequence."""
    for name in drill.decodes():
        if await drill.metric(name, "baton_decode_active_sequences"):
            return name
    raise AssertionError("no decode worker runs a sequence")
