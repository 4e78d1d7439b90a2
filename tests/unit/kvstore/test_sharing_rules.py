"""What keeps one log's KV from being another's: token ids, page generations, seals, quarantine."""

from __future__ import annotations

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.log.state import Parent
from services.kvstore.nodes import Node
from services.kvstore.state import PageRow
from services.kvstore.tree import BlockTree
from tests.unit.kvstore.cores import BLOCK, NOW, SCOPE, build_store, open_log

KEY, CLASS_ID = b"k" * 32, 7
IDS, OTHER_IDS = b"\x01\x00\x00\x00" * BLOCK, b"\x02\x00\x00\x00" * BLOCK


def row(page: int, page_generation: int) -> PageRow:
    """A full page."""
    return PageRow(page=page, page_generation=page_generation, tokens=BLOCK, crc=5)


def planted(tree: BlockTree, page: PageRow) -> Node:
    """The root of a tree with one block."""
    root = tree.plant(SCOPE)
    node = tree.grow(root, KEY, IDS)
    assert node is not None
    assert tree.put_row(node, CLASS_ID, page)
    return root


def test_a_key_with_other_tokens_is_no_hit() -> None:
    """Keys are digests; were two prompts ever to meet in one, the tokens tell them apart."""
    tree = BlockTree(lambda page, page_generation: True)
    root = planted(tree, row(3, 1))
    assert len(tree.walk(root, [IDS], iter([KEY]))) == 1
    assert tree.walk(root, [OTHER_IDS], iter([KEY])) == []
    assert tree.collisions == 1


def test_an_entry_ends_with_the_use_of_its_page() -> None:
    """A page that was freed and granted again holds somebody else's KV (A3)."""
    current = {3: 1}
    tree = BlockTree(lambda page, page_generation: current.get(page) == page_generation)
    (node,) = tree.walk(planted(tree, row(3, 1)), [IDS], iter([KEY]))
    current[3] = 2
    assert tree.usable(node, [CLASS_ID], with_cold=False) is None
    assert tree.pages() == set()
    assert len(tree) == 0


def test_an_unsealed_log_is_no_parent() -> None:
    """Its committed chunks serve no fork (O2), also not by name."""
    store = build_store()
    prompt = list(range(2 * BLOCK + 1))
    first = open_log(store, prompt)
    first.checkpoint(2 * BLOCK)
    base = Parent(log_id=first.log_id, generation=1, position=BLOCK)
    with pytest.raises(ServiceError) as refused:
        open_log(store, prompt, base=base)
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_time_alone_frees_no_page() -> None:
    """A lease that ended says nothing about the writer: what it may still write stays away (A2)."""
    store = build_store()
    log = open_log(store, list(range(2 * BLOCK + 1)))
    log.checkpoint(BLOCK)
    granted = len(log.log.granted)
    free = store.core.pool.free_count
    assert store.keeper.expire_leases(NOW.monotonic_s + 60.0, NOW.wall_s) == [log.log_id]
    assert granted > 0
    assert store.core.pool.free_count == free
    assert store.core.pool.counts().quarantined == granted
    assert store.keeper.worker_gone(log.writer.slot, NOW.wall_s) == []
    assert store.core.pool.free_count == free + granted
