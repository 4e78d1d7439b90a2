"""Damage never makes a wrong token: what cannot be told is given up, the rest comes back whole."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import StartupError
from services.kvstore.log.format import SEGMENT_HEADER_BYTES, RecordType
from services.kvstore.log.reader import LogScan, read_directory, scan_directory
from services.kvstore.log.recovery import Recovered, recover, recover_records
from services.kvstore.log.segment_scan import BROKEN_SUFFIX
from services.kvstore.log.segments import segment_paths
from tests.unit.kvlog.story import ARENA, Story, write_records
from tests.unit.kvlog.test_recovery import facts

SECTOR = 512


class Told:
    """A story whose every record is on disk for certain, and says so."""

    def __init__(
        self, directory: Path, seed: int, *, steps: int = 60, segment_bytes: int = 1 << 14
    ) -> None:
        story = Story(seed)
        story.live(steps)
        writer = write_records(
            directory, story.sink.records, random.Random(seed), segment_bytes=segment_bytes
        )
        writer.close(read_directory(directory).newest_lsn + 1)
        scan = read_directory(directory)
        self.newest_lsn = scan.newest_lsn
        self._items = [item for segment in scan.segments for item in segment.records]

    def at(self, lsn: int) -> Recovered:
        """What was true when the record of this LSN was the newest."""
        return recover_records((item for item in self._items if item.header.lsn <= lsn), ARENA)

    def check(self, scan: LogScan, recovered: Recovered) -> None:
        """Every log that comes back is as it was; none does that was gone; nothing is forgotten.

        Where the newest end is gone and nothing states that it was on disk, this is a prefix.
        """
        truth = self.at(scan.newest_lsn)
        for log_id, back in recovered.logs.items():
            assert log_id in truth.logs, "a log came back that was gone"
            assert facts(back) == facts(truth.logs[log_id])
        assert {prefix.prefix_id for prefix in recovered.prefixes} <= {
            prefix.prefix_id for prefix in truth.prefixes
        }, "what was withdrawn is offered again"
        lost = set(truth.logs) - set(recovered.logs)
        assert not lost or scan.holes, "a log was lost without a word"
        assert not scan.holes or lost <= recovered.damaged or may_be_unnamed(scan)


def may_be_unnamed(scan: LogScan) -> bool:
    """Whether all records of a log may be among what is missing."""
    return any(hole.log_id is None for hole in scan.holes)


def flip_bits(data: bytearray, rng: random.Random) -> None:
    """One to four single bits, anywhere."""
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(5)


def zero_sector(data: bytearray, rng: random.Random) -> None:
    """A sector that reads as zeros."""
    start = rng.randrange(len(data)) // SECTOR * SECTOR
    end = min(start + SECTOR, len(data))
    data[start:end] = bytes(end - start)


def misdirect(data: bytearray, rng: random.Random) -> None:
    """A sector, or some lines, that stand where others were written."""
    size = rng.choice([64, 128, SECTOR])
    source, target = (rng.randrange(max(len(data) - size, 1)) // 64 * 64 for _ in range(2))
    data[target : target + size] = data[source : source + size]


def lose_end(data: bytearray, rng: random.Random) -> None:
    """The file became shorter."""
    del data[rng.randrange(len(data)) :]


def cut_out(data: bytearray, rng: random.Random) -> None:
    """Lines in the middle are gone, what is behind moved up."""
    start = rng.randrange(len(data)) // 64 * 64
    del data[start : start + 64 * rng.randrange(1, 6)]


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    flip_bits,
    zero_sector,
    misdirect,
    lose_end,
    cut_out,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes_never_come_back_as_another_log(
    damage: Callable[[bytearray, random.Random], None], seed: int, tmp_path: Path
) -> None:
    """Whatever happened to bytes on disk: the same tokens, or the log is given up (W2, W6)."""
    story = Told(tmp_path, seed, steps=50)
    paths = segment_paths(tmp_path)
    whole = {path: path.read_bytes() for path in paths}
    rng = random.Random(seed)
    for _ in range(6):
        for path, content in whole.items():
            path.write_bytes(content)
        for _ in range(rng.randrange(1, 3)):
            path = rng.choice(paths)
            data = bytearray(path.read_bytes() or b"\0")
            damage(data, rng)
            path.write_bytes(data)
        scan = read_directory(tmp_path)
        story.check(scan, recover(scan, ARENA))


@pytest.mark.parametrize("seed", range(4))
def test_repair_is_done_once_and_says_the_same_again(seed: int, tmp_path: Path) -> None:
    """A start that is cut short, or comes again, finds what the first one found."""
    story = Told(tmp_path, seed)
    rng = random.Random(seed)
    path = rng.choice(segment_paths(tmp_path))
    data = bytearray(path.read_bytes())
    flip_bits(data, rng)
    path.write_bytes(data)
    first = recover(scan_directory(tmp_path), ARENA)
    names = sorted(os.listdir(tmp_path))
    scan = scan_directory(tmp_path)
    second = recover(scan, ARENA)
    assert sorted(os.listdir(tmp_path)) == names
    assert first.logs == second.logs
    assert first.damaged == second.damaged
    copy = path.with_name(path.name + BROKEN_SUFFIX)
    assert copy.exists() == bool(scan.holes)
    assert not scan.holes or copy.read_bytes() == bytes(data)
    story.check(scan, second)


def record_place(scan: LogScan, kind: RecordType, nth: int = 0) -> tuple[Path, int, bytes, int]:
    """File, offset, log id and bytes of a record of a type."""
    found = [
        (segment.path, item.offset, item.header.log_id, item.end_offset - item.offset)
        for segment in scan.segments
        for item in segment.records
        if item.header.type_code == kind
    ]
    return found[nth]


def poke(path: Path, offset: int, value: bytes) -> None:
    """Overwrites bytes."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)


