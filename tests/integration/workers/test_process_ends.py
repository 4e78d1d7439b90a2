"""Processes that end: a killed kvstore that comes back, workers told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.decode.v1 import decode_pb2
from baton.api.prefill.v1 import prefill_pb2
from baton.errors import Reason
from baton.ids import new_request_id
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import (
    Answer,
    DecodeStream,
    Direct,
    Gateway,
    OpenedLog,
    Processes,
    all_ready,
    event_shape,
    gateway_to,
    running_workers,
    shape,
)

pytestmark = [pytest.mark.cluster, pytest.mark.more]

PARAMETERS = SamplingParameters(temperature=0.0, max_tokens=450, ignore_eos=True)
PROMPT = [4 + index % 80 for index in range(40)]


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes of this test's own: it kills one."""
    with running_workers(tmp_path_factory.mktemp("restart"), (16,)) as running:
        yield running


async def test_answers_go_on_after_the_kvstore_was_killed(processes: Processes) -> None:
    """Tokens are precious, KV is recomputable: what was acked stands, and the rest is the same."""
    direct = Direct(processes.addresses.model)
    expected = shape(direct.tokens(PROMPT, PARAMETERS))
    async with gateway_to(processes.addresses, direct) as gateway:
        log = await gateway.open(PROMPT, PARAMETERS, "prefill-16")
        _, sealed = await gateway.prefill(log, 16)
        got = [event_shape(sealed.first_token)]
        async with gateway.stream() as stream:
            await stream.start(log, next_index=1)
            await stream.until(log.request_id, tokens=5)
            processes.kill("kvstore-0")
            broken = await stream.until(log.request_id)
        assert broken.error is not None
        assert broken.error.reason in (Reason.WORKER_LOST, Reason.TRANSFER_TIMEOUT)
        got += broken.shapes()
        processes.start("kvstore-0")
        await all_ready({"kvstore-0": processes.addresses.kvstore}, processes.run_dir)
        again = await resumed(gateway, log, len(got))
        assert [*got, *again.shapes()] == expected
        assert await gateway.answer(PROMPT, PARAMETERS, 16) == expected


async def resumed(gateway: Gateway, log: OpenedLog, next_index: int) -> Answer:
    """Take the log again, as a gateway does that learns its newest generation from refusals."""
    async with asyncio.timeout(60.0):
        while True:
            log.request_id = new_request_id()
            async with gateway.stream() as stream:
                await stream.start(log, next_index=next_index)
                answer = await stream.until(log.request_id)
            if answer.error is None:
                return answer
            reason = answer.error.reason
            if reason == Reason.STALE_GENERATION:
                log.generation = int(answer.error.metadata["current"])
            else:
                assert reason in (Reason.WORKER_LOST, Reason.NO_WORKER), answer.error


@pytest.mark.parametrize("is_call", [False, True], ids=["sigterm", "drain"])
async def test_workers_told_to_stop_finish_what_they_have(
    processes: Processes, is_call: bool
) -> None:
    """The running answer comes whole, new work is refused, the exit is clean: by SIGTERM, and by
    Drain, which says that nothing was left.
    """
    direct = Direct(processes.addresses.model)
    async with gateway_to(processes.addresses, direct) as gateway:
        log = await gateway.open(PROMPT, PARAMETERS, "prefill-16")
        _, sealed = await gateway.prefill(log, 16)
        late = await gateway.open(PROMPT, PARAMETERS, "decode-0")
        async with gateway.stream() as stream:
            await stream.start(log, next_index=1)
            await stream.until(log.request_id, tokens=3)
            drain: asyncio.Task[int] | None = None
            async with asyncio.TaskGroup() as group:
                if is_call:
                    wait = decode_pb2.DrainRequest(
                        timeout=Duration(seconds=30), capability=gateway.operator()
                    )
                    drain = group.create_task(_remaining(gateway.decode.Drain(wait, timeout=60.0)))
                else:
                    processes.running["decode-0"].terminate()
                await draining(stream, late)
                answer = await stream.until(log.request_id)
        if drain is not None:
            assert drain.result() == 0
            wait_too = prefill_pb2.DrainRequest(
                timeout=Duration(seconds=30), capability=gateway.operator()
            )
            assert await _remaining(gateway.prefills[16].Drain(wait_too, timeout=60.0)) == 0
        else:
            processes.running["prefill-16"].terminate()
    assert answer.error is None
    got = [event_shape(sealed.first_token), *answer.shapes()]
    assert got == shape(direct.tokens(PROMPT, PARAMETERS))
    for name in ("decode-0", "prefill-16"):
        assert await asyncio.to_thread(processes.running[name].wait, 30.0) == 0


async def _remaining(call: Awaitable[Any]) -> int:
    return int((await call).remaining)


async def draining(stream: DecodeStream, late: OpenedLog) -> None:
    """Ask until the worker says that it is stopping; the signal takes a moment to arrive."""
    async with asyncio.timeout(10.0):
        while True:
            late.request_id = new_request_id()
            await stream.start(late, next_index=1)
            answer = await stream.until(late.request_id)
            assert answer.error is not None
            if answer.error.reason == Reason.DRAINING:
                return
