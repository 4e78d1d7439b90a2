"""Who asks: bearer keys to tenants.

Owns the hashed keys and the constant-time comparison; `tenants_file` reads them. Never keeps a key
in the clear and never puts one into a message. Only headers decide; a body cannot.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from services.gateway.request import Tenant

KEY_CHARS_MAX: Final = 512
DEV_TENANT: Final = Tenant(name="dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key's SHA-256 and whom it stands for."""

    digest: bytes
    tenant: Tenant
    requests_per_minute: int | None = None


class Authenticator:
    """Checks `Authorization` headers.

    `rows` are the keys of a tenants file. Without them, `is_open` (loopback only) makes every
    caller the tenant `dev`, and otherwise nobody is let in.
    """

    def __init__(self, rows: tuple[KeyRow, ...], *, is_open: bool) -> None:
        assert not (rows and is_open), "a tenants file and open access exclude each other"
        self._rows = rows
        self._is_open = is_open

    @property
    def is_open(self) -> bool:
        """Everybody on this host is the tenant `dev`."""
        return self._is_open

    def tenants(self) -> tuple[str, ...]:
        """Names of all tenants."""
        if self._is_open:
            return (DEV_TENANT.name,)
        return tuple(sorted({row.tenant.name for row in self._rows}))

    def requests_per_minute(self) -> dict[str, int]:
        """Limits of the tenants that have one."""
        return {
            row.tenant.name: row.requests_per_minute
            for row in self._rows
            if row.requests_per_minute is not None
        }

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header's value; UNAUTHENTICATED otherwise."""
        if self._is_open:
            return DEV_TENANT
        key = _bearer(authorization)
        if key is None:
            raise _refused("send the key as `Authorization: Bearer <key>`")
        digest = key_digest(key)
        found: Tenant | None = None
        # Every row is compared, so that the time says nothing about which one matched.
        for row in self._rows:
            if hmac.compare_digest(row.digest, digest):
                found = row.tenant
        if found is None:
            raise _refused("the key is not known here")
        return found


def _bearer(authorization: str | None) -> str | None:
    if authorization is None or len(authorization) > KEY_CHARS_MAX + 16:
        return None
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" and key else None


def key_digest(key: str) -> bytes:
    """What is kept of a key, and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _refused(why: str) -> ServiceError:
    return ServiceError(Reason.UNAUTHENTICATED, f"no valid key: {why}")
