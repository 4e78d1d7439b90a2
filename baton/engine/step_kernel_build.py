"""Building the native libraries with CMake, and where they lie.

Owns the command that turns `native/` into `libbaton_step.so` beside this file, `native/log/` into
`libbaton_log.so` beside the log of the kvstore, and `native/copy/` into `libbaton_copy.so` beside
the arena's client. It needs only the standard library, because setup.py runs it while nothing of
Baton is installed. It never fails an installation: without a compiler it says so once for each, and
torch or Python serves.

    python -m baton.engine.step_kernel_build         build what has a source newer than its library
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIBRARY_NAME: Final = "libbaton_step.so"
LIBRARY: Final = Path(__file__).with_name(LIBRARY_NAME)
SOURCES: Final = Path(__file__).parents[2] / "native"
BUILD_TIMEOUT_S: Final = 600.0
_TAIL_LINES: Final = 15
_LOG_FOLDER: Final = "log"
_COPY_FOLDER: Final = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One library: its CMake target, its file, its sources, and what is lost without it."""

    name: str
    file: Path
    sources: Path
    loss: str


STEP: Final = Target(
    name="baton_step",
    file=LIBRARY,
    sources=SOURCES,
    loss="the native step kernel was not built; decoding runs on torch, several times slower",
)
LOG: Final = Target(
    name="baton_log",
    file=Path(__file__).parents[2] / "services" / "kvstore" / "log" / "libbaton_log.so",
    sources=SOURCES / _LOG_FOLDER,
    loss="the native part of the kvstore's log was not built; restarts read it in Python, slower",
)
COPY: Final = Target(
    name="baton_copy",
    file=Path(__file__).parents[1] / "arena" / "libbaton_copy.so",
    sources=SOURCES / _COPY_FOLDER,
    loss="the native copy of KV was not built; KV is copied and its CRC taken in two passes",
)
TARGETS: Final = (STEP, LOG, COPY)


class BuildError(Exception):
    """The library could not be built; the text says why and what to do."""


def is_stale(library: Path = LIBRARY, sources: Path = SOURCES) -> bool:
    """Whether there are sources newer than the library; never so in an installation without them.

    The time of this file does not count: a change of it alone does not change the library.
    """
    if not sources.is_dir():
        return False
    if not library.is_file():
        return True
    built = library.stat().st_mtime
    # The other libraries' sources lie in folders of the step kernel's, and are not its sources.
    foreign = (sources / _LOG_FOLDER, sources / _COPY_FOLDER)
    return any(
        file.stat().st_mtime > built
        for file in sources.rglob("*")
        if file.is_file() and not any(file.is_relative_to(folder) for folder in foreign)
    )


def build(library: Path = LIBRARY, sources: Path = SOURCES, name: str = STEP.name) -> None:
    """Build `sources` into `library`, replacing it in one step. Raises BuildError."""
    if not sources.is_dir():
        raise BuildError(f"{sources} is missing: build from a source checkout")
    if shutil.which("cmake") is None:
        raise BuildError("cmake was not found; on Debian and Ubuntu: apt-get install cmake g++")
    with tempfile.TemporaryDirectory(prefix="baton-native-") as folder:
        _run(["cmake", "-S", str(sources), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"])
        _run(["cmake", "--build", folder, "--parallel", str(os.cpu_count() or 1)])
        built = next((path for path in Path(folder).glob(f"lib{name}.*") if path.is_file()), None)
        if built is None:
            raise BuildError("the build left no library; report this as a bug")
        try:
            _put(built, library)
        except OSError as error:
            raise BuildError(f"{library} cannot be written: {error.strerror}") from error


def _put(built: Path, library: Path) -> None:
    """In one step, also where two builds end at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    # A process that has the old file mapped keeps it: the name moves, the bytes do not.
    with tempfile.TemporaryDirectory(prefix=f".{library.name}-", dir=library.parent) as folder:
        part = Path(folder) / library.name
        shutil.copyfile(built, part)
        part.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
        raise BuildError(f"{' '.join(command[:2])} failed:\n{tail}")


def build_or_warn(library: Path = LIBRARY, sources: Path = SOURCES, target: Target = STEP) -> bool:
    """Build; on failure say once, on stderr, what is lost and how to get it. Returns success."""
    try:
        build(library, sources, target.name)
    except BuildError as error:
        sys.stderr.write(
            f"baton: {target.loss}.\nbaton: cause: {error}\n"
            "baton: once that is mended: python -m baton.engine.step_kernel_build\n"
        )
        return False
    return True


def main() -> None:
    """Build what is stale; leaves status 0 either way, for the other paths serve."""
    for target in TARGETS:
        if is_stale(target.file, target.sources):
            build_or_warn(target.file, target.sources, target)


if __name__ == "__main__":
    main()
