"""Local prefills beside running sequences: everybody's tokens are those of a solo run, and whoever
is cancelled in the middle leaves nothing behind.
"""

from __future__ import annotations

import asyncio

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import Gateway, OpenedLog, shape

pytestmark = pytest.mark.cluster
RUNNING = SamplingParameters(temperature=0.0, max_tokens=120, ignore_eos=True)
SHORT = SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG_PROMPT = 400


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens that no other test's prompt begins with."""
    return [3 + (seed * 31 + index * 7) % 190 for index in range(length)]


async def test_prompts_and_steps_beside_each_other_change_no_token(gateway: Gateway) -> None:
    """Four sequences decode while long prompts come; float32, so that equal means equal."""
    running = [prompt_of(20 + index, 1000 + index) for index in range(4)]
    long = [prompt_of(LONG_PROMPT + index, 2000 + index) for index in range(3)]
    logs: list[tuple[OpenedLog, list[int], SamplingParameters]] = []
    async with gateway.stream() as stream:
        for prompt in running:
            log = await gateway.open(prompt, RUNNING, "decode-0")
            logs.append((log, prompt, RUNNING))
            await stream.start(log, next_index=0, local_prefill=True)
        for log, _, _ in logs:
            await stream.until(log.request_id, tokens=3)
        for prompt in long:
            log = await gateway.open(prompt, SHORT, "decode-0")
            logs.append((log, prompt, SHORT))
            await stream.start(log, next_index=0, local_prefill=True)
        answers = await stream.all()
    for log, prompt, sampling in logs:
        answer = answers[log.request_id]
        assert answer.error is None
        assert answer.shapes() == shape(gateway.direct.tokens(prompt, sampling))
    await _dropped(gateway, [log for log, _, _ in logs])


async def test_prompts_cancelled_in_the_middle_free_everything(gateway: Gateway) -> None:
    """One computes, others wait for their turns, others have not begun: all end, no page stays, the
    stream beside them goes on, and the next prompt runs.
    """
    async with gateway.stream() as stream:
        beside = await gateway.open(prompt_of(20, 3000), RUNNING, "decode-0")
        await stream.start(beside, next_index=0, local_prefill=True)
        await stream.until(beside.request_id, tokens=2)
        logs = [
            await gateway.open(prompt_of(LONG_PROMPT, 3001 + index), SHORT, "decode-0")
            for index in range(6)
        ]
        for log in logs:
            await stream.start(log, next_index=0, local_prefill=True)
        await stream.until(beside.request_id, tokens=4)
        for log in logs:
            await stream.stop(log)
        answers = await stream.all()
    told = gateway.direct.tokens(prompt_of(20, 3000), RUNNING)
    assert answers[beside.request_id].shapes() == shape(told)
    errors = [answers[log.request_id].error for log in logs]
    assert all(error is None or error.reason == Reason.CANCELLED for error in errors)
    assert any(error is not None for error in errors)
    for log in logs:
        fence = kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability)
        await gateway.store.Cancel(fence, timeout=5.0)
    await _dropped(gateway, [beside, *logs])
    await _free_again(gateway)
    prompt = prompt_of(50, 3100)
    log = await gateway.open(prompt, SHORT, "decode-0")
    async with gateway.stream() as stream:
        await stream.start(log, next_index=0, local_prefill=True)
        answer = await stream.until(log.request_id)
    assert answer.shapes() == shape(gateway.direct.tokens(prompt, SHORT))


async def _dropped(gateway: Gateway, logs: list[OpenedLog]) -> None:
    for log in logs:
        close = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=True)
        await gateway.store.Close(close, timeout=5.0)


async def _free_again(gateway: Gateway) -> None:
    """Conserved at every look, and nothing stays quarantined."""
    async with asyncio.timeout(30.0):
        while True:
            counts = await gateway.arena()
            held = (counts.pages_granted, counts.pages_live, counts.pages_shared)
            total = sum((counts.pages_free, counts.pages_quarantined, *held))
            assert total == counts.arena.page_count
            if counts.pages_quarantined == 0:
                return
