"""Hundreds of streams cut at random points: right after the last one nothing is held.

The points: before admission, while the prompt is computed, between seal and take, between two
decode steps. Drawn by seed; the client is a bare socket that is closed without a word.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import random
import urllib.parse
from dataclasses import dataclass
from typing import Final

import pytest

from tests.faults.drill import Drill, prompt_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SEED: Final = 20261129
AT_ONCE: Final = 8
TOKENS: Final = 48
WARM_UP: Final = 60
FREE_WITHIN_S: Final = 2.0
"""A second, and what it takes to look at every process on two busy cores."""

QUARANTINE_ENDS_WITHIN_S: Final = 20.0
GROWTH_KIB_MAX: Final = 12 * 1024
READ_TIMEOUT_S: Final = 20.0

_log = logging.getLogger("drill")


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a client leaves: after `wait_s`, or once `tokens` tokens came if that is not None."""

    name: str
    prompt_tokens: int
    wait_s: float = 0.0
    tokens: int | None = None
    body_share: float = 1.0


def draw(random_: random.Random) -> Cut:
    """One of the four places, each with its own luck."""
    prompt_tokens = random_.randint(8, 160)
    match random_.randrange(4):
        case 0:
            return Cut("before_admit", prompt_tokens, body_share=random_.choice((0.5, 1.0)))
        case 1:
            return Cut("mid_prefill", prompt_tokens, wait_s=random_.uniform(0.0, 0.15))
        case 2:
            return Cut("seal_to_take", prompt_tokens, tokens=1)
        case _:
            return Cut("mid_decode", prompt_tokens, tokens=random_.randint(2, TOKENS - 4))


async def run_cut(drill: Drill, number: int, cut: Cut) -> str:
    """One stream, cut; says how it was met: `cut`, or `ended` when it was over before."""
    url = urllib.parse.urlsplit(drill.cluster.url)
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": prompt_of(1000 + number, cut.prompt_tokens),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    assert url.hostname is not None
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            writer.write(head + body[: int(len(body) * cut.body_share)])
            await writer.drain()
            if cut.tokens is not None:
                return await _read_tokens(reader, cut.tokens)
            return await _read_for(reader, cut.wait_s)
    finally:
        writer.transport.abort()


async def _read_tokens(reader: asyncio.StreamReader, tokens: int) -> str:
    seen = 0
    while seen < tokens:
        line = await reader.readline()
        if not line or b"[DONE]" in line:
            return "ended"
        seen += line.startswith(b'data: {"id"')
    return "cut"


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(65_536):
                continue
    except TimeoutError:
        return "cut"
    return "ended"


async def run_all(drill: Drill, cuts: list[Cut], first: int) -> collections.Counter[str]:
    """All of them, a few at a time."""
    met: collections.Counter[str] = collections.Counter()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, cut: Cut) -> None:
        async with room:
            met[f"{cut.name}-{await run_cut(drill, number, cut)}"] += 1

    async with asyncio.TaskGroup() as group:
        for number, cut in enumerate(cuts, start=first):
            group.create_task(one(number, cut))
    return met


@pytest.mark.parametrize("streams", [pytest.param(100), pytest.param(500, marks=pytest.mark.more)])
async def test_cut_streams_leave_nothing_held(drill: Drill, streams: int) -> None:
    """Pages, leases, slots, requests: free or counted as quarantined; memory does not grow."""
    random_ = random.Random(SEED)
    for name in drill.decodes():
        await drill.arm(name, "decode.before_accept:pause:0.01,decode.step:pause:0.01")
    await drill.arm("prefill-0", "prefill.after_compute:pause:0.005")
    await run_all(drill, [draw(random_) for _ in range(WARM_UP)], first=0)
    await drill.settles()
    names = ("gateway-0", "prefill-0", "kvstore-0", *drill.decodes())
    before = {name: drill.rss_kib(name) for name in names}
    met = await run_all(drill, [draw(random_) for _ in range(streams)], first=WARM_UP)
    settled_s = await drill.settles()
    growth = {name: drill.rss_kib(name) - before[name] for name in names}
    arena = await drill.arena()
    _log.info(
        "%d streams %s; free after %.2f s, %d pages quarantined; growth in KiB %s",
        streams,
        dict(sorted(met.items())),
        settled_s,
        arena.pages_quarantined,
        growth,
    )
    assert sum(met.values()) == streams
    for place in ("before_admit", "mid_prefill", "seal_to_take", "mid_decode"):
        assert met[f"{place}-cut"] > streams // 16, met
    assert settled_s < FREE_WITHIN_S
    assert arena.logs_open == 0, "what is live or shared belongs to kept logs"

    async def is_released() -> bool:
        return (await drill.arena()).pages_quarantined == 0

    # Workers that live say at each renewal what they write no more.
    await until(is_released, QUARANTINE_ENDS_WITHIN_S, "quarantined pages free again")
    assert max(growth.values()) < GROWTH_KIB_MAX, growth
    again = await drill.ask(prompt_of(1), tokens=8)
    assert again.is_whole
