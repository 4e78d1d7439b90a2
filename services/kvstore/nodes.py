"""The nodes of the tree of lookups, and where each one's KV is.

Owns the shapes and how they hang together; what counts and what goes is `tree`'s. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TypeAlias

from baton.kv.blocks import NO_PARENT, AnyScope
from services.kvstore.rows import PageRow

Owner: TypeAlias = bytes | str
"""Who holds a copy in the NVMe tier, or a published page: a log id, or a prefix id."""


class Place:
    """Where the KV of one block, written by one numeric class, is: on the host, on NVMe, or both.

    `row` is its page; `cold` its slot, as a row of which `page` is the slot number. `owner` says
    whose copy `cold` is, or which published prefix holds `row`.
    """

    __slots__ = ("class_id", "cold", "owner", "row")

    def __init__(self, class_id: int) -> None:
        self.class_id = class_id
        self.row: PageRow | None = None
        self.cold: PageRow | None = None
        self.owner: Owner | None = None


class Node:
    """A block of one scope behind all the blocks above it, or a root, which stands for none."""

    __slots__ = ("children", "grafts", "ids", "key", "parent", "places", "trunk")

    def __init__(self, trunk: Trunk, parent: Node | None, key: bytes, ids: bytes) -> None:
        self.trunk = trunk
        self.parent = parent
        self.key = key
        # Token ids, u32 little-endian. Fewer than a block's: a tail, whose key is empty.
        self.ids = ids
        self.places: tuple[Place, ...] = ()
        # By ids, so that the two neighbours of a query share the most with it.
        self.children: list[Node] | None = None
        self.grafts: list[Root] | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is in the tree; what is above a node that is, is in it too."""
        return self.trunk.nodes.get(self.key) is self

    @property
    def is_tail(self) -> bool:
        """A partial block: a leaf."""
        return not self.key

    def above(self) -> Node | None:
        """The node of the block before; across a graft that is the published one."""
        parent = self.parent
        return parent.graft if isinstance(parent, Root) else parent


class Root(Node):
    """Where a scope's chains begin: at position 0, or behind a published node (`graft`)."""

    __slots__ = ("graft",)

    def __init__(self, trunk: Trunk, graft: Node | None) -> None:
        super().__init__(trunk, None, NO_PARENT if graft is None else graft.key, b"")
        self.graft = graft


class Trunk:
    """All nodes of one scope."""

    __slots__ = ("nodes", "roots", "scope")

    def __init__(self, scope: AnyScope) -> None:
        self.scope = scope
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[Node | None, Root] = {}


Links: TypeAlias = "dict[int, Node | list[Node]]"
"""The nodes that know a page, or a slot."""

ids_of: Final = attrgetter("ids")
row_of: Final[Callable[[Place], PageRow | None]] = attrgetter("row")
cold_of: Final[Callable[[Place], PageRow | None]] = attrgetter("cold")


def common_tokens(one: bytes, other: bytes) -> int:
    """How many first token ids two runs of ids share."""
    count = min(len(one), len(other))
    one, other = one[:count], other[:count]
    if one == other:
        return count // 4
    differing = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return ((differing & -differing).bit_length() - 1) // 32


def place_of(node: Node, class_id: int) -> Place:
    for place in node.places:
        if place.class_id == class_id:
            return place
    place = Place(class_id)
    node.places = (*node.places, place)
    return place


def drop_empty(node: Node) -> None:
    places = node.places
    if any(place.row is None and place.cold is None for place in places):
        node.places = tuple(one for one in places if one.row is not None or one.cold is not None)


def add_child(parent: Node, node: Node) -> None:
    if parent.children is None:
        parent.children = [node]
    else:
        parent.children.insert(bisect_left(parent.children, node.ids, key=ids_of), node)


def remove_child(parent: Node, node: Node) -> bool:
    """False when it was taken out before."""
    children = parent.children
    if children is None:
        return False
    at = bisect_left(children, node.ids, key=ids_of)
    if at == len(children) or children[at] is not node:
        return False
    del children[at]
    if not children:
        parent.children = None
    return True


def link(table: Links, number: int, node: Node) -> None:
    linked = table.get(number)
    if linked is None:
        table[number] = node
    elif isinstance(linked, Node):
        if linked is not node:
            table[number] = [linked, node]
    elif node not in linked:
        linked.append(node)


def has_use(
    linked: Node | list[Node], row: PageRow, part: Callable[[Place], PageRow | None]
) -> bool:
    """Whether the places known of a page or slot are those of this use of it."""
    known = [part(place) for place in nodes_of(linked)[0].places]
    return any(
        one is not None and (one.page, one.page_generation) == (row.page, row.page_generation)
        for one in known
    )


def nodes_of(linked: Node | Sequence[Node]) -> Sequence[Node]:
    return (linked,) if isinstance(linked, Node) else linked
