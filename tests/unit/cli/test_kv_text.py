"""How `baton kv` writes sizes, times, trees and refusals, without a kvstore."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from baton.api.kvstore.v1 import operators_pb2
from baton.cli import kv_store
from baton.cli.checks import Status
from baton.cli.console import CommandFailed, ExitCode
from baton.cli.kv_blob_file import written_whole
from baton.cli.kv_doctor import check_scrub, judge_scrub
from baton.cli.kv_files import chosen
from baton.cli.kv_look import stems
from baton.cli.kv_store import Store as KvStore
from baton.cli.kv_store import Target, failed, reach
from baton.cli.kv_text import iso, size, time_span
from baton.errors import Reason, ServiceError
from baton.launcher.plan import kvstore_port_file
from baton.process_files import write_port_file


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 42, "20.0 TiB")],
)
def test_sizes_are_in_binary_units(count: int, text: str) -> None:
    """As memory is."""
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (190_000, "2 d 4 h"),
    ],
)
def test_times_have_at_most_two_units(seconds: float, text: str) -> None:
    """What people need to decide whether to wait."""
    assert time_span(seconds) == text


def test_moments_for_programs_are_utc() -> None:
    """Whatever the time zone here."""
    assert iso(Timestamp(seconds=86_400, nanos=500_000_000)) == "1970-01-02T00:00:00.500Z"


def test_trees_are_joined_by_lines() -> None:
    """Two trees, one of them three deep."""
    assert stems([0, 1, 2, 2, 1, 0, 1]) == ["", "├─ ", "│  ├─ ", "│  └─ ", "└─ ", "", "└─ "]
    assert stems([]) == []


@pytest.mark.parametrize(
    ("reason", "field", "code", "words"),
    [
        (Reason.WORKER_LOST, None, ExitCode.UNREACHABLE, "no kvstore answers at h:1"),
        (Reason.DEADLINE_EXCEEDED, None, ExitCode.UNREACHABLE, "no kvstore answers at h:1"),
        (Reason.UNAUTHENTICATED, "capability", ExitCode.FAILED, "another key"),
        (Reason.UNSUPPORTED, None, ExitCode.FAILED, "is no kvstore, or an older one"),
        (Reason.QUEUE_FULL, None, ExitCode.FAILED, "as it was said"),
    ],
)
def test_what_a_call_raises_becomes_one_line(
    reason: Reason, field: str | None, code: ExitCode, words: str
) -> None:
    """With what can be done about it."""
    store = KvStore(Target(name="n", address="h:1"), bytes(32))
    line = failed(ServiceError(reason, "as it was said", field=field), store)
    assert words in line.one_line()
    assert line.exit_code is code


def test_an_import_into_a_cluster_of_several_kvstores_names_one() -> None:
    """It is nobody's choice but the operator's."""
    stores = [KvStore(Target(name=f"node-{n}", address=f"h:{n}"), bytes(32)) for n in (0, 1)]
    assert chosen(stores[:1], None) is stores[0]
    assert chosen(stores, "node-1") is stores[1]
    with pytest.raises(CommandFailed, match="has 2 kvstores") as refused:
        chosen(stores, None)
    assert "node-0, node-1" in refused.value.one_line()
    with pytest.raises(CommandFailed, match="no kvstore is called node-7"):
        chosen(stores, "node-7")


def test_kvstores_of_a_run_directory_are_found_by_their_port_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their nodes; the key is the run directory's."""
    monkeypatch.setattr(kv_store, "running_pid", lambda _path: 1)
    with pytest.raises(CommandFailed, match="is ready yet"):
        reach(tmp_path, None, None)
    for node in (10, 2, 0):
        write_port_file(kvstore_port_file(tmp_path, node), f"127.0.0.1:{7000 + node}")
    (tmp_path / "cluster.key").write_text("ab" * 32)
    found = reach(tmp_path, None, None)
    assert [target.name for target in found.targets] == ["node-0", "node-2", "node-10"]
    assert found.targets[1].address == "127.0.0.1:7002"
    assert found.key == bytes.fromhex("ab" * 32)


def test_a_run_directory_without_a_cluster_is_said(tmp_path: Path) -> None:
    """And an address that is none, before anybody is asked."""
    with pytest.raises(CommandFailed, match="no cluster runs in"):
        reach(tmp_path, None, None)
    with pytest.raises(CommandFailed, match="is no address"):
        reach(None, "7070", None)
    assert check_scrub(tmp_path) == []


def breaks_off(path: Path, *, may_replace: bool) -> None:
    """A write that fails half way."""
    with written_whole(path, may_replace=may_replace) as file:
        file.write(b"half")
        raise RuntimeError


def is_overtaken(path: Path) -> None:
    """Another program's file comes meanwhile."""
    with written_whole(path, may_replace=False) as file:
        path.write_bytes(b"theirs")
        file.write(b"ours")


def test_a_file_is_there_in_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failure half way leaves nothing, and what was there."""
    path = tmp_path / "file"
    with pytest.raises(RuntimeError):
        breaks_off(path, may_replace=False)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError):
        breaks_off(path, may_replace=True)
    assert path.read_bytes() == b"old"
    with pytest.raises(CommandFailed, match="is there already"):
        is_overtaken(tmp_path / "late")
    assert (tmp_path / "late").read_bytes() == b"theirs"


def report(**fields: int) -> operators_pb2.ReportScrubResponse:
    """What a kvstore says of its scrubbing."""
    tier = operators_pb2.TierScrub(tier="host", checked_pages=12, **fields)
    return operators_pb2.ReportScrubResponse(period=Duration(seconds=3600), tiers=[tier])


def test_doctor_says_how_often_it_is_scrubbed_and_what_was_found() -> None:
    """Damage is a warning with a remedy, and so is a scrub that is off."""
    fine = judge_scrub("scrub node-0", report())
    assert (fine.status, fine.remedy) == (Status.OK, "")
    assert "every 1 h" in fine.detail
    assert "12 pages checked" in fine.detail
    damaged = judge_scrub("scrub node-0", report(damaged_pages=3))
    assert damaged.status is Status.WARN
    assert damaged.detail.startswith("3 damaged pages")
    assert "memory" in damaged.remedy
    off = judge_scrub("scrub node-0", operators_pb2.ReportScrubResponse())
    assert off.status is Status.WARN
    assert "--scrub-period-s" in off.remedy
