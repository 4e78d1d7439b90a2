"""Every call of the kvstore's services x {no capability, altered, expired, right missing, other
tenant, a generation that is over} is refused, and a refusal changes nothing.

The table is checked against the services' descriptors: a new call without a row fails here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import (
    device_pb2,
    device_pb2_grpc,
    operators_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)
from baton.api.kvstore.v1 import kvstore_pb2 as pb
from baton.api.kvstore.v1 import operators_pb2 as ops
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.wire.errors import error_from_proto
from tests.integration.kvstore.harness import (
    BLOCK,
    Model,
    StoreProcess,
    capability,
    connected,
    running_store,
    worker_capability,
)
from tests.integration.kvstore.rights_of_sessions import SESSION_ROWS
from tests.integration.kvstore.rights_table import (
    EVERYBODY,
    OPERATOR,
    STORE_ROWS,
    WORKER,
    Row,
    Scene,
    body,
)

ROWS = {**STORE_ROWS, **SESSION_ROWS}
METHODS = {
    method.name: method
    for service in (
        pb.DESCRIPTOR.services_by_name["KVStoreService"],
        ops.DESCRIPTOR.services_by_name["OperatorService"],
        device_pb2.DESCRIPTOR.services_by_name["DeviceService"],
        sessions_pb2.DESCRIPTOR.services_by_name["SessionService"],
    )
    for method in service.methods
}
SESSION = "notes"
PROMPT = [3 + index % 90 for index in range(BLOCK + 5)]
CASES = ("none", "altered", "expired", "right", "tenant", "generation", "bound generation")
NOT_FOR_YOU = {
    Reason.PERMISSION_DENIED,
    Reason.LOG_NOT_FOUND,
    Reason.PREFIX_NOT_FOUND,
    Reason.NOT_FOUND,
    Reason.ALREADY_EXISTS,
}
OVER = {
    Reason.STALE_GENERATION,
    Reason.PERMISSION_DENIED,
    Reason.ALREADY_EXISTS,
    Reason.INVALID_REQUEST,
}
ALLOWED = {
    "none": {Reason.UNAUTHENTICATED},
    "altered": {Reason.UNAUTHENTICATED},
    "expired": {Reason.UNAUTHENTICATED},
    "right": {Reason.PERMISSION_DENIED},
    "tenant": NOT_FOR_YOU,
    "generation": OVER,
    "bound generation": {Reason.PERMISSION_DENIED, Reason.ALREADY_EXISTS},
}


@pytest.fixture(scope="module")
def patient_store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A kvstore whose leases outlast a slow machine."""
    directory: Path = tmp_path_factory.mktemp("kvstore-rights")
    with running_store(model, directory, "--lease-s", "60") as running:
        yield running


@pytest.fixture
async def scene(patient_store: StoreProcess) -> AsyncIterator[Scene]:
    """Three logs of tenant acme and a published prefix; all dropped at the end."""
    async with connected(patient_store) as site:
        worker = await site.attach("writer")
        kept = await site.open(worker, PROMPT)
        await worker.prefill(kept, 5, "stop")
        await site.close(kept)
        decoding = await site.open(worker, PROMPT[1:])
        await worker.prefill(decoding, 5)
        decoding = await worker.take(decoding)
        writing = await site.open(worker, PROMPT[2:])
        await worker.commit(writing, 4)
        prefix = pb.PublishRequest(capability=kept.capability, request_id=new_request_id())
        prefix.prefix.name = kept.log_id.hex()
        prefix.prefix.log.log_id = kept.log_id
        prefix.prefix.log.position = BLOCK
        published = await site.stub.Publish(prefix)
        sessions = sessions_pb2_grpc.SessionServiceStub(site.channel)
        named = await sessions.SetSession(
            sessions_pb2.SetSessionRequest(
                capability=capability(None),
                request_id=new_request_id(),
                session_id=SESSION,
                head=common_pb2.LogPosition(log_id=kept.log_id, position=len(kept.tokens)),
            )
        )
        assert named.session.generation == 1
        named = await sessions.SetSession(
            sessions_pb2.SetSessionRequest(
                capability=capability(None),
                request_id=new_request_id(),
                session_id=SESSION,
                expected_generation=1,
                head=named.session.head,
            )
        )
        assert named.session.generation == 2
        tree = await sessions.GetSession(
            sessions_pb2.GetSessionRequest(
                capability=capability(None), session_id=SESSION, with_lineage=True
            )
        )
        blob = pb.GetBlobRequest(log_id=kept.log_id, capability=kept.capability)
        descriptor, *chunks = [piece async for piece in site.stub.GetBlob(blob)]
        entry = pb.AppendEntry(log_id=decoding.log_id, position=len(decoding.tokens), token_id=7)
        yield Scene(
            site=site,
            worker=worker,
            writing=writing,
            decoding=decoding,
            kept=kept,
            prefix_id=published.prefix.prefix_id,
            session_id=SESSION,
            kept_request_id=next(
                one.request_id for one in tree.lineage if one.log_id == kept.log_id
            ),
            descriptor=descriptor.descriptor,
            payload=b"".join(piece.chunk for piece in chunks),
            entry=entry,
        )
        revoke = pb.RevokeRequest(prefix_id=published.prefix.prefix_id, capability=kept.capability)
        await site.stub.Revoke(revoke)
        await sessions.DeleteSession(
            sessions_pb2.DeleteSessionRequest(
                capability=capability(None), request_id=new_request_id(), session_id=SESSION
            )
        )
        for log in (kept, decoding, writing):
            await site.close(log, drop=True)


