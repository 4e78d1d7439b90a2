"""Signed capabilities: what a holder may do, to which log, until when.

Owns the token `bc1.<payload>.<mac>` (both parts base64url without padding) and its checks. The
payload is one deterministic little-endian byte string, the MAC is HMAC-SHA256 over the prefix and
the payload. Never does I/O, never puts a token or a key into a message. Only gateways and kvstores
hold the key.

Payload, in order: version u8 = 1 | rights u32 (bit = number of the right) | expiry f64 (wall
seconds) | tenant, scope (flag u8; if 1: length u16, UTF-8) | log id (flag u8; if 1: 16 bytes) |
generation (flag u8; if 1: u64) | request id (length u16, UTF-8).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import struct
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final

from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.ids import LOG_ID_BYTES

DEV_KEY: Final = b"baton development key, not secret"
"""Signs capabilities when no key is configured: public, so fit for one machine only."""

KEY_BYTES_MIN: Final = 16
TEXT_BYTES_MAX: Final = 256
TOKEN_CHARS_MAX: Final = 2048

_PREFIX: Final = "bc1."
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BId")
_U16: Final = struct.Struct("<H")
_U64: Final = struct.Struct("<Q")


@unique
class Right(IntEnum):
    """One thing a capability allows; the number is the bit in the payload and never changes."""

    OPEN = 0
    READ = 1
    WRITE = 2
    TAKE = 3
    FORK = 4
    PUBLISH = 5
    BLOB_PUT = 6
    BLOB_GET = 7
    ATTACH = 8
    ADMIN = 9
    HEARTBEAT = 10
    TRUNCATE = 11
    MOVE = 12
    GENERATE = 13
    CANCEL = 14
    SPLICE = 15
    SEAL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a capability says.

    `tenant` and `scope` are None in a worker's capability; `log_id` (16 bytes) and `generation` are
    None where it is not bound to one log or one generation; `expiry_wall_s` is in seconds since the
    epoch.
    """

    tenant: str | None
    scope: str | None
    rights: frozenset[Right]
    expiry_wall_s: float
    request_id: str
    log_id: bytes | None = None
    generation: int | None = None

    def __post_init__(self) -> None:
        """Claims are minted by us: a bad one is our bug."""
        assert self.rights, "a capability without rights allows nothing"
        assert math.isfinite(self.expiry_wall_s), self.expiry_wall_s
        assert self.log_id is None or len(self.log_id) == LOG_ID_BYTES
        assert self.generation is None or 0 <= self.generation < 2**64, self.generation

    def tenant_scope(self) -> tuple[str, str]:
        """The tenant and its scope; PERMISSION_DENIED for a worker's capability, which has none."""
        if self.tenant is None or self.scope is None:
            raise _denied(
                "tenant", "the capability names no tenant; show the one minted for a request"
            )
        return self.tenant, self.scope


def key_or_dev(key: bytes | None) -> bytes:
    """The configured key, or the public development key where none is set."""
    return DEV_KEY if key is None else key


def is_dev_key(key: bytes) -> bool:
    """True for the public development key, so that `doctor` and start-up can warn."""
    return hmac.compare_digest(key, DEV_KEY)


class CapabilitySigner:
    """Mints capabilities. `key`: at least 16 bytes, the same at every gateway and kvstore."""

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._key = _checked_key(key)
        self._clock = clock

    def sign(self, claims: Claims) -> str:
        """The token that says exactly `claims`."""
        payload = _encode(claims)
        return f"{_PREFIX}{_text(payload)}.{_text(_mac(self._key, payload))}"

    def expiry_after(self, ttl_s: float) -> float:
        """The `expiry_wall_s` of claims that end `ttl_s` seconds from now."""
        assert ttl_s > 0.0, ttl_s
        return self._clock.wall_s() + ttl_s


class CapabilityVerifier:
    """Checks capabilities against one key and one clock."""

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._key = _checked_key(key)
        self._clock = clock

    def verify(
        self,
        token: str | None,
        *,
        right: Right,
        log_id: bytes | None = None,
        generation: int | None = None,
        tenant: str | None = None,
    ) -> Claims:
        """The claims of a token that allows `right` here and now.

        What is given as `log_id`, `generation` and `tenant` must not contradict the claims; a claim
        that is None binds nothing, except that a tenant-less capability never stands for a tenant.
        UNAUTHENTICATED: missing, malformed, altered, signed by another key, expired.
        PERMISSION_DENIED: genuine, but not for this. `metadata["failed"]` names the check.
        """
        claims = self._authentic(token)
        if right not in claims.rights:
            raise _denied("right", f"the capability does not allow {right.name}")
        if log_id is not None and claims.log_id is not None and log_id != claims.log_id:
            raise _denied("log_id", "the capability is for another log")
        if tenant is not None and tenant != claims.tenant:
            raise _denied("tenant", "the capability is for another tenant")
        if None not in (generation, claims.generation) and generation != claims.generation:
            raise _denied("generation", "the capability is for another generation of this log")
        return claims

    def _authentic(self, token: str | None) -> Claims:
        """The claims of a genuine, unexpired token."""
        payload, mac = _taken_apart(token)
        if not hmac.compare_digest(mac, _mac(self._key, payload)):
            raise _unauthenticated(
                "signature",
                "the capability was altered, or signed with another key than this service has",
            )
        claims = _decode(payload)
        if claims.expiry_wall_s <= self._clock.wall_s():
            raise _unauthenticated("expiry", "the capability has expired; ask for a new one")
        return claims


