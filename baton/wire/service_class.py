"""Service classes: the library's enum <-> the wire's.

Owns the two spellings. Never decides who has which class.
"""

from __future__ import annotations

from typing import Final

from baton.api.decode.v1 import decode_pb2
from baton.scheduling.claims import ServiceClass

_TO_PROTO: Final = {
    ServiceClass.INTERACTIVE: decode_pb2.SERVICE_CLASS_INTERACTIVE,
    ServiceClass.BATCH: decode_pb2.SERVICE_CLASS_BATCH,
}
_FROM_PROTO: Final[dict[int, ServiceClass]] = {
    decode_pb2.SERVICE_CLASS_UNSPECIFIED: ServiceClass.INTERACTIVE,
    **{number: service_class for service_class, number in _TO_PROTO.items()},
}


def class_to_proto(service_class: ServiceClass) -> decode_pb2.ServiceClass.ValueType:
    """The enum value."""
    return _TO_PROTO[service_class]


def class_from_proto(value: int) -> ServiceClass | None:
    """The class; unspecified is interactive, None is a value that this version does not know."""
    return _FROM_PROTO.get(value)
