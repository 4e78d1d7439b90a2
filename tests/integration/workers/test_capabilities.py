"""Whose a request is, and who may drain a worker: capabilities decide, and workers have no key."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from baton.api.decode.v1 import decode_pb2
from baton.api.prefill.v1 import prefill_pb2
from baton.capability import Right
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.harness import Gateway, shape

pytestmark = pytest.mark.cluster

SHORT = SamplingParameters(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPT = [4 + index % 80 for index in range(40)]
WAIT = Duration(seconds=5)


async def drained(gateway: Gateway, role: str, capability: str) -> Any:
    """What a worker answers to Drain."""
    if role == "decode":
        request = decode_pb2.DrainRequest(timeout=WAIT, capability=capability)
        return await gateway.decode.Drain(request, timeout=10.0)
    wanted = prefill_pb2.DrainRequest(timeout=WAIT, capability=capability)
    return await gateway.prefills[16].Drain(wanted, timeout=10.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_only_an_operator_drains_a_worker(gateway: Gateway, role: str) -> None:
    """Refused as the kvstore refuses its own operators' calls, naming what is wrong; the worker
    goes on and takes new work.
    """
    log_capability = gateway.capability(bytes(range(16)))
    wrong = {
        "missing": ("", Reason.UNAUTHENTICATED),
        "format": ("bc1.nonsense", Reason.UNAUTHENTICATED),
        "signature": (gateway.operator()[:-4] + "AAAA", Reason.UNAUTHENTICATED),
        "expiry": (gateway.operator(ttl_s=-1.0), Reason.UNAUTHENTICATED),
        "right": (gateway.operator(right=Right.ATTACH), Reason.PERMISSION_DENIED),
        "tenant": (gateway.operator(tenant="acme"), Reason.PERMISSION_DENIED),
    }
    for failed, (capability, reason) in wrong.items():
        with pytest.raises(ServiceError) as caught:
            await drained(gateway, role, capability)
        assert (caught.value.reason, caught.value.field) == (reason, "capability"), failed
        assert caught.value.metadata["failed"] == failed
    with pytest.raises(ServiceError) as caught:
        await drained(gateway, role, log_capability)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert await gateway.answer(PROMPT, SHORT, 16) == shape(gateway.direct.tokens(PROMPT, SHORT))


async def test_a_tenant_that_is_not_the_capabilitys_is_refused_naming_the_field(
    gateway: Gateway,
) -> None:
    """By prefill and by decode; the right name, or none, is served."""
    log = await gateway.open(PROMPT, SHORT, "prefill-16", tenant="acme")
    with pytest.raises(ServiceError) as caught:
        await gateway.prefill(log, 16, tenant="globex")
    assert (caught.value.reason, caught.value.field) == (Reason.PERMISSION_DENIED, "tenant")
    await gateway.prefill(log, 16, tenant="acme")
    async with gateway.stream() as stream:
        await stream.start(log, next_index=1, tenant="globex")
        refused = (await stream.until(log.request_id)).error
        assert refused is not None
        assert (refused.reason, refused.field) == (Reason.PERMISSION_DENIED.value, "start.tenant")
        await stream.start(log, next_index=1)
        served = await stream.until(log.request_id)
    assert served.error is None
    assert served.shapes() == shape(gateway.direct.tokens(PROMPT, SHORT))[1:]


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"service_class": 9}, "start.service_class"), ({"priority": 101}, "start.priority"),
     ({"weight": 1001}, "start.weight")],
)  # fmt: skip
async def test_a_rank_beyond_its_bounds_is_refused_naming_the_field(
    gateway: Gateway, fields: dict[str, int], field: str
) -> None:
    """The stream goes on: only its own sequence ends."""
    log = await gateway.open(PROMPT, SHORT, "decode-0")
    async with gateway.stream() as stream:
        await stream.start(log, next_index=0, local_prefill=True, **fields)
        refused = (await stream.until(log.request_id)).error
        assert refused is not None
        assert (refused.reason, refused.field) == (Reason.INVALID_REQUEST.value, field)
        await stream.start(log, next_index=0, local_prefill=True, weight=1000, priority=-100)
        served = await stream.until(log.request_id)
    assert served.shapes() == shape(gateway.direct.tokens(PROMPT, SHORT))
