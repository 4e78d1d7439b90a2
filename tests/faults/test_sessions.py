"""Edits of sessions: every range equals a fresh computation; what dies leaves the old or the new.

Greedy tokens of a tiny model in float32. What ends at which step stands in `test_session_ends`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from baton.sampling_parameters import SamplingParameters
from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, prompt_of, until
from tests.integration.workers.harness import Direct

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CONTEXT: Final = 40
AT_ONCE: Final = 4
NEW: Final = [11, 12, 13]
GREEDY: Final = SamplingParameters(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def direct(two_decodes: RunningCluster) -> Direct:
    """The cluster's model, computed in this process."""
    return Direct(Path(two_decodes.run_dir).parent / "tiny")


async def completed(drill: Drill, ids: list[int], *, is_fresh: bool) -> dict[str, Any]:
    """A few greedy tokens behind the ids."""
    body = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"X-Cache": "off"} if is_fresh else {}
    answer = await drill.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def named(drill: Drill, ids: list[int]) -> dict[str, Any]:
    """A session of exactly these ids."""
    told = await completed(drill, ids, is_fresh=False)
    body = {"position": len(ids)}
    answer = await drill.client.post(f"/v1/sessions/{told['id']}/fork", json=body)
    assert answer.status_code == 201, answer.text
    session: dict[str, Any] = answer.json()
    return session


async def edit(drill: Drill, session_id: str, start: int, end: int, **more: Any) -> httpx.Response:
    """Other ids at a range of tokens."""
    body = {
        "start": {"token": start},
        "end": {"token": end},
        "replacement": {"token_ids": NEW},
        **more,
    }
    return await drill.client.post(f"/v1/sessions/{session_id}/edit", json=body)


def ranges(*, is_all: bool) -> list[tuple[int, int]]:
    """(start, end): all of a context, or from every start the ends at edges and a few more."""
    found = [(start, end) for start in range(CONTEXT + 1) for end in range(start, CONTEXT + 1)]
    if is_all:
        return found
    edges = (CONTEXT, CONTEXT - 1)
    return [(start, end) for start, end in found if end - start < 2 or end in edges]


@pytest.mark.parametrize("is_all", [False, True])
async def test_every_edit_of_a_context_equals_a_fresh_computation(
    drill: Drill, direct: Direct, is_all: bool
) -> None:
    """Insertions, replacements at both ends, and the whole range among them."""
    ids = prompt_of(7 + is_all, CONTEXT)
    base = await named(drill, ids)
    gate = asyncio.Semaphore(AT_ONCE)
    reused: list[int] = []
    cached: list[int] = []

    async def one(start: int, end: int) -> None:
        async with gate:
            made = await drill.client.post(f"/v1/sessions/{base['id']}/fork", json={})
            session = made.json()
            edited = await edit(drill, session["id"], start, end)
            assert edited.status_code == 200, edited.text
            told, new = edited.json(), [*ids[:start], *NEW, *ids[end:]]
            assert told["tokens"] == len(new)
            assert told["reused_tokens"] + told["recomputed_tokens"] == len(new)
            # KV that nobody uses may have been evicted meanwhile: then all is computed.
            reused.append(told["reused_tokens"] - start)
            mine = await completed(drill, new, is_fresh=False)
            want = [token.sampled.token_id for token in direct.tokens(new, GREEDY)]
            assert mine["choices"][0]["token_ids"] == want, (start, end)
            cached.append(mine["usage"]["prompt_tokens_details"]["cached_tokens"] - len(new))
            await drill.client.delete(f"/v1/sessions/{session['id']}")

    async with asyncio.TaskGroup() as group:
        for start, end in ranges(is_all=is_all):
            group.create_task(one(start, end))
    assert sum(more >= -1 for more in reused) > len(reused) / 2, reused
    assert sum(more == -1 for more in cached) > len(cached) / 2, cached


async def test_of_edits_at_once_one_wins(drill: Drill) -> None:
    """The others get STALE_GENERATION, and what was theirs is nowhere in the history."""
    session = await named(drill, prompt_of(8, CONTEXT))
    answers = await asyncio.gather(
        *(edit(drill, session["id"], 30, 31, generation=1) for _ in range(4))
    )
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200, codes
    assert all(code == 409 for code in codes[1:]), [answer.text for answer in answers]
    lost = next(answer for answer in answers if answer.status_code == 409)
    assert lost.json()["error"]["code"] == "stale_generation"
    shown = (await drill.client.get(f"/v1/sessions/{session['id']}")).json()
    assert (shown["generation"], shown["tokens"]) == (2, CONTEXT + 2)


@pytest.mark.parametrize("victim", ["prefill-0", "kvstore-0"])
async def test_an_edit_whose_parts_die_leaves_the_old_or_the_new(drill: Drill, victim: str) -> None:
    """And the session is there afterwards, also behind a restart of its kvstore."""
    ids = prompt_of(9 + len(victim), CONTEXT)
    session = await named(drill, ids)
    point = "kv.before_commit"
    await drill.arm("kvstore-0", f"{point}:pause:2:once")
    before = await drill.hits("kvstore-0", point)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(edit(drill, session["id"], 4, 5))
        await drill.until_hit(["kvstore-0"], point, [before])
        drill.kill(victim)
    answer = task.result()
    await drill.is_whole()
    path = f"/v1/sessions/{session['id']}"

    async def is_there() -> bool:
        return (await drill.client.get(path)).status_code == 200

    await until(is_there, 60.0, "the session is read again")
    shown = (await drill.client.get(path)).json()
    seen = (shown["generation"], shown["tokens"])
    assert seen in ((1, CONTEXT), (2, CONTEXT + 2)), seen
    if victim == "prefill-0":
        # Nothing was committed to: the edit is computed again, elsewhere or by the same worker.
        assert answer.status_code == 200, answer.text
    if answer.status_code == 200:
        assert seen == (2, CONTEXT + 2)

    async def is_edited() -> bool:
        again = await edit(drill, session["id"], 0, 1, generation=shown["generation"])
        # Refused while who was killed is not heard yet; 409: a lost answer of a try before.
        assert again.status_code in (200, 409, 429, 503), again.text
        # 409: a try before was done although its answer was lost.
        return again.status_code in (200, 409)

    await until(is_edited, 60.0, "the session is edited again")
