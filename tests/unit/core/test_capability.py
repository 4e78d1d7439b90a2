"""Capabilities: what was signed comes back, and nothing else is ever accepted."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.capability import (
    DEV_KEY,
    CapabilitySigner,
    CapabilityVerifier,
    Claims,
    Right,
    is_dev_key,
    key_or_dev,
)
from baton.errors import Reason, ServiceError
from baton.testing.clock import ManualClock

KEY = b"k" * 32
LOG = bytes(range(16))
OTHER_LOG = bytes(range(1, 17))
NOW_S = ManualClock().wall_s()

texts = st.text(max_size=40).filter(lambda text: len(text.encode()) <= 256)
claims_strategy = st.builds(
    Claims,
    tenant=st.none() | texts,
    scope=st.none() | texts,
    rights=st.frozensets(st.sampled_from(Right), min_size=1),
    expiry_wall_s=st.floats(min_value=NOW_S + 1e-3, max_value=1e12),
    request_id=texts,
    log_id=st.none() | st.binary(min_size=16, max_size=16),
    generation=st.none() | st.integers(min_value=0, max_value=2**64 - 1),
)


def _claims(**changes: object) -> Claims:
    base: dict[str, object] = {
        "tenant": "acme",
        "scope": "acme/search",
        "rights": frozenset({Right.READ, Right.TAKE}),
        "expiry_wall_s": NOW_S + 60.0,
        "request_id": "r1",
        "log_id": LOG,
        "generation": 3,
    }
    return Claims(**(base | changes))  # type: ignore[arg-type]  # the values above fit


def _token(key: bytes = KEY, **changes: object) -> str:
    return CapabilitySigner(key, ManualClock()).sign(_claims(**changes))


def _refusal(token: str | None, clock: ManualClock | None = None, **wanted: object) -> ServiceError:
    verifier = CapabilityVerifier(KEY, clock or ManualClock())
    with pytest.raises(ServiceError) as refused:
        # A table of wrong values.
        verifier.verify(token, **({"right": Right.READ} | wanted))  # type: ignore[arg-type]
    if token and len(token) > 40:
        assert token not in str(refused.value)
    return refused.value


@given(claims=claims_strategy)
def test_signed_claims_come_back_unchanged_and_deterministically(claims: Claims) -> None:
    """A capability is one byte string for one meaning: both sides rely on it in logs and caches."""
    signer = CapabilitySigner(KEY, ManualClock())
    token = signer.sign(claims)
    assert token == signer.sign(claims)
    assert set(token) <= set(string.ascii_letters + string.digits + "-_.")
    verified = CapabilityVerifier(KEY, ManualClock()).verify(token, right=min(claims.rights))
    assert verified == claims


@given(data=st.data(), claims=claims_strategy)
def test_one_changed_character_is_refused(data: st.DataObject, claims: Claims) -> None:
    """Also the spare bits of the last base64 character: one token has one spelling."""
    token = CapabilitySigner(KEY, ManualClock()).sign(claims)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(max_codepoint=0x2FF).filter(lambda char: char != token[at]))
    altered = token[:at] + other + token[at + 1 :]
    assert _refusal(altered, right=min(claims.rights)).reason is Reason.UNAUTHENTICATED


@given(data=st.data(), claims=claims_strategy)
def test_any_truncation_or_extension_is_refused(data: st.DataObject, claims: Claims) -> None:
    """A cut token must not verify as a shorter one."""
    token = CapabilitySigner(KEY, ManualClock()).sign(claims)
    cut = data.draw(st.integers(0, len(token) - 1))
    assert _refusal(token[:cut]).reason is Reason.UNAUTHENTICATED
    assert _refusal(token + "=").reason is Reason.UNAUTHENTICATED
    assert _refusal(token + "A").reason is Reason.UNAUTHENTICATED


@given(text=st.text(max_size=200))
def test_arbitrary_text_is_refused_with_a_reason(text: str) -> None:
    """Whatever a client sends, the answer is an error of ours and not a crash."""
    assert _refusal(text).reason is Reason.UNAUTHENTICATED
    assert _refusal(f"bc1.{text}").reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("token", "failed"),
    [
        (None, "missing"),
        ("", "missing"),
        ("Bearer x", "format"),
        ("bc1." + "A" * 3000 + ".AAAA", "format"),
        ("bc1.AAAA", "format"),
        (_token(key=b"z" * 32), "signature"),
    ],
)
def test_a_token_that_is_not_ours_says_what_failed(token: str | None, failed: str) -> None:
    """The caller learns which check failed; an operator sees a key mismatch at once."""
    refused = _refusal(token)
    assert (refused.reason, refused.metadata["failed"]) == (Reason.UNAUTHENTICATED, failed)
    assert refused.field == "capability"


@pytest.mark.parametrize(
    ("wanted", "failed"),
    [
        ({"right": Right.ADMIN}, "right"),
        ({"log_id": OTHER_LOG}, "log_id"),
        ({"tenant": "other"}, "tenant"),
        ({"generation": 4}, "generation"),
    ],
)
def test_a_genuine_token_for_something_else_is_denied(
    wanted: dict[str, object], failed: str
) -> None:
    """Another tenant's, log's or generation's capability is a denial, not an authentication
    fault.
    """
    refused = _refusal(_token(), **wanted)
    assert (refused.reason, refused.metadata["failed"]) == (Reason.PERMISSION_DENIED, failed)


def test_an_unbound_claim_binds_nothing_but_never_stands_for_a_tenant() -> None:
    """A worker's capability reads any log it is asked about, yet acts for no tenant."""
    token = _token(tenant=None, scope=None, log_id=None, generation=None)
    verifier = CapabilityVerifier(KEY, ManualClock())
    claims = verifier.verify(token, right=Right.READ, log_id=LOG, generation=9)
    assert _refusal(token, tenant="acme").metadata["failed"] == "tenant"
    with pytest.raises(ServiceError, match="names no tenant"):
        claims.tenant_scope()
    assert _claims().tenant_scope() == ("acme", "acme/search")


def test_a_token_ends_at_its_expiry() -> None:
    """At the limit it is refused, just before it is not; the ttl counts from the signer's wall
    clock.
    """
    clock = ManualClock()
    token = _token(expiry_wall_s=CapabilitySigner(KEY, clock).expiry_after(10.0))
    verifier = CapabilityVerifier(KEY, clock)
    clock.advance(9.5)
    assert verifier.verify(token, right=Right.READ).expiry_wall_s == NOW_S + 10.0
    clock.advance(0.5)
    assert _refusal(token, clock).metadata["failed"] == "expiry"


def test_the_dev_key_is_recognised_and_short_keys_are_refused() -> None:
    """`doctor` warns about the public key; a key short enough to guess never signs."""
    assert is_dev_key(key_or_dev(None))
    assert not is_dev_key(key_or_dev(KEY))
    assert key_or_dev(DEV_KEY) == DEV_KEY
    with pytest.raises(ServiceError) as refused:
        CapabilitySigner(b"short", ManualClock())
    assert refused.value.field == "capability_key"
