"""The commands as a user meets them: start, stop, and what goes wrong at the start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.testing.cluster import RunningCluster, free_port, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def baton(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the `baton` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "baton.cli.main", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    )


def test_down_stops_the_cluster_and_leaves_nothing(tmp_path: Path) -> None:
    """`baton down` ends `baton up`: exit code 0, no process and no arena left."""
    with running_cluster(tmp_path) as cluster:
        pids = [cluster.pid(f"{name}-0") for name in ("kvstore", "prefill", "decode", "merger")]
        done = baton("down", "--run-dir", str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert cluster.process.wait(30) == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """Refused before anything starts."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        done = baton("up", "--http-port", str(port), "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


def test_an_arena_that_does_not_fit_is_refused_with_a_hint(tmp_path: Path) -> None:
    """One report: the cause, the flag, the log."""
    done = baton(
        "up",
        *("--http-port", str(free_port()), "--grpc-port", str(free_port())),
        *("--run-dir", str(tmp_path)),
        *("--arena-bytes", str(1 << 50)),
    )
    assert done.returncode == 1
    assert "kvstore-0" in done.stderr
    assert "arena" in done.stderr


def test_an_unreadable_model_is_refused(tmp_path: Path) -> None:
    """A damaged GGUF file is named with what is wrong about it."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    done = baton(
        "up",
        *("--http-port", str(free_port()), "--grpc-port", str(free_port())),
        *("--run-dir", str(tmp_path / "run")),
        *("--model", str(broken)),
    )
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr


def test_two_clusters_in_one_directory_are_refused(
    cluster_f32: RunningCluster,
) -> None:
    """The second start says who holds the directory."""
    done = baton(
        "up",
        *("--http-port", str(free_port()), "--grpc-port", str(free_port())),
        *("--run-dir", str(cluster_f32.run_dir)),
    )
    assert done.returncode == 1
    assert "already runs" in done.stderr


def test_ctrl_c_during_the_start_stops_cleanly(tmp_path: Path) -> None:
    """SIGINT right after the start leaves no child behind."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "baton.cli.main", "up"),
            *("--http-port", str(free_port()), "--grpc-port", str(free_port())),
            *("--run-dir", str(tmp_path)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    # The merger is the first to be ready: its line says that children run.
    first = process.stdout.readline()
    assert "ready" in first, first
    pids = [int(path.read_text()) for path in tmp_path.glob("*-0.pid")]
    assert pids
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_unknown_flags_are_refused() -> None:
    """A typo is an error with the usage, not a silent default."""
    done = baton("up", "--http-prot", "9000")
    assert done.returncode == 2
    assert "--http-prot" in done.stderr
