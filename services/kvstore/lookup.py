"""Lookups: the longest run of KV that a prompt's tenant may begin with, to the token.

Owns the order of scopes and the choice among the ways through the tree. Pure; it changes nothing.

Granted scopes come first, then the tenant's own; a way passes from a published scope into the
tenant's own once and never back. Behind the last full block the child that shares the most first
tokens counts for these: a tail, or a block that diverges. The last token is never part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.kv.blocks import PublishedScope, Scope
from baton.kv.digests import ids_bytes
from baton.kv.numeric import NumericClass
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core
from services.kvstore.nodes import Node, Owner, Place
from services.kvstore.rows import PageRow
from services.kvstore.tree import Near


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who wants a base, and what it can read."""

    tenant: str
    scope: Scope
    numeric_class: NumericClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """One block of a hit: its page `row`, or its NVMe slot `cold` (of which `page` is the slot).

    Of the last one `tokens` may be fewer than a block's: the first of a tail or of a block that
    diverges; `row` and `cold` are not cut to them. `owner` (a log or a prefix) had `cold` when it
    was offered.
    """

    block_index: int
    tokens: int
    row: PageRow | None
    cold: PageRow | None
    owner: Owner | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyHit:
    """The longest run that one reader can use, wherever it is."""

    numeric_class_id: int
    tokens: int
    blocks: tuple[Where, ...]

    def wants(self, block_tokens: int) -> list[tuple[Owner, int]]:
        """What is on NVMe only, as runs in order: whose it is, and the position the run ends at."""
        runs: list[tuple[Owner, int]] = []
        for block in self.blocks:
            if block.row is None and block.owner is not None:
                if runs and runs[-1][0] == block.owner:
                    runs.pop()
                runs.append((block.owner, block.block_index * block_tokens + block.tokens))
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best way: full blocks at `places`, then the first tokens of `near`.

    `node` is that of the last full block; the first `published` blocks are of `published_scope`,
    published by `prefix_id`.
    """

    numeric_class_id: int
    tokens: int
    places: tuple[Place, ...]
    near: Near | None
    node: Node | None
    published: int = 0
    published_scope: PublishedScope | None = None
    prefix_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Nodes of blocks 0.., of which the first `published` are published. The children of
    `anchors[k]` come behind k blocks.
    """

    path: Sequence[Node]
    anchors: Sequence[Node]
    published: int = 0
    scope: PublishedScope | None = None


class Lookups:
    """Looks for what prompts can begin with."""

    def __init__(self, core: Core, chains: ScopeChains) -> None:
        self._core = core
        self._chains = chains

    def find(self, asker: Asker, tokens: Sequence[int], *, with_cold: bool) -> Found | None:
        """The most tokens that a reader can begin with; ties go to what is looked at first.

        `with_cold`: also what is on NVMe only.
        """
        tree, block_tokens = self._core.tree, self._core.block_tokens
        usable = len(tokens) - 1
        if usable < 1 or (not tree.blocks and not tree.tails):
            return None
        data, size = ids_bytes(tokens), 4 * block_tokens
        end = 4 * usable
        blocks = [data[first : first + size] for first in range(0, end - size + 1, size)]
        class_sets = self._class_sets(asker)
        best: Found | None = None
        for way in self._ways(asker, blocks):
            for class_ids in class_sets:
                places: list[Place] = []
                for node in way.path:
                    place = tree.usable(node, class_ids, with_cold=with_cold)
                    if place is None:
                        break
                    places.append(place)
                depth = len(places)
                query = data[depth * size : min((depth + 1) * size, end)]
                near = tree.nearest(way.anchors[depth], query, class_ids, with_cold=with_cold)
                count = depth * block_tokens + (0 if near is None else near.tokens)
                if count > (0 if best is None else best.tokens):
                    best = _found(way, places, near, count, class_ids[0])
        return best

    def anywhere(self, asker: Asker, tokens: Sequence[int]) -> AnyHit | None:
        """The longest run on the host and on NVMe together."""
        found = self.find(asker, tokens, with_cold=True)
        if found is None:
            return None
        block_tokens = self._core.block_tokens
        spans = [(place, block_tokens) for place in found.places]
        if found.near is not None:
            spans.append((found.near.place, found.near.tokens))
        return AnyHit(
            numeric_class_id=found.numeric_class_id,
            tokens=found.tokens,
            blocks=tuple(
                Where(
                    block_index=index,
                    tokens=count,
                    row=place.row,
                    cold=place.cold,
                    owner=None if place.cold is None else place.owner,
                )
                for index, (place, count) in enumerate(spans)
            ),
        )

    def _class_sets(self, asker: Asker) -> list[tuple[int, ...]]:
        """The asker's own class, and each other one beside it: a base names one other at most."""
        own = asker.numeric_class.id
        others = sorted(self._core.limits.policy.writers_for(own) - {own})
        return [(own,), *((own, other) for other in others)]

    def _ways(self, asker: Asker, blocks: Sequence[bytes]) -> Iterator[_Way]:
        granted = self._core.prefixes.scopes_for(asker.tenant)
        for scope in granted:
            if scope.owner != asker.tenant:
                yield from self._published_ways(asker, scope, blocks)
        root = self._core.tree.root(asker.scope)
        if root is not None:
            keys = self._chains.chain(asker.scope).keys_of(blocks)
            path = self._core.tree.walk(root, blocks, keys)
            yield _Way(path=path, anchors=[root, *path])
        for scope in granted:
            if scope.owner == asker.tenant:
                yield from self._published_ways(asker, scope, blocks)

    def _published_ways(
        self, asker: Asker, scope: PublishedScope, blocks: Sequence[bytes]
    ) -> Iterator[_Way]:
        """The way through a published scope, and those that go on in the asker's own behind it."""
        tree = self._core.tree
        root = tree.root(scope)
        if root is None:
            return
        path = tree.walk(root, blocks, self._chains.chain(scope).keys_of(blocks))
        yield _Way(path=path, anchors=[root, *path], published=len(path) + 1, scope=scope)
        for depth in range(len(path), 0, -1):
            node = path[depth - 1]
            graft = tree.root(asker.scope, node) if node.grafts else None
            if graft is None:
                continue
            rest = blocks[depth:]
            keys = self._chains.chain(asker.scope).keys_of(rest, parent=node.key)
            own = tree.walk(graft, rest, keys)
            yield _Way(
                path=[*path[:depth], *own],
                anchors=[root, *path[: depth - 1], graft, *own],
                published=depth,
                scope=scope,
            )


def _found(
    way: _Way, places: Sequence[Place], near: Near | None, tokens: int, own_class_id: int
) -> Found:
    used = [*places, *(() if near is None else (near.place,))]
    others = [place.class_id for place in used if place.class_id != own_class_id]
    published = used[: way.published]
    owner = published[-1].owner if published else None
    return Found(
        numeric_class_id=others[0] if others else own_class_id,
        tokens=tokens,
        places=tuple(places),
        near=near,
        node=way.path[len(places) - 1] if places else None,
        published=min(way.published, len(places)),
        published_scope=way.scope,
        prefix_id=owner if isinstance(owner, str) else None,
    )
