"""Print what pyproject.toml asks for, one requirement a line, so that packages get a layer of
their own.

    requirements.py [--only] EXTRA...

With --only the extras alone, else the base and the extras. Runs with the standard library only:
nothing is installed yet when the image build calls it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Write the requirements to stdout."""
    with (Path.cwd() / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = [word for word in sys.argv[1:] if word != "--only"]
    wanted = [] if "--only" in sys.argv[1:] else list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    sys.stdout.write("".join(f"{line}\n" for line in wanted))


if __name__ == "__main__":
    main()
