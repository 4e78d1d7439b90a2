"""Whose a request is: what its capability says, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.capability import (
    DEV_KEY,
    CapabilitySigner,
    CapabilityVerifier,
    Claims,
    Right,
    unverified_claims,
)
from baton.errors import Reason, ServiceError
from baton.scheduling.claims import PRIORITY_MAX, WEIGHT_MAX, ServiceClass
from baton.testing.clock import ManualClock
from baton.wire.service_class import class_from_proto, class_to_proto
from baton.worker.claims_wire import Asked, claim_of

SIGNER = CapabilitySigner(DEV_KEY, ManualClock())


def capability(tenant: str | None = "acme") -> str:
    """What a gateway mints."""
    return SIGNER.sign(
        Claims(
            tenant=tenant,
            scope=tenant,
            rights=frozenset({Right.READ}),
            expiry_wall_s=SIGNER.expiry_after(60.0),
            request_id="r",
        )
    )


ASKED = Asked(
    request_id="r",
    capability=capability(),
    tenant="",
    service_class=2,
    priority=-3,
    weight=7,
    at="start.",
)


def test_the_tenant_is_the_capabilitys() -> None:
    """Named or not; the rest is what the gateway says."""
    for named in ("", "acme"):
        claim = claim_of(replace(ASKED, tenant=named))
        assert (claim.tenant, claim.service_class) == ("acme", ServiceClass.BATCH)
        assert (claim.priority, claim.weight) == (-3, 7)
    plain = claim_of(replace(ASKED, service_class=0, priority=0, weight=0))
    assert (plain.service_class, plain.weight) == (ServiceClass.INTERACTIVE, 1)


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"tenant": "globex"}, Reason.PERMISSION_DENIED, "start.tenant"),
        ({"tenant": "acme "}, Reason.PERMISSION_DENIED, "start.tenant"),
        ({"capability": capability(None)}, Reason.PERMISSION_DENIED, "capability"),
        ({"capability": ""}, Reason.UNAUTHENTICATED, "capability"),
        ({"capability": "bc1.x.y"}, Reason.UNAUTHENTICATED, "capability"),
        ({"capability": capability()[:40]}, Reason.UNAUTHENTICATED, "capability"),
        ({"service_class": 9}, Reason.INVALID_REQUEST, "start.service_class"),
        ({"priority": PRIORITY_MAX + 1}, Reason.INVALID_REQUEST, "start.priority"),
        ({"priority": -PRIORITY_MAX - 1}, Reason.INVALID_REQUEST, "start.priority"),
        ({"weight": WEIGHT_MAX + 1}, Reason.INVALID_REQUEST, "start.weight"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_field(
    change: dict[str, object], reason: Reason, field: str
) -> None:
    """Before anything is queued."""
    with pytest.raises(ServiceError) as caught:
        claim_of(replace(ASKED, **change))  # type: ignore[arg-type]  # one field, of its own type
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_an_altered_capability_says_something_and_is_verified_by_whoever_has_the_key() -> None:
    """A worker may read it, so that it can queue; the store it shows it to refuses it."""
    text = CapabilitySigner(b"another key of 16 bytes or more", ManualClock()).sign(
        unverified_claims(capability())
    )
    assert unverified_claims(text).tenant == "acme"
    with pytest.raises(ServiceError) as caught:
        CapabilityVerifier(DEV_KEY, ManualClock()).verify(text, right=Right.READ)
    assert caught.value.reason is Reason.UNAUTHENTICATED


def test_classes_pass_the_wire() -> None:
    """Each comes back as it went; unspecified is interactive."""
    for one in ServiceClass:
        assert class_from_proto(class_to_proto(one)) is one
    assert class_from_proto(0) is ServiceClass.INTERACTIVE
    assert class_from_proto(77) is None
