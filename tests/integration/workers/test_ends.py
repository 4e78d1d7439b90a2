"""How sequences end before their time, resume, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.decode.v1 import decode_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.api.prefill.v1 import prefill_pb2
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import Gateway, OpenedLog, event_shape, shape

pytestmark = pytest.mark.cluster
LONG = SamplingParameters(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParameters(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5 + index % 90 for index in range(37)]


async def handed_off(
    gateway: Gateway, parameters: SamplingParameters = SHORT, prompt: list[int] = PROMPT
) -> tuple[OpenedLog, Any]:
    """A sealed log and its first token."""
    log = await gateway.open(prompt, parameters, "prefill-64")
    _, sealed = await gateway.prefill(log, 64)
    return log, event_shape(sealed.first_token)


async def cancel_log(gateway: Gateway, log: OpenedLog) -> None:
    """The store's fence."""
    request = kvstore_pb2.CancelRequest(log_id=log.log_id, capability=log.capability)
    await gateway.store.Cancel(request, timeout=5.0)


async def test_a_stopped_sequence_ends_between_two_steps(gateway: Gateway) -> None:
    """It gets its last event, and its slot is free for another at once."""
    log, _ = await handed_off(gateway, LONG)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        await stream.until(log.request_id, tokens=3)
        await stream.stop(log)
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.reason == Reason.CANCELLED
    found = await gateway.decode.Cancel(
        decode_pb2.CancelRequest(request_id=log.request_id), timeout=5.0
    )
    assert not found.found


async def test_cancel_by_call_reaches_a_sequence_of_a_stream(gateway: Gateway) -> None:
    """Cancel needs no stream of its own."""
    log, _ = await handed_off(gateway, LONG)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        await stream.until(log.request_id, tokens=2)
        request = decode_pb2.CancelRequest(request_id=log.request_id)
        assert (await gateway.decode.Cancel(request, timeout=5.0)).found
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.reason == Reason.CANCELLED


async def test_a_fenced_log_ends_its_sequence_as_stale(gateway: Gateway) -> None:
    """Somebody else's generation: the writer is told by its next append, and stops for good."""
    log, _ = await handed_off(gateway, LONG)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        await stream.until(log.request_id, tokens=3)
        await cancel_log(gateway, log)
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.reason == Reason.STALE_GENERATION


@pytest.mark.parametrize("delivered", [1, 5, 12, 17])
async def test_a_sequence_resumes_at_any_token(gateway: Gateway, delivered: int) -> None:
    """Stopped after some tokens and taken again: each token comes once, and none changes."""
    expected = shape(gateway.direct.tokens(PROMPT, SHORT))
    log, first = await handed_off(gateway)
    got = [first]
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        interrupted = await stream.until(log.request_id, tokens=delivered)
        assert interrupted.started is not None
        await stream.stop(log)
        answer = await stream.until(log.request_id)
        if answer.error is not None:
            got += answer.shapes()[:delivered]
            log.generation = interrupted.started.generation
            await stream.start(log, next_index=len(got))
            answer = await stream.until(log.request_id)
            assert answer.error is None
        got += answer.shapes()
    assert got == expected


async def test_a_finished_log_is_told_again_without_an_owner(gateway: Gateway) -> None:
    """A gateway that lost its stream after the end gets the rest, end and usage included."""
    expected = shape(gateway.direct.tokens(PROMPT, SHORT))
    log, _ = await handed_off(gateway)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
        assert answer.started is not None
        log.generation, log.request_id = answer.started.generation, new_request_id()
        await stream.start(log, next_index=20)
        again = await stream.until(log.request_id)
    assert again.error is None
    assert again.shapes() == expected[20:]
    assert again.usage is not None
    assert again.usage.completion_tokens == 24


async def test_a_gateway_that_comes_back_gets_what_it_lacks(gateway: Gateway) -> None:
    """The sequence ran on meanwhile; the same request asks from its index on."""
    expected = shape(gateway.direct.tokens(PROMPT, LONG))
    log, first = await handed_off(gateway, LONG)
    async with gateway.stream() as broken:
        await broken.start(log, next_index=1)
        seen = await broken.until(log.request_id, tokens=4)
        got = [first, *seen.shapes()[:4]]
    async with gateway.stream() as stream:
        await stream.start(log, next_index=len(got))
        answer = await stream.until(log.request_id)
    assert answer.error is None
    assert [*got, *answer.shapes()] == expected


