"""A prefill worker that computes in a device's memory, a stand-in here: no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import (
    Direct,
    Gateway,
    Processes,
    gateway_to,
    running_workers,
    shape,
)
from tests.integration.workers.test_handoff import prompt_of

pytestmark = pytest.mark.cluster

CHUNK = 32
PAGE_BYTES = 16_384
DEVICE_PAGES = 32
"""Those of the model's context: three long prompts at once do not fit."""

GREEDY = SamplingParameters(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One such worker beside a decode worker over the arena."""
    device = ("--device", "standin", "--device-bytes", str(DEVICE_PAGES * PAGE_BYTES))
    with running_workers(
        tmp_path_factory.mktemp("device"), (CHUNK,), decode_flags=(), prefill_flags=device
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


@pytest.mark.parametrize("length", [1, 16, 33, 130])
async def test_what_it_computed_is_what_decode_reads(gateway: Gateway, length: int) -> None:
    """KV landed in the arena before it was committed: checksums and tokens say so."""
    prompt = prompt_of(length)
    expected = shape(gateway.direct.tokens(prompt, GREEDY))
    assert await gateway.answer(prompt, GREEDY, CHUNK) == expected


async def test_prompts_that_push_each_other_out_of_the_device_end_the_same(
    gateway: Gateway,
) -> None:
    """Five at once, of which two fit: what had to go comes back from the arena."""
    prompts = [prompt_of(200 + 9 * index, seed=300) for index in range(5)]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(gateway.answer(prompt, GREEDY, CHUNK)) for prompt in prompts]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.result() == shape(gateway.direct.tokens(prompt, GREEDY))


async def test_a_cached_prefix_is_brought_to_the_device(gateway: Gateway) -> None:
    """The second prompt begins as the first one did."""
    prompt = prompt_of(100, seed=400)
    log = await gateway.open(prompt, GREEDY, f"prefill-{CHUNK}", is_cached=True)
    await gateway.prefill(log, CHUNK)
    longer = [*prompt, *prompt_of(40, seed=500)]
    again = await gateway.open(longer, GREEDY, f"prefill-{CHUNK}", is_cached=True)
    assert again.cached_tokens >= 96
    _, sealed = await gateway.prefill(again, CHUNK)
    async with gateway.stream() as stream:
        await stream.start(again, next_index=1)
        answer = await stream.until(again.request_id)
    expected = shape(gateway.direct.tokens(longer, GREEDY))
    assert sealed.first_token.token_id == expected[0][1]
    assert answer.shapes() == expected[1:]
