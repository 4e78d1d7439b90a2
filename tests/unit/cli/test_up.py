"""`baton up` and `baton down`: what is refused before a process starts, and how it is said."""

from __future__ import annotations

from pathlib import Path

from baton.launcher.rundir import RunDir
from baton.testing.tiny_models import TinyModel, write_directory
from tests.unit.cli.conftest import Run


def test_one_port_for_both_doors_is_refused(run: Run, tmp_path: Path) -> None:
    """It started four services first and then failed at the gateway."""
    ports = ("--http-port", "18299", "--grpc-port", "18299")
    ran = run("up", *ports, "--run-dir", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "baton: --http-port and --grpc-port are both 18299. give two ports\n"


def test_an_unknown_log_level_is_a_wrong_command_line(run: Run, tmp_path: Path) -> None:
    """A child ended with "the configuration has 1 fault", which named neither flag nor values."""
    ran = run("up", "--log-level", "loud", "--run-dir", str(tmp_path))
    assert ran.code == 2
    assert "--log-level" in ran.err
    assert "'warning'" in ran.err


def test_a_busy_directory_names_both_ways_out(run: Run, tmp_path: Path) -> None:
    """Plain `baton down` would look in the default directory and stop nothing."""
    model = tmp_path / "model.gguf"
    model.touch()
    where = tmp_path / "run dir"
    with RunDir(where):
        ran = run("up", "--model", str(model), "--run-dir", str(where))
    assert ran.code == 1
    assert f"`baton down --run-dir '{where}'`, or give another --run-dir" in ran.err


def test_an_arena_without_room_for_a_conversation_is_refused(run: Run, tmp_path: Path) -> None:
    """It started, and then refused most prompts, naming a field that nobody had sent."""
    model = write_directory(tmp_path / "tiny", TinyModel(layers=8, kv_heads=4, max_context=8192))
    flags = ("--model", str(model), "--arena-bytes", str(1 << 20), "--dtype", "float32")
    ran = run("up", *flags, "--run-dir", str(tmp_path / "run"))
    assert (ran.code, ran.out) == (2, "")
    assert "fewer than 1024: prompts would be refused. give --arena-bytes " in ran.err
    assert not (tmp_path / "run" / "kvstore-0.pid").exists()


def test_down_without_a_cluster_says_where_it_looked(run: Run, tmp_path: Path) -> None:
    """Several clusters may run; the way to the others is named."""
    ran = run("down", "--run-dir", str(tmp_path))
    assert (ran.code, ran.out) == (
        0,
        f"no cluster runs in {tmp_path}; --run-dir names another\n",
    )