async def test_a_deadline_ends_a_sequence_with_its_reason(gateway: Gateway) -> None:
    """Work whose deadline passed is not continued."""
    log, _ = await handed_off(gateway, LONG)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1, deadline=Duration(nanos=30_000_000))
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.reason == Reason.DEADLINE_EXCEEDED


async def test_next_index_beyond_the_log_is_refused(gateway: Gateway) -> None:
    """Tokens nobody logged cannot have been delivered."""
    log, _ = await handed_off(gateway)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=5)
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert (answer.error.reason, answer.error.field) == (Reason.INVALID_REQUEST, "next_index")


async def test_an_unsealed_log_is_not_continued(gateway: Gateway) -> None:
    """Committed chunks of an unsealed log serve no computation."""
    log = await gateway.open(PROMPT, SHORT, "decode-0")
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.reason == Reason.INVALID_REQUEST


async def test_another_label_is_refused_naming_the_field(gateway: Gateway) -> None:
    """By prefill, by Prepare and by Start alike."""
    foreign = type(gateway.label)()
    foreign.CopyFrom(gateway.label)
    foreign.numeric_class = "weights=f32 act=bf16 acc=f32 kv=f32 invariant=no"
    log = await gateway.open(PROMPT, SHORT, "prefill-64")
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(log, 64, label=foreign)
    assert (caught.value.reason, caught.value.field) == (Reason.COMPAT_MISMATCH, "numeric_class")
    prepare = decode_pb2.PrepareRequest(request_id="r", prompt_tokens=5, label=foreign)
    with pytest.raises(ServiceError) as caught:
        await gateway.decode.Prepare(prepare, timeout=5.0)
    assert caught.value.field == "numeric_class"
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1, label=foreign)
        answer = await stream.until(log.request_id)
    assert answer.error is not None
    assert answer.error.field == "numeric_class"


async def test_prefill_refuses_what_is_not_its_own(gateway: Gateway) -> None:
    """A log for another worker, one that is sealed, one nobody knows, one of another generation."""
    other = await gateway.open(PROMPT, SHORT, "prefill-16")
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(other, 64)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    sealed, _ = await handed_off(gateway)
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(sealed, 64)
    assert caught.value.reason is Reason.ALREADY_EXISTS
    unknown = OpenedLog(bytes(15) + b"\7", new_request_id(), "", 1, 0)
    unknown.capability = gateway.capability(unknown.log_id)
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(unknown, 64)
    assert caught.value.reason is Reason.LOG_NOT_FOUND
    other.generation += 1
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(other, 64)
    assert caught.value.reason is Reason.STALE_GENERATION


async def test_calls_without_a_capability_are_refused(gateway: Gateway) -> None:
    """The worker has no right of its own to a tenant's log."""
    log = await gateway.open(PROMPT, SHORT, "prefill-64")
    log.capability = ""
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(log, 64)
    assert caught.value.reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("way", ["disconnect", "cancel"])
async def test_a_cancelled_prefill_stops_and_frees_its_place(gateway: Gateway, way: str) -> None:
    """Between two layers; the next prompt runs, and the fenced log is gone."""
    prompt = [3 + index % 200 for index in range(480)]
    log = await gateway.open(prompt, SHORT, "prefill-16")
    request = prefill_pb2.RunRequest(
        request_id=log.request_id,
        log_id=log.log_id,
        generation=log.generation,
        capability=log.capability,
    )
    call = gateway.prefills[16].Run(request, timeout=30.0)
    messages: AsyncIterator[Any] = aiter(call)
    await anext(messages)
    if way == "disconnect":
        call.cancel()
    else:
        cancel = prefill_pb2.CancelRequest(request_id=log.request_id)
        assert (await gateway.prefills[16].Cancel(cancel, timeout=5.0)).found
        with pytest.raises(ServiceError) as caught:
            await _drained(messages)
        assert caught.value.reason is Reason.CANCELLED
    await cancel_log(gateway, log)
    next_log = await gateway.open(PROMPT, SHORT, "prefill-16")
    _, sealed = await gateway.prefill(next_log, 16)
    assert sealed.first_token.index == 0
    await _gone(gateway, log.request_id)


