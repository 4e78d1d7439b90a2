"""Content-addressed block keys and the scopes that keep tenants apart.

Owns `Scope`, the scope secret and the block key. Never holds the cluster key: callers pass it in.

Invariant: a key depends on a secret of its scope, so that nobody outside the scope can compute or
guess one; a caller's salt only ever makes a scope smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from blake3 import blake3

from baton.errors import Reason, ServiceError
from baton.kv.digests import DIGEST_BYTES, HASH_BYTES, TokenIds, canonical, ids_bytes

SECRET_CONTEXT: Final = "baton-serving scope secret v1"
"""The literal context of BLAKE3 derive_key; changing it invalidates every block key."""

PUBLISHED_LABEL: Final = "baton.published.v1"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedScope:
    """Published prefixes that are looked up together: their owner, and whom they are granted to.

    `tenants` are sorted and distinct. Its keys never meet those of a tenant's own scope: the two
    encodings differ in their number of fields.
    """

    owner: str
    tenants: tuple[str, ...]

    def canonical_bytes(self) -> bytes:
        """Return the bytes that keys and secrets cover."""
        return canonical(PUBLISHED_LABEL, self.owner, canonical(*self.tenants))


AnyScope: TypeAlias = Scope | PublishedScope
"""What has block keys of its own."""


def scope_secret(cluster_key: bytes, key_version: int, scope: AnyScope) -> bytes:
    """Return the scope's secret (32 bytes): BLAKE3 derive_key(literal context; key material)."""
    assert len(cluster_key) >= HASH_BYTES, "the cluster key has at least 32 bytes"
    material = canonical(cluster_key, struct.pack("<I", key_version), scope.canonical_bytes())
    return blake3(material, derive_key_context=SECRET_CONTEXT).digest()


def block_key(
    secret: bytes, scope: AnyScope, kv: bytes, ids: TokenIds, *, parent: bytes | None = None
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
    scope: AnyScope
    kv: bytes
    block_tokens: int

    def keys(self, ids: TokenIds, *, parent: bytes | None = None) -> Iterator[bytes]:
        """Yield one key per full block of `ids`; a partial last block has no key.

        `parent` continues a chain, for instance from a published scope into the tenant's own.
        """
        data, size = ids_bytes(ids), 4 * self.block_tokens
        blocks = (data[first : first + size] for first in range(0, len(data) - size + 1, size))
        return self.keys_of(blocks, parent=parent)

    def keys_of(self, blocks: Iterable[bytes], *, parent: bytes | None = None) -> Iterator[bytes]:
        """Yield the key of each full block, given as its `ids_bytes`."""
        assert len(self.secret) == HASH_BYTES
        key = NO_PARENT if parent is None else parent
        # The fields of `block_key`, those that stay encoded once: it runs for each block of a
        # prompt.
        head = canonical(self.scope.canonical_bytes(), self.kv) + struct.pack("<I", HASH_BYTES)
        between = struct.pack("<I", 4 * self.block_tokens)
        for block in blocks:
            key = blake3(head + key + between + block, key=self.secret).digest()
            yield key
