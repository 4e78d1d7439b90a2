"""Published prefixes: histories that a tenant offers to others under a name.

Owns the table, its version and who may use what. Pure; wall time is passed in. A published prefix
holds its own pages: the log it was cut from may end.

Invariant: the version grows with every change, so that a caller who has it knows the list.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.errors import Reason, ServiceError
from baton.kv.blocks import PublishedScope
from services.kvstore.state import PageRow, Rows

EVERY_TENANT = "*"
PREFIXES_MAX = 1024
PREFIX_NAME_CHARS_MAX = 256
PREFIX_TENANTS_MAX = 1024


@dataclass(slots=True, kw_only=True)
class Prefix:
    """One published prefix: tokens [0, position) of a log and the pages with their KV.

    `cold` has copies on the NVMe tier, as a log's. `version` counts the publications under the
    owner's name. A pinned one keeps its pages in the host, and its own end does not come.
    """

    prefix_id: str
    name: str
    owner_tenant: str
    tenants: tuple[str, ...]
    log_id: bytes
    generation: int
    position: int
    token_ids: tuple[int, ...]
    rows: tuple[PageRow, ...]
    numeric_class: str
    numeric_class_id: int
    history_end: bytes
    text_hash: bytes
    ids_hash: bytes
    text_bytes: int
    template_digest: bytes
    tokenizer_hash: bytes
    model: str
    create_wall_s: float
    expire_wall_s: float | None = None
    version: int = 1
    is_pinned: bool = False
    hits: int = field(default=0)
    cold: Rows = field(default_factory=Rows)

    @property
    def scope(self) -> PublishedScope:
        """What it is looked up in, with the owner's others of the same grant."""
        return PublishedScope(owner=self.owner_tenant, tenants=tuple(sorted({*self.tenants})))

    def is_granted_to(self, tenant: str) -> bool:
        """The owner, the tenants it names, or everybody by `*`."""
        return tenant == self.owner_tenant or EVERY_TENANT in self.tenants or tenant in self.tenants

    def is_over(self, wall_s: float) -> bool:
        """Its own end has come."""
        if self.is_pinned or self.expire_wall_s is None:
            return False
        return self.expire_wall_s <= wall_s

    def is_content_of(self, other: Prefix) -> bool:
        """Whether both say the same text in the same tokens, read and written alike."""
        names = ("ids_hash", "text_hash", "template_digest", "tokenizer_hash")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class PrefixTable:
    """All published prefixes of one kvstore."""

    __slots__ = ("_by_id", "_scopes", "version")

    def __init__(self) -> None:
        self._by_id: dict[str, Prefix] = {}
        # By tenant (or `*`): the scopes it may look into, and how many prefixes each has.
        self._scopes: dict[str, Counter[PublishedScope]] = {}
        self.version = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Prefix]:
        """Every prefix, in the order of publication."""
        return list(self._by_id.values())

    def visible_to(self, tenant: str | None) -> list[Prefix]:
        """What a tenant may use; None (a gateway or an operator) sees all."""
        return [p for p in self._by_id.values() if tenant is None or p.is_granted_to(tenant)]

    def get(self, prefix_id: str) -> Prefix | None:
        """The prefix, if it is published."""
        return self._by_id.get(prefix_id)

    def named(self, owner_tenant: str, name: str) -> list[Prefix]:
        """What an owner has published under a name, in the order of publication."""
        return [
            prefix
            for prefix in self._by_id.values()
            if (prefix.owner_tenant, prefix.name) == (owner_tenant, name)
        ]

    def find(self, prefix_id: str) -> Prefix:
        """The prefix; PREFIX_NOT_FOUND."""
        prefix = self._by_id.get(prefix_id)
        if prefix is None:
            raise ServiceError(
                Reason.PREFIX_NOT_FOUND,
                f"no published prefix {prefix_id}; list them with `baton prefix list`",
                field="prefix_id",
            )
        return prefix

    def scopes_for(self, tenant: str) -> list[PublishedScope]:
        """The published scopes a tenant may look into, each once, in the order of publication."""
        if not self._scopes:
            return []
        own, everybody = self._scopes.get(tenant, ()), self._scopes.get(EVERY_TENANT, ())
        return list(dict.fromkeys((*own, *everybody)))

    def granting(self, log_id: bytes, tenant: str, to_position: int) -> Prefix | None:
        """The prefix that lets `tenant` use [0, to_position) of a log, if one does."""
        for prefix in self._by_id.values():
            is_source = prefix.log_id == log_id and prefix.position >= to_position
            if is_source and prefix.is_granted_to(tenant):
                return prefix
        return None

    def add(self, prefix: Prefix) -> None:
        """Offers a prefix; QUOTA_EXCEEDED when the table is full."""
        if len(self._by_id) >= PREFIXES_MAX:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"{PREFIXES_MAX} prefixes are published; revoke one first",
                field="prefix",
            )
        if prefix.prefix_id in self._by_id:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                "a prefix of this id is published; draw another id",
                field="prefix.prefix_id",
            )
        self._by_id[prefix.prefix_id] = prefix
        for tenant in _granted(prefix):
            self._scopes.setdefault(tenant, Counter())[prefix.scope] += 1
        self.version += 1

    def remove(self, prefix_id: str) -> Prefix:
        """Withdraws a prefix; PREFIX_NOT_FOUND."""
        prefix = self.find(prefix_id)
        del self._by_id[prefix_id]
        for tenant in _granted(prefix):
            scopes = self._scopes[tenant]
            scopes[prefix.scope] -= 1
            if not scopes[prefix.scope]:
                del scopes[prefix.scope]
            if not scopes:
                del self._scopes[tenant]
        self.version += 1
        return prefix

    def touch(self) -> None:
        """What is told of some prefix has changed."""
        self.version += 1

    def over(self, wall_s: float) -> list[Prefix]:
        """Prefixes whose own end has come."""
        return [prefix for prefix in self._by_id.values() if prefix.is_over(wall_s)]


def _granted(prefix: Prefix) -> set[str]:
    return {prefix.owner_tenant, *prefix.tenants}
