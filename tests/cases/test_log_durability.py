"""Log and file durability: what stands on disk after a crash is used, mended or thrown away, and
never in the way.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from services.kvstore.log.files import SUFFIX
from tests.cases.replay import CAPITAL, CAPITAL_ANSWER, CHAT, Replay, _flag, chat

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

STORE: Final = "kvstore-0"
RECORD_ALIGN: Final = 64
SEGMENT_BYTES: Final = 64 << 20


def log_files(drill: Replay) -> list[Path]:
    """The store's segments, the newest last."""
    directory = Path(_flag(drill.cluster.pid(STORE), "--log-dir"))
    return sorted(directory.glob(f"*{SUFFIX}"))


@contextmanager
def killed(drill: Replay) -> Iterator[None]:
    """The store stands still for the block, dies, and its successor serves."""
    old = drill.kill(STORE, signal.SIGSTOP)
    try:
        yield
    finally:
        drill.kill(STORE)
        drill.restarted(STORE, old)
        drill.is_whole(60)


def tear(path: Path) -> None:
    """Garbage behind the last record: what a write that was cut leaves."""
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    end += -end % RECORD_ALIGN
    with path.open("r+b") as file:
        file.seek(end)
        file.write(b"\x01\x02\x03")


def on_disk(drill: Replay) -> int:
    """Bytes that the log really takes."""
    return sum(path.stat().st_blocks * 512 for path in log_files(drill))


def test_c56_records_behind_a_torn_tail_outlive_the_next_crash(drill: Replay) -> None:
    """Durability: garbage at the end, new answers, another crash; the new answers are there.

    cqlite#1390, amelie#17: new records went behind the garbage and the next recovery dropped them.
    """
    second = chat("second " + "word " * 40, max_tokens=20)
    drill.call(CHAT, chat("first " + "word " * 40, max_tokens=20))
    with killed(drill):
        tear(log_files(drill)[-1])
    answered = drill.call(CHAT, second)
    with killed(drill):
        pass
    again = drill.call(CHAT, second)
    assert again.cached_tokens > 0
    assert again.text == answered.text


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_remove, _empty])
def test_c58_a_missing_or_empty_log_file_costs_kv_and_no_answer(
    drill: Replay, harm: Callable[[Path], None]
) -> None:
    """Durability: every file of the log is gone; the store comes back, the answer is the same.

    LMCache#1313, LMCache#2420, LMCache#1981: the exception of a missing file ended the engine.
    """
    body = chat("gone " + "word " * 60, max_tokens=8)
    want = drill.call(CHAT, body).text
    with killed(drill):
        for path in log_files(drill):
            harm(path)
    assert drill.call(CHAT, body).text == want
    assert drill.call(CHAT, chat(CAPITAL, max_tokens=16)).text == CAPITAL_ANSWER


def test_c60_after_a_restart_the_log_is_used_and_does_not_grow(drill: Replay) -> None:
    """Durability: the index is rebuilt from the log, and old files are not kept beside new ones.

    LMCache#562, LMCache#2273: every restart recomputed everything and kept all files.
    """
    body = chat("persist " + "word " * 60, max_tokens=4)
    drill.call(CHAT, body)
    with killed(drill):
        pass
    before = on_disk(drill)
    for _ in range(3):
        with killed(drill):
            pass
        assert drill.call(CHAT, body).cached_tokens > 0
    # Each start after a crash begins one segment and cuts the older ones to what is in them; a
    # spare may have been made meanwhile.
    assert on_disk(drill) <= before + SEGMENT_BYTES, (before, on_disk(drill))