def test_every_call_has_a_row_and_every_row_a_call() -> None:
    """A new call says who may make it before it is served."""
    assert set(ROWS) == set(METHODS), set(ROWS) ^ set(METHODS)
    for name, row in ROWS.items():
        assert row.stale is not None or row.no_generation, name
        assert row.rights & row.holders, name


@pytest.mark.parametrize("call", sorted(ROWS))
async def test_a_call_is_refused_to_who_may_not_make_it(call: str, scene: Scene) -> None:
    """All cases of one call; after each the store is as it was."""
    row = ROWS[call]
    before = await state_of(scene)
    tried = 0
    for case in CASES:
        request = request_of(call, row, case, scene)
        if request is None:
            continue
        tried += 1
        outcome = await made(scene, call, row, request)
        if case == "tenant" and row.harmless_for_others:
            assert_says_nothing_of(scene, outcome)
        else:
            assert isinstance(outcome, ServiceError), f"{call}, {case}: answered {outcome!r}"
            assert outcome.reason in ALLOWED[case], f"{call}, {case}: {outcome}"
        assert await state_of(scene) == before, f"{call}, {case}: something changed"
    assert tried >= (3 if row.rights == EVERYBODY else 5)


def request_of(call: str, row: Row, case: str, scene: Scene) -> Message | None:
    """The request of one case; None where the row says that there is none."""
    build = row.build
    if case == "tenant" and row.others is not None:
        build = row.others
    elif case == "generation":
        if row.stale is None:
            return None
        build = row.stale
    request = build(scene)
    text = capability_of(row, case, request, call)
    if text is None:
        return None
    body(call, request).capability = text
    return request


def capability_of(row: Row, case: str, request: Message, call: str) -> str | None:
    """What the caller of one case shows."""
    named = log_of(call, request)
    is_worker = row.holders == WORKER
    tenant = None if is_worker or row.holders == frozenset({Right.ADMIN}) else "acme"
    rights = row.holders
    generation: int | None = None
    expiry_s = 600.0
    match case:
        case "none":
            return ""
        case "right":
            rights = rights - row.rights
            if not rights:
                rights = frozenset({Right.GENERATE})
            if row.rights == EVERYBODY:
                return None
        case "tenant":
            # Nothing is bound: a tenant that is as free as one can be.
            tenant, named = "rival", None
            rights = EVERYBODY - {Right.ADMIN, Right.ATTACH}
        case "expired":
            expiry_s = -1.0
        case "bound generation":
            if named is None or row.unbound or is_worker or row.stale is None:
                return None
            generation = 77
    text = signed(tenant, rights, named, generation, expiry_s)
    if case == "altered":
        middle = len(text) // 2
        text = text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]
    return text


