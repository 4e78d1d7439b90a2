"""What `baton doctor` looks at, one function a question.

Owns: the checks and their remedies. Each takes what it judges as arguments, so that tests can hand
it any machine. Never does: print, change anything, or start a service.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

UCX_IMPORT_TIMEOUT_S = 20.0
HEALTH_TIMEOUT_S = 1.0
OPEN_FILES_WANTED = 4096
OPEN_FILES_MIN = 1024
PYTHON_MIN = (3, 11)
MIB = 1024 * 1024
LOOPBACK_NAMES = frozenset({"localhost", "::1", "[::1]", "unix"})
SHM = Path("/dev/shm")  # noqa: S108 - the arena's home; nothing of ours is created there by name
KEY_VARIABLE = re.compile(r"BATON_\w*(?:CAPABILITY|CLUSTER)_KEY\w*")
BIND_VARIABLE = re.compile(r"BATON_\w*(?:BIND|HOST|LISTEN)\w*")


class Status(StrEnum):
    """OK: nothing to do. WARN: works, with a limit. FAIL: Baton will not work."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report; `figures` are what it was judged by, where that was measured."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    figures: Mapping[str, Any] | None = None


def check_python(version: tuple[int, ...]) -> Check:
    """The interpreter is one we support."""
    text = ".".join(str(part) for part in version[:3])
    if version[:2] >= PYTHON_MIN:
        return Check(name="python", status=Status.OK, detail=text)
    return Check(
        name="python",
        status=Status.FAIL,
        detail=f"{text} is older than 3.11",
        remedy="make setup PYTHON=/path/to/python3.11",
    )


def pinned_versions(requirements: Iterable[str]) -> dict[str, str]:
    """The `name==version` lines of the distribution's own requirements, extras included."""
    pins = {}
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)==([\w.]+)", requirement)
        if match and 'extra == "dev"' not in requirement:
            pins[match[1]] = match[2]
    return pins


def check_packages(
    requirements: Iterable[str], installed: Callable[[str], str | None]
) -> list[Check]:
    """Pinned packages have their version, torch is there, numpy is one that torch reads.

    `installed` gives the version of a distribution, None when it is absent.
    """
    checks = []
    for name, wanted in sorted(pinned_versions(requirements).items()):
        checks.append(
            _check_torch(installed(name), wanted)
            if name == "torch"
            else _check_pin(name, installed(name), wanted)
        )
    return [*checks, _check_numpy(installed("numpy"))]


def _check_pin(name: str, found: str | None, wanted: str) -> Check:
    if found == wanted:
        return Check(name=name, status=Status.OK, detail=found)
    return Check(
        name=name,
        status=Status.FAIL,
        detail=f"{found or 'not installed'}; Baton is built and tested with {wanted}",
        remedy=f"pip install {name}=={wanted}",
    )


def _check_torch(found: str | None, wanted: str) -> Check:
    if found is None:
        return Check(
            name="torch",
            status=Status.WARN,
            detail="not installed: this machine can run gateway, kvstore and merger only",
            remedy="pip install 'baton-serving[engine]' where prefill or decode runs",
        )
    if found.partition("+")[0] != wanted:
        return Check(
            name="torch",
            status=Status.WARN,
            detail=f"{found}; tested with {wanted}",
            remedy=f"pip install torch=={wanted}",
        )
    return Check(name="torch", status=Status.OK, detail=found)


def _check_numpy(found: str | None) -> Check:
    parts = tuple(int(part) for part in re.findall(r"\d+", found or "")[:2])
    if found and (2, 2) <= parts < (2, 5):
        return Check(name="numpy", status=Status.OK, detail=found)
    return Check(
        name="numpy",
        status=Status.FAIL,
        detail=f"{found or 'not installed'}; 2.2 to 2.4 is needed",
        remedy="pip install 'numpy>=2.2,<2.5'",
    )


def check_port(host: str, port: int, is_gateway: Callable[[str, int], bool]) -> Check:
    """A service could listen there; a gateway of ours that already does is fine too."""
    name = f"port {port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                return Check(
                    name=name,
                    status=Status.FAIL,
                    detail=f"cannot listen on {host}: {problem.strerror}",
                    remedy="choose another port or address",
                )
        else:
            return Check(name=name, status=Status.OK, detail=f"free on {host}")
    if is_gateway(host, port):
        return Check(name=name, status=Status.OK, detail="a Baton gateway answers there")
    return Check(
        name=name,
        status=Status.FAIL,
        detail=f"taken on {host} by another program",
        remedy=f"stop it (ss -ltnp 'sport = :{port}' names it) or choose another port",
    )


def check_shared_memory(
    free_bytes: int | None, memory_available_bytes: int | None, wanted_bytes: int
) -> Check:
    """The arena fits: it is allocated and touched whole when the kvstore starts.

    `free_bytes` of /dev/shm, None when it is not there.
    """
    wanted = f"{wanted_bytes // MIB} MiB arena"
    if free_bytes is None:
        return Check(
            name="shared memory",
            status=Status.FAIL,
            detail=f"{SHM} is not there",
            remedy="mount a tmpfs on it, or point the kvstore's arena folder elsewhere",
        )
    if free_bytes < wanted_bytes:
        return Check(
            name="shared memory",
            status=Status.FAIL,
            detail=f"{SHM} has {free_bytes // MIB} MiB free, too little for a {wanted}",
            remedy=f"mount -o remount,size=4G {SHM} (Docker: --shm-size=4g), or a smaller arena",
        )
    if memory_available_bytes is not None and memory_available_bytes < wanted_bytes:
        return Check(
            name="shared memory",
            status=Status.FAIL,
            detail=f"{memory_available_bytes // MIB} MiB of memory left, too little for a {wanted}",
            remedy="free memory or configure a smaller arena",
        )
    detail = f"{SHM} has {free_bytes // MIB} MiB free, enough for a {wanted}"
    return Check(name="shared memory", status=Status.OK, detail=detail)


