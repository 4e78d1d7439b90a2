"""Which segments are still needed, and for whom.

Owns the rule of retention: a segment is needed by every log and published prefix whose state cannot
be folded without its records. A log needs the segments that hold its own records and, when it began
from another log (OPEN with a parent or a manifest), those the other needed at that moment; so the
other's end, or its truncation, never loses it. Its SNAPSHOT replaces what was before, its CLOSE
everything. A published prefix needs what its log needed until its REVOKE. Pure; the writer of the
log and recovery use the same object.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Final

from baton.errors import ServiceError
from baton.kv.manifest import decode_segments
from services.kvstore.log.session_records import (
    IS_DELETED,
    SESSION_FLAGS_AT,
    SESSION_HEAD_BYTES,
    SESSION_ID_AT,
)

PREFIX_MARK: Final = b"prefix:"
SESSION_MARK: Final = b"session:"

_OPEN: Final = 1
_PLACE: Final = 10
_PUBLISH: Final = 11
_REVOKE: Final = 12
_SNAPSHOT: Final = 13
_CLOSE: Final = 15
_SESSION: Final = 0x90

_OPEN_HEAD: Final = struct.Struct("<B3xIIIQ16s")
_IDENTITY_BYTES: Final = 112
_IDENTITY_SIZES: Final = struct.Struct("<HHHHHI")
_IDENTITY_SIZES_AT: Final = 22
_PUBLISH_ID_SIZE: Final = struct.Struct("<H")
_PUBLISH_ID_SIZE_AT: Final = 160
_PUBLISH_BYTES: Final = 168
_PLACE_HEAD: Final = struct.Struct("<IIIBBH")
_U16: Final = struct.Struct("<H")
_REVOKE_HEAD: Final = struct.Struct("<QHHI")
_BASE_PARENT: Final = 1
_BASE_MANIFEST: Final = 2


def prefix_key(prefix_id: str) -> bytes:
    """What a published prefix is called among the holders of a segment."""
    return PREFIX_MARK + prefix_id.encode()


def session_key(session_id: str) -> bytes:
    """What a session is called among the holders of a segment."""
    return SESSION_MARK + session_id.encode()


class LivingSegments:
    """Holders by segment: log ids (16 bytes) and keys of published prefixes (`prefix_key`).

    A log holds from its OPEN or SNAPSHOT to its CLOSE; a record of any other log (a GRANT told
    again for a writer whose log is gone) holds nothing. A record costs a look-up or two, whatever
    the number of segments and logs: what a holder needs is kept with the holder as well.
    """

    __slots__ = ("_holders", "_needed")

    def __init__(self) -> None:
        self._holders: dict[int, set[bytes]] = {}
        # By holder, ascending. A log that is alive has an entry, be it empty.
        self._needed: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._holders))

    def begin(self, sequence: int) -> None:
        """A segment exists, whether or not anything in it is needed."""
        self._holders.setdefault(sequence, set())

    def holders(self, sequence: int) -> set[bytes]:
        """Who needs a segment: log ids and prefix keys; a copy."""
        return set(self._holders.get(sequence, ()))

    def oldest(self) -> int | None:
        """The oldest segment there is."""
        return min(self._holders, default=None)

    def first_needed(self) -> int | None:
        """The oldest segment that anybody needs; those before it may go. None: nobody any."""
        return min((number for number, held in self._holders.items() if held), default=None)

    def remove_before(self, sequence: int) -> list[int]:
        """Forgets the segments older than `sequence`, which have gone; returns them in order."""
        gone = sorted(number for number in self._holders if number < sequence)
        for number in gone:
            for holder in self._holders.pop(number):
                self._needed[holder].remove(number)
        return gone

    def hold(self, sequence: int, log_id: bytes) -> None:
        """A record of the log stands in the segment; no kind that changes what is needed before.

        For the many records of one log in a segment, once is enough.
        """
        needed = self._needed.get(log_id)
        if needed is None or (needed and needed[-1] == sequence):
            return
        held = self._holders.setdefault(sequence, set())
        if log_id not in held:
            held.add(log_id)
            insort(needed, sequence)

    def note(
        self, sequence: int, type_code: int, log_id: bytes, payload: bytes | memoryview
    ) -> None:
        """A record was written or read; `payload` is looked into for OPEN, PLACE, PUBLISH,
        REVOKE and SESSION.
        """
        if sequence not in self._holders:
            self._holders[sequence] = set()
        if type_code == _PUBLISH:
            self.hold(sequence, log_id)
            self._inherit(prefix_key(_published_id(payload)), (log_id,), is_anew=True)
        elif type_code == _PLACE and (prefix_id := _placed_id(payload)):
            self.hold(sequence, prefix_key(prefix_id))
        elif type_code == _REVOKE:
            self.release(prefix_key(_revoked_id(payload)))
        elif type_code == _CLOSE:
            self.release(log_id)
        elif type_code == _SESSION:
            self._note_session(sequence, payload)
        else:
            if type_code in (_OPEN, _SNAPSHOT):
                self._needed.setdefault(log_id, [])
            self.hold(sequence, log_id)
            if type_code == _SNAPSHOT:
                self.release(log_id, before=sequence)
            elif type_code == _OPEN:
                self._inherit(log_id, bases_of(payload))

    def _note_session(self, sequence: int, payload: bytes | memoryview) -> None:
        """A session needs its last record only, and none once it is deleted."""
        session_id, is_deleted = _session_of(payload)
        key = session_key(session_id)
        self.release(key)
        if not is_deleted:
            self._needed[key] = []
            self.hold(sequence, key)

    def release(self, holder: bytes, *, before: int | None = None) -> None:
        """A log or prefix needs no segment any more, or none older than `before`."""
        needed = self._needed.get(holder)
        if needed is None:
            return
        stays = len(needed) if before is None else bisect_left(needed, before)
        for number in needed[:stays]:
            self._holders[number].discard(holder)
        if before is None:
            del self._needed[holder]
        else:
            del needed[:stays]

    def _inherit(self, holder: bytes, bases: Iterable[bytes], *, is_anew: bool = False) -> None:
        """The holder needs, besides, what its bases need now."""
        needed = {number for base in bases for number in self._needed.get(base, ())}
        if is_anew:
            self.release(holder)
        elif needed:
            needed.update(self._needed.get(holder, ()))
        else:
            return
        for number in needed:
            self._holders[number].add(holder)
        self._needed[holder] = sorted(needed)


def bases_of(payload: bytes | memoryview) -> Iterable[bytes]:
    """The logs whose records an OPEN leans on; bytes that cannot be read lean on none."""
    if len(payload) < _OPEN_HEAD.size:
        return ()
    kind, base_bytes, _, _, _, parent = _OPEN_HEAD.unpack_from(payload, 0)
    if kind == _BASE_PARENT:
        return (parent,)
    if kind != _BASE_MANIFEST or len(payload) < _OPEN_HEAD.size + _IDENTITY_BYTES:
        return ()
    sizes = _IDENTITY_SIZES.unpack_from(payload, _OPEN_HEAD.size + _IDENTITY_SIZES_AT)
    start = _OPEN_HEAD.size + _IDENTITY_BYTES + sum(sizes)
    try:
        segments = decode_segments(bytes(payload[start : start + base_bytes]))
    except ServiceError:
        return ()
    return {segment.log_id for segment in segments}


def _published_id(payload: bytes | memoryview) -> str:
    size = 0
    if len(payload) >= _PUBLISH_BYTES:
        (size,) = _PUBLISH_ID_SIZE.unpack_from(payload, _PUBLISH_ID_SIZE_AT)
    return bytes(payload[_PUBLISH_BYTES : _PUBLISH_BYTES + size]).decode(errors="replace")


def _placed_id(payload: bytes | memoryview) -> str:
    """The prefix whose places a PLACE tells; empty: the log's own."""
    if len(payload) < _PLACE_HEAD.size:
        return ""
    size, start = _PLACE_HEAD.unpack_from(payload, 0)[-1], _PLACE_HEAD.size
    return bytes(payload[start : start + size]).decode(errors="replace")


def _session_of(payload: bytes | memoryview) -> tuple[str, bool]:
    """(Session id, whether it was deleted)."""
    if len(payload) < SESSION_HEAD_BYTES:
        return "", True
    (flags,) = _U16.unpack_from(payload, SESSION_FLAGS_AT)
    (size,) = _U16.unpack_from(payload, SESSION_ID_AT)
    start = SESSION_HEAD_BYTES
    text = bytes(payload[start : start + size]).decode(errors="replace")
    return text, bool(flags & IS_DELETED)


def _revoked_id(payload: bytes | memoryview) -> str:
    if len(payload) < _REVOKE_HEAD.size:
        return ""
    _, size, _, _ = _REVOKE_HEAD.unpack_from(payload, 0)
    start = _REVOKE_HEAD.size
    return bytes(payload[start : start + size]).decode(errors="replace")
