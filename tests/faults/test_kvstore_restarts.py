"""A kvstore that is killed and comes back: streams pause, its KV serves the next turn.

Workers wait longer here than by default: how long a start takes on a busy machine is not the point.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

import httpx
import pytest

from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, drill_on, drilled_cluster, prompt_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

_log = logging.getLogger("drill")
TOKENS: Final = 200
KILLS_AT: Final = (30, 90, 150)
PACE_S: Final = 0.02
PATIENCE_S: Final = "25"
STORE: Final = "kvstore-0"


@pytest.fixture(scope="module")
def patient_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill and one decode worker that wait for their store."""
    with pytest.MonkeyPatch.context() as patch:
        for service in ("PREFILL", "DECODE"):
            patch.setenv(f"BATON_{service}_KVSTORE_PATIENCE_S", PATIENCE_S)
        with drilled_cluster(tmp_path_factory.mktemp("patient")) as cluster:
            yield cluster


@pytest.fixture
async def drill(patient_cluster: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster, whole and at rest before and after."""
    async with drill_on(patient_cluster) as drill:
        yield drill


async def asked(drill: Drill, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A whole answer of a request that may use what is cached."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    response = await drill.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def restarted(drill: Drill) -> None:
    """SIGKILL, and another process that its workers have attached to serves."""
    workers = len(drill.decodes()) + 1
    killed = drill.kill(STORE)

    async def is_attached() -> bool:
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError, AssertionError):
            attached = await drill.metric(STORE, "baton_kvstore_workers")
            return drill.pid(STORE) != killed and attached == workers
        return False

    await until(is_attached, 20.0, "another process with its workers")
    await drill.is_whole()


async def test_stream_of_200_tokens_outlives_three_kills(drill: Drill) -> None:
    """Token for token the undisturbed answer, by the same worker: a pause and nothing else."""
    prompt = prompt_of(301)
    expected = await drill.ask(prompt, tokens=TOKENS)
    assert expected.is_whole, expected
    await drill.pace(PACE_S)
    killed: list[int] = []

    async def kill(count: int) -> None:
        if count in KILLS_AT:
            killed.append(drill.kill(STORE))

    outcome = await drill.ask(prompt, tokens=TOKENS, on_token=kill)
    _log.info("3 kills: %.2f s, resumed %d", outcome.ended_s, outcome.resumed)
    assert len(set(killed)) == len(KILLS_AT)
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert outcome.resumed == 0, "the worker went on by itself"


async def test_next_turn_finds_the_kv_of_before_a_restart(drill: Drill) -> None:
    """What was computed before the kill serves after it, with the same answer."""
    prompt = prompt_of(302) * 2
    first = await asked(drill, prompt)
    turn = [*prompt, *first["choices"][0]["token_ids"], 7, 8, 9]
    await restarted(drill)
    again = await asked(drill, turn)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(prompt) // 16 * 16 > 0
    fresh = await drill.ask(turn, tokens=4)
    assert again["choices"][0]["token_ids"] == fresh.token_ids
    assert await drill.metric(STORE, "baton_kvstore_kv_damaged_total") == 0


async def test_prefill_goes_on_where_its_committed_chunks_end(drill: Drill) -> None:
    """The store dies with a chunk computed and another committed: the same attempt goes on."""
    prompt, point = prompt_of(303), "prefill.before_commit"
    expected = await drill.ask(prompt, tokens=8)
    held = [await drill.hits("prefill-0", point)]
    await drill.arm("prefill-0", f"{point}:pause:30:once")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(drill.ask(prompt, tokens=8))
        await drill.until_hit(["prefill-0"], point, held)
        drill.kill(STORE)
        await drill.disarm("prefill-0")
    outcome = asking.result()
    assert outcome.is_whole, outcome
    assert outcome.token_ids == expected.token_ids
    assert outcome.headers["x-baton-kv-source"] == "remote", "not recomputed"