def test_a_damaged_body_costs_its_own_log_only(tmp_path: Path) -> None:
    """Its header says whose it was: the other logs lost nothing."""
    story = Told(tmp_path, 3)
    path, offset, log_id, _ = record_place(read_directory(tmp_path), RecordType.SEAL, -1)
    poke(path, offset + 64, b"\xee\xee\xee")
    scan = read_directory(tmp_path)
    (hole,) = scan.holes
    assert (hole.log_id, hole.type_code, hole.offset) == (log_id, RecordType.SEAL, offset)
    recovered = recover(scan, ARENA)
    assert set(recovered.logs) == set(story.at(scan.newest_lsn).logs) - {log_id}
    story.check(scan, recovered)


def test_a_later_record_that_states_where_its_log_stood_clears_the_doubt(tmp_path: Path) -> None:
    """A lost record of unknown log costs the logs that nothing vouches for, and no others."""
    story = Told(tmp_path, 5, steps=80)
    path, offset, _, _ = record_place(read_directory(tmp_path), RecordType.APPEND, 3)
    poke(path, offset + 8, b"\xff\xff")
    scan = read_directory(tmp_path)
    assert [hole.log_id for hole in scan.holes] == [None]
    recovered = recover(scan, ARENA)
    assert recovered.logs, "every log was given up"
    story.check(scan, recovered)


