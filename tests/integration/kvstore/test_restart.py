"""Ends and starts of the process: kill -9 after acks, clean stops, what does not fit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.client import KVStoreClient
from baton.arena.page_table import PageTable
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.rpc.channel import open_channel
from baton.wire.durations import duration_to_proto
from services.kvstore.log import native
from services.kvstore.log.format import HEADER_BYTES, RecordType
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Model,
    Site,
    StoreProcess,
    capability,
    connected,
    running_store,
)

PROMPT = [4 + index % 100 for index in range(BLOCK + 5)]


async def write_until_dead(site: Site, logs: list[FakeLog]) -> dict[bytes, list[int]]:
    """Appends to all logs, one group commit after the other, while the store is killed; the
    tokens that were acked.
    """
    worker = site.workers[0]
    acked = {log.log_id: list(log.tokens) for log in logs}
    killed = False
    for step in range(200):
        try:
            outcomes = await worker.send(
                [worker.entry(log, (step + index) % 200) for index, log in enumerate(logs)]
            )
        except ServiceError:
            assert killed, "the store died before it was killed"
            return acked
        for log, outcome in zip(logs, outcomes, strict=True):
            assert outcome.error is None
            log.table.grant(outcome.pages)
            log.tokens.append((step + logs.index(log)) % 200)
            log.committed += 1
            acked[log.log_id] = list(log.tokens)
        if step == 20:
            site.store.kill()
            killed = True
    raise AssertionError("the killed store went on answering")


@pytest.mark.parametrize("level", [common_pb2.ACK_LEVEL_OS, common_pb2.ACK_LEVEL_DISK])
def test_every_acked_token_survives_kill_9(
    model: Model, tmp_path: Path, level: common_pb2.AckLevel.ValueType
) -> None:
    """W1, and the old generation is over: a writer from before takes the log anew and goes on."""
    with running_store(model, tmp_path) as store:
        acked = asyncio.run(_first_life(store, level))
        store.start()
        asyncio.run(_second_life(store, acked))


async def _first_life(
    store: StoreProcess, level: common_pb2.AckLevel.ValueType
) -> dict[bytes, tuple[str, list[int]]]:
    async with connected(store) as site:
        worker = await site.attach()
        logs = []
        for first in range(4):
            log = await site.open(worker, [first, *PROMPT], ack_level=level)
            await worker.prefill(log)
            logs.append(log)
        acked = await write_until_dead(site, logs)
        return {log.log_id: (log.capability, acked[log.log_id]) for log in logs}


async def _second_life(store: StoreProcess, acked: dict[bytes, tuple[str, list[int]]]) -> None:
    async with connected(store) as site:
        worker = await site.attach()
        for log_id, (text, tokens) in acked.items():
            view = await worker.store.replay(log_id, text, BLOCK)
            assert list(view.token_ids)[: len(tokens)] == tokens
            assert len(view.token_ids) <= len(tokens) + 1
            assert view.head.committed_position == len(view.token_ids) - 1
            assert view.head.generation == 2, "its writer went with the store"
            log = FakeLog(
                log_id=log_id,
                generation=2,
                capability=text,
                tokens=list(view.token_ids),
                table=PageTable((), (), BLOCK),
                committed=view.head.committed_position,
                prompt_tokens=view.head.prompt_tokens,
            )
            taken = await worker.take(log, pages=4)
            assert taken.committed == log.committed
            await worker.append(taken, 199, "stop")
            await site.close(taken)
            assert (await worker.view(taken)).token_ids == (*view.token_ids, 199)
        await site.until("all ended", leases=0, pages_granted=0)


def test_clean_stop_is_quick_and_nothing_is_torn(model: Model, tmp_path: Path) -> None:
    """SIGTERM: exit 0, and the next start finds every log as it was."""
    with running_store(model, tmp_path) as store:
        text, log_id, tokens = asyncio.run(_one_log(store))
        assert store.stop() == 0
        store.start()
        asyncio.run(_same_log(store, text, log_id, tokens))
    assert "torn" not in store.text()
    assert "error" not in store.text()


async def _one_log(store: StoreProcess) -> tuple[str, bytes, list[int]]:
    async with connected(store) as site:
        worker = await site.attach()
        log = await site.open(worker, PROMPT)
        await worker.prefill(log, 9, "stop")
        await site.close(log)
        return log.capability, log.log_id, log.tokens


async def _same_log(store: StoreProcess, text: str, log_id: bytes, tokens: list[int]) -> None:
    async with open_channel(store.address) as channel:
        view = await KVStoreClient(channel, "reader").replay(log_id, text, BLOCK)
        assert list(view.token_ids) == tokens
        assert view.head.generation == 1
        assert view.head.finish_reason == "stop"


def test_torn_tail_is_cut_and_the_rest_is_there(model: Model, tmp_path: Path) -> None:
    """Half a record at the end of the log is what a power cut leaves."""
    with running_store(model, tmp_path) as store:
        text, log_id, tokens = asyncio.run(_one_log(store))
        store.stop()
        newest = max((tmp_path / "log").glob("*.blog"))
        with newest.open("ab") as file:
            file.write(b"BLR1" + bytes(30))
        store.start()
        asyncio.run(_same_log(store, text, log_id, tokens))
    assert "torn_tail_cut" in store.text()


def test_damaged_log_is_reported_and_never_served(model: Model, tmp_path: Path) -> None:
    """A flipped bit below what was on disk, in a record that has a token: the log is given up
    loudly, and its id is not used again.
    """
    with running_store(model, tmp_path) as store:
        text, log_id, _ = asyncio.run(_one_log(store))
        store.stop()
        first = min((tmp_path / "log").glob("*.blog"))
        data = bytearray(first.read_bytes())
        rows = native.scan(data, chain_crc=None).rows
        (seal,) = rows["offset"][rows["type_code"] == RecordType.SEAL]
        data[int(seal) + HEADER_BYTES + 8] ^= 1
        first.write_bytes(data)
        store.start()
        error = asyncio.run(_refusal(store, text, log_id))
    assert error.reason in (Reason.LOG_NOT_FOUND, Reason.STALE_GENERATION)


async def _refusal(store: StoreProcess, text: str, log_id: bytes) -> ServiceError:
    async with open_channel(store.address) as channel:
        client = KVStoreClient(channel, "reader")
        with pytest.raises(ServiceError) as refused:
            await client.replay(log_id, text, BLOCK)
        return refused.value


def start_up_failure(model: Model, directory: Path, *flags: str) -> str:
    """What a kvstore says that does not start."""
    argv = [
        *(sys.executable, "-m", "services.kvstore", "--model", str(model.path)),
        *("--dtype", "float32", "--log-dir", str(directory / "log2"), "--log-level", "error"),
        *flags,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2), done
    return done.stdout + done.stderr


def test_arena_that_does_not_fit_is_refused_with_the_remedy(model: Model, tmp_path: Path) -> None:
    """Allocated whole at start: better no start than a SIGBUS later."""
    arena = ("--arena-dir", str(tmp_path / "arena"))
    text = start_up_failure(model, tmp_path, "--arena-bytes", str(1 << 60), *arena)
    assert "--arena-bytes" in text
    assert "--shm-size" in text
    assert "Traceback" not in text


def test_second_kvstore_on_the_same_log_is_refused(store: StoreProcess) -> None:
    """Two owners of one log would be two homes."""
    log_dir = store.directory / "log"
    text = start_up_failure(store.model, store.directory, "--log-dir", str(log_dir))
    assert "--log-dir" in text


def test_draining_store_opens_no_logs(model: Model, tmp_path: Path) -> None:
    """Drain waits for written logs and says how many are left."""
    with running_store(model, tmp_path) as store:
        asyncio.run(_drained(store))


async def _drained(store: StoreProcess) -> None:
    text = capability(tenant=None, rights=frozenset({Right.ADMIN}))
    drain = kvstore_pb2.DrainRequest(timeout=duration_to_proto(0.2), capability=text)
    async with connected(store) as site:
        worker = await site.attach()
        log = await site.open(worker, PROMPT)
        assert (await site.stub.Drain(drain)).remaining == 1
        with pytest.raises(ServiceError) as refused:
            await site.open(worker, PROMPT)
        assert refused.value.reason is Reason.DRAINING
        await worker.prefill(log, 5, "stop")
        assert (await site.stub.Drain(drain)).remaining == 0
