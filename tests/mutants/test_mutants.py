"""Planted bugs: tests that pass prove little until they have failed for the right reason.

Each mistake of `planted.py` is made in a copy of the tree, one at a time, and the test named with
it has to fail there. A text that is gone, a test that does not exist, a test that fails without the
mistake: all of these fail here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import pytest

from tests.mutants.planted import MUTANTS, Mutant

ROOT: Final = Path(__file__).parents[2]
COPIED: Final = ("baton", "services", "tests", "docs", "pyproject.toml", "native", "protos")
TREES: Final = 2
TEST_S: Final = 30.0
GRACE_S: Final = 5.0
CAUGHT, SURVIVED = 1, 0
"""Exit codes of pytest: a test failed; all passed. Any other one means that nothing was tested."""


def places(mutant: Mutant) -> int:
    """How often the text that a mutant changes is there."""
    return (ROOT / mutant.file).read_text("utf-8").count(mutant.old)


def test_every_mistake_can_still_be_planted() -> None:
    """Whoever changes a guarded line sees it here, in seconds."""
    gone = [f"{one.name} ({one.file}): {places(one)} places" for one in MUTANTS if places(one) != 1]
    assert not gone, "the old text must stand there once; adapt tests/mutants/planted.py:\n" + (
        "\n".join(gone)
    )
    names = [one.name for one in MUTANTS]
    assert len(set(names)) == len(names) >= 25


def copy_tree(target: Path) -> Path:
    """The parts of the tree that tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


@contextmanager
def planted(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The mistake is in the tree while the block runs."""
    path = tree / mutant.file
    whole = path.read_text("utf-8")
    path.write_text(whole.replace(mutant.old, mutant.new), "utf-8")
    try:
        yield
    finally:
        path.write_text(whole, "utf-8")


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of pytest in a tree, which imports nothing of ours from elsewhere.

    What hangs has failed, and is ended with all it started.
    """
    # Compiled files are told apart by second and size: a planted one must not outlive its text.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    options = ("-q", "-x", "-p", "no:cacheprovider", f"--timeout={timeout_s:.0f}")
    with (tree / "output.txt").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = CAUGHT
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")[-2000:]


@pytest.mark.more
@pytest.mark.timeout(600)
def test_every_planted_mistake_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The named test fails with the mistake, and passes without it."""
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(TREES):
        trees.put(copy_tree(tmp_path / str(number)))

    def outcome(mutant: Mutant) -> tuple[Mutant, int, str]:
        tree = trees.get()
        try:
            with planted(tree, mutant):
                code, text = run_tests(tree, [mutant.test], TEST_S)
        finally:
            trees.put(tree)
        return mutant, code, text

    code, text = run_tests(tmp_path / "0", sorted({one.test for one in MUTANTS}), 10 * TEST_S)
    assert code == SURVIVED, f"the named tests fail without any mistake:\n{text}"
    with ThreadPoolExecutor(TREES) as pool:
        outcomes = list(pool.map(outcome, MUTANTS))
    caught = [mutant for mutant, code, _ in outcomes if code == CAUGHT]
    with capsys.disabled():
        sys.stdout.write(f"\nplanted {len(MUTANTS)}, caught {len(caught)}\n")
    missed = [
        f"{mutant.name}: {mutant.test}: "
        + ("passed" if code == SURVIVED else f"no test ran: {text}")
        for mutant, code, text in outcomes
        if code != CAUGHT
    ]
    assert not missed, "\n".join(missed)
