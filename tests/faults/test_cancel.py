"""Every way a request is cut short reaches every leg: nothing is held afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import pytest

from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.errors import Reason, ServiceError
from baton.rpc.channel import open_channel
from tests.faults.drill import Drill, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

TOKENS: Final = 400
PACE_S: Final = 0.03
SETTLES_WITHIN_S: Final = 2.0
"""A second, and what the machine needs to look."""


class _Enough(Exception):
    """The client has read what it wanted."""


async def test_client_gone_from_a_stream(drill: Drill) -> None:
    """The decode worker stops between two steps; its slot and pages are free."""
    await drill.pace(PACE_S)

    async def leave(count: int) -> None:
        if count == 5:
            raise _Enough

    with contextlib.suppress(_Enough):
        await drill.ask(prompt_of(201), tokens=TOKENS, on_token=leave)
    assert await drill.settles() < SETTLES_WITHIN_S


@pytest.mark.parametrize("point", ["prefill.after_accept", "prefill.mid_upload"])
async def test_client_gone_while_its_prompt_is_computed(drill: Drill, point: str) -> None:
    """Streaming or not, queued or computing: the prefill worker lets go."""
    for is_streamed in (True, False):
        before = [await drill.hits("prefill-0", point)]
        await drill.arm("prefill-0", f"{point}:pause:0.3:once")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(
                drill.ask(prompt_of(202), tokens=TOKENS, is_streamed=is_streamed)
            )
            await drill.until_hit(["prefill-0"], point, before)
            asking.cancel()
        assert await drill.settles() < SETTLES_WITHIN_S


async def test_client_gone_without_streaming_while_decode_runs(drill: Drill) -> None:
    """Nobody reads the answer, so nobody computes it."""
    await drill.pace(PACE_S)
    before = [await drill.hits(name, "decode.step") for name in drill.decodes()]
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(drill.ask(prompt_of(203), tokens=TOKENS, is_streamed=False))
        await drill.until_hit(drill.decodes(), "decode.step", before)
        asking.cancel()
    assert await drill.settles() < SETTLES_WITHIN_S


async def test_deadline_before_the_first_byte_is_504(drill: Drill) -> None:
    """X-Request-Timeout bounds all of a request."""
    await drill.arm("prefill-0", "prefill.before_send:pause:5:once")
    outcome = await drill.ask(prompt_of(204), timeout_s=0.5)
    assert (outcome.status, outcome.error) == (504, "deadline_exceeded")
    await drill.disarm("prefill-0")
    assert await drill.settles() < SETTLES_WITHIN_S


async def test_deadline_after_the_first_byte_is_an_error_event(drill: Drill) -> None:
    """A stream never just stops."""
    await drill.pace(PACE_S)
    outcome = await drill.ask(prompt_of(205), tokens=TOKENS, timeout_s=1.5)
    assert outcome.status == 200
    assert (outcome.error, outcome.has_done) == ("deadline_exceeded", True)
    assert outcome.token_ids
    assert await drill.settles() < SETTLES_WITHIN_S


async def test_deadline_of_a_grpc_call_ends_its_sequence(drill: Drill) -> None:
    """The call's own deadline; nobody has to cancel."""
    await drill.pace(PACE_S)
    channel = open_channel(drill.cluster.grpc_address)
    try:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(ServiceError) as refused:
            async for _ in stub.Generate(_generate(206), timeout=1.5):
                pass
        assert refused.value.reason is Reason.DEADLINE_EXCEEDED
    finally:
        await channel.close()
    assert await drill.settles() < SETTLES_WITHIN_S


@pytest.mark.parametrize("door", ["rest", "grpc"])
async def test_cancel_by_request_id_ends_the_stream_with_a_reason(drill: Drill, door: str) -> None:
    """Whoever has the tenant's key can stop a request; the reader is told."""
    await drill.pace(PACE_S)
    channel = open_channel(drill.cluster.grpc_address)
    found: list[bool] = []

    async def cancel(count: int) -> None:
        if count != 5:
            return
        request_id = drill.last_headers["x-baton-request-id"]
        if door == "rest":
            response = await drill.client.delete(f"/v1/requests/{request_id}")
            found.append(response.status_code == 200)
        else:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            request = gateway_pb2.CancelRequest(request_id=request_id)
            found.append((await stub.Cancel(request, timeout=5.0)).found)

    try:
        outcome = await drill.ask(prompt_of(207), tokens=TOKENS, on_token=cancel)
    finally:
        await channel.close()
    assert found == [True]
    assert (outcome.error, outcome.has_done) == ("cancelled", True)
    assert len(outcome.token_ids) < 50
    assert await drill.settles() < SETTLES_WITHIN_S
    unknown = await drill.client.delete("/v1/requests/nobody")
    assert unknown.status_code == 404


def _generate(seed: int) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(model="tiny")
    request.token_ids.ids.extend(prompt_of(seed))
    request.sampling.max_tokens = TOKENS
    request.sampling.ignore_eos = True
    return request
