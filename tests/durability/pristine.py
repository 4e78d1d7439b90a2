"""A log as the real writer left it, where each record stands in it, and the verdict on a damaged
copy.

Owns the rules for what a start may say about changed bytes (W2): every change is reported, torn
tail and damage are told apart by the durable LSN that intact FLUSH records state, and nothing wrong
is served. The records' places are read here with a parser of its own, from intact bytes.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from services.kvstore.log.format import HEADER_BYTES, SEGMENT_HEADER_BYTES, RecordType
from services.kvstore.state import AckLevel
from tests.durability.engine import Batch, Found, InlineExecutor, live, start
from tests.durability.simulation import scratch
from tests.durability.workload import GUEST, Script, appends_only

Files = dict[str, bytes]
ALIGNMENT: Final = 64
GUEST_LSN: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One intact record. `durable_lsn` is what it states, if it is a FLUSH."""

    file: str
    offset: int
    end: int
    lsn: int
    type_code: int
    durable_lsn: int | None


def places_in(file: str, data: bytes) -> list[Place]:
    """Every record of an intact segment."""
    places = []
    offset = SEGMENT_HEADER_BYTES
    while offset + HEADER_BYTES <= len(data) and data[offset : offset + 4] == b"BLR1":
        (payload_bytes,) = struct.unpack_from("<I", data, offset + 48)
        type_code = data[offset + 5]
        end = offset + HEADER_BYTES + -(-payload_bytes // ALIGNMENT) * ALIGNMENT
        is_flush = type_code == RecordType.FLUSH
        places.append(
            Place(
                file=file,
                offset=offset,
                end=end,
                lsn=struct.unpack_from("<Q", data, offset + 24)[0],
                type_code=type_code,
                durable_lsn=struct.unpack_from("<Q", data, offset + 64)[0] if is_flush else None,
            )
        )
        offset = end
    return places


class Pristine:
    """An intact log: its files, and what its logs are after each record."""

    def __init__(self, files: Mapping[str, bytes], script: Script) -> None:
        self.files: Files = dict(sorted(files.items()))
        self.states = script.states
        self.places = [
            place for name, data in self.files.items() for place in places_in(name, data)
        ]

    @cached_property
    def record_lsns(self) -> list[int]:
        """LSNs of the script's records, in order."""
        return [place.lsn for place in self.places if place.durable_lsn is None]

    def count_up_to(self, lsn: int) -> int:
        """How many of the script's records have at most this LSN."""
        return sum(other <= lsn for other in self.record_lsns)

    def broken(self, files: Mapping[str, bytes]) -> list[Place]:
        """Records of which not all bytes are where they were."""
        return [
            place
            for place in self.places
            if files.get(place.file, b"")[place.offset : place.end]
            != self.files[place.file][place.offset : place.end]
        ]

    def stated_durable(self, files: Mapping[str, bytes]) -> int:
        """The highest durable LSN that an intact FLUSH in an intact place states."""
        broken = {(place.file, place.offset) for place in self.broken(files)}
        return max(
            (
                place.durable_lsn
                for place in self.places
                if place.durable_lsn is not None and (place.file, place.offset) not in broken
            ),
            default=0,
        )


def write_log(
    path: Path,
    script: Script,
    seed: int,
    segment_bytes: int,
    *,
    is_clean: bool,
    first_lsn: int = 1,
) -> Files:
    """The real writer writes a script, in small groups; returns the files."""
    rng = random.Random(seed)
    batches, rest = [], list(script.steps)
    while rest:
        size = rng.randint(1, 4)
        batches.append(Batch(rest[:size], rng.choice((AckLevel.OS, AckLevel.DISK))))
        del rest[:size]
    failed = asyncio.run(
        live(
            path,
            batches,
            lambda count, level: None,
            executor=InlineExecutor(),
            segment_bytes=segment_bytes,
            is_clean=is_clean,
            first_lsn=first_lsn,
        )
    )
    assert failed is None
    return {item.name: item.read_bytes() for item in path.iterdir()}


def one_segment(target_bytes: int, *, seed: int = 1, kinds: str = "all") -> Pristine:
    """A log in one segment, cut to its size at a clean stop, a little over `target_bytes`."""
    for records in range(4, 1000, 2):
        script = _script(records, seed, kinds)
        with scratch() as path:
            files = write_log(path, script, seed, 1 << 20, is_clean=True)
        (data,) = files.values()
        if len(data) >= target_bytes:
            return Pristine(files, script)
    raise AssertionError("the log does not grow")


def segments(
    count: int, *, seed: int, segment_bytes: int = 2048, is_guest: bool = False
) -> Pristine:
    """A log over at least `count` segments; a guest is another store's: other ids, other LSNs."""
    for records in range(8, 1000, 4):
        script = Script(logs_ever=GUEST if is_guest else 0)
        script.extend(random.Random(seed), records)
        with scratch() as path:
            files = write_log(
                path,
                script,
                seed,
                segment_bytes,
                is_clean=True,
                first_lsn=GUEST_LSN if is_guest else 1,
            )
        if len(files) >= count:
            return Pristine(files, script)
    raise AssertionError("the log does not grow")


def _script(records: int, seed: int, kinds: str) -> Script:
    if kinds == "appends":
        return appends_only(3, records)
    script = Script()
    script.extend(random.Random(seed), records)
    return script


# --- the verdict --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a start said about changed files, and what of it is against the promises."""

    is_damage: bool
    faults: tuple[str, ...]


def judge(pristine: Pristine, files: Mapping[str, bytes], *, has_strays: bool = False) -> Verdict:
    """Starts on changed files and compares what it says with what was written.

    With `has_strays` valid records stand where they do not belong. A FLUSH among them may state
    more than those at their place, so that a torn tail may be called damage: that errs loudly.
    """
    with scratch() as path:
        for name, data in files.items():
            (path / name).write_bytes(data)
        found = start(path)
        left = {item.name: item.read_bytes() for item in path.iterdir()}
    durable = pristine.stated_durable(files)
    faults = [*_undetected(pristine, files, found), *_wrong(pristine, found, durable)]
    faults += _taken_for_torn(pristine, files, found, durable)
    if not has_strays:
        faults += _taken_for_damage(pristine, files, found, durable)
    gone = {place.file for place in pristine.places if place.lsn <= durable} & set(files) - set(
        left
    )
    faults += [f"{name} is gone although it held what was on disk" for name in gone]
    return Verdict(found.is_damage_reported, tuple(faults))


def _undetected(pristine: Pristine, files: Mapping[str, bytes], found: Found) -> list[str]:
    is_reported = found.is_damage_reported or found.has_copies or found.torn_bytes > 0
    if is_reported or dict(files) == pristine.files or _is_shorter_log(pristine, files):
        return []
    return ["undetected: changed bytes and no word about them"]


def _is_shorter_log(pristine: Pristine, files: Mapping[str, bytes]) -> bool:
    """Cut between two of the newest segment's records: that is how the log looked once."""
    newest = max(pristine.files)
    left = files.get(newest, b"")
    ends = {place.end for place in pristine.places if place.file == newest}
    is_start = pristine.files[newest].startswith(left)
    is_alone = {**files, newest: b""} == {**pristine.files, newest: b""}
    return is_alone and is_start and len(left) in {0, SEGMENT_HEADER_BYTES, *ends}


def _first_broken(pristine: Pristine, files: Mapping[str, bytes]) -> int | None:
    return min((place.lsn for place in pristine.broken(files)), default=None)


def _taken_for_torn(
    pristine: Pristine, files: Mapping[str, bytes], found: Found, durable: int
) -> list[str]:
    """Records at or below the durable LSN that are not as written are damage."""
    first = _first_broken(pristine, files)
    if first is None or first > durable or found.is_damage_reported:
        return []
    return [f"record {first} was on disk (durable {durable}) and is taken for a torn tail"]


def _taken_for_damage(
    pristine: Pristine, files: Mapping[str, bytes], found: Found, durable: int
) -> list[str]:
    """Records above the durable LSN are a torn tail. A damaged segment header alone loses no
    record, and a start may say either.
    """
    first = _first_broken(pristine, files)
    has_headers = all(
        files.get(name, b"")[:SEGMENT_HEADER_BYTES] == data[:SEGMENT_HEADER_BYTES]
        for name, data in pristine.files.items()
    )
    if not has_headers or not found.is_damage_reported or (first is not None and first <= durable):
        return []
    return [f"record {first} was never on disk (durable {durable}), taken for damage"]


def _wrong(pristine: Pristine, found: Found, durable: int) -> list[str]:
    """What is served must be what was written: without damage a prefix of everything, else for each
    log a state that it had, and none from before the durable LSN.
    """
    at_least = pristine.count_up_to(durable)
    states = pristine.states[at_least:]
    if not found.is_damage_reported:
        return [] if found.state in states else ["what is served is no prefix of what was written"]
    return [
        f"log {log_id.hex()[-4:]} is served as it never was"
        for log_id, seen in found.state.items()
        if not any(state.get(log_id) == seen for state in states)
    ]
