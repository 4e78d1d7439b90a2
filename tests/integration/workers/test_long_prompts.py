"""A huge prompt in a real prefill worker: it is computed chunk by chunk, and others pass it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest

from baton.api.prefill.v1 import prefill_pb2
from baton.sampling_parameters import SamplingParameters
from baton.testing.tiny_models import GQA_TIED
from tests.integration.workers.harness import (
    Direct,
    Gateway,
    OpenedLog,
    Processes,
    event_shape,
    gateway_to,
    running_workers,
    shape,
)

pytestmark = pytest.mark.cluster

CHUNK = 64
LONG_TOKENS = 8_000
SHORT_TOKENS = 20
SHORTS = 6
CONTEXT = 8_192
FIRST_TOKEN = SamplingParameters(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One prefill worker of a model with a long context."""
    model = replace(GQA_TIED, max_context=CONTEXT)
    with running_workers(
        tmp_path_factory.mktemp("long"), (CHUNK,), tiny=model, arena_bytes=32 << 20
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


class Order:
    """What the worker told, in the order in which it came."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.chunks_of_long = 0
        self.sealed: list[str] = []
        self.is_under_way = asyncio.Event()

    async def run(self, name: str, log: OpenedLog) -> prefill_pb2.Sealed:
        """One prompt to its seal."""
        request = prefill_pb2.RunRequest(
            request_id=log.request_id,
            log_id=log.log_id,
            generation=log.generation,
            capability=log.capability,
        )
        async for message in self._gateway.prefills[CHUNK].Run(request, timeout=60.0):
            if message.HasField("sealed"):
                self.sealed.append(name)
                return message.sealed
            if name == "long":
                self.chunks_of_long += 1
                self.is_under_way.set()
        raise AssertionError(f"{name} ended without a seal")


@pytest.mark.parametrize("tenants", ["one tenant", "each its own"])
async def test_short_prompts_pass_a_huge_one(gateway: Gateway, tenants: str) -> None:
    """Whoever comes while a prompt of many chunks is computed waits for a pass, not for the prompt:
    all of them have their first token before the huge one has half of its chunks, and it is right.
    """
    prompts = [prompt_of(SHORT_TOKENS, seed) for seed in range(SHORTS)]
    order = Order(gateway)

    async def opened(prompt: list[int], number: int) -> OpenedLog:
        tenant = "acme" if tenants == "one tenant" else f"tenant-{number}"
        return await gateway.open(prompt, FIRST_TOKEN, f"prefill-{CHUNK}", tenant=tenant)

    long_log = await opened(prompt_of(LONG_TOKENS, 99), SHORTS)
    logs = [await opened(prompt, number) for number, prompt in enumerate(prompts)]
    async with asyncio.TaskGroup() as group:
        long = group.create_task(order.run("long", long_log))
        await order.is_under_way.wait()
        shorts = [
            group.create_task(order.run(f"short {index}", log)) for index, log in enumerate(logs)
        ]
        await asyncio.wait(shorts)
        assert not long.done()
        chunks_then = order.chunks_of_long
    assert order.sealed[-1] == "long"
    assert chunks_then < LONG_TOKENS // CHUNK // 2, "they waited for half of the huge prompt"
    assert order.chunks_of_long == -(-LONG_TOKENS // CHUNK)
    for short, prompt in zip(shorts, prompts, strict=True):
        first = event_shape(short.result().first_token)
        assert first == shape(gateway.direct.tokens(prompt, FIRST_TOKEN))[0]
    assert long.result().usage.prompt_tokens == LONG_TOKENS
