"""The radix tree of everything that lookups find: full blocks, tails, published prefixes, copies.

Owns the tree and where each block's KV is. Pure. There is one root for each scope, so that a lookup
in one scope never sees what another has, whatever their keys. A node is a full block: it is found
by its key under its parent node, and a hit compares its token ids as well. A *tail* is a leaf of
fewer ids: the partial last block of a sealed log. A published scope has a root of its own; where a
tenant goes on behind a published node, its own nodes hang on a second root of the tenant's, grafted
onto that node: a chain passes from a published scope into a tenant's own once and never back.

A place (a host page, a slot of the NVMe tier) is a hint: it counts as long as the page or slot is
still held in the use that it was offered in. Where many pages are freed at once their places go
when somebody meets them. A node without places stays while others hang on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.kv.blocks import AnyScope, PublishedScope
from services.kvstore.nodes import (
    Links,
    Node,
    Owner,
    Place,
    Root,
    Trunk,
    add_child,
    cold_of,
    common_tokens,
    drop_empty,
    has_use,
    ids_of,
    link,
    nodes_of,
    place_of,
    remove_child,
    row_of,
)
from services.kvstore.rows import PageRow

IsHeld: TypeAlias = Callable[[int, int], bool]
"""Whether a page (or slot) is still in that use (page generation) of it."""

UNUSABLE_MAX: Final = 32
"""Neighbours without a usable place that a search for the nearest looks past, on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """The child that shares the most first tokens with a query."""

    place: Place
    tokens: int