def unverified_claims(token: str | None) -> Claims:
    """What a token says of itself; UNAUTHENTICATED where it says nothing.

    For workers, who have no key: whose turn it is may be decided by these, since the kvstore
    verifies the very same token before it hands out anything of the log. Never believe them alone.
    """
    return _decode(_taken_apart(token)[0])


def _taken_apart(token: str | None) -> tuple[bytes, bytes]:
    """Payload and MAC, neither of them checked."""
    if not token:
        raise _unauthenticated("missing", "no capability was shown; ask the gateway for one")
    if len(token) > TOKEN_CHARS_MAX or not token.startswith(_PREFIX):
        raise _unauthenticated("format", "the capability is not a bc1 token")
    payload_text, dot, mac_text = token[len(_PREFIX) :].partition(".")
    payload, mac = _bytes(payload_text), _bytes(mac_text)
    if not dot or payload is None or mac is None:
        raise _unauthenticated("format", "the capability is truncated or not base64url")
    return payload, mac


def _checked_key(key: bytes) -> bytes:
    if len(key) < KEY_BYTES_MIN:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"a capability key needs at least {KEY_BYTES_MIN} bytes, got {len(key)}",
            field="capability_key",
        )
    return key


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _PREFIX.encode() + payload, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes | None:
    """The bytes of canonical base64url without padding, or None.

    The decoder ignores the last character's spare bits and foreign characters, so that several
    texts would be one token; only the text that encodes back to itself passes.
    """
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return None
    return data if _text(data) == text else None


def _encode(claims: Claims) -> bytes:
    rights = sum(1 << right.value for right in claims.rights)
    parts = [_HEAD.pack(_VERSION, rights, claims.expiry_wall_s)]
    parts += [_optional_text(claims.tenant), _optional_text(claims.scope)]
    parts.append(b"\0" if claims.log_id is None else b"\1" + claims.log_id)
    parts.append(b"\0" if claims.generation is None else b"\1" + _U64.pack(claims.generation))
    parts.append(_sized_text(claims.request_id))
    return b"".join(parts)


def _optional_text(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + _sized_text(text)


def _sized_text(text: str) -> bytes:
    data = text.encode("utf-8")
    assert len(data) <= TEXT_BYTES_MAX, f"a capability text of {len(data)} bytes"
    return _U16.pack(len(data)) + data


class _Reader:
    """Takes a payload apart; every size is checked against the bytes left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ValueError("payload too short")
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def flag(self) -> bool:
        byte = self.take(1)
        if byte not in (b"\0", b"\1"):
            raise ValueError("flag out of range")
        return byte == b"\1"

    def text(self) -> str:
        (size,) = _U16.unpack(self.take(_U16.size))
        return self.take(size).decode("utf-8")

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("bytes after the payload")


def _decode(payload: bytes) -> Claims:
    """Claims of an authentic payload; a signer of another version may still have made it."""
    reader = _Reader(payload)
    try:
        version, rights, expiry_wall_s = _HEAD.unpack(reader.take(_HEAD.size))
        known = sum(1 << right.value for right in Right)
        if version != _VERSION or not rights or rights & ~known or not math.isfinite(expiry_wall_s):
            raise ValueError("version, rights or expiry unknown")
        claims = Claims(
            tenant=reader.text() if reader.flag() else None,
            scope=reader.text() if reader.flag() else None,
            log_id=reader.take(LOG_ID_BYTES) if reader.flag() else None,
            generation=_U64.unpack(reader.take(_U64.size))[0] if reader.flag() else None,
            rights=frozenset(right for right in Right if rights >> right.value & 1),
            expiry_wall_s=expiry_wall_s,
            request_id=reader.text(),
        )
        reader.end()
    except (ValueError, struct.error) as error:
        raise _unauthenticated("format", "the capability is of a version we do not read") from error
    return claims


def _unauthenticated(failed: str, message: str) -> ServiceError:
    return ServiceError(
        Reason.UNAUTHENTICATED, message, field="capability", metadata={"failed": failed}
    )


def _denied(failed: str, message: str) -> ServiceError:
    return ServiceError(
        Reason.PERMISSION_DENIED, message, field="capability", metadata={"failed": failed}
    )