@pytest.mark.parametrize("bit", range(0, 8 * SEGMENT_HEADER_BYTES, 41))
def test_a_segments_own_header_damaged_loses_nothing(bit: int, tmp_path: Path) -> None:
    """The records behind it count on: they say themselves that none is missing."""
    story = Told(tmp_path, 4)
    path = segment_paths(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    scan = scan_directory(tmp_path)
    recovered = recover(scan, ARENA)
    assert scan.newest_lsn == story.newest_lsn
    assert recovered.logs == story.at(scan.newest_lsn).logs
    assert path.with_name(path.name + BROKEN_SUFFIX).read_bytes() == bytes(data)


def test_a_file_missing_in_the_middle_is_damage(tmp_path: Path) -> None:
    """And no reason not to start."""
    story = Told(tmp_path, 6, steps=80, segment_bytes=1 << 13)
    paths = segment_paths(tmp_path)
    assert len(paths) > 2
    paths[1].unlink()
    scan = scan_directory(tmp_path)
    assert scan.holes
    story.check(scan, recover(scan, ARENA))


def as_directory(path: Path) -> None:
    """A directory under the segment's name."""
    path.unlink()
    path.mkdir()


def as_dangling_link(path: Path) -> None:
    """A link to nothing."""
    path.unlink()
    path.symlink_to("nowhere")


def as_pipe(path: Path) -> None:
    """A named pipe, which a plain open would wait on for ever."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("become", [as_directory, as_dangling_link, as_pipe])
@pytest.mark.parametrize("which", [1, -1])
def test_what_is_no_file_is_damage_and_stays(
    become: Callable[[Path], None], which: int, tmp_path: Path
) -> None:
    """The store starts, gives up what may have been in it, and leaves the thing to its owner."""
    story = Told(tmp_path, 6, steps=80, segment_bytes=1 << 13)
    path = segment_paths(tmp_path)[which]
    before = read_directory(tmp_path)
    become(path)
    scan = scan_directory(tmp_path)
    assert scan.holes
    assert os.path.lexists(path)
    if which == -1:
        assert scan.newest_lsn > before.newest_lsn, "its LSNs would be used again"
    assert scan.next_sequence == before.next_sequence
    story.check(scan, recover(scan, ARENA))


def test_a_sector_that_cannot_be_read_is_damage_never_a_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off that the system only refused to show."""
    story = Told(tmp_path, 8, segment_bytes=1 << 20)
    (path,) = segment_paths(tmp_path)
    end = read_directory(tmp_path).segments[0].end_offset
    bad = end - 4096
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    size = path.stat().st_size
    scan = scan_directory(tmp_path)
    assert scan.holes
    assert path.stat().st_size == size
    story.check(scan, recover(scan, ARENA))


def test_a_start_gives_back_what_an_unclean_stop_left_preallocated(tmp_path: Path) -> None:
    """Only zeros are cut: the segment ends with its last record and means the same."""
    story = Told(tmp_path, 12, segment_bytes=1 << 20)
    path = segment_paths(tmp_path)[-1]
    end = read_directory(tmp_path).segments[-1].end_offset
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    scan = scan_directory(tmp_path)
    assert path.stat().st_size == end
    assert not scan.holes
    assert not scan.torn_bytes
    story.check(read_directory(tmp_path), recover(read_directory(tmp_path), ARENA))


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    """Another store's segment, a copy under another number, strange names: none is read."""
    story = Told(tmp_path, 9)
    paths = segment_paths(tmp_path)
    foreign = bytearray(paths[0].read_bytes())
    other = tmp_path / "other"
    other.mkdir()
    strange = Story(11)
    strange.live(20)
    write_records(other, strange.sink.records, random.Random(1), store_id=b"z" * 16)
    guests = {
        f"{77:016x}.blog": segment_paths(other)[0].read_bytes(),
        f"{78:016x}.blog": bytes(foreign),
        "notes.txt": b"hello",
        "zz.blog": b"hello",
        "0000000000000001.blog.old": b"hello",
    }
    for name, content in guests.items():
        (tmp_path / name).write_bytes(content)
    scan = scan_directory(tmp_path)
    assert not scan.holes
    recovered = recover(scan, ARENA)
    assert recovered.logs == story.at(scan.newest_lsn).logs
    assert all((tmp_path / name).read_bytes() == content for name, content in guests.items())
    assert scan.next_sequence > 78


def test_an_unused_tail_of_zeros_and_an_empty_segment_are_fine(tmp_path: Path) -> None:
    """Preallocated, never written; a file that was begun and has no header goes."""
    story = Story(12)
    story.live(30)
    write_records(tmp_path, story.sink.records, random.Random(1), segment_bytes=1 << 20)
    empty, zeros = (tmp_path / f"{number:016x}.blog" for number in (5, 6))
    empty.touch()
    zeros.write_bytes(bytes(4096))
    scan = scan_directory(tmp_path)
    assert not scan.holes
    assert not empty.exists()
    assert not zeros.exists()
    assert set(recover(scan).logs) == set(story.store.core.logs)


def test_a_torn_tail_that_goes_over_segments_is_cut_and_never_damage(tmp_path: Path) -> None:
    """A segment may be begun before the one before it is flushed: power takes both ends."""
    story = Story(13)
    story.live(80)
    rng = random.Random(13)
    write_records(tmp_path, story.sink.records, rng, segment_bytes=1 << 13, is_ever_flushed=False)
    paths = segment_paths(tmp_path)
    assert len(paths) > 2
    data = bytearray(paths[1].read_bytes())
    data[2048:2560] = bytes(512)
    paths[1].write_bytes(data)
    before = scan_directory(tmp_path)
    assert not before.holes
    assert before.torn_bytes
    left = recover(before, ARENA)
    writer = write_records(
        tmp_path,
        story.sink.records[-3:],
        rng,
        first_lsn=before.newest_lsn + 1,
        first_sequence=before.next_sequence,
        durable_lsn=before.newest_lsn,
    )
    writer.close(before.newest_lsn + 20)
    after = scan_directory(tmp_path)
    assert not after.holes
    assert set(recover(after, ARENA).logs) <= set(left.logs)


def test_nothing_is_allocated_for_a_file_that_is_too_large(tmp_path: Path) -> None:
    """A sparse terabyte under a segment's name is not read into memory."""
    Told(tmp_path, 3)
    path = tmp_path / f"{50:016x}.blog"
    path.touch()
    os.truncate(path, 1 << 40)
    scan = scan_directory(tmp_path)
    assert scan.holes
    assert path.stat().st_size == 1 << 40


def test_an_empty_directory_is_a_new_store(tmp_path: Path) -> None:
    """Nothing is missing where nothing was."""
    scan = scan_directory(tmp_path)
    assert (scan.newest_lsn, scan.holes, scan.store_id, scan.next_sequence) == (0, [], None, 1)
    assert not recover(scan).logs


@pytest.mark.parametrize("name", ["fsync", "ftruncate"])
def test_a_directory_that_cannot_be_repaired_stops_the_start_with_a_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read but cannot be made durable must not be promised again."""
    story = Story(14)
    story.live(40)
    write_records(tmp_path, story.sink.records, random.Random(14), is_ever_flushed=False)
    path, offset, _, _ = record_place(read_directory(tmp_path), RecordType.APPEND, -1)
    poke(path, offset + 70, b"\xff")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        with pytest.raises(StartupError, match="cannot be taken over"):
            scan_directory(tmp_path)
    assert not scan_directory(tmp_path).holes
    assert path.stat().st_size == offset
