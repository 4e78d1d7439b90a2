"""Published prefixes: which one a prompt begins with, and where a new one may be cut.

Owns the two-hash comparison and the cut. Pure: prefixes and prompts in, an index or a cut out.

Invariant: a prefix matches only if the rendered bytes *and* the token ids are those it was
published with; text alone has several token sequences, and ids alone do not say who wrote what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.kv.digests import ids_hash, text_hash
from baton.kv.manifest import Segment
from services.gateway.request import EncodedPrompt

EVERY_TENANT = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrefix:
    """A published prefix as a store lists it. `text_bytes` of the prompt are its `tokens`."""

    prefix_id: str
    name: str
    segment: Segment
    text_bytes: int
    template_digest: bytes
    owner_tenant: str
    tenants: tuple[str, ...]
    model: str
    create_wall_s: float
    expire_wall_s: float | None
    hits: int
    kvstore_address: str

    @property
    def tokens(self) -> int:
        """Tokens it covers."""
        return self.segment.to_position

    def is_granted_to(self, tenant: str, now_wall_s: float) -> bool:
        """Whether a tenant may use it now."""
        if self.expire_wall_s is not None and self.expire_wall_s <= now_wall_s:
            return False
        return tenant == self.owner_tenant or bool({tenant, EVERY_TENANT} & set(self.tenants))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A prefix that a prompt begins with, and the hashes computed over the prompt itself."""

    prefix: PublishedPrefix
    text_hash: bytes
    ids_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixQuery:
    """Whose prompt is matched: the prompt, its tenant, the template and the pair it will run on."""

    prompt: EncodedPrompt
    tenant: str
    template_digest: bytes
    kv_digest: bytes
    kvstore_address: str
    now_wall_s: float


def match_prefix(prefixes: Iterable[PublishedPrefix], query: PrefixQuery) -> PrefixMatch | None:
    """The longest granted prefix that the prompt truly begins with, or None.

    At least one prompt token stays outside, so that prefill has something to compute.
    """
    usable = [
        one
        for one in prefixes
        if one.kvstore_address == query.kvstore_address
        and one.segment.kv_digest == query.kv_digest
        and one.template_digest == query.template_digest
        and one.tokens < len(query.prompt.token_ids)
        and one.text_bytes <= len(query.prompt.rendered)
        and one.is_granted_to(query.tenant, query.now_wall_s)
    ]
    for prefix in sorted(usable, key=lambda one: (-one.tokens, one.prefix_id)):
        ids = ids_hash(query.prompt.token_ids[: prefix.tokens])
        if ids != prefix.segment.ids_hash:
            continue
        text = text_hash(query.prompt.rendered[: prefix.text_bytes])
        if text == prefix.segment.text_hash:
            return PrefixMatch(prefix=prefix, text_hash=text, ids_hash=ids)
    return None


def common_prefix(one: EncodedPrompt, other: EncodedPrompt) -> Sequence[int]:
    """The token ids with which both prompts begin."""
    count = 0
    for left, right in zip(one.token_ids, other.token_ids, strict=False):
        if left != right:
            break
        count += 1
    return one.token_ids[:count]


def cut_to_blocks(
    token_ids: Sequence[int], block_tokens: int, token_bytes: Callable[[int], bytes]
) -> EncodedPrompt:
    """The part of a prefix that fills whole blocks, with the bytes its tokens spell."""
    count = len(token_ids) // block_tokens * block_tokens
    kept = tuple(token_ids[:count])
    return EncodedPrompt(token_ids=kept, rendered=b"".join(map(token_bytes, kept)))
