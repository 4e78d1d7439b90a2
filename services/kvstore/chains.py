"""What becomes findable, and in whose scope: the full blocks and tails of logs, prefixes, copies.

Owns the block chains of scopes and every offer to the tree. Pure. Callers offer sealed logs only
(O2). A log that begins with a published prefix of another tenant goes on behind the published
nodes; those blocks are never offered as its tenant's own, so that withdrawing the prefix ends every
lookup of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from baton.kv.blocks import AnyScope, BlockChain, Scope
from baton.kv.digests import TokenIds, ids_bytes
from services.kvstore.core import Core
from services.kvstore.nodes import Node
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import cut_row
from services.kvstore.state import LogState, PageRow
from services.kvstore.tree import BlockTree

SecretOf: TypeAlias = Callable[[AnyScope], bytes]
SCOPES_MAX: Final = 4096


class ScopeChains:
    """Offers what one store has to its tree. Each scope's secret is derived once, and kept."""

    def __init__(self, core: Core, secret_of: SecretOf) -> None:
        self._core = core
        self._secret_of = secret_of
        self._chains: dict[AnyScope, BlockChain] = {}

    @property
    def _tree(self) -> BlockTree:
        return self._core.tree

    def chain(self, scope: AnyScope) -> BlockChain:
        """The chain that keys a scope's blocks."""
        known = self._chains.get(scope)
        if known is None:
            if len(self._chains) >= SCOPES_MAX:
                self._chains.clear()
            known = self._chains[scope] = BlockChain(
                secret=self._secret_of(scope),
                scope=scope,
                kv=self._core.limits.kv_digest,
                block_tokens=self._core.block_tokens,
            )
        return known

    # --- logs -------------------------------------------------------------------------------

    def offer(self, log: LogState) -> None:
        """Makes a sealed log's blocks that are not in the tree yet findable, and its tail."""
        if not log.is_cacheable:
            return
        full, rest = divmod(log.committed, self._core.block_tokens)
        if full > log.indexed_blocks:
            self._offer_blocks(log, full)
        if rest:
            self._offer_tail(log, full)

    def _offer_blocks(self, log: LogState, full: int) -> None:
        trail = self._trail(log, log.indexed_blocks)
        log.indexed_blocks = full
        if trail is None:
            return
        node, first = trail
        if node is None:
            node, first = self._published_part(log, full)
        for index, child in self._grown(log, node, (first, full)):
            row = log.rows[index]
            assert row.crc is not None, "only full pages are found as blocks"
            self._tree.put_row(child, _class_of(log, index, child, self._core.block_tokens), row)

    def _offer_tail(self, log: LogState, full: int) -> None:
        """The last page's committed slots; they never change, whoever writes those behind them."""
        last = log.rows.last
        if last is None or len(last.slot_crcs) != last.tokens:
            return
        tail = self._grown_tail(log, full, last.tokens)
        if tail is not None:
            class_id = _class_of(log, full, tail, self._core.block_tokens)
            self._tree.put_row(tail, class_id, cut_row(last, last.tokens))

    def offer_cold(self, log: LogState, first_block: int = 0) -> None:
        """Makes the NVMe copies of a log from that block on findable, if it is sealed."""
        if not log.is_cacheable or not log.is_sealed or not log.cold:
            return
        block_tokens = self._core.block_tokens
        full, rest = divmod(log.cold.tokens, block_tokens)
        trail = self._trail(log, first_block)
        if trail is None:
            return
        node, first = trail
        if node is None:
            node, first = self._published_part(log, full)
        for index, child in self._grown(log, node, (first, full)):
            class_id = _class_of(log, index, child, block_tokens)
            self._tree.put_cold(child, class_id, log.cold[index], log.log_id)
        last = log.cold.last
        if rest and last is not None:
            tail = self._grown_tail(log, full, rest)
            if tail is not None:
                class_id = _class_of(log, full, tail, block_tokens)
                self._tree.put_cold(tail, class_id, cut_row(last, rest), log.log_id)

    def _trail(self, log: LogState, blocks: int) -> tuple[Node | None, int] | None:
        """The log's deepest node that is in the tree, at most `blocks` (or what is published of
        it) deep, and how deep it is; None: it began with a prefix that was withdrawn.
        """
        blocks = min(max(blocks, log.foreign_blocks), log.node_blocks)
        node, depth = log.node, log.node_depth
        while node is not None and (depth > blocks or not node.is_live):
            node, depth = node.above(), depth - 1
        if node is None:
            depth = 0
        return None if depth < log.foreign_blocks else (node, depth)

    def _published_part(self, log: LogState, full: int) -> tuple[Node | None, int]:
        """After a restart: how many of its first blocks are another's published ones."""
        node: Node | None = None
        depth = 0
        while depth < full:
            child = self._published_child(log, node, depth)
            if child is None:
                break
            node, depth = child, depth + 1
        if node is not None:
            log.node, log.node_depth = node, depth
            log.node_blocks = log.foreign_blocks = depth
        return node, depth

    def _published_child(self, log: LogState, node: Node | None, index: int) -> Node | None:
        """Another's published node behind `node` of the log's block, by its page or its slot."""
        for rows, is_cold in ((log.rows, False), (log.cold, True)):
            if index < len(rows):
                row = rows[index]
                child = self._tree.published_child(node, row, log.tenant, is_cold=is_cold)
                if child is not None:
                    return child
        return None

    def _grown(
        self, log: LogState, node: Node | None, span: tuple[int, int]
    ) -> Iterator[tuple[int, Node]]:
        """Each block of `span` with its node behind `node`; give it a place. The log remembers
        the last one.
        """
        first, end = span
        if first >= end:
            return
        tree, block_tokens = self._tree, self._core.block_tokens
        parent = self._behind(log.scope, node)
        ids = log.tokens[first * block_tokens : end * block_tokens]
        blocks = list(_blocks(ids, block_tokens))
        keys = self.chain(log.scope).keys_of(blocks, parent=parent.key)
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True), start=first):
            child = tree.grow(parent, key, block)
            if child is None:
                tree.prune(parent)
                return
            yield index, child
            parent = log.node = child
            log.node_depth = log.node_blocks = index + 1

    def _grown_tail(self, log: LogState, full: int, tokens: int) -> Node | None:
        trail = self._trail(log, full)
        if trail is None or trail[1] != full:
            return None
        first = full * self._core.block_tokens
        ids = ids_bytes(log.tokens[first : first + tokens])
        return self._tree.grow_tail(self._behind(log.scope, trail[0]), ids)

    def _behind(self, scope: Scope, node: Node | None) -> Node:
        """Where the scope's own blocks go on behind `node`."""
        if node is not None and node.trunk.scope == scope:
            return node
        return self._tree.plant(scope, node)

    # --- published prefixes -----------------------------------------------------------------

    def offer_prefix(self, prefix: Prefix) -> None:
        """Makes a published prefix findable by those it is granted to, unless it is stale."""
        for node, row in self._prefix_nodes(prefix, prefix.rows):
            self._tree.put_row(node, prefix.numeric_class_id, row, prefix.prefix_id)

    def offer_prefix_cold(self, prefix: Prefix) -> None:
        """Makes a published prefix's NVMe copies findable by those it is granted to."""
        for node, row in self._prefix_nodes(prefix, prefix.cold):
            self._tree.put_cold(node, prefix.numeric_class_id, row, prefix.prefix_id)

    def _prefix_nodes(
        self, prefix: Prefix, rows: Sequence[PageRow]
    ) -> Iterator[tuple[Node, PageRow]]:
        # Ids of another tokenizer stand for another text: found, they would be a chance hit.
        if not rows or prefix.tokenizer_hash != self._core.limits.tokenizer_hash:
            return
        tree, block_tokens, ids = self._tree, self._core.block_tokens, prefix.token_ids
        parent: Node = tree.plant(prefix.scope)
        full, rest = divmod(min(prefix.position, len(rows) * block_tokens), block_tokens)
        blocks = list(_blocks(ids[: full * block_tokens], block_tokens))
        keys = self.chain(prefix.scope).keys_of(blocks)
        for row, key, block in zip(rows, keys, blocks, strict=False):
            child = tree.grow(parent, key, block)
            if child is None:
                tree.prune(parent)
                return
            yield child, row
            parent = child
        if rest:
            first = full * block_tokens
            yield tree.grow_tail(parent, ids_bytes(ids[first : first + rest])), rows[full]

    def published_path(self, prefix: Prefix, blocks: int) -> list[Node]:
        """The nodes of a published prefix's first full blocks that are in the tree."""
        root = self._tree.root(prefix.scope)
        if root is None:
            return []
        ids = prefix.token_ids[: blocks * self._core.block_tokens]
        found = list(_blocks(ids, self._core.block_tokens))
        return self._tree.walk(root, found, self.chain(prefix.scope).keys_of(found))

    def withdraw_prefix(self, prefix: Prefix) -> None:
        """Nobody finds the prefix any more but its owner, in the logs that it was cut from.

        Call it once the table of prefixes is without it: what others of the same grant share with
        it stays.
        """
        tree, block_tokens = self._tree, self._core.block_tokens
        full, rest = divmod(prefix.position, block_tokens)
        path = self.published_path(prefix, full)
        root = tree.root(prefix.scope)
        if rest and root is not None and len(path) == full:
            ids = ids_bytes(prefix.token_ids[full * block_tokens : prefix.position])
            path.append(tree.grow_tail(path[-1] if path else root, ids))
        for node in path:
            tree.disown(node, prefix.prefix_id)
        # Those that share blocks with it first, so that what is grafted there stays.
        for other in self._core.prefixes.all():
            if other.scope == prefix.scope:
                self.offer_prefix(other)
                self.offer_prefix_cold(other)
        for node in reversed(path):
            tree.prune(node)
        for row in prefix.rows:
            tree.forget_elsewhere(row.page, prefix.owner_tenant)


def _class_of(log: LogState, index: int, node: Node, block_tokens: int) -> int:
    """The numeric class that wrote a log's block: what is known of the same page or slot, else
    that of its base or of its writer.
    """
    row = log.rows[index] if index < len(log.rows) else None
    cold = log.cold[index] if index < len(log.cold) else None
    for place in node.places:
        if row is not None and place.row is not None and place.row.page == row.page:
            return place.class_id
        if cold is not None and place.cold is not None and place.cold.page == cold.page:
            return place.class_id
    end = min((index + 1) * block_tokens, log.position)
    return log.base_class_id if end <= log.cached_tokens else log.numeric_class_id


def _blocks(ids: TokenIds, block_tokens: int) -> Iterator[bytes]:
    """The ids of each full block."""
    data, size = ids_bytes(ids), 4 * block_tokens
    return (data[first : first + size] for first in range(0, len(data) - size + 1, size))
