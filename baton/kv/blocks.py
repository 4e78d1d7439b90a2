"""Content-addressed block keys and the scopes that keep tenants apart.

Owns `Scope`, the scope secret and the block key. Never holds the cluster key: callers pass it in.

Invariant: a key depends on a secret of its scope, so that nobody outside the scope can compute or
guess one; a caller's salt only ever makes a scope smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from blake3 import blake3

from baton.errors import Reason, ServiceError
from baton.kv.digests import DIGEST_BYTES, HASH_BYTES, TokenIds, canonical, ids_bytes

SECRET_CONTEXT: Final = "baton-serving scope secret v1"
"""The literal context of BLAKE3 derive_key; changing it invalidates every block key."""

NO_PARENT: Final = bytes(HASH_BYTES)
SCOPE_TEXT_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Who may share blocks: a tenant and its permission context, from the verified credential.

    `team` and `role` are None where the credential has none. `cache_salt` comes from the caller and
    can only narrow. Raises INVALID_REQUEST naming the field for empty or overlong text.
    """

    tenant: str
    team: str | None = None
    role: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "team", "role", "cache_salt"):
            text: str | None = getattr(self, name)
            if text is None and name != "tenant":
                continue
            if not text or len(text.encode()) > SCOPE_TEXT_BYTES_MAX:
                raise ServiceError(
                    Reason.INVALID_REQUEST,
                    f"{name} must be 1 to {SCOPE_TEXT_BYTES_MAX} bytes of UTF-8",
                    field=name,
                )

    def narrowed(self, cache_salt: str | None) -> Scope:
        """Return the scope under a caller's salt; None changes nothing."""
        if cache_salt is None:
            return self
        assert self.cache_salt is None, "a scope is narrowed once"
        return replace(self, cache_salt=cache_salt)

    def canonical_bytes(self) -> bytes:
        """Return the bytes that keys and secrets cover; an absent part is an empty field."""
        return canonical(self.tenant, self.team or "", self.role or "", self.cache_salt or "")


def scope_secret(cluster_key: bytes, key_version: int, scope: Scope) -> bytes:
    """Return the scope's secret (32 bytes): BLAKE3 derive_key(literal context; key material)."""
    assert len(cluster_key) >= HASH_BYTES, "the cluster key has at least 32 bytes"
    material = canonical(cluster_key, struct.pack("<I", key_version), scope.canonical_bytes())
    return blake3(material, derive_key_context=SECRET_CONTEXT).digest()


def block_key(
    secret: bytes, scope: Scope, kv: bytes, ids: TokenIds, *, parent: bytes | None = None
) -> bytes:
    """Return the key (32 bytes) of the block that holds `ids` after `parent` (None: the first).

    `kv` is the KV digest, which names block_tokens. A hit must also compare the stored token ids.
    """
    assert len(secret) == HASH_BYTES
    assert len(kv) == DIGEST_BYTES
    parent_key = NO_PARENT if parent is None else parent
    assert len(parent_key) == HASH_BYTES
    data = canonical(scope.canonical_bytes(), kv, parent_key, ids_bytes(ids))
    return blake3(data, key=secret).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChain:
    """Computes the chained keys of the full blocks of a sequence within one scope."""

    secret: bytes
    scope: Scope
    kv: bytes
    block_tokens: int

    def keys(self, ids: TokenIds, *, parent: bytes | None = None) -> Iterator[bytes]:
        """Yield one key per full block of `ids`; a partial last block has no key.

        `parent` continues a chain, for instance from a published scope into the tenant's own.
        """
        key = parent
        for first in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            block = ids[first : first + self.block_tokens]
            key = block_key(self.secret, self.scope, self.kv, block, parent=key)
            yield key
