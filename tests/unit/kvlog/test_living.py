"""What may be freed, by the index that costs a look-up a record, and by the rule spelt out."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.log.format import RecordType
from services.kvstore.log.living import LivingSegments, prefix_key
from services.kvstore.log.store_records import Place, Tier

LOGS = [bytes([number]) * 16 for number in range(1, 6)]


class Spelt:
    """Every holder of every segment, looked through for each record."""

    def __init__(self) -> None:
        self.holders: dict[int, set[bytes]] = {}
        self.alive: set[bytes] = set()

    def note(self, sequence: int, kind: int, log_id: bytes, parent: bytes | None) -> None:
        held = self.holders.setdefault(sequence, set())
        if kind == RecordType.CLOSE:
            self.alive.discard(log_id)
            for each in self.holders.values():
                each.discard(log_id)
            return
        if kind in (RecordType.OPEN, RecordType.SNAPSHOT):
            self.alive.add(log_id)
        if log_id in self.alive:
            held.add(log_id)
        if kind == RecordType.SNAPSHOT:
            for number, each in self.holders.items():
                if number < sequence:
                    each.discard(log_id)
        elif parent is not None:
            for each in self.holders.values():
                if parent in each:
                    each.add(log_id)


KINDS = st.sampled_from(
    [
        RecordType.OPEN,
        RecordType.APPEND,
        RecordType.APPEND,
        RecordType.GRANT,
        RecordType.SNAPSHOT,
        RecordType.CLOSE,
    ]
)
STEPS = st.lists(
    st.tuples(KINDS, st.sampled_from(LOGS), st.none() | st.sampled_from(LOGS), st.booleans()),
    max_size=60,
)


def open_from(parent: bytes) -> bytes:
    """The fixed part of an OPEN's body with a parent."""
    return struct.pack("<BBHIIIQ16s", 1, 0, 0, 0, 0, 0, 1, parent)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_the_index_says_what_the_rule_says(steps):
    """Opens from parents, snapshots, closes, records of logs that are gone, and freeing between."""
    index, spelt, sequence = LivingSegments(), Spelt(), 1
    for kind, log_id, parent, is_next in steps:
        sequence += is_next
        base = parent if kind is RecordType.OPEN else None
        index.note(sequence, kind, log_id, b"" if base is None else open_from(base))
        spelt.note(sequence, kind, log_id, base)
        assert {number: index.holders(number) for number in index} == spelt.holders
        if is_next:
            needed = index.first_needed()
            keep = sequence if needed is None else min(needed, sequence)
            gone = index.remove_before(keep)
            assert all(not spelt.holders.pop(number) for number in gone)
            assert index.oldest() == min(spelt.holders)


def test_a_child_keeps_what_its_parent_was_until_its_snapshot():
    """The parent may be closed or compacted: the child's history is in the parent's records."""
    living, (parent, child, *_) = LivingSegments(), LOGS
    living.note(1, RecordType.OPEN, parent, b"")
    living.note(2, RecordType.OPEN, child, open_from(parent))
    living.note(3, RecordType.CLOSE, parent, b"")
    assert living.first_needed() == 1
    living.note(3, RecordType.SNAPSHOT, child, b"")
    assert living.first_needed() == 3


def test_places_of_a_prefix_are_needed_by_the_prefix_and_not_by_its_log():
    """Its log may be closed or compacted; the record stays until the prefix is told again."""
    living, (log_id, *_) = LivingSegments(), LOGS
    place = Place(
        tier=Tier.NVME, from_position=0, to_position=0, entries=(), prefix_id="pfx-1"
    ).encode()
    living.note(1, RecordType.OPEN, log_id, b"")
    living.note(1, RecordType.PUBLISH, log_id, published("pfx-1"))
    living.note(2, RecordType.PLACE, log_id, place)
    living.note(3, RecordType.SNAPSHOT, log_id, b"")
    assert living.holders(2) == {prefix_key("pfx-1")}
    living.note(4, RecordType.PUBLISH, log_id, published("pfx-1"))
    assert living.holders(2) == set()


def test_places_of_a_log_are_needed_by_it_until_its_snapshot():
    """Behind which they are told again."""
    living, (log_id, *_) = LivingSegments(), LOGS
    place = Place(tier=Tier.NVME, from_position=0, to_position=0, entries=()).encode()
    living.note(1, RecordType.OPEN, log_id, b"")
    living.note(2, RecordType.PLACE, log_id, place)
    assert living.holders(2) == {log_id}
    living.note(3, RecordType.SNAPSHOT, log_id, b"")
    assert living.holders(2) == set()


def published(prefix_id: str) -> bytes:
    """A PUBLISH's body as far as it is looked into."""
    name = prefix_id.encode()
    return bytes(160) + struct.pack("<HHHH", len(name), 0, 0, 0) + name
