"""Who may call what: one row for each call of the kvstore's services, with a request that is right
but for its capability.

Owns the rows. A call without a row fails the build: `test_authorisation.py` compares them with the
service's descriptor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import device_pb2
from baton.api.kvstore.v1 import kvstore_pb2 as pb
from baton.api.kvstore.v1 import operators_pb2 as ops
from baton.capability import Right
from baton.ids import new_log_id, new_request_id
from tests.integration.kvstore.harness import FakeLog, FakeWorker, Site, worker_capability

TENANT: Final = frozenset(Right) - {Right.ADMIN, Right.ATTACH, Right.HEARTBEAT}
WORKER: Final = frozenset({Right.ATTACH, Right.HEARTBEAT})
OPERATOR: Final = frozenset({Right.ADMIN})
EVERYBODY: Final = frozenset(Right)


@dataclass(slots=True, kw_only=True)
class Scene:
    """What stands in the store: all of tenant acme.

    `writing` is being prefilled at generation 1, `decoding` was taken once and is at generation 2,
    `kept` has ended, its beginning is published, and the session names its end: generation 2.
    """

    site: Site
    worker: FakeWorker
    writing: FakeLog
    decoding: FakeLog
    kept: FakeLog
    prefix_id: str
    session_id: str
    kept_request_id: str
    descriptor: common_pb2.KvBlobDescriptor
    payload: bytes
    entry: pb.AppendEntry


Build = Callable[[Scene], Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call. `rights`: any of them allows it; `holders`: who is given such rights at all.

    `build` makes a request without a capability. `others` makes the request that another tenant
    would try (None: as `build`); `harmless_for_others` says why an answer to it is none of acme's.
    `stale` makes a request at a generation that is over; `no_generation` says why there is none.
    `unbound`: no capability for it is ever bound to a log that is there.
    """

    rights: frozenset[Right]
    build: Build
    holders: frozenset[Right] = TENANT
    is_client_stream: bool = False
    others: Build | None = None
    harmless_for_others: str = ""
    stale: Build | None = None
    no_generation: str = ""
    unbound: bool = False


def _log(scene: Scene, log: FakeLog, kind: type[Message], **fields: Any) -> Message:
    return kind(log_id=log.log_id, **fields)


def _open(scene: Scene, **fields: Any) -> pb.OpenRequest:
    request = scene.site.open_request(scene.worker, [9, 8, 7, 6], capability="x", **fields)
    request.capability = ""
    return request


def _open_on_acmes(scene: Scene) -> Message:
    parent = common_pb2.LogPosition(log_id=scene.kept.log_id, position=4)
    request = _open(scene, parent=parent)
    del request.prompt_token_ids[:]
    request.prompt_token_ids.extend(scene.kept.tokens)
    return request


def _grant(generation: int, log: str) -> Build:
    return lambda scene: pb.GrantRequest(
        log_id=getattr(scene, log).log_id,
        generation=generation,
        pages=1,
        worker_id=scene.worker.worker_id,
        request_id=new_request_id(),
    )


def _commit(generation: int, log: str) -> Build:
    def build(scene: Scene) -> Message:
        one: FakeLog = getattr(scene, log)
        return pb.CommitCheckpointRequest(
            log_id=one.log_id, generation=generation, from_position=one.committed,
            to_position=one.committed + 1,
        )  # fmt: skip

    return build


def _seal(generation: int, log: str) -> Build:
    return lambda scene: pb.SealRequest(
        log_id=getattr(scene, log).log_id,
        generation=generation,
        chunk_list_digest=bytes(32),
        first_token_id=5,
    )


def _take(generation: int) -> Build:
    return lambda scene: pb.TakeRequest(
        log_id=scene.decoding.log_id,
        generation=generation,
        worker_id=scene.worker.worker_id,
        request_id=new_request_id(),
    )


def _park(generation: int) -> Build:
    return lambda scene: pb.ParkRequest(
        log_id=scene.decoding.log_id, generation=generation, request_id=new_request_id()
    )