class BlockTree:
    """The nodes of all scopes. `is_held` tells of host pages, `is_slot_held` of NVMe slots."""

    __slots__ = (
        "_by_page",
        "_by_slot",
        "_is_held",
        "_is_slot_held",
        "_trunks",
        "blocks",
        "collisions",
        "tails",
    )

    def __init__(self, is_held: IsHeld, is_slot_held: IsHeld = lambda _slot, _use: False) -> None:
        self._is_held = is_held
        self._is_slot_held = is_slot_held
        self._trunks: dict[AnyScope, Trunk] = {}
        # A page may be known in several nodes: a published one, tails that forks share.
        self._by_page: Links = {}
        self._by_slot: Links = {}
        self.blocks = 0
        self.tails = 0
        # Keys that met under other tokens or another parent: misses, and never once for real.
        self.collisions = 0

    def __len__(self) -> int:
        """Full blocks, those that nobody has noticed are gone included."""
        return self.blocks

    def pages(self) -> set[int]:
        """The host pages that lookups find."""
        return {
            place.row.page
            for linked in self._by_page.values()
            for node in nodes_of(linked)
            for place in node.places
            if place.row is not None and self._is_current(place.row)
        }

    def _is_current(self, row: PageRow) -> bool:
        return self._is_held(row.page, row.page_generation)

    # --- growing ----------------------------------------------------------------------------

    def root(self, scope: AnyScope, graft: Node | None = None) -> Root | None:
        """Where a scope's chains begin, or go on behind a published node; None: nothing there."""
        trunk = self._trunks.get(scope)
        return None if trunk is None else trunk.roots.get(graft)

    def plant(self, scope: AnyScope, graft: Node | None = None) -> Root:
        """`root`, made if it is missing. Put something on it, or `prune` it."""
        trunk = self._trunks.get(scope)
        if trunk is None:
            trunk = self._trunks[scope] = Trunk(scope)
        root = trunk.roots.get(graft)
        if root is None:
            root = trunk.roots[graft] = Root(trunk, graft)
            if graft is not None:
                assert isinstance(graft.trunk.scope, PublishedScope), "only grants are passed from"
                graft.grafts = [*(graft.grafts or ()), root]
        return root

    def grow(self, parent: Node, key: bytes, ids: bytes) -> Node | None:
        """The child of `parent` with this key, made if it is missing. Give it a place, or `prune`
        it. None when the key is another block's: what is behind it is not to be found.
        """
        trunk = parent.trunk
        node = trunk.nodes.get(key)
        if node is None:
            node = trunk.nodes[key] = Node(trunk, parent, key, ids)
            self.blocks += 1
            add_child(parent, node)
        elif node.parent is not parent or node.ids != ids:
            self.collisions += 1
            return None
        return node

    def grow_tail(self, parent: Node, ids: bytes) -> Node:
        """The leaf of these fewer ids behind `parent`, made if it is missing; as `grow`."""
        children = parent.children
        if children is not None:
            at = bisect_left(children, ids, key=ids_of)
            if at < len(children) and children[at].ids == ids:
                return children[at]
        node = Node(parent.trunk, parent, b"", ids)
        self.tails += 1
        add_child(parent, node)
        return node

    def put_row(self, node: Node, class_id: int, row: PageRow, owner: Owner | None = None) -> bool:
        """A page with the block's KV. False when one is known already; a tail's newer page, which
        will be there for longer, takes its place.
        """
        place = place_of(node, class_id)
        known = place.row
        if known is not None:
            if not node.is_tail and self._is_current(known):
                return False
            place.row = None
            self._unlink_page(node, known.page)
        self._forget_older_use(row)
        place = place_of(node, class_id)
        place.row = row
        if owner is not None:
            place.owner = owner
        link(self._by_page, row.page, node)
        self._supersede(node, row)
        return True

    def put_cold(self, node: Node, class_id: int, row: PageRow, owner: Owner) -> None:
        """A slot with a copy of the block's KV, and whose it is; the newest counts."""
        place = place_of(node, class_id)
        known, place.cold = place.cold, None
        if known is not None:
            self._unlink_slot(node, known.page)
        linked = self._by_slot.get(row.page)
        if linked is not None and not has_use(linked, row, cold_of):
            self.forget_slot(row.page)
        place = place_of(node, class_id)
        place.cold, place.owner = row, owner
        link(self._by_slot, row.page, node)

    def _forget_older_use(self, row: PageRow) -> None:
        """The page was freed and granted again since the places of it were known."""
        linked = self._by_page.get(row.page)
        if linked is not None and not has_use(linked, row, row_of):
            self.forget_page(row.page)

    def _supersede(self, node: Node, row: PageRow) -> None:
        """Earlier tails of the same page behind the same block say less than this node."""
        linked = self._by_page[row.page]
        if isinstance(linked, Node):
            return
        for other in tuple(linked):
            is_less = other.is_tail and other is not node and other.parent is node.parent
            if is_less and node.ids.startswith(other.ids):
                self._drop_rows(other, row.page)
                self._unlink_page(other, row.page)
                self.prune(other)

    def follow(self, old: PageRow, new: PageRow) -> None:
        """The slots of a tail were copied into another page, and the old one goes."""
        self._forget_older_use(new)
        for node in tuple(nodes_of(self._by_page.get(old.page, ()))):
            for place in node.places:
                row = place.row
                is_same = row is not None and row.page == old.page and node.is_tail
                if row is None or not is_same or row.tokens > new.tokens:
                    continue
                place.row = PageRow(
                    page=new.page,
                    page_generation=new.page_generation,
                    tokens=row.tokens,
                    slot_crcs=row.slot_crcs,
                )
                self._unlink_page(node, old.page)
                link(self._by_page, new.page, node)

    # --- forgetting -------------------------------------------------------------------------

    def forget_page(self, page: int) -> None:
        """The page was freed or found damaged: nothing finds it any more."""
        linked = self._by_page.pop(page, None)
        if linked is not None:
            for node in nodes_of(linked):
                self._drop_rows(node, page)
                self.prune(node)

    def forget_slot(self, slot: int) -> None:
        """The slot was freed or found damaged: nothing finds it any more."""
        linked = self._by_slot.pop(slot, None)
        if linked is not None:
            for node in nodes_of(linked):
                for place in node.places:
                    if place.cold is not None and place.cold.page == slot:
                        place.cold = None
                drop_empty(node)
                self.prune(node)

    def forget_elsewhere(self, page: int, tenant: str) -> None:
        """No other tenant's own lookups find the page any more."""
        for node in tuple(nodes_of(self._by_page.get(page, ()))):
            scope = node.trunk.scope
            if not isinstance(scope, PublishedScope) and scope.tenant != tenant:
                self._drop_rows(node, page)
                self._unlink_page(node, page)
                self.prune(node)

    def disown(self, node: Node, owner: Owner) -> None:
        """The owner's places of a node are withdrawn. `prune` it then, the deepest node first."""
        for place in node.places:
            if place.owner == owner:
                self._clear(node, place)
        drop_empty(node)

    def prune(self, node: Node) -> None:
        """Takes a node out that has no place and no children, and those above that become so."""
        while not node.places and not node.children:
            parent = node.parent
            if parent is None:
                self._uproot(node)
                return
            if not remove_child(parent, node):
                return
            if node.is_tail:
                self.tails -= 1
            else:
                self.blocks -= 1
                del node.trunk.nodes[node.key]
                self._fell(node)
            node = parent

    def _uproot(self, root: Node) -> None:
        assert isinstance(root, Root)
        trunk = root.trunk
        if trunk.roots.get(root.graft) is not root:
            return
        del trunk.roots[root.graft]
        if root.graft is not None and root.graft.grafts is not None:
            root.graft.grafts = [one for one in root.graft.grafts if one is not root] or None
        if not trunk.roots and self._trunks.get(trunk.scope) is trunk:
            del self._trunks[trunk.scope]

    def _fell(self, node: Node) -> None:
        """A published node is gone: what tenants have behind it is found no more."""
        for root in node.grafts or ():
            below = [*(root.children or ())]
            while below:
                one = below.pop()
                below += one.children or ()
                for place in one.places:
                    self._clear(one, place)
                one.places, one.children = (), None
                if one.is_tail:
                    self.tails -= 1
                else:
                    self.blocks -= 1
                    del one.trunk.nodes[one.key]
            root.children = None
            self._uproot(root)

    def _drop_rows(self, node: Node, page: int) -> None:
        for place in node.places:
            if place.row is not None and place.row.page == page:
                place.row = None
        drop_empty(node)

    def _clear(self, node: Node, place: Place) -> None:
        row, cold = place.row, place.cold
        place.row = place.cold = None
        if row is not None:
            self._unlink_page(node, row.page)
        if cold is not None:
            self._unlink_slot(node, cold.page)

    def _unlink_page(self, node: Node, page: int) -> None:
        """Unless the node has the page under another class as well."""
        if not any(place.row is not None and place.row.page == page for place in node.places):
            self._unlink(self._by_page, page, node)

    def _unlink_slot(self, node: Node, slot: int) -> None:
        if not any(place.cold is not None and place.cold.page == slot for place in node.places):
            self._unlink(self._by_slot, slot, node)

    @staticmethod
    def _unlink(table: Links, number: int, node: Node) -> None:
        linked = table.get(number)
        if linked is node:
            del table[number]
        elif isinstance(linked, list) and node in linked:
            linked.remove(node)
            if not linked:
                del table[number]

    # --- looking ----------------------------------------------------------------------------

    def walk(self, root: Node, blocks: Sequence[bytes], keys: Iterator[bytes]) -> list[Node]:
        """The nodes of the first `blocks` (ids) behind `root`, as far as there are any."""
        node, nodes = root, root.trunk.nodes
        path: list[Node] = []
        for ids in blocks:
            # Most prompts end here: nothing to hash for.
            if not node.children:
                break
            child = nodes.get(next(keys))
            if child is None:
                break
            if child.ids != ids or child.parent is not node:
                self.collisions += 1
                break
            path.append(child)
            node = child
        return path

    def usable(self, node: Node, class_ids: Sequence[int], *, with_cold: bool) -> Place | None:
        """Where a reader of these classes, the first one liked best, finds a node's KV."""
        found: Place | None = None
        rank = len(class_ids)
        for place in node.places:
            if place.class_id in class_ids:
                at = class_ids.index(place.class_id)
                if at < rank and self._is_there(node, place, with_cold=with_cold):
                    found, rank = place, at
        return found

    def _is_there(self, node: Node, place: Place, *, with_cold: bool) -> bool:
        """Whether the place counts still; what does not is forgotten."""
        row, cold = place.row, place.cold
        if row is not None:
            if self._is_current(row):
                return True
            self.forget_page(row.page)
        if cold is not None and with_cold:
            if self._is_slot_held(cold.page, cold.page_generation):
                return True
            self.forget_slot(cold.page)
        return False

    def nearest(
        self, node: Node, query: bytes, class_ids: Sequence[int], *, with_cold: bool
    ) -> Near | None:
        """The child of `node` that shares the most first tokens, at least one, with `query`."""
        children = node.children
        if not children or not query:
            return None
        at = bisect_left(children, query, key=ids_of)
        # Copies: what is met and found stale is taken out meanwhile.
        after = children[at : at + UNUSABLE_MAX]
        before = children[max(at - UNUSABLE_MAX, 0) : at]
        best: Near | None = None
        for side in (after, reversed(before)):
            for child in side:
                tokens = common_tokens(child.ids, query)
                if tokens <= (0 if best is None else best.tokens):
                    break
                place = self.usable(child, class_ids, with_cold=with_cold)
                if place is not None:
                    best = Near(place=place, tokens=tokens)
                    break
        return best

    def published_child(
        self, node: Node | None, row: PageRow, tenant: str, *, is_cold: bool = False
    ) -> Node | None:
        """The published node of this use of a page (`is_cold`: of a slot) behind `node` (None: the
        first block) that is not the tenant's own.
        """
        table, part = (self._by_slot, cold_of) if is_cold else (self._by_page, row_of)
        for found in nodes_of(table.get(row.page, ())):
            scope = found.trunk.scope
            is_others = isinstance(scope, PublishedScope) and scope.owner != tenant
            if is_others and not found.is_tail and has_use(found, row, part):
                parent = found.parent
                if parent is node or (node is None and isinstance(parent, Root)):
                    return found
        return None

    def check_invariants(self) -> None:
        """Asserts that every node is where its parent, its trunk and its pages look for it."""
        blocks = tails = 0
        for scope, trunk in self._trunks.items():
            assert trunk.scope == scope
            assert trunk.roots
            below: list[Node] = list(trunk.roots.values())
            while below:
                node = below.pop()
                children = node.children or []
                assert [c.ids for c in children] == sorted({c.ids for c in children})
                assert all(child.parent is node for child in children)
                below += children
                if isinstance(node, Root):
                    assert children, "a root that nothing hangs on"
                    assert node.graft is None or node in (node.graft.grafts or ())
                    continue
                assert node.places or children, "a node without place and child"
                assert node.is_tail or node.is_live
                assert not (node.is_tail and children)
                blocks += not node.is_tail
                tails += node.is_tail
                for place in node.places:
                    assert place.row is not None or place.cold is not None
                    assert place.row is None or node in nodes_of(self._by_page[place.row.page])
                    assert place.cold is None or node in nodes_of(self._by_slot[place.cold.page])
        assert (blocks, tails) == (self.blocks, self.tails)
