"""One tenant's hundred long requests and another's short ones, on the whole cluster.

The cluster has its default queues, so that a hundred requests are more than it takes at once:
whoever sends them is told when to come back, and does. The other tenant has to notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from baton.launcher.cluster import METRICS_TARGETS_FILE
from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import TinyModel, write_directory

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(240)]

TENANTS: Final = """
tenants:
  - name: many
    keys: [key-many]
  - name: few
    keys: [key-few]
  - name: night
    keys: [key-night]
    class: batch
"""
SLOTS: Final = 16
"""Of a decode worker that was not told otherwise."""

LONG_REQUESTS: Final = 100
LONG_TOKENS: Final = 600
LONG_ANSWER: Final = 120
SHORT_REQUESTS: Final = 12
SLO_S: Final = 2.0
"""What the gateway promises interactive tenants unless it is told otherwise."""

_log = logging.getLogger("fair")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A worker of each kind on a tiny model, and two tenants."""
    folder: Path = tmp_path_factory.mktemp("fair")
    model = write_directory(folder / "tiny", TinyModel(max_context=2048))
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    flags = ("--model", str(model), "--arena-bytes", str(256 << 20), "--tenants-file", str(file))
    with running_cluster(folder / "run", *flags) as running:
        yield running


def body(seed: int, tokens: int, answer: int) -> dict[str, Any]:
    """A request whose prompt shares no beginning with another one's."""
    prompt = [3 + (seed * 31 + index * 7 + seed * index) % 250 for index in range(tokens)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": answer, "ignore_eos": True}


async def pause(seconds: float) -> None:
    """So long a client that was told to comes back stays away."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


@dataclass(slots=True)
class Crowd:
    """One tenant's requests to a cluster."""

    client: httpx.AsyncClient
    key: str
    finishes: list[str] = field(default_factory=list)
    refusals: int = 0
    was_refused: asyncio.Event = field(default_factory=asyncio.Event)
    """Slots and queues are full."""
    first_tokens_s: list[float] = field(default_factory=list)

    async def insist(self, request: dict[str, Any]) -> None:
        """Ask until it is answered, as late as it is told to when there is no room."""
        while True:
            answer = await self.client.post("/v1/completions", json=request, headers=self._headers)
            if answer.status_code == 200:
                self.finishes.append(answer.json()["choices"][0]["finish_reason"])
                return
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "queue_full", answer.text
            self.refusals += 1
            self.was_refused.set()
            await pause(float(answer.headers["retry-after"]))

    async def stream(self, request: dict[str, Any]) -> None:
        """Ask once, and note after how long the first token left, by the gateway's clock."""
        asked = self.client.stream(
            "POST", "/v1/completions", json={**request, "stream": True}, headers=self._headers
        )
        async with asked as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        self.finishes += [
            choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        told = [event["baton"] for event in events if event.get("baton")]
        self.first_tokens_s.append(told[-1]["time_to_first_token_s"])

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Decode:
    """The metrics of the decode worker."""

    def __init__(self, cluster: RunningCluster, client: httpx.AsyncClient) -> None:
        targets = json.loads((cluster.run_dir / METRICS_TARGETS_FILE).read_text())
        (self._address,) = (
            target["targets"][0] for target in targets if target["labels"]["process"] == "decode-0"
        )
        self._client = client

    async def value(self, series: str) -> float:
        """The value of one series, written as the page writes it; 0 where it is not shown."""
        page = await self._client.get(f"http://{self._address}/metrics")
        found = [line for line in page.text.splitlines() if line.startswith(series + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    async def until(self, series: str, least: float) -> None:
        """Wait until it is so much."""
        while await self.value(series) < least:
            await pause(0.05)


async def test_batch_tenants_give_their_slots_to_interactive_ones(cluster: RunningCluster) -> None:
    """The class comes from the tenants file: all slots are a batch tenant's, a request that
    somebody waits for gets one at once, and the batch requests lose nothing.
    """
    async with (
        asyncio.timeout(120.0),
        httpx.AsyncClient(base_url=cluster.url, timeout=100.0, trust_env=False) as client,
    ):
        decode = Decode(cluster, client)
        night, few = Crowd(client, "key-night"), Crowd(client, "key-few")
        async with asyncio.TaskGroup() as tasks:
            for seed in range(SLOTS + 4):
                tasks.create_task(night.insist(body(3000 + seed, 24, 1500)))
            await decode.until("baton_decode_active_sequences", SLOTS)
            before = await decode.value('baton_decode_preemptions_total{cause="class"}')
            await few.stream(body(4000, 24, 8))
            assert not night.finishes, "nobody had ended whose slot it could have had"
            after = await decode.value('baton_decode_preemptions_total{cause="class"}')
    assert few.finishes == ["length"]
    assert after - before >= 1
    assert night.finishes == ["length"] * (SLOTS + 4)


async def test_a_hundred_long_requests_of_one_tenant_do_not_cost_another_its_slo(
    cluster: RunningCluster,
) -> None:
    """Short requests of the other tenant: not one is refused, each first token is in time. All of
    the hundred are answered in the end.
    """
    bounds = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(200.0),
        httpx.AsyncClient(
            base_url=cluster.url, timeout=180.0, limits=bounds, trust_env=False
        ) as client,
    ):
        alone, beside = Crowd(client, "key-few"), Crowd(client, "key-few")
        for seed in range(SHORT_REQUESTS):
            await alone.stream(body(1000 + seed, 24, 8))
        many = Crowd(client, "key-many")
        async with asyncio.TaskGroup() as tasks:
            for seed in range(LONG_REQUESTS):
                tasks.create_task(many.insist(body(seed, LONG_TOKENS, LONG_ANSWER)))
            await many.was_refused.wait()
            for seed in range(SHORT_REQUESTS):
                await beside.stream(body(2000 + seed, 24, 8))
            unfinished = LONG_REQUESTS - len(many.finishes)
    quiet_s, busy_s = statistics.median(alone.first_tokens_s), sorted(beside.first_tokens_s)
    told = f"first token: alone {quiet_s:.3f} s, beside {statistics.median(busy_s):.3f} s, at most "
    told += f"{busy_s[-1]:.3f} s, {unfinished} of {LONG_REQUESTS} unfinished, {many.refusals} told "
    told += "to come back"
    _log.info(told)
    assert busy_s[-1] <= SLO_S, told
    assert many.finishes == ["length"] * LONG_REQUESTS
    assert unfinished >= LONG_REQUESTS // 4, f"the others were there all the time: {told}"
    assert beside.finishes == ["length"] * SHORT_REQUESTS
