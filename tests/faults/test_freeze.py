"""Parts that freeze and go on: what they write late changes nothing, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import pytest

from tests.faults.drill import Drill, Outcome, prompt_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TOKENS: Final = 24
FREEZE_AT_TOKEN: Final = 6
PACE_S: Final = 0.05
ERROR_WITHIN_S: Final = 5.0
WRITE: Final = "decode.before_append"
STALE: Final = "baton_kvstore_stale_writes_refused_total"
LEASE_S: Final = 10.0


async def test_frozen_decode_worker_changes_nothing_when_it_wakes(drill: Drill) -> None:
    """Its log was taken by another: late writes are refused and counted, pages and log stay."""
    prompt = prompt_of(101)
    expected = await drill.ask(prompt, tokens=TOKENS)
    await drill.pace(PACE_S)
    frozen: list[int] = []

    async def freeze(count: int) -> None:
        if count == FREEZE_AT_TOKEN:
            # A step is computed and its KV written: when it wakes, its append is what comes next.
            name = await drill.running_decode()
            held = [await drill.hits(name, WRITE)]
            await drill.arm(name, f"{WRITE}:pause:1:once")
            await drill.until_hit([name], WRITE, held)
            frozen.append(drill.freeze(name))

    outcome = await drill.ask(prompt, tokens=TOKENS, on_token=freeze)
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert outcome.resumed == 1
    assert outcome.log_id is not None
    stale_before = await drill.metric("kvstore-0", STALE)
    before = await drill.log_image(outcome.log_id)
    drill.thaw(frozen[0])

    async def is_refused() -> bool:
        return await drill.metric("kvstore-0", STALE) > stale_before

    await until(is_refused, 20.0, "a late write refused as stale")
    await drill.is_whole()
    await drill.settles()
    after = await drill.log_image(outcome.log_id)
    assert len(after[1]) == (len(prompt) + TOKENS - 1 + 15) // 16
    assert after == before


async def test_frozen_kvstore_for_less_than_a_lease_is_a_pause(drill: Drill) -> None:
    """Nobody gives up, nothing is sent twice, nothing is computed again."""
    prompt, freeze_s = prompt_of(102), 4.0
    expected = await drill.ask(prompt, tokens=TOKENS)
    await drill.pace(PACE_S)
    outcome = await _frozen_kvstore(drill, prompt, freeze_s)
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert outcome.resumed == 0
    assert outcome.ended_s > freeze_s


@pytest.mark.more
async def test_frozen_kvstore_for_longer_ends_the_stream_with_a_reason(drill: Drill) -> None:
    """A lease is what a silent store is waited for."""
    await drill.pace(PACE_S)
    outcome = await _frozen_kvstore(drill, prompt_of(103), LEASE_S + 8.0)
    assert outcome.error in {"worker_lost", "transfer_timeout", "no_worker"}, outcome
    assert outcome.has_done
    assert outcome.ended_s < LEASE_S + ERROR_WITHIN_S


async def _frozen_kvstore(drill: Drill, prompt: list[int], freeze_s: float) -> Outcome:
    """A stream over a kvstore that stands still for a while in its middle."""
    is_frozen = asyncio.Event()
    pids: list[int] = []

    async def freeze(count: int) -> None:
        if count == FREEZE_AT_TOKEN:
            pids.append(drill.freeze("kvstore-0"))
            is_frozen.set()

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(drill.ask(prompt, tokens=TOKENS, on_token=freeze))
        await asyncio.wait_for(is_frozen.wait(), 20.0)
        thaw_at_s = time.monotonic() + freeze_s

        async def is_time() -> bool:
            return time.monotonic() >= thaw_at_s

        await until(is_time, freeze_s + 5.0, "the end of the freeze")
        drill.thaw(pids[0])
    return asking.result()


async def test_frozen_prefill_worker_is_left_behind(drill: Drill) -> None:
    """Mid chunk: another worker computes the prompt; what the frozen one commits late is stale."""
    prompt = prompt_of(104)
    expected = await drill.ask(prompt, tokens=TOKENS)
    before = [await drill.hits("prefill-0", "prefill.before_commit")]
    await drill.arm("prefill-0", "prefill.before_commit:pause:30:once")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(drill.ask(prompt, tokens=TOKENS))
        await drill.until_hit(["prefill-0"], "prefill.before_commit", before)
        frozen = drill.freeze("prefill-0")
        frozen_s = time.monotonic()
    outcome = asking.result()
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert time.monotonic() - frozen_s < 3 * ERROR_WITHIN_S
    assert outcome.headers["x-baton-kv-source"] == "recomputed"
    drill.thaw(frozen)


@pytest.mark.more
async def test_stream_ends_with_a_reason_when_every_decode_worker_is_frozen(drill: Drill) -> None:
    """Within five seconds of the last sign of life."""
    await drill.pace(PACE_S)
    frozen: list[int] = []
    frozen_at_s: list[float] = []
    began_s = time.monotonic()

    async def freeze(count: int) -> None:
        if count == FREEZE_AT_TOKEN:
            frozen.extend(drill.freeze(name) for name in drill.decodes())
            frozen_at_s.append(time.monotonic() - began_s)

    began_s = time.monotonic()
    outcome = await drill.ask(prompt_of(105), tokens=TOKENS, on_token=freeze)
    assert outcome.error == "worker_lost", outcome
    assert outcome.has_done
    assert outcome.ended_s - frozen_at_s[0] < ERROR_WITHIN_S + 0.5
    for pid in frozen:
        drill.thaw(pid)