def check_open_files(soft: int, hard: int) -> Check:
    """Every stream, page file and worker holds descriptors."""
    if soft >= OPEN_FILES_WANTED:
        return Check(name="open files", status=Status.OK, detail=f"limit {soft}")
    status = Status.WARN if soft >= OPEN_FILES_MIN else Status.FAIL
    reach = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return Check(
        name="open files",
        status=status,
        detail=f"limit {soft}; {OPEN_FILES_WANTED} serve a few hundred streams",
        remedy=reach if hard < 0 or hard >= OPEN_FILES_WANTED else "raise the hard limit as root",
    )


def check_compiler(which: Callable[[str], str | None], environment: Mapping[str, str]) -> Check:
    """The native step kernel is compiled here; without it torch serves, slower."""
    names = [environment["CXX"]] if environment.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        path = which(name.split()[0])
        if path:
            return Check(name="compiler", status=Status.OK, detail=path)
    return Check(
        name="compiler",
        status=Status.WARN,
        detail=f"none of {', '.join(names)} found: the torch path serves instead of native decode",
        remedy="install a C++ compiler (Debian: apt-get install g++)",
    )


def check_shm_transport(folder: Path) -> Check:
    """What a hand-off on one host needs: a file to map, locks of descriptors, passing them."""
    if not hasattr(socket, "send_fds"):
        return _unusable("this Python cannot pass descriptors")
    try:
        with tempfile.TemporaryFile(dir=folder) as first:
            is_exclusive = _locks_exclude(first.fileno())
    except OSError as problem:
        return _unusable(f"{folder}: {problem.strerror or problem}")
    if not is_exclusive:
        return _unusable("descriptor locks (F_OFD_SETLK) do not exclude each other")
    return Check(name="transport shm", status=Status.OK, detail=f"usable ({folder})")


def _locks_exclude(descriptor: int) -> bool:
    """Whether a lock through one open of the file keeps out a lock through another."""
    _lock_byte(descriptor)
    with open(f"/proc/self/fd/{descriptor}", "r+b") as other:
        try:
            _lock_byte(other.fileno())
        except BlockingIOError:
            return True
    return False


def _lock_byte(descriptor: int) -> None:
    lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)


def _unusable(why: str) -> Check:
    return Check(
        name="transport shm",
        status=Status.FAIL,
        detail=f"not usable: {why}",
        remedy="give the kvstore and its workers a tmpfs they may write (Docker: a shared volume)",
    )


def check_ucx_transport(import_problem: str | None) -> Check:
    """UCX is optional; this says whether it is usable and why not."""
    if import_problem is None:
        return Check(name="transport ucx", status=Status.OK, detail="usable (ucxx imports)")
    return Check(
        name="transport ucx",
        status=Status.OK,
        detail=f"not usable: {import_problem}; shm and stream serve instead",
        remedy="only for fast networks: pip install 'baton-serving[ucx]'",
    )


def ucx_import_problem() -> str | None:
    """Why `import ucxx` fails, None when it works; tried in a child, since it may take us down."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import ucxx"],
            capture_output=True,
            text=True,
            timeout=UCX_IMPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"its import was given up: {type(problem).__name__}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its import ended with status {done.returncode}"


def check_stream_transport(is_grpc_installed: bool) -> Check:
    """gRPC chunks: there whenever gRPC is."""
    if is_grpc_installed:
        return Check(name="transport stream", status=Status.OK, detail="usable")
    return Check(
        name="transport stream",
        status=Status.FAIL,
        detail="not usable: grpcio is not installed",
        remedy="make setup",
    )


def check_capability_key(environment: Mapping[str, str]) -> Check:
    """Whether capabilities are signed with the key that everybody knows."""
    configured = sorted(n for n, v in environment.items() if v and KEY_VARIABLE.fullmatch(n))
    if configured:
        return Check(name="capability key", status=Status.OK, detail=f"set by {configured[0]}")
    return Check(
        name="capability key",
        status=Status.WARN,
        detail="none set: the public development key signs, which is fit for one machine only",
        remedy="for more than one machine give gateways and kvstores a key (docs/config.md)",
    )


def check_bind_addresses(environment: Mapping[str, str]) -> Check:
    """Nothing listens beyond loopback unless somebody said so."""
    wide = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if BIND_VARIABLE.fullmatch(name) and not is_loopback(value)
    ]
    if not wide:
        return Check(name="bind addresses", status=Status.OK, detail="loopback only")
    return Check(
        name="bind addresses",
        status=Status.WARN,
        detail=f"beyond loopback: {', '.join(wide)}",
        remedy="without TLS anyone on that network reads prompts: use 127.0.0.1 or a private one",
    )


def is_loopback(address: str) -> bool:
    """Whether an address (`host`, `host:port`, `[v6]:port`, `unix:path`) stays on this machine."""
    host = address.strip()
    if host.startswith("["):
        host = host.partition("]")[0] + "]"
    elif host.count(":") <= 1:
        host = host.partition(":")[0]
    return host in LOOPBACK_NAMES or re.fullmatch(r"127(?:\.\d{1,3}){3}", host) is not None


def free_shared_memory(folder: Path = SHM) -> int | None:
    """Free bytes of the tmpfs that holds the arena, None when there is none."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def memory_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What the kernel says can still be had without swapping, None where it does not say."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
