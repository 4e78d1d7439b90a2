"""A validated request for one or more answers: what REST and gRPC hand to the orchestrator.

Owns the prompt kinds and the request records. Everything in them was checked before; nothing here
does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum, unique

from blake3 import blake3

from baton.kv.blocks import SCOPE_TEXT_BYTES_MAX, Scope
from baton.sampling_parameters import SamplingParameters
from baton.scheduling.claims import ServiceClass

_SEED_MASK = (1 << 63) - 1
ID_CHARS_MAX = 256
"""Characters of a session or response id that is read at all."""


@unique
class Role(StrEnum):
    """Who speaks in a turn."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn; special tokens inside `content` are plain text."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered with the model's template."""

    turns: tuple[ChatTurn, ...]
    has_assistant_header: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Raw text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPrompt:
    """Token ids that the caller made."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model reads it: `rendered` are the bytes that `token_ids` spell."""

    token_ids: tuple[int, ...]
    rendered: bytes


@unique
class CacheMode(StrEnum):
    """Whether the shared cache is read and filled."""

    READ_WRITE = "read_write"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who asks, from the verified credential alone; the rest is what the operator gave.

    `priority`: within a class a higher one goes first. `weight`: of what tenants of one level
    share, a tenant of weight 2 gets twice as much as one of weight 1.
    """

    name: str
    team: str | None = None
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0
    weight: int = 1

    def scope(self, cache_salt: str | None) -> Scope:
        """The sharing scope; a caller's salt narrows it. A long salt is replaced by its hash."""
        if cache_salt is not None and len(cache_salt.encode()) > SCOPE_TEXT_BYTES_MAX:
            cache_salt = blake3(cache_salt.encode()).hexdigest()
        return Scope(tenant=self.name, team=self.team).narrowed(cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentLog:
    """Tokens [0, position) of a log at the kvstore of that address."""

    log_id: bytes
    position: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Continues:
    """A session's or a response's id that a chat goes on from, and what the caller calls it."""

    wanted: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRef:
    """A session at its store's address, as it was when somebody began to change it."""

    session_id: str
    generation: int
    address: str
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to run. `sampling` has its seed and max_tokens resolved.

    `parent`: a log that the prompt goes on from, used where the writer sits at its kvstore.
    `session`: what names the answer's end once it is complete. `ttl_s`: how long its log is kept;
    None: as long as the store keeps any.

    `prompt_field`: what its caller calls the prompt, for refusals of it.
    Times are on this process's monotonic clock: `received_s` is when the request came in,
    `ready_s` when it was checked and tokenised. `stage_seconds` say what it took until then.
    """

    request_id: str
    tenant: Tenant
    prompt: EncodedPrompt
    sampling: SamplingParameters
    cache_mode: CacheMode
    cache_salt: str | None
    is_dropped_at_end: bool
    received_s: float
    deadline_s: float
    ready_s: float
    prompt_field: str = "prompt"
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    parent: ParentLog | None = None
    session: SessionRef | None = None
    ttl_s: float | None = None

    def numbered(self, index: int) -> SequenceRequest:
        """The request of the index-th parallel answer: own id, own seed, the same prompt."""
        if index == 0:
            return self
        assert self.sampling.seed is not None, "the gateway resolves the seed first"
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            session=None,
            sampling=self.sampling.with_seed(derived_seed(self.sampling.seed, index)),
        )


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th parallel answer: index 0 keeps the given one."""
    if index == 0:
        return seed
    digest = blake3(f"baton.seed.v1:{seed}:{index}".encode()).digest(8)
    return int.from_bytes(digest, "little") & _SEED_MASK