def _move(generation: int) -> Build:
    return lambda scene: pb.MoveRequest(
        log_id=scene.decoding.log_id,
        generation=generation,
        to_kvstore_address="127.0.0.1:1",
        request_id=new_request_id(),
    )


def _append(generation: int) -> Build:
    def build(scene: Scene) -> Message:
        request = pb.AppendRequest(
            batch_id=1, entries=[scene.entry], worker_id=scene.worker.worker_id
        )
        request.entries[0].generation = generation
        return request

    return build


def _follow_orders(scene: Scene) -> Message:
    hello = device_pb2.DeviceHello(
        worker_id=scene.worker.worker_id,
        incarnation=scene.worker.incarnation,
        slots=4,
        slot_bytes=scene.site.model.geometry.page_bytes,
    )
    return device_pb2.FollowOrdersRequest(hello=hello)


def _truncate(generation: int) -> Build:
    return lambda scene: pb.TruncateRequest(
        log_id=scene.decoding.log_id,
        generation=generation,
        position=3,
        request_id=new_request_id(),
    )


def _fork(scene: Scene) -> Message:
    return pb.ForkRequest(
        parent=common_pb2.LogPosition(log_id=scene.kept.log_id, position=4),
        log_id=new_log_id(),
        request_id=new_request_id(),
    )


def _fork_newer(scene: Scene) -> Message:
    parent = common_pb2.LogPosition(log_id=scene.kept.log_id, position=4, generation=99)
    return pb.ForkRequest(parent=parent, log_id=new_log_id(), request_id=new_request_id())


def _renew(scene: Scene) -> Message:
    return pb.RenewLeasesRequest(
        worker_id=scene.worker.worker_id, incarnation=scene.worker.incarnation, progress=1 << 40
    )


def _renew_of_another_run(scene: Scene) -> Message:
    return pb.RenewLeasesRequest(
        worker_id=scene.worker.worker_id, incarnation=scene.worker.incarnation + 1, progress=1 << 40
    )


def _distrust(run: int) -> Build:
    return lambda scene: pb.DistrustRequest(
        worker_id=scene.worker.worker_id, incarnation=scene.worker.incarnation + run
    )


def _put(scene: Scene) -> Message:
    header = pb.PutBlobHeader(request_id=new_request_id(), descriptor=scene.descriptor)
    header.descriptor.log_id = scene.kept.log_id
    return pb.PutBlobRequest(header=header)


def _import(scene: Scene) -> Message:
    header = ops.ImportLogHeader(
        request_id=new_request_id(),
        log_id=scene.kept.log_id,
        total_tokens=scene.descriptor.total_tokens,
    )
    return ops.ImportLogRequest(header=header)


def _operators(kind: Any, log: str = "") -> Row:
    """A call for operators, who have no tenant and whom no generation binds."""
    return Row(
        rights=OPERATOR,
        holders=OPERATOR,
        build=_of(kind, log) if log else lambda _scene: kind(),
        no_generation=_ANY_GENERATION if log else _NO_LOG,
    )


def _map(scene: Scene) -> Message:
    return pb.MapLogRequest(
        log_id=scene.kept.log_id,
        worker_id=scene.worker.worker_id,
        worker_capability=worker_capability(),
    )


def _publish(scene: Scene) -> Message:
    request = pb.PublishRequest(request_id=new_request_id())
    request.prefix.name = "theirs"
    request.prefix.log.log_id = scene.kept.log_id
    request.prefix.log.position = 3
    return request


def _attach(scene: Scene) -> Message:
    return pb.AttachRequest(worker_id="intruder", incarnation=1)


def _describe_move(generation: int) -> Build:
    return lambda scene: pb.DescribeMoveRequest(log_id=scene.decoding.log_id, generation=generation)


def _move_done(scene: Scene) -> Message:
    return pb.MoveDoneRequest(log_id=scene.decoding.log_id, generation=2)


def _pages(scene: Scene) -> Message:
    return pb.FetchPagesRequest(log_id=scene.decoding.log_id, first_index=0, page_count=1)


