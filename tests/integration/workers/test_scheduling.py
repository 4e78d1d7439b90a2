"""More sequences than slots, more KV than pages: everybody gets its own tokens, all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from baton.api.decode.v1 import decode_pb2
from baton.errors import Reason
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.crowd import Crowd, crowd_on, preempted, told
from tests.integration.workers.harness import (
    Direct,
    Gateway,
    OpenedLog,
    Processes,
    gateway_to,
    running_workers,
    shape,
)

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

PAGE_BYTES = 16_384
PAGES = 40
SLOTS = 4
BATCH = decode_pb2.SERVICE_CLASS_BATCH
LONG = SamplingParameters(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A worker with few slots over an arena that holds three long sequences."""
    with running_workers(
        tmp_path_factory.mktemp("scheduling"),
        (64,),
        arena_bytes=PAGES * PAGE_BYTES,
        decode_flags=("--active-sequences-max", str(SLOTS), "--queue-max", "400"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def direct(processes: Processes) -> Direct:
    """The same model in this process."""
    return Direct(processes.addresses.model)


@pytest.fixture
async def gateway(processes: Processes, direct: Direct) -> AsyncIterator[Gateway]:
    """A gateway's side."""
    async with gateway_to(processes.addresses, direct) as side:
        yield side


def prompt_of(length: int, seed: int) -> list[int]:
    """Random text tokens."""
    random = np.random.default_rng(1000 * seed + length)
    return [int(token) for token in random.integers(3, 250, length)]


async def begun(crowd: Crowd, prompt: list[int], **fields: object) -> OpenedLog:
    """A sequence that runs and has told its first token."""
    log = await crowd.open(prompt, LONG, "decode-0")
    answer = await crowd.start(log, next_index=0, local_prefill=True, **fields)
    await crowd.until(answer, lambda one: bool(one.tokens))
    return log


async def test_out_of_pages_the_youngest_of_the_lowest_class_gives_way_and_ends_the_same(
    gateway: Gateway, processes: Processes
) -> None:
    """Four sequences of 15 pages each in an arena of 40: nobody fails, the oldest never waits, and
    of the others the batch one is the first to give way.
    """
    prompts = [prompt_of(33, seed) for seed in range(4)]
    async with crowd_on(gateway) as crowd:
        oldest = await begun(crowd, prompts[0])
        batch = await begun(crowd, prompts[1], service_class=BATCH)
        others = [await begun(crowd, prompt) for prompt in prompts[2:]]
        answers = crowd.stream.answers
        logs = [oldest, batch, *others]
        for log in logs:
            await crowd.until(answers[log.request_id], lambda _one: False)
        for log, prompt in zip(logs, prompts, strict=True):
            answer = answers[log.request_id]
            assert answer.error is None, answer.error
            assert told(answer) == shape(gateway.direct.tokens(prompt, LONG))
    for_pages = [name for name, cause in preempted(processes.run_dir) if cause == "pages"]
    assert for_pages[0] == batch.request_id
    assert oldest.request_id not in for_pages
    counts = await gateway.arena()
    assert counts.pages_granted == 0


async def test_a_higher_class_gets_a_slot_at_once_and_the_batch_goes_on_later(
    gateway: Gateway, processes: Processes
) -> None:
    """All slots are batch's; what somebody waits for does not wait for them to end."""
    prompts = [prompt_of(20, seed) for seed in range(10, 10 + SLOTS + 1)]
    async with crowd_on(gateway) as crowd:
        logs = [await begun(crowd, one, service_class=BATCH) for one in prompts[:SLOTS]]
        urgent = await begun(crowd, prompts[SLOTS])
        answers = crowd.stream.answers
        assert not all(answers[log.request_id].is_over for log in logs)
        for log, prompt in zip([*logs, urgent], prompts, strict=True):
            answer = await crowd.until(answers[log.request_id], lambda _one: False)
            assert told(answer) == shape(gateway.direct.tokens(prompt, LONG))
    assert (logs[-1].request_id, "class") in preempted(processes.run_dir)


async def test_a_hundred_long_requests_of_one_tenant_do_not_hold_another_ones_first_token(
    gateway: Gateway,
) -> None:
    """All slots and a long queue are one tenant's. Another's first token comes while that tenant
    still has nearly all of its own before it.
    """
    async with crowd_on(gateway) as crowd:
        answers = crowd.stream.answers
        logs = []
        for seed in range(100):
            log = await crowd.open(prompt_of(20, seed), LONG, "decode-0")
            await crowd.start(log, next_index=0, local_prefill=True, tenant="acme")
            logs.append(log)
        log = await crowd.open(prompt_of(20, 500), LONG, "decode-0", tenant="small")
        ended = sum(answers[one.request_id].is_over for one in logs)
        mine = await crowd.start(log, next_index=0, local_prefill=True, tenant="small")
        await crowd.until(mine, lambda one: bool(one.tokens))
        assert mine.error is None
        # A slot was made for it; it did not wait for those of a hundred requests to end.
        assert sum(answers[one.request_id].is_over for one in logs) - ended < SLOTS
        await crowd.until(mine, lambda _one: False)
        assert told(mine) == shape(gateway.direct.tokens(prompt_of(20, 500), LONG))
        for one in logs:
            await crowd.stop(one)
            await crowd.until(answers[one.request_id], lambda _one: False)
            error = answers[one.request_id].error
            assert error is None or error.reason == Reason.CANCELLED.value