async def _drained(messages: AsyncIterator[Any]) -> None:
    """Read to the end of a run that must not seal."""
    async for message in messages:
        assert not message.HasField("sealed")


async def _gone(gateway: Gateway, request_id: str) -> None:
    """The cancelled run has left the worker."""
    cancel = prefill_pb2.CancelRequest(request_id=request_id)
    async with asyncio.timeout(5.0):
        while (await gateway.prefills[16].Cancel(cancel, timeout=5.0)).found:
            pass


async def test_prepare_reserves_and_prompts_must_fit(gateway: Gateway) -> None:
    """A slot is held for the sequence to come; a prompt over the context is refused before."""
    log, _ = await handed_off(gateway)
    prepare = decode_pb2.PrepareRequest(
        request_id=log.request_id, prompt_tokens=37, max_tokens=24, label=gateway.label
    )
    await gateway.decode.Prepare(prepare, timeout=5.0)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1, label=gateway.label)
        answer = await stream.until(log.request_id)
    assert answer.error is None
    too_long = decode_pb2.PrepareRequest(request_id="long", prompt_tokens=512)
    with pytest.raises(ServiceError) as caught:
        await gateway.decode.Prepare(too_long, timeout=5.0)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


async def test_a_context_that_is_full_ends_the_answer(gateway: Gateway) -> None:
    """Prompt and output together reach the model's limit: `length`, not an error."""
    prompt = [3 + index % 200 for index in range(500)]
    log, first = await handed_off(gateway, LONG, prompt)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        answer = await stream.until(log.request_id)
    assert answer.error is None
    assert [first, *answer.shapes()] == shape(gateway.direct.tokens(prompt, LONG))
    assert len(answer.tokens) == 11


async def test_a_stream_must_begin_with_hello(gateway: Gateway) -> None:
    """Nobody speaks without a name."""
    call = gateway.decode.Run(timeout=5.0)
    await call.write(decode_pb2.RunRequest(stop=decode_pb2.StopSequence(request_id="x")))
    with pytest.raises(ServiceError) as caught:
        await call.read()
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, "hello")


async def test_a_malformed_start_ends_only_its_own_sequence(gateway: Gateway) -> None:
    """The stream carries other sequences; they go on."""
    log, _ = await handed_off(gateway)
    bad = OpenedLog(b"short", new_request_id(), log.capability, 1, 0)
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1)
        await stream.start(bad, next_index=1)
        answers = await stream.all()
    assert answers[log.request_id].error is None
    error = answers[bad.request_id].error
    assert error is not None
    assert error.field == "start.log_id"


async def test_pages_are_conserved_and_come_free(gateway: Gateway) -> None:
    """After answers, cancels and drops: free + granted + live + shared + quarantined = total."""
    logs = []
    async with gateway.stream() as stream:
        for index in range(4):
            log, _ = await handed_off(gateway, LONG)
            await stream.start(log, next_index=1)
            logs.append(log)
            if index % 2:
                await stream.until(log.request_id, tokens=3)
                await cancel_log(gateway, log)
        for log in logs:
            await stream.stop(log)
        await stream.all()
    for log in logs:
        close = kvstore_pb2.CloseRequest(log_id=log.log_id, capability=log.capability, drop=True)
        await gateway.store.Close(close, timeout=5.0)
    async with asyncio.timeout(10.0):
        while True:
            counts = await gateway.arena()
            total = sum(
                (
                    counts.pages_free,
                    counts.pages_granted,
                    counts.pages_live,
                    counts.pages_shared,
                    counts.pages_quarantined,
                )
            )
            assert total == counts.arena.page_count
            if counts.pages_quarantined == 0:
                return
