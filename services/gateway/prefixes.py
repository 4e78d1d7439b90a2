"""Published prefixes: which one a prompt begins with, which is stale, where a new one may be cut.

Owns the two-hash comparison, staleness and the cut. Pure: prefixes and prompts in, an index or a
cut out.

Invariant: a prefix matches only if the rendered bytes *and* the token ids are those it was
published with; text alone has several token sequences, and ids alone do not say who wrote what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
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
    version: int = 1
    is_pinned: bool = False
    kv_bytes: int = 0
    host_tokens: int = 0
    nvme_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens it covers."""
        return self.segment.to_position

    def is_granted_to(self, tenant: str, now_wall_s: float) -> bool:
        """Whether a tenant may use it now."""
        is_over = self.expire_wall_s is not None and self.expire_wall_s <= now_wall_s
        if is_over and not self.is_pinned:
            return False
        return tenant == self.owner_tenant or bool({tenant, EVERY_TENANT} & set(self.tenants))

    def difference_to(self, prompt: EncodedPrompt) -> ServiceError | None:
        """How a prompt begins otherwise, naming both hashes of both; None: it begins with this."""
        text = text_hash(prompt.rendered[: self.text_bytes])
        ids = ids_hash(prompt.token_ids[: self.tokens])
        segment = self.segment
        if (text, ids) == (segment.text_hash, segment.ids_hash):
            return None
        theirs_text = "none" if segment.text_hash is None else segment.text_hash.hex()
        theirs_ids = "none" if segment.ids_hash is None else segment.ids_hash.hex()
        return ServiceError(
            Reason.INVALID_REQUEST,
            f"the prompt does not begin with prefix {self.name}: over its {self.text_bytes} bytes "
            f"and {self.tokens} tokens the text hash is {text.hex()}, not {theirs_text}, and the "
            f"ids hash is {ids.hex()}, not {theirs_ids}",
            field="X-Baton-Prefix",
            metadata={"prefix_id": self.prefix_id},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    """What a gateway makes tokens with; a prefix made with anything else is stale for it."""

    tokenizer_hash: bytes
    template_digest: bytes

    def refusal(self, prefix: PublishedPrefix) -> ServiceError | None:
        """Why a prefix is stale, naming both hashes: TOKENIZER_MISMATCH, or COMPAT_MISMATCH for the
        template. None: it is not.
        """
        for name, published, served, reason in (
            (
                "tokenizer_hash",
                prefix.segment.tokenizer_hash,
                self.tokenizer_hash,
                Reason.TOKENIZER_MISMATCH,
            ),
            (
                "template_digest",
                prefix.template_digest,
                self.template_digest,
                Reason.COMPAT_MISMATCH,
            ),
        ):
            if published != served:
                ours, theirs = served.hex() or "none", published.hex() or "none"
                return ServiceError(
                    reason,
                    f"prefix {prefix.name} version {prefix.version} is stale: it was published "
                    f"with {name} {theirs}, and prompts are read with {ours}; publish it again",
                    field="prefix",
                    metadata={
                        "prefix_id": prefix.prefix_id,
                        "field": name,
                        "ours": ours,
                        "theirs": theirs,
                    },
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A prefix that a prompt begins with, and the hashes computed over the prompt itself."""

    prefix: PublishedPrefix
    text_hash: bytes
    ids_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixQuery:
    """Whose prompt is matched: the prompt, its tenant, how it was read and where it will run."""

    prompt: EncodedPrompt
    tenant: str
    rules: ReadingRules
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
        and query.rules.refusal(one) is None
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
