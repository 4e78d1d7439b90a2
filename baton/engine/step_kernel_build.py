"""Building the step kernel's library with CMake, and where it lies.

Owns the command that turns `native/` into `libbaton_step.so` beside this file. It needs only the
standard library, because setup.py runs it while nothing of Baton is installed. It never fails an
installation: without a compiler it says so once, and the torch path serves.

    python -m baton.engine.step_kernel_build           build when a source is newer than the library
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

LIBRARY_NAME: Final = "libbaton_step.so"
LIBRARY: Final = Path(__file__).with_name(LIBRARY_NAME)
SOURCES: Final = Path(__file__).parents[2] / "native"
BUILD_TIMEOUT_S: Final = 600.0
_TAIL_LINES: Final = 15


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
    return any(file.stat().st_mtime > built for file in sources.rglob("*") if file.is_file())


def build(library: Path = LIBRARY, sources: Path = SOURCES) -> None:
    """Build `sources` into `library`, replacing it in one step. Raises BuildError."""
    if not sources.is_dir():
        raise BuildError(f"{sources} is missing: build from a source checkout")
    if shutil.which("cmake") is None:
        raise BuildError("cmake was not found; on Debian and Ubuntu: apt-get install cmake g++")
    with tempfile.TemporaryDirectory(prefix="baton-step-") as folder:
        _run(["cmake", "-S", str(sources), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"])
        _run(["cmake", "--build", folder, "--parallel", str(os.cpu_count() or 1)])
        built = next(
            (path for path in Path(folder).glob("libbaton_step.*") if path.is_file()), None
        )
        if built is None:
            raise BuildError("the build left no library; report this as a bug")
        library.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old file mapped keeps it: the name moves, the bytes do not.
        part = library.with_suffix(".part")
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


def build_or_warn(library: Path = LIBRARY, sources: Path = SOURCES) -> bool:
    """Build; on failure say once, on stderr, what is lost and how to get it. Returns success."""
    try:
        build(library, sources)
    except BuildError as error:
        sys.stderr.write(
            "baton: the native step kernel was not built; decoding runs on torch, several times "
            f"slower.\nbaton: cause: {error}\n"
            "baton: once that is mended: python -m baton.engine.step_kernel_build\n"
        )
        return False
    return True


def main() -> None:
    """Build when stale; leaves status 0 either way, for the torch path serves."""
    if is_stale():
        build_or_warn()


if __name__ == "__main__":
    main()
