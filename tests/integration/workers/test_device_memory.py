"""The decode worker's device memory, a stand-in here: the kvstore places what the worker writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.api.kvstore.v1 import operators_pb2, operators_pb2_grpc
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.rpc.channel import open_channel
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import Addresses, Gateway, shape

pytestmark = pytest.mark.cluster

PARAMETERS = SamplingParameters(temperature=0.0, max_tokens=450, ignore_eos=True)
PROMPT = [5 + index % 80 for index in range(40)]
TIMEOUT_S = 60.0


async def device_pages(kvstore: str) -> int:
    """Pages that stand in device memory, as the kvstore has them."""
    signer = CapabilitySigner(DEV_KEY, SystemClock())
    operator = signer.sign(
        Claims(
            tenant=None,
            scope=None,
            rights=frozenset({Right.ADMIN}),
            expiry_wall_s=signer.expiry_after(60.0),
            request_id="r",
        )
    )
    async with open_channel(kvstore) as channel:
        stub: Any = operators_pb2_grpc.OperatorServiceStub(channel)
        usage = await stub.ReportUsage(operators_pb2.ReportUsageRequest(capability=operator))
    return sum(tier.pages_used for tier in usage.tiers if tier.tier == "device")


async def test_what_is_written_is_placed_in_device_memory(
    gateway: Gateway, addresses: Addresses
) -> None:
    """Answers run until some of their pages stand there; every token of each is the direct
    computation's.
    """
    expected = shape(gateway.direct.tokens(PROMPT, PARAMETERS))
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            assert await gateway.answer(PROMPT, PARAMETERS, 16) == expected
            if await device_pages(addresses.kvstore):
                break
