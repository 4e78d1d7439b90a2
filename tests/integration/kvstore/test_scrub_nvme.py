"""Scrub of the NVMe tier: a byte that changed on the disk costs a copy, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.api.kvstore.v1 import operators_pb2, operators_pb2_grpc
from baton.capability import Right
from baton.clock import SystemClock
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
    kv_value,
    running_store,
)

pytestmark = pytest.mark.more

PROMPT = [3 + index % 90 for index in range(5 * BLOCK + 3)]
FLAGS = (
    *("--nvme-bytes", str(4 << 20), "--demote-below", "1", "--demote-until", "1"),
    *("--lease-s", "60", "--scrub-period-s", "0.2"),
)
HEADER_BYTES = 4096
WAIT_S = 30.0


def operator_capability() -> str:
    """Signed when it is used: one signed at import has expired late in a long run."""
    return capability(tenant=None, rights=frozenset({Right.ADMIN}))


@pytest.fixture
def own_store(model: Model, tmp_path: Path) -> Iterator[StoreProcess]:
    """A store of its own: its disk is damaged."""
    with running_store(model, tmp_path, *FLAGS) as store:
        yield store


def operators(site: Site) -> Any:
    """The stub."""
    return operators_pb2_grpc.OperatorServiceStub(site.channel)


async def summary(site: Site, log: FakeLog) -> operators_pb2.LogSummary:
    """The log as an operator sees it."""
    request = operators_pb2.InspectLogRequest(capability=operator_capability(), log_id=log.log_id)
    return (await operators(site).InspectLog(request)).log


async def nvme_scrub(site: Site, damaged: int, checked: int) -> operators_pb2.TierScrub:
    """The tier's report once so many slots were checked, and found damaged."""
    deadline_s = SystemClock().monotonic_s() + WAIT_S
    while True:
        report = await operators(site).ReportScrub(
            operators_pb2.ReportScrubRequest(capability=operator_capability())
        )
        (tier,) = (tier for tier in report.tiers if tier.tier == "nvme")
        if tier.damaged_pages >= damaged and tier.checked_pages >= checked:
            return tier
        assert SystemClock().monotonic_s() < deadline_s, report


def flip_in_slots(store: StoreProcess, slot_bytes: int, slots: range) -> None:
    """One bit of each of these slots, as a failing disk would."""
    (path,) = (store.directory / "log").glob("nvme-*.kv")
    with path.open("r+b", buffering=0) as file:
        for slot in slots:
            at = HEADER_BYTES + slot * slot_bytes + 100
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


async def test_a_damaged_slot_is_retired_and_the_rest_still_serves(own_store: StoreProcess) -> None:
    """What is in the arena is as it was; what is only on the disk is loaded up to the damage."""
    async with connected(own_store) as site:
        worker = await site.attach()
        log = await site.open(worker, PROMPT)
        await worker.prefill(log, 7, "stop")
        await site.close(log)
        deadline_s = SystemClock().monotonic_s() + WAIT_S
        while (found := await summary(site, log)).cold_tokens < found.committed_tokens:
            assert SystemClock().monotonic_s() < deadline_s, found
        assert found.nvme_pages == 6
        await nvme_scrub(site, 0, 6)
        slot_bytes = (await site.counts()).arena.slot_bytes
        # Slots are granted in order: the fourth holds the fourth block.
        flip_in_slots(own_store, slot_bytes, range(3, 4))
        tier = await nvme_scrub(site, 1, 0)
        assert tier.damaged_pages == 1
        after = await summary(site, log)
        assert after.committed_tokens == found.committed_tokens
        evicted = operators_pb2.EvictLogRequest(capability=operator_capability(), log_id=log.log_id)
        await operators(site).EvictLog(evicted)
        request = site.open_request(worker, [*PROMPT, 7, 8, 9])
        answer = await site.stub.Open(request)
        assert answer.cached_tokens >= 3 * BLOCK
        opened = await worker.follow(request.log_id, answer.generation, request.capability)
        view = await worker.view(opened)
        for position in range(view.head.committed_position):
            assert worker.read(view, position) == kv_value(opened.tokens[position], position)
        assert "scrub_found_damage" in own_store.text()
