"""Whose a request is, as far as a worker can tell: from its capability, never from the request.

Owns the way from a request's fields to a claim. A worker has no key: what it reads here orders its
queue and nothing else; its kvstore verifies the same capability before anything is read or written.
What only an operator may ask is checked by the kvstore first (`OperatorCheck`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.api.kvstore.v1 import operators_pb2, operators_pb2_grpc
from baton.capability import unverified_claims
from baton.errors import Reason, ServiceError
from baton.rpc.channel import Channel
from baton.scheduling.claims import PRIORITY_MAX, WEIGHT_MAX, Claim
from baton.wire.service_class import class_from_proto

CHECK_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request says of itself; `weight` 0: it did not say. `at` begins the fields' names."""

    request_id: str
    capability: str
    tenant: str
    service_class: int
    priority: int
    weight: int
    at: str = ""


def claim_of(asked: Asked) -> Claim:
    """The claim of a request; its tenant is its capability's.

    UNAUTHENTICATED: the capability cannot be read. PERMISSION_DENIED: it names no tenant, or
    another one than the request. INVALID_REQUEST: class, priority or weight beyond its bounds.
    """
    tenant, _scope = unverified_claims(asked.capability).tenant_scope()
    if asked.tenant not in ("", tenant):
        raise ServiceError(
            Reason.PERMISSION_DENIED,
            f"{asked.at}tenant is not the tenant of the capability; leave it out or name that one",
            field=f"{asked.at}tenant",
            metadata={"failed": "tenant"},
        )
    service_class = class_from_proto(asked.service_class)
    if service_class is None:
        raise _invalid(asked, "service_class", f"has the unknown value {asked.service_class}")
    if abs(asked.priority) > PRIORITY_MAX:
        raise _invalid(asked, "priority", f"must lie between -{PRIORITY_MAX} and {PRIORITY_MAX}")
    if asked.weight > WEIGHT_MAX:
        raise _invalid(asked, "weight", f"must be at most {WEIGHT_MAX}")
    return Claim(
        request_id=asked.request_id,
        tenant=tenant,
        service_class=service_class,
        priority=asked.priority,
        weight=max(1, asked.weight),
    )


class OperatorCheck:
    """Asks this node's kvstore whether a capability is an operator's."""

    def __init__(self, channel: Channel) -> None:
        self._stub = operators_pb2_grpc.OperatorServiceStub(channel)

    async def require(self, capability: str) -> None:
        """Return for an operator's; else the kvstore's refusal: UNAUTHENTICATED for one that is
        missing, altered or over, PERMISSION_DENIED for one that may not. WORKER_LOST when the
        kvstore does not answer: then nobody is let through.
        """
        request = operators_pb2.CheckOperatorRequest(capability=capability)
        await self._stub.CheckOperator(request, timeout=CHECK_TIMEOUT_S)


def _invalid(asked: Asked, name: str, why: str) -> ServiceError:
    field = f"{asked.at}{name}"
    return ServiceError(Reason.INVALID_REQUEST, f"{field} {why}", field=field)