def signed(
    tenant: str | None,
    rights: frozenset[Right],
    log_id: bytes | None,
    generation: int | None,
    expiry_s: float,
) -> str:
    """A genuine capability."""
    return CapabilitySigner(DEV_KEY, SystemClock()).sign(
        Claims(
            tenant=tenant,
            scope=None if tenant is None else "",
            rights=rights,
            expiry_wall_s=time.time() + expiry_s,
            request_id="r",
            log_id=log_id,
            generation=generation,
        )
    )


def log_of(call: str, request: Message) -> bytes | None:
    """The log a request names."""
    any_request: Any = request
    if call == "PutBlob":
        return bytes(any_request.header.descriptor.log_id)
    if call == "ImportLog":
        return bytes(any_request.header.log_id)
    if call == "Publish":
        return bytes(any_request.prefix.log.log_id)
    return getattr(request, "log_id", None) or None


async def made(scene: Scene, call: str, row: Row, request: Message) -> Any:
    """The answer, the first of several, or the refusal; an append's refusal is its outcome's."""
    payload = scene.payload
    stub: Any = scene.site.stub
    if METHODS[call].containing_service.name == "OperatorService":
        stub = operators_pb2_grpc.OperatorServiceStub(scene.site.channel)
    elif METHODS[call].containing_service.name == "DeviceService":
        stub = device_pb2_grpc.DeviceServiceStub(scene.site.channel)
    elif METHODS[call].containing_service.name == "SessionService":
        stub = sessions_pb2_grpc.SessionServiceStub(scene.site.channel)
    method = getattr(stub, call)

    async def one() -> AsyncIterator[Message]:
        yield request
        if call == "PutBlob":
            yield pb.PutBlobRequest(chunk=payload)
        if call == "ImportLog":
            yield ops.ImportLogRequest(descriptor=scene.descriptor)
            yield ops.ImportLogRequest(chunk=payload)

    is_stream = METHODS[call].server_streaming
    try:
        answer = method(one() if row.is_client_stream else request, timeout=10.0)
        if not is_stream:
            return await answer
        found = None
        async for piece in answer:
            found = piece
            break
        answer.cancel()
    except ServiceError as error:
        return error
    if call == "Append" and found is not None and found.outcomes[0].HasField("error"):
        return error_from_proto(found.outcomes[0].error)
    return found


def assert_says_nothing_of(scene: Scene, outcome: Any) -> None:
    """An answer for everybody names nothing of acme's."""
    if isinstance(outcome, ServiceError):
        return
    text = outcome.SerializeToString()
    for log in (scene.kept, scene.decoding, scene.writing):
        assert log.log_id not in text
    assert scene.prefix_id.encode() not in text


async def state_of(scene: Scene) -> list[bytes]:
    """Everything that can be asked of the store, as bytes: page counts, logs, prefixes."""
    counts = await scene.site.stub.DescribeArena(
        pb.DescribeArenaRequest(capability=worker_capability())
    )
    found = [counts.SerializeToString(deterministic=True)]
    for log in (scene.writing, scene.decoding, scene.kept):
        request = pb.ReplayLogRequest(log_id=log.log_id, capability=capability(log.log_id))
        pieces = [piece async for piece in scene.site.stub.ReplayLog(request)]
        # The last message says how many records there are: those of closing a test's scene count.
        found += [piece.SerializeToString(deterministic=True) for piece in pieces[:-1]]
    listed = await scene.site.stub.ListPrefixes(pb.ListPrefixesRequest(capability=capability(None)))
    sessions = await sessions_pb2_grpc.SessionServiceStub(scene.site.channel).ListSessions(
        sessions_pb2.ListSessionsRequest(capability=capability(None))
    )
    return [*found, *(one.SerializeToString(deterministic=True) for one in (listed, sessions))]


async def test_a_tenant_with_the_right_of_operators_is_no_operator(scene: Scene) -> None:
    """ADMIN lets an operator see every tenant's logs: one that names a tenant does not."""
    for call, row in ROWS.items():
        if METHODS[call].containing_service.name != "OperatorService" or row.holders != OPERATOR:
            continue
        request = row.build(scene)
        body(call, request).capability = signed("acme", OPERATOR, None, None, 600.0)
        outcome = await made(scene, call, row, request)
        assert isinstance(outcome, ServiceError), call
        assert outcome.reason is Reason.PERMISSION_DENIED, call
