"""Reuse to the token changes no token: a prompt that leaves a kept log at any position answers as a
fresh computation does, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import (
    DecodeStream,
    Gateway,
    OpenedLog,
    event_shape,
    shape,
)
from tests.integration.workers.test_handoff import prompt_of

pytestmark = pytest.mark.cluster

GREEDY = SamplingParameters(temperature=0.0, max_tokens=4, ignore_eos=True)
LONGER = SamplingParameters(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT_TOKENS = 100
CHUNK = 16

Shapes = list[tuple[int, int, str, str | None]]


async def answered(
    gateway: Gateway,
    stream: DecodeStream,
    prompt: Sequence[int],
    sampling: SamplingParameters = GREEDY,
) -> tuple[OpenedLog, Shapes]:
    """A prompt's answer with whatever the store has of it."""
    log = await gateway.open(prompt, sampling, f"prefill-{CHUNK}", is_cached=True)
    _, sealed = await gateway.prefill(log, CHUNK)
    await stream.start(log, next_index=1)
    rest = await stream.until(log.request_id)
    assert rest.error is None, rest.error
    assert sealed.usage.cached_tokens == log.cached_tokens
    return log, [event_shape(sealed.first_token), *rest.shapes()]


async def closed(gateway: Gateway, log: OpenedLog, *, is_dropped: bool) -> None:
    """The log ends."""
    request = kvstore_pb2.CloseRequest(
        log_id=log.log_id, capability=log.capability, drop=is_dropped
    )
    await gateway.store.Close(request, timeout=10.0)


async def forked_everywhere(gateway: Gateway, positions: Sequence[int], seed: int) -> None:
    """At each position of a kept history of prompt and answer: the tokens reused are those that
    are shared, the answer is the one without reuse.
    """
    prompt = prompt_of(PROMPT_TOKENS, seed=seed)
    async with gateway.stream() as stream:
        kept, answer = await answered(gateway, stream, prompt, LONGER)
        await closed(gateway, kept, is_dropped=False)
        history = [*prompt, *(token for _, token, _, _ in answer)]
        for position in positions:
            shared = history[:position]
            other = next(token for token in range(3, 250) if token != [*history, 0][position])
            asked = [*shared, other, 5 + position % 7]
            log, got = await answered(gateway, stream, asked)
            # The last token of an answer has no KV: nothing was computed behind it.
            assert log.cached_tokens == min(position, len(history) - 1), position
            assert got == shape(gateway.direct.tokens(asked, GREEDY)), position
            await closed(gateway, log, is_dropped=True)


async def test_a_fork_at_a_few_positions_answers_as_a_fresh_prompt(gateway: Gateway) -> None:
    """The first token, inside and at the end of a block, in the tail, in decode's own KV."""
    await forked_everywhere(gateway, (1, 15, 16, 17, 97, 100, 101, 117, 129), seed=7100)


@pytest.mark.more
@pytest.mark.timeout(300)
async def test_a_fork_at_every_position_answers_as_a_fresh_prompt(gateway: Gateway) -> None:
    """All of 0 to 130: prompt, prefill's partial page, and what decode wrote."""
    await forked_everywhere(gateway, range(PROMPT_TOKENS + 31), seed=7200)


async def test_a_prompt_that_is_known_whole_answers_the_same(gateway: Gateway) -> None:
    """Its last token alone is computed."""
    prompt = prompt_of(61, seed=7300)
    async with gateway.stream() as stream:
        first, fresh = await answered(gateway, stream, prompt)
        await closed(gateway, first, is_dropped=False)
        again, reused = await answered(gateway, stream, prompt)
        assert again.cached_tokens == len(prompt) - 1
        assert reused == fresh == shape(gateway.direct.tokens(prompt, GREEDY))
        await closed(gateway, again, is_dropped=True)