def _coming(kind: Any) -> Build:
    return lambda scene: kind(
        log_id=scene.decoding.log_id,
        from_kvstore_address="127.0.0.1:1",
        request_id=new_request_id(),
    )


def _of(kind: Any, log: str = "kept", **fields: Any) -> Build:
    return lambda scene: kind(log_id=getattr(scene, log).log_id, **fields)


_NO_LOG: Final = "the call names no log"
_ANY_GENERATION: Final = "the call is about the log as it stands, at whatever generation"
_MOVE: Final = frozenset({Right.MOVE})

STORE_ROWS: Final[dict[str, Row]] = {
    "Attach": Row(
        rights=frozenset({Right.ATTACH}), holders=WORKER, build=_attach, no_generation=_NO_LOG
    ),
    "Open": Row(
        rights=frozenset({Right.OPEN}),
        build=_open,
        others=_open_on_acmes,
        stale=lambda scene: _open(scene, log_id=scene.decoding.log_id),
        unbound=True,
    ),
    "Grant": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=_grant(1, "writing"),
        stale=_grant(1, "decoding"),
    ),
    "CommitCheckpoint": Row(
        rights=frozenset({Right.WRITE}),
        build=_commit(1, "writing"),
        stale=_commit(1, "decoding"),
    ),
    "Seal": Row(
        rights=frozenset({Right.SEAL}), build=_seal(1, "writing"), stale=_seal(1, "decoding")
    ),
    "Take": Row(rights=frozenset({Right.TAKE}), build=_take(2), stale=_take(1)),
    "Park": Row(rights=frozenset({Right.TAKE}), build=_park(2), stale=_park(1)),
    "Move": Row(rights=_MOVE, build=_move(2), stale=_move(1)),
    "ExpectLog": Row(
        rights=_MOVE,
        build=_coming(pb.ExpectLogRequest),
        harmless_for_others="a replica of a log that is not theirs is refused by its home",
        no_generation=_ANY_GENERATION,
    ),
    "AdoptLog": Row(
        rights=_MOVE,
        build=_coming(pb.AdoptLogRequest),
        no_generation="the log's home refuses it: nothing is taken here before that",
    ),
    "FollowLog": Row(
        rights=_MOVE,
        build=_of(pb.FollowLogRequest, "decoding"),
        no_generation=_ANY_GENERATION,
    ),
    "FetchPages": Row(rights=_MOVE, build=_pages, no_generation=_ANY_GENERATION),
    "FetchSnapshot": Row(
        rights=_MOVE,
        build=_of(pb.FetchSnapshotRequest, "decoding", generation=2),
        stale=_of(pb.FetchSnapshotRequest, "decoding", generation=1),
    ),
    "MoveDone": Row(
        rights=_MOVE,
        holders=EVERYBODY,
        build=_move_done,
        no_generation="a log that was not moved at that generation is left alone, and that is said",
    ),
    "DescribeMove": Row(
        rights=_MOVE,
        holders=EVERYBODY,
        build=_describe_move(2),
        no_generation="it is asked whether a generation is here",
    ),
    "Append": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=_append(2),
        is_client_stream=True,
        stale=_append(1),
    ),
    "FollowOrders": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=_follow_orders,
        is_client_stream=True,
        no_generation="it is about the worker's own memory; wants are of logs it writes",
    ),
    "Truncate": Row(
        rights=frozenset({Right.TRUNCATE, Right.WRITE}), build=_truncate(2), stale=_truncate(1)
    ),
    "Fork": Row(rights=frozenset({Right.FORK}), build=_fork, stale=_fork_newer, unbound=True),
    "Cancel": Row(
        rights=frozenset({Right.CANCEL, Right.WRITE, Right.OPEN, Right.ADMIN}),
        build=_of(pb.CancelRequest, "decoding"),
        no_generation=_ANY_GENERATION,
    ),
    "Close": Row(
        rights=frozenset({Right.WRITE, Right.OPEN, Right.ADMIN}),
        build=_of(pb.CloseRequest, "decoding", drop=True),
        no_generation=_ANY_GENERATION,
    ),
    "RenewLeases": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=_renew,
        stale=_renew_of_another_run,
    ),
    "Distrust": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=_distrust(0),
        stale=_distrust(1),
    ),
    "ReplayLog": Row(
        rights=frozenset({Right.READ, Right.WRITE}),
        build=_of(pb.ReplayLogRequest, "decoding", generation=2),
        stale=_of(pb.ReplayLogRequest, "decoding", generation=1),
    ),
    "PutBlob": Row(
        rights=frozenset({Right.BLOB_PUT}),
        build=_put,
        is_client_stream=True,
        no_generation="a blob makes a new log",
    ),
    "GetBlob": Row(
        rights=frozenset({Right.BLOB_GET}),
        build=_of(pb.GetBlobRequest),
        no_generation=_ANY_GENERATION,
    ),
    "DescribeBlob": Row(
        rights=frozenset({Right.BLOB_GET}),
        build=_of(pb.DescribeBlobRequest),
        no_generation=_ANY_GENERATION,
    ),
    "MapLog": Row(rights=frozenset({Right.BLOB_GET}), build=_map, no_generation=_ANY_GENERATION),
    "UnmapLog": Row(
        rights=frozenset({Right.ATTACH}),
        holders=WORKER,
        build=lambda scene: pb.UnmapLogRequest(map_id=1, worker_id=scene.worker.worker_id),
        no_generation=_NO_LOG,
    ),
    "Publish": Row(
        rights=frozenset({Right.PUBLISH}), build=_publish, no_generation=_ANY_GENERATION
    ),
    "Revoke": Row(
        rights=frozenset({Right.PUBLISH, Right.ADMIN}),
        build=lambda scene: pb.RevokeRequest(prefix_id=scene.prefix_id),
        no_generation=_NO_LOG,
        unbound=True,
    ),
    "ListPrefixes": Row(
        rights=frozenset({Right.READ, Right.OPEN, Right.PUBLISH, Right.ADMIN}),
        build=lambda _scene: pb.ListPrefixesRequest(),
        harmless_for_others="they see those granted to them, and none of acme's own",
        no_generation=_NO_LOG,
        unbound=True,
    ),
    "DescribeLog": Row(
        rights=frozenset({Right.READ, Right.WRITE}),
        build=_of(pb.DescribeLogRequest),
        no_generation=_ANY_GENERATION,
    ),
    "DescribeArena": Row(
        rights=EVERYBODY,
        build=lambda _scene: pb.DescribeArenaRequest(),
        harmless_for_others="page counts are nobody's secret",
        no_generation=_NO_LOG,
        unbound=True,
    ),
    "ProbeTransfer": Row(
        rights=frozenset({Right.ADMIN, Right.ATTACH}),
        holders=OPERATOR | WORKER,
        build=lambda _scene: pb.ProbeTransferRequest(size_bytes=1000),
        no_generation=_NO_LOG,
    ),
    "Drain": Row(
        rights=OPERATOR,
        holders=OPERATOR,
        build=lambda _scene: pb.DrainRequest(),
        no_generation=_NO_LOG,
    ),
    # OperatorService
    "ListLogs": _operators(ops.ListLogsRequest),
    "InspectLog": _operators(ops.InspectLogRequest, "kept"),
    "ListLineage": _operators(ops.ListLineageRequest),
    "ReportUsage": _operators(ops.ReportUsageRequest),
    "EvictLog": _operators(ops.EvictLogRequest, "kept"),
    "ReportScrub": _operators(ops.ReportScrubRequest),
    "CheckOperator": _operators(ops.CheckOperatorRequest),
    "ImportLog": Row(
        rights=frozenset({Right.BLOB_PUT}),
        build=_import,
        is_client_stream=True,
        no_generation="a file makes a new log",
    ),
}
WITH_HEADER: Final = frozenset({"PutBlob", "ImportLog"})
"""Client streams whose first message is a header, which the capability stands in."""


def body(call: str, request: Message) -> Any:
    """Where the capability stands in a request."""
    any_request: Any = request
    if call == "FollowOrders":
        return any_request.hello
    return any_request.header if call in WITH_HEADER else any_request
