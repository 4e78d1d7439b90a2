"""Port files: there while the service is ready, whole, private."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton.errors import ServiceError, StartupError
from baton.process_files import PortFile, read_port_file, write_private


async def test_a_port_file_is_there_exactly_while_ready(tmp_path: Path) -> None:
    """A script that waits for the file may connect at once."""
    path = tmp_path / "run" / "decode.port"
    file = PortFile(path, "127.0.0.1:7001")
    assert read_port_file(path) is None
    await file.set_ready(True)
    assert path.read_text() == "127.0.0.1:7001\n"
    assert read_port_file(path) == "127.0.0.1:7001"
    await file.set_ready(False)
    assert read_port_file(path) is None
    await file.set_ready(False)


def test_a_file_left_by_an_earlier_process_is_removed_at_once(tmp_path: Path) -> None:
    """Until the new process is ready nobody is sent to the old one's port."""
    path = tmp_path / "decode.port"
    path.write_text("127.0.0.1:1\n")
    PortFile(path, "127.0.0.1:7001")
    assert not path.exists()


def test_private_files_are_replaced_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    """A reader sees the old bytes or the new ones; nobody else reads either."""
    path = tmp_path / "key"
    write_private(path, b"old")
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    """The operator learns which path to change."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=str(tmp_path / "file")):
        write_private(tmp_path / "file" / "x", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StartupError, match="folder"):
        write_private(tmp_path / "folder", b"")
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


@pytest.mark.parametrize("data", [b"", b"nonsense", b"a:b\n", b"\xff:1", b"h:70000\n", b"x" * 600])
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    """Garbage must not become a connection attempt."""
    path = tmp_path / "p"
    path.write_bytes(data)
    with pytest.raises(ServiceError) as refused:
        read_port_file(path)
    assert refused.value.field == "port_file"
