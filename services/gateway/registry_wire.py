"""Worker records as bytes, for a store that anybody may have written to.

Owns the encoding, which is that of heartbeats. Bytes are judged as a heartbeat is.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError
from services.gateway.registry import WorkerRecord
from services.gateway.wire import record_from_proto, record_to_proto


def record_to_bytes(record: WorkerRecord) -> bytes:
    """A record as its worker's heartbeat would carry it."""
    return record_to_proto(record).SerializeToString()


def record_from_bytes(data: bytes) -> WorkerRecord:
    """The record; ServiceError when the bytes are none, or none that a heartbeat could carry."""
    message = common_pb2.WorkerRecord()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ServiceError(Reason.INVALID_REQUEST, "the bytes are no worker record") from error
    return record_from_proto(message)
