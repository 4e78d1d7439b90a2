"""Damage in the arena of a running cluster between two turns: found, counted, computed again, and
the answer is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc, operators_pb2, operators_pb2_grpc
from baton.capability import CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.cluster_key import read_cluster_key
from baton.launcher.cluster import arena_dir
from baton.process_files import read_port_file
from baton.rpc.channel import open_channel
from baton.testing.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(300)]

SYSTEM = "You are a patient guide to a small museum of clocks. " * 6
FIRST = "Which clock is the oldest one here?"
SECOND = "And who built it?"
BLOCK = 16
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """In float32, so that KV computed again is the same; scrubbed every second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("BATON_KVSTORE_SCRUB_PERIOD_S", "1")
        # The arena is the only place that has the KV.
        patched.setenv("BATON_KVSTORE_NVME_BYTES", "0")
        run_dir = tmp_path_factory.mktemp("cluster-scrub")
        with running_cluster(run_dir, "--dtype", "float32", "--nvme-bytes", "0") as running:
            yield running


def answer(client: httpx.Client, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A greedy answer, with its token ids."""
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24}
    told = client.post("/v1/chat/completions", json={**body, "return_token_ids": True, **more})
    assert told.status_code == 200, told.text
    found: dict[str, Any] = told.json()
    return found


def cached(told: dict[str, Any]) -> int:
    """Prompt tokens whose KV was found."""
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


class Store:
    """The cluster's kvstore, asked as an operator."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.run_dir = cluster.run_dir
        address = read_port_file(cluster.run_dir / "kvstore-0.port")
        assert address is not None
        self.address = address
        signer = CapabilitySigner(read_cluster_key(cluster.run_dir / "cluster.key"), SystemClock())
        self.operator = signer.sign(self._claims(signer, frozenset({Right.ADMIN})))
        self.reader = signer.sign(self._claims(signer, frozenset({Right.ADMIN, Right.READ})))

    def _claims(self, signer: CapabilitySigner, rights: frozenset[Right]) -> Claims:
        return Claims(
            tenant=None,
            scope=None,
            rights=rights,
            expiry_wall_s=signer.expiry_after(600.0),
            request_id="test",
        )

    async def damaged_pages(self) -> int:
        """What scrub found so far."""
        async with open_channel(self.address) as channel:
            report = await operators_pb2_grpc.OperatorServiceStub(channel).ReportScrub(
                operators_pb2.ReportScrubRequest(capability=self.operator)
            )
        return int(report.tiers[0].damaged_pages)

    async def flip(self, block: int, *, is_written: bool = False) -> list[int]:
        """One bit in the page of that block of every log that nobody writes, or of those that
        somebody does; the pages, none where no such log has got so far.
        """
        async with open_channel(self.address) as channel:
            data = kvstore_pb2_grpc.KVStoreServiceStub(channel)
            arena = (
                await data.DescribeArena(kvstore_pb2.DescribeArenaRequest(capability=self.operator))
            ).arena
            listed = await operators_pb2_grpc.OperatorServiceStub(channel).ListLogs(
                operators_pb2.ListLogsRequest(capability=self.operator)
            )
            pages = set()
            for log in listed.logs:
                if bool(log.writer_worker_id) is not is_written:
                    continue
                if log.committed_tokens < (block + 1) * BLOCK:
                    continue
                request = kvstore_pb2.ReplayLogRequest(log_id=log.log_id, capability=self.reader)
                rows = [row async for piece in data.ReplayLog(request) for row in piece.pages.pages]
                pages.add(rows[block].page)
        (path,) = arena_dir(self.run_dir).glob("*.kv")
        flip_bits(path, [arena.data_offset + page * arena.slot_bytes for page in sorted(pages)])
        return sorted(pages)


def flip_bits(path: Path, offsets: list[int]) -> None:
    """One bit at each offset, 1000 bytes in: of a number's last ones, so that who reads it before
    scrub does computes the same tokens.
    """
    with path.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset + 1000)
            byte = file.read(1)
            file.seek(offset + 1000)
            file.write(bytes([byte[0] ^ 4]))


async def found_damage(store: Store, count: int) -> None:
    """Asks until scrub has found so much; each answer takes a round trip."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + WAIT_S
    while await store.damaged_pages() < count:
        assert clock.monotonic_s() < deadline_s


def test_a_byte_that_changed_between_two_turns_costs_time_and_no_truth(
    cluster: RunningCluster,
) -> None:
    """The second turn, asked before and behind the damage, is answered by the same tokens; behind
    it fewer of them were cached, and what is cached ends before the damaged block.
    """
    with httpx.Client(base_url=cluster.url, timeout=120.0, trust_env=False) as client:
        first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
        said = answer(client, first)["choices"][0]["message"]["content"]
        second = [
            *first,
            {"role": "assistant", "content": said},
            {"role": "user", "content": SECOND},
        ]
        before = answer(client, second)
        assert cached(before) > 3 * BLOCK
        store = Store(cluster)
        pages = asyncio.run(store.flip(block=3))
        asyncio.run(found_damage(store, len(pages)))
        behind = answer(client, second)
        assert behind["choices"][0] == before["choices"][0]
        assert cached(behind) == 3 * BLOCK
        healed = answer(client, second)
        assert healed["choices"][0] == before["choices"][0]
        assert cached(healed) > 3 * BLOCK, "what was computed again serves the next one"
    assert "scrub_found_damage" in cluster.log("kvstore-0")


def test_a_stream_over_damaged_pages_is_stopped_and_goes_on_with_the_same_tokens(
    cluster: RunningCluster,
) -> None:
    """Its worker reads the page at each step: it is fenced, and the answer goes on from the tokens,
    computed again.
    """
    messages = [{"role": "user", "content": "Write a long story about a clock in a museum. " * 3}]
    store = Store(cluster)
    with httpx.Client(base_url=cluster.url, timeout=120.0, trust_env=False) as client:
        long = {"max_tokens": 60, "ignore_eos": True}
        before = answer(client, messages, **long)
        damaged = asyncio.run(store.damaged_pages())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answer, client, messages, **long)
            pages: list[int] = []
            while not pages and not running.done():
                pages = asyncio.run(store.flip(block=1, is_written=True))
            behind = running.result(WAIT_S)
        assert pages, "the log was there to be damaged"
        assert behind["choices"][0] == before["choices"][0]
        asyncio.run(found_damage(store, damaged + 1))
