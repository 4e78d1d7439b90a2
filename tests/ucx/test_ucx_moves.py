"""Logs copied from store to store over UCX: TCP and shared memory, equal bytes, clean refusals."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    Model,
    Site,
    StoreProcess,
    connected,
)
from tests.netns.moves import FIRST_TOKEN, check_kv, outcome, prefill, prompt_of, take

pytestmark = [pytest.mark.timeout(120)]

_log = logging.getLogger("ucx")
ARENA_BYTES: Final = 64 << 20
TOKENS: Final = 1000
WAYS: Final = {"tcp": "tcp", "shared memory": "posix,sysv,self"}
"""What UCX may use. Without TCP in the list nothing but shared memory can have carried a byte."""

Pair = tuple[StoreProcess, StoreProcess]


@contextmanager
def stores(
    model: Model,
    folder: Path,
    *,
    tls: tuple[str, str],
    transports: tuple[str, str] = ("auto", "auto"),
    faults: str = "",
) -> Iterator[Pair]:
    """The old home and the new one. `tls`: UCX_TLS of each; `faults`: armed at the old home."""
    made = []
    for number, name in enumerate(("old", "new")):
        environment = {"UCX_TLS": tls[number]}
        if faults and name == "old":
            environment |= {"BATON_FAULTS_ENABLED": "1", "FAULT": faults}
        (folder / name).mkdir()
        made.append(
            StoreProcess(
                model=model,
                directory=folder / name,
                flags=("--transport", transports[number], "--transfer-stall-s", "10"),
                node_id=f"n{number}",
                arena_bytes=ARENA_BYTES,
                environment=environment,
            )
        )
    try:
        for store in made:
            store.launch()
        for store in made:
            store.await_ready()
        yield made[0], made[1]
    finally:
        for store in made:
            if store.process is not None and store.process.poll() is None:
                store.stop()
            shutil.rmtree(store.arena_dir, ignore_errors=True)


def adopt_request(old: Site, log: FakeLog, timeout_s: float = 30.0) -> kvstore_pb2.AdoptLogRequest:
    """What a gateway asks of the new home."""
    request = kvstore_pb2.AdoptLogRequest(
        log_id=log.log_id,
        generation=log.generation,
        from_kvstore_address=old.store.address,
        capability=log.capability,
        request_id=new_request_id(),
    )
    request.timeout.FromMilliseconds(round(timeout_s * 1000))
    return request


async def moved(
    pair: Pair, prompt: list[int], *, is_followed: bool = False
) -> tuple[kvstore_pb2.AdoptLogResponse, int]:
    """A log prefilled at the old home and moved; the answer, and how many positions' KV read at
    the new home as they were written.
    """
    async with connected(pair[0]) as old, connected(pair[1]) as new:
        writer, reader = await old.attach("w-old"), await new.attach("w-new")
        log = await old.open(writer, prompt, cache_mode=2)
        if is_followed:
            await new.stub.ExpectLog(
                kvstore_pb2.ExpectLogRequest(
                    log_id=log.log_id,
                    from_kvstore_address=old.store.address,
                    capability=log.capability,
                    request_id=new_request_id(),
                )
            )
            await writer.commit(log, 4 * BLOCK)
            await new.until("the replica has the committed pages", pages_granted=4)
        await prefill(writer, log)
        began_s = time.perf_counter()
        answer = await new.stub.AdoptLog(adopt_request(old, log), timeout=40.0)
        _log.warning(
            "%s: %.1f MB in %.0f ms, transfer %.1f ms, sync %.1f ms, registration %.1f ms",
            answer.transport,
            answer.transfer_bytes / 1e6,
            (time.perf_counter() - began_s) * 1e3,
            answer.transfer.ToMicroseconds() / 1e3,
            answer.sync.ToMicroseconds() / 1e3,
            answer.registration.ToMicroseconds() / 1e3,
        )
        here = await take(reader, log, answer.generation)
        committed = await check_kv(reader, here, [*prompt, FIRST_TOKEN])
        await new.close(here, drop=True)
        return answer, committed


@pytest.fixture(scope="module", params=list(WAYS.values()), ids=list(WAYS))
def pair(
    request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two stores that share one way."""
    way = request.param
    with stores(model, tmp_path_factory.mktemp("pair"), tls=(way, way)) as made:
        yield made


