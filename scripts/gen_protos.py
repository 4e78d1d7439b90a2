"""Generate the typed gRPC stubs under `baton/api` from `protos/`.

Owns: the one way stubs are made, so that a second run gives the same bytes.
Never does: touch the network, or write outside `baton/api`.

    python scripts/gen_protos.py           # write
    python scripts/gen_protos.py --check   # compare only; exit 1 and name what differs
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = Path("protos")
PACKAGE = Path("baton/api")
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
GENERATE_TIMEOUT_S = 120
INIT_TEXT = '''"""Generated stubs of `{package}`: written by `make gen`, never edited."""
'''


class StubsFailed(Exception):
    """protoc refused the sources; the message is its own output."""


def proto_sources(proto_root: Path) -> list[Path]:
    """Every .proto below `proto_root`, relative to it, in a stable order."""
    return sorted(path.relative_to(proto_root) for path in proto_root.rglob("*.proto"))


def include_folders() -> list[str]:
    """Folders that hold google/protobuf/*.proto and google/rpc/*.proto."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    google = importlib.resources.files("google.rpc")
    return [str(well_known), str(Path(str(google)).parent.parent)]


def run_protoc(proto_root: Path, sources: Iterable[Path], out: Path) -> None:
    """Run protoc with the Python, gRPC and typing plugins; raises `StubsFailed`."""
    binaries = str(Path(sys.executable).parent)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto_root}"]
    command += [f"-I{folder}" for folder in include_folders()]
    plugins = ("python", "grpc_python", "mypy", "mypy_grpc")
    command += [f"--{plugin}_out={'quiet:' if 'mypy' in plugin else ''}{out}" for plugin in plugins]
    command += [str(source) for source in sources]
    # The typing plugins are found on PATH: those of this interpreter must come first.
    environment = {**os.environ, "PATH": binaries + os.pathsep + os.environ.get("PATH", "")}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=GENERATE_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise StubsFailed(done.stderr.strip() or "protoc failed without a message")


def write_package_inits(out: Path) -> None:
    """Give every folder from `baton/api` down an `__init__.py` that says it is generated."""
    package_root = out / PACKAGE
    folders = [package_root, *sorted(path for path in package_root.rglob("*") if path.is_dir())]
    for folder in folders:
        name = ".".join(folder.relative_to(out).parts)
        (folder / "__init__.py").write_text(INIT_TEXT.format(package=name), encoding="utf-8")


def generate(out: Path) -> None:
    """Write all stubs below `out`, laid out as in the repository."""
    proto_root = ROOT / PROTO_ROOT
    sources = proto_sources(proto_root)
    if not sources:
        raise StubsFailed(f"no .proto file below {PROTO_ROOT}/: nothing to generate")
    stray = [source for source in sources if PACKAGE not in source.parents]
    if stray:
        raise StubsFailed(f"{stray[0]} must stand below {PROTO_ROOT / PACKAGE}/")
    run_protoc(proto_root, sources, out)
    write_package_inits(out)


def generated_files(root: Path) -> dict[str, bytes]:
    """Generated files below `root`/baton/api by relative path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / PACKAGE).rglob("*"))
        if path.name == "__init__.py" or path.name.endswith(GENERATED_SUFFIXES)
    }


def drift(fresh: dict[str, bytes], committed: dict[str, bytes]) -> list[str]:
    """One line for each file that is missing, stale or no longer generated."""
    lines = [f"missing: {name}" for name in sorted(fresh.keys() - committed.keys())]
    lines += [f"orphan: {name}" for name in sorted(committed.keys() - fresh.keys())]
    both = sorted(fresh.keys() & committed.keys())
    return lines + [f"stale: {name}" for name in both if fresh[name] != committed[name]]


def install(fresh: dict[str, bytes], committed: dict[str, bytes]) -> int:
    """Write what changed and remove orphans; returns how many files were touched."""
    for name in committed.keys() - fresh.keys():
        (ROOT / name).unlink()
    changed = [name for name, content in fresh.items() if committed.get(name) != content]
    for name in changed:
        target = ROOT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(fresh[name])
    return len(changed) + len(committed.keys() - fresh.keys())


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-gen-") as folder:
        try:
            generate(Path(folder))
        except StubsFailed as problem:
            print(f"gen: {problem}", file=sys.stderr)
            return 2
        fresh, committed = generated_files(Path(folder)), generated_files(ROOT)
    if not arguments.check:
        print(f"gen: {len(fresh)} files, {install(fresh, committed)} changed")
        return 0
    differences = drift(fresh, committed)
    for line in differences:
        print(line, file=sys.stderr)
    if differences:
        print("gen: stubs do not match protos/: run `make gen` and commit", file=sys.stderr)
        return 1
    print(f"gen: {len(fresh)} files match protos/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
