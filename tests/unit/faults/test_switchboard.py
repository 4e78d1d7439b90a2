"""Fault points acting: pauses, failures, data, counts, and silence while off."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.errors import Reason, ServiceError, StartupError
from baton.faults import Faults, faults
from baton.faults.points import POINTS
from baton.faults.switchboard import EXIT_CODE
from baton.testing.clock import ManualClock

ROOT = Path(__file__).resolve().parents[3]
ON = {"BATON_FAULTS_ENABLED": "1"}


async def turn_of_the_loop() -> None:
    """Every callback that was ready has run."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


def enabled(spec: str = "", **options: object) -> Faults:
    """Faults that may act, with a specification armed."""
    made = Faults(is_enabled=True, **options)
    if spec:
        made.arm(spec)
    return made


# --- the switch ----------------------------------------------------------------------------------
def test_faults_are_off_by_default() -> None:
    """A production process has no fault points, whoever calls arm."""
    off = Faults.from_environment({})
    assert not off.is_enabled
    assert not faults.is_enabled
    with pytest.raises(ServiceError) as refused:
        off.arm("decode.step:fail")
    assert refused.value.reason is Reason.PERMISSION_DENIED
    assert "BATON_FAULTS_ENABLED=1" in refused.value.message


async def test_an_off_point_hands_back_what_it_was_given() -> None:
    """Nothing is counted, copied or looked up on the hot path."""
    off, data, buffer = Faults(), b"abc", bytearray(b"abc")
    await off.reach("decode.step")
    off.reach_blocking("decode.step")
    assert off.shorten("kv.read_chunk", data) is data
    assert off.flipped("kv.read_chunk", data) is data
    off.flip("kv.read_chunk", buffer)
    assert buffer == b"abc"
    assert not off.is_absent("kv.get")
    assert off.hits == {}


@pytest.mark.parametrize("flag", [{}, {"BATON_FAULTS_ENABLED": "0"}, {"BATON_FAULTS_ENABLED": ""}])
def test_a_specification_without_the_flag_stops_the_start(flag: dict[str, str]) -> None:
    """A FAULT left over in an environment must neither act nor be ignored."""
    with pytest.raises(StartupError) as refused:
        Faults.from_environment({"FAULT": "decode.step:fail", **flag})
    assert refused.value.exit_code == 2
    assert "FAULT" in refused.value.message
    assert "BATON_FAULTS_ENABLED" in refused.value.message


def test_an_unknown_flag_value_stops_the_start() -> None:
    """`true` would be read as off by one and as on by another."""
    with pytest.raises(StartupError, match="'true'"):
        Faults.from_environment({"BATON_FAULTS_ENABLED": "true"})


def test_the_flag_alone_arms_nothing() -> None:
    """A drill arms while the process runs; an empty FAULT is what compose passes for unset."""
    on = Faults.from_environment({"FAULT": "", **ON})
    assert on.is_enabled
    assert on.armed == ()


# --- flow ----------------------------------------------------------------------------------------
async def test_fail_raises_at_its_point_only() -> None:
    """Other points go on."""
    made = enabled("decode.step:fail:WORKER_LOST")
    await made.reach("decode.first_token")
    with pytest.raises(ServiceError) as failed:
        await made.reach("decode.step")
    assert failed.value.reason is Reason.WORKER_LOST
    assert made.hits == {"decode.first_token": 1, "decode.step": 1}
    assert made.fired["decode.step"] == 1


async def test_once_fires_once() -> None:
    """The retry must find a healthy system."""
    made = enabled("decode.step:fail:once")
    with pytest.raises(ServiceError):
        await made.reach("decode.step")
    await made.reach("decode.step")
    assert made.armed == ()
    assert made.hits["decode.step"] == 2
    assert made.fired["decode.step"] == 1


async def test_once_fires_once_across_restarts(tmp_path: Path) -> None:
    """A supervisor restarts a killed worker with the same environment."""
    variables = {"FAULT": "decode.step:fail:once", "BATON_FAULTS_FIRED_DIR": str(tmp_path), **ON}
    with pytest.raises(ServiceError):
        await Faults.from_environment(variables).reach("decode.step")
    restarted = Faults.from_environment(variables)
    await restarted.reach("decode.step")
    assert restarted.hits["decode.step"] == 1


async def test_a_pause_lasts_its_seconds() -> None:
    """By the clock it was given."""
    clock = ManualClock()
    made = enabled("decode.step:pause:3", clock=clock)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        paused = group.create_task(made.reach("decode.step"))
        await clock.until_waiting()
        clock.advance(2.9)
        await turn_of_the_loop()
        assert not paused.done()
        clock.advance(0.2)


@pytest.mark.parametrize("let_go", [Faults.release, Faults.disarm])
async def test_a_pause_ends_when_released(let_go: Callable[[Faults, str], object]) -> None:
    """A drill holds work exactly until it has done its harm, without guessing seconds."""
    made = enabled("decode.step:pause:3600")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        paused = group.create_task(made.reach("decode.step"))
        await made.until_reached("decode.step", timeout_s=5)
        let_go(made, "decode.first_token")
        await turn_of_the_loop()
        assert not paused.done()
        let_go(made, "decode.step")
        await paused