def test_a_log_moves_over_ucx_with_equal_bytes(pair: Pair) -> None:
    """12.3 MB with a partial last page, twice over the same pair: lanes are used again."""
    for seed in range(2):
        answer, committed = asyncio.run(moved(pair, prompt_of(TOKENS, seed)))
        assert (answer.transport, committed) == ("ucx", TOKENS)
        assert answer.transport_reason == "both sides have it"
        assert answer.sync.ToMicroseconds() > 0


def test_pages_come_over_ucx_while_the_prompt_is_computed(pair: Pair) -> None:
    """The replica grows over the same transport."""
    answer, committed = asyncio.run(moved(pair, prompt_of(TOKENS, 2), is_followed=True))
    assert (answer.transport, committed) == ("ucx", TOKENS)
    assert answer.hidden_transfer_share > 0.0


def test_a_byte_that_the_wire_flipped_is_sent_again(small: Model, tmp_path: Path) -> None:
    """What arrived is not what left: another try, still over ucx when that is forced."""
    spec = "move.mid_send:flip_byte:once"
    forced = ("ucx", "ucx")
    with stores(small, tmp_path, tls=("tcp", "tcp"), transports=forced, faults=spec) as pair:
        for seed in range(2):
            answer, committed = asyncio.run(moved(pair, prompt_of(100, seed)))
            assert (answer.transport, committed) == ("ucx", 100)
        assert pair[1].text().count('"event": "transfer_broken"') == 1


def test_where_ucx_does_not_reach_the_stream_carries_on_and_says_so(
    model: Model, tmp_path: Path
) -> None:
    """One side speaks TCP only, the other shared memory only."""
    with stores(model, tmp_path, tls=("posix,self", "tcp")) as pair:
        answer, committed = asyncio.run(moved(pair, prompt_of(TOKENS)))
        assert (answer.transport, committed) == ("stream", TOKENS)
        assert "ucx failed" in answer.transport_reason
        answer, committed = asyncio.run(moved(pair, prompt_of(TOKENS, 1)))
        assert (answer.transport, committed) == ("stream", TOKENS)
        assert "a moment ago" in answer.transport_reason


def test_forced_against_a_store_that_may_not_is_refused_before_anything_moves(
    model: Model, tmp_path: Path
) -> None:
    """The old home keeps the log, and the answer names the setting."""
    with stores(model, tmp_path, tls=("tcp", "tcp"), transports=("stream", "ucx")) as pair:
        asyncio.run(_refused(pair))


async def _refused(pair: Pair) -> None:
    async with connected(pair[0]) as old, connected(pair[1]) as new:
        writer = await old.attach("w-old")
        log = await old.open(writer, prompt_of(100))
        await prefill(writer, log)
        refused = await outcome(new.stub.AdoptLog(adopt_request(old, log)))
        assert isinstance(refused, ServiceError), refused
        assert refused.reason is Reason.UNSUPPORTED
        assert "--transport" in refused.message
        assert (await writer.view(log)).head.generation == log.generation
        await old.close(log, drop=True)


def test_an_old_home_that_dies_in_the_middle_costs_a_bounded_time(
    model: Model, tmp_path: Path
) -> None:
    """The log opens at the new home with its tokens; KV that did not come is computed again."""
    spec = "move.mid_send:exit"
    with stores(model, tmp_path, tls=("posix,self", "posix,self"), faults=spec) as pair:
        asyncio.run(_bounded(pair))


async def _bounded(pair: Pair) -> None:
    async with connected(pair[0]) as old, connected(pair[1]) as new:
        writer, reader = await old.attach("w-old"), await new.attach("w-new")
        log = await old.open(writer, prompt_of(TOKENS), cache_mode=2)
        await prefill(writer, log)
        began_s = time.monotonic()
        answer = await new.stub.AdoptLog(adopt_request(old, log, 4.0), timeout=30.0)
        assert time.monotonic() - began_s < 25.0
        assert answer.position == TOKENS + 1
        assert answer.committed_position < TOKENS
        here = await take(reader, log, answer.generation)
        await check_kv(reader, here, [*prompt_of(TOKENS), FIRST_TOKEN])
        await new.close(here, drop=True)
