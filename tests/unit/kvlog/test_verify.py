"""`baton kv verify`: says what is there and what a start would do, and touches nothing."""

from __future__ import annotations

import fcntl
import json
import os
import random
from pathlib import Path

import pytest

from services.kvstore.log.format import RecordType
from services.kvstore.log.reader import read_directory, scan_directory
from services.kvstore.log.segments import segment_paths
from services.kvstore.verify import LOCK_FILE, Exit, is_in_use, main
from tests.unit.kvlog.story import Story, write_records
from tests.unit.kvlog.test_damage import Told, poke, record_place


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Names, bytes and times of everything in a directory."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def run(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit code and text; the directory must be as before."""
    before = snapshot(directory)
    code = main([str(directory), *flags])
    assert snapshot(directory) == before
    return code, capsys.readouterr().out


def test_a_clean_directory_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Segments, records by type and logs are listed."""
    story = Told(tmp_path, 1)
    code, text = run(tmp_path, capsys)
    assert code == Exit.FINE
    assert f"newest LSN {story.newest_lsn}" in text
    for path in segment_paths(tmp_path):
        assert path.name in text
    code, text = run(tmp_path, capsys, "--json")
    data = json.loads(text)
    alive = story.at(story.newest_lsn).logs
    assert (code, data["state"]) == (Exit.FINE, "fine")
    assert data["logs"]["alive"] == len(alive)
    assert data["logs"]["tokens"] == sum(log.position for log in alive.values())
    assert data["records"]["OPEN"] > 0
    assert data["missing"] == []


def test_a_torn_tail_is_told_from_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a start cuts off is said in bytes, and then it does just that."""
    story = Story(2)
    story.live(40)
    write_records(tmp_path, story.sink.records, random.Random(2), is_ever_flushed=False)
    path, offset, _, _ = record_place(read_directory(tmp_path), RecordType.APPEND, -1)
    poke(path, offset + 70, b"\xff")
    code, text = run(tmp_path, capsys)
    assert code == Exit.TORN
    assert "torn tail" in text
    assert "does not match its checksum" in text
    assert f"cut to {offset} bytes" in text
    assert scan_directory(tmp_path).torn_bytes
    assert path.stat().st_size == offset
    assert run(tmp_path, capsys)[0] == Exit.FINE


def test_damage_names_the_place_the_reason_and_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator learns what is lost, and whose it was."""
    Told(tmp_path, 3)
    path, offset, log_id, _ = record_place(read_directory(tmp_path), RecordType.SEAL, -1)
    poke(path, offset + 64, b"\xee\xee")
    code, text = run(tmp_path, capsys)
    assert code == Exit.DAMAGED
    assert f"{path.name} byte {offset}" in text
    assert log_id.hex() in text
    assert "give 1 log(s) up" in text
    code, text = run(tmp_path, capsys, "--json")
    (hole,) = json.loads(text)["missing"]
    assert (hole["segment"], hole["offset"], hole["log_id"]) == (path.name, offset, log_id.hex())
    assert json.loads(text)["logs"]["damaged"] == [log_id.hex()]


def test_what_cannot_be_read_is_one_line_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No directory, or a file."""
    assert main([str(tmp_path / "none")]) == Exit.UNREADABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--log-dir" in captured.err


def test_a_running_kvstore_is_named_and_its_growing_end_is_not_torn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is looked up, not taken: a kvstore that starts meanwhile is not refused."""
    story = Story(4)
    story.live(30)
    write_records(tmp_path, story.sink.records, random.Random(4), is_ever_flushed=False)
    path, offset, _, _ = record_place(read_directory(tmp_path), RecordType.APPEND, -1)
    poke(path, offset + 70, b"\xff")
    assert is_in_use(tmp_path) is False
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    assert is_in_use(tmp_path) is False
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert is_in_use(tmp_path) is True
    code, text = run(tmp_path, capsys)
    assert "a running kvstore writes here" in text
    assert code == Exit.FINE
    os.close(descriptor)
    assert run(tmp_path, capsys)[0] == Exit.TORN
    assert is_in_use(tmp_path, locks=tmp_path / "none") is None