async def test_a_pause_in_a_thread_is_released_from_the_loop() -> None:
    """Engines compute in executor threads; so do their fault points."""
    made = enabled("prefill.after_compute:pause:3600")
    async with asyncio.timeout(5):
        thread = asyncio.to_thread(made.reach_blocking, "prefill.after_compute")
        async with asyncio.TaskGroup() as group:
            working = group.create_task(thread)
            await made.until_paused("prefill.after_compute", timeout_s=5)
            assert made.release("prefill.after_compute") == 1
            await working


async def test_a_paused_call_can_be_cancelled() -> None:
    """The pause stands for slow work, and slow work is cancelled like any other."""
    made = enabled("decode.step:pause:3600")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        paused = group.create_task(made.reach("decode.step"))
        await made.until_reached("decode.step", timeout_s=5)
        paused.cancel()
    assert paused.cancelled()
    assert made.release() == 0


async def test_waiting_for_a_point_is_bounded() -> None:
    """A drill whose point is never reached says so."""
    with pytest.raises(TimeoutError):
        await enabled().until_reached("decode.step", timeout_s=0.01)


async def test_exit_ends_the_process_at_once() -> None:
    """No handler, no flush, as a kill."""
    codes: list[int] = []
    made = enabled("decode.step:exit", exit_process=codes.append)
    await made.reach("decode.step")
    made.reach_blocking("decode.step")
    assert codes == [EXIT_CODE, EXIT_CODE]


def test_exit_really_ends_a_process() -> None:
    """In a real one: `finally` does not run and the code tells it from a crash."""
    program = (
        "import asyncio, os\n"
        "from baton.faults import faults\n"
        "faults.start_from(os.environ)\n"
        "try:\n"
        "    asyncio.run(faults.reach('decode.step'))\n"
        "finally:\n"
        "    print('cleaned up')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"FAULT": "decode.step:exit", "PYTHONPATH": str(ROOT), **ON},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert "cleaned up" not in done.stdout


def test_counts_survive_many_threads() -> None:
    """Engine threads and the loop reach points at the same time."""
    made = enabled()
    workers = [
        threading.Thread(
            target=lambda: [*map(made.reach_blocking, ["prefill.after_compute"] * 500)]
        )
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert made.hits == {"prefill.after_compute": 2000}


# --- data ----------------------------------------------------------------------------------------
def test_short_keeps_the_first_bytes() -> None:
    """As a read that ended early; a view stays a view of the same memory."""
    made = enabled("kv.read_chunk:short:2")
    data = memoryview(b"abcd")
    assert made.shorten("kv.read_chunk", b"abcd") == b"ab"
    assert made.shorten("kv.read_chunk", b"a") == b"a"
    cut = made.shorten("kv.read_chunk", data)
    assert isinstance(cut, memoryview)
    assert cut.obj is data.obj


@pytest.mark.parametrize(
    ("spec", "index"),
    [
        ("kv.read_chunk:flip_byte", 2),
        ("kv.read_chunk:flip_byte:0", 0),
        ("kv.read_chunk:flip_byte:5", 1),
    ],
)
def test_flip_inverts_exactly_one_byte(spec: str, index: int) -> None:
    """All its bits, so that no value is left as it was; an offset past the end wraps."""
    made, buffer = enabled(spec), bytearray(4)
    made.flip("kv.read_chunk", buffer)
    assert [place for place, value in enumerate(buffer) if value == 0xFF] == [index]
    assert made.flipped("kv.read_chunk", bytes(4)) == bytes(buffer)
    made.flip("kv.read_chunk", bytearray())


def test_flip_reaches_a_view_of_any_type() -> None:
    """Logits are floats."""
    made = enabled("prefill.logits:flip_byte:0")
    view = memoryview(bytearray(8)).cast("f")
    made.flip("prefill.logits", view)
    assert view.tobytes() == b"\xff" + bytes(7)


def test_absent_hides_what_is_there() -> None:
    """As after an eviction; once means the second look finds it."""
    made = enabled("kv.get:absent:once")
    assert made.is_absent("kv.get")
    assert not made.is_absent("kv.get")


def test_an_action_that_a_point_does_not_offer_is_our_bug() -> None:
    """Else a FAULT could be armed that no call site ever serves."""
    made = enabled()
    with pytest.raises(AssertionError):
        made.shorten("decode.step", b"")
    with pytest.raises(AssertionError):
        made.is_absent("nowhere")


def test_arming_again_replaces_the_same_fault() -> None:
    """A drill changes its mind."""
    made = enabled("decode.step:pause:5,kv.get:absent")
    made.arm("decode.step:pause:1")
    assert {(one.point, one.seconds) for one in made.armed} == {
        ("kv.get", None),
        ("decode.step", 1),
    }


# --- call sites ----------------------------------------------------------------------------------
def points_named(tree: ast.AST) -> Iterator[str]:
    """The first argument of every call of a method that stands at a point."""
    methods = {"reach", "reach_blocking", "shorten", "flip", "flipped", "is_absent"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            first = node.args[0]
            is_ours = owner == "faults" and node.func.attr in methods
            if is_ours and isinstance(first, ast.Constant):
                yield str(first.value)


def test_call_sites_name_points_of_the_table() -> None:
    """A misspelt point would never fire, and only an enabled process would notice."""
    assert list(points_named(ast.parse('self._faults.reach("a.b")\nfaults.arm("c")'))) == ["a.b"]
    files = [path for folder in ("baton", "services") for path in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in points_named(ast.parse(path.read_text(encoding="utf-8")))
        if name not in POINTS
    ]
    assert wrong == []
