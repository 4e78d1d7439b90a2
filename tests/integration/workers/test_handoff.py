"""Disaggregated answers equal the direct computation, token for token, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import Gateway, event_shape, shape

pytestmark = pytest.mark.cluster
PROMPT_LENGTHS = (1, 15, 16, 17, 48, 130)
GREEDY = SamplingParameters(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random text tokens."""
    random = np.random.default_rng(seed + length)
    return [int(token) for token in random.integers(3, 250, length)]


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
async def test_disaggregated_greedy_output_equals_the_direct_one(
    gateway: Gateway, length: int, size: int
) -> None:
    """KV written by one process and continued by another gives the same tokens and text."""
    prompt = prompt_of(length)
    expected = shape(gateway.direct.tokens(prompt, GREEDY))
    assert await gateway.answer(prompt, GREEDY, size) == expected


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
async def test_local_prefill_equals_the_direct_output(gateway: Gateway, length: int) -> None:
    """The decode worker prefills in chunks of its own and goes on at the same generation."""
    prompt = prompt_of(length)
    log = await gateway.open(prompt, GREEDY, "decode-0")
    async with gateway.stream() as stream:
        await stream.start(log, next_index=0, local_prefill=True)
        answer = await stream.until(log.request_id)
    assert answer.error is None
    assert answer.shapes() == shape(gateway.direct.tokens(prompt, GREEDY))
    assert answer.started is not None
    assert answer.started.generation == log.generation
    assert answer.started.HasField("prefill_compute")


async def test_eight_concurrent_sequences_each_equal_their_solo_run(gateway: Gateway) -> None:
    """A batch changes nothing but speed; one stream message carries many sequences' tokens."""
    prompts = [prompt_of(9 + 7 * index, seed=100) for index in range(8)]
    logs = [await gateway.open(prompt, GREEDY, "prefill-64") for prompt in prompts]
    firsts = {}
    for log in logs:
        _, sealed = await gateway.prefill(log, 64)
        firsts[log.request_id] = event_shape(sealed.first_token)
    async with gateway.stream() as stream:
        for log in logs:
            await stream.start(log, next_index=1)
        answers = await stream.all()
    for log, prompt in zip(logs, prompts, strict=True):
        answer = answers[log.request_id]
        assert answer.error is None
        expected = shape(gateway.direct.tokens(prompt, GREEDY))
        assert [firsts[log.request_id], *answer.shapes()] == expected
    tokens = sum(len(answer.tokens) for answer in answers.values())
    assert stream.messages < tokens / 2


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
async def test_max_tokens_is_exact_and_usage_with_it(gateway: Gateway, max_tokens: int) -> None:
    """One token ends in prefill, two in the first step; counts say so."""
    parameters = SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = prompt_of(20)
    log = await gateway.open(prompt, parameters, "prefill-16")
    _, sealed = await gateway.prefill(log, 16)
    usage = sealed.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (20, 0, 1)
    if max_tokens == 1:
        assert sealed.first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
        return
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
    assert len(answer.tokens) == max_tokens - 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert answer.tokens[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_stop_strings_end_an_answer_across_the_hand_off(gateway: Gateway) -> None:
    """The stop string begins in prefill's token and ends in decode's: it still matches."""
    prompt = prompt_of(30, seed=5)
    whole = gateway.direct.tokens(prompt, GREEDY)
    text = "".join(token.text for token in whole)
    for first, last in ((0, 2), (1, 4), (3, 9)):
        stop = text[first:last]
        if not stop or text.index(stop) != first:
            continue
        parameters = SamplingParameters(
            temperature=0.0, max_tokens=40, ignore_eos=True, stop_strings=(stop,)
        )
        expected = shape(gateway.direct.tokens(prompt, parameters))
        got = await gateway.answer(prompt, parameters, 64)
        assert got == expected
        assert "".join(item[2] for item in got) == text[:first]
        assert got[-1][3] == "stop"


async def test_sampled_output_with_penalties_equals_the_direct_one(gateway: Gateway) -> None:
    """Draws are a function of seed and position, penalties of the history: any worker agrees."""
    parameters = SamplingParameters(
        temperature=1.1,
        top_p=0.9,
        seed=77,
        max_tokens=30,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
    )
    prompt = prompt_of(40, seed=9)
    expected = shape(gateway.direct.tokens(prompt, parameters))
    assert await gateway.answer(prompt, parameters, 16) == expected


async def test_logprobs_travel_with_both_legs(gateway: Gateway) -> None:
    """Prefill's token and decode's tokens carry theirs, and the log keeps them."""
    parameters = SamplingParameters(
        temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2
    )
    prompt = prompt_of(20)
    log = await gateway.open(prompt, parameters, "prefill-16")
    _, sealed = await gateway.prefill(log, 16)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
    expected = gateway.direct.tokens(prompt, parameters)
    for token, event in zip(expected, [sealed.first_token, *answer.tokens], strict=True):
        assert event.logprob.logprob == pytest.approx(token.sampled.logprob, abs=1e-4)
        assert len(event.logprob.top) == 2


async def test_a_cached_prefix_is_not_computed_again(gateway: Gateway) -> None:
    """The second prompt with the same beginning starts behind it and answers the same."""
    prompt = prompt_of(100, seed=31)
    for is_second in (False, True):
        log = await gateway.open(prompt, GREEDY, "prefill-16", is_cached=True)
        assert bool(log.cached_tokens) == is_second
        chunks, sealed = await gateway.prefill(log, 16)
        assert sealed.usage.cached_tokens == log.cached_tokens
        assert chunks[0].from_position == log.cached_tokens
        async with gateway.stream() as stream:
            await stream.start(log, next_index=1)
            answer = await stream.until(log.request_id)
        got = [event_shape(sealed.first_token), *answer.shapes()]
        assert got == shape(gateway.direct.tokens(prompt, GREEDY))
        close = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability)
        await gateway.store.Close(close, timeout=5.0)


async def test_kv_only_seals_without_a_token(gateway: Gateway) -> None:
    """How a published prefix is computed."""
    log = await gateway.open(prompt_of(33), GREEDY, "prefill-16")
    _, sealed = await gateway.prefill(log, 16, kv_only=True)
    assert not sealed.HasField("first_token")
    assert sealed.usage.completion_tokens == 0
    described = await gateway.store.DescribeLog(
        kvstore_pb2.DescribeLogRequest(log_id=log.log_id, capability=log.capability), timeout=5.0
    )
    assert described.head.sealed
    assert described.head.committed_position == 33


async def test_the_float32_path_says_exact(gateway: Gateway) -> None:
    """Both legs name the exactness class."""
    log = await gateway.open(prompt_of(10), GREEDY, "prefill-16")
    _, sealed = await gateway.prefill(log, 16)
    assert sealed.exactness == common_pb2.EXACTNESS_CLASS_EXACT
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
    assert answer.started is not None
    assert answer.started.exactness == common_pb2.EXACTNESS_CLASS_EXACT
