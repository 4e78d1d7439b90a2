"""`baton doctor`: what is wrong with this machine, and what to do about it.

Owns: which checks are made and how they are shown. Never does: judge (that is `checks`), or change
anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.table import Table
from rich.text import Text

from baton import models
from baton.cli import checks, probe, thread_check
from baton.cli.checks import MIB, SHM, Check, Status
from baton.cli.console import ExitCode, output
from baton.cli.disk_check import check_disk_tier, free_disk, nearest, takes_direct_io
from baton.cli.kv_doctor import check_scrub
from baton.errors import ServiceError
from baton.launcher.rundir import default_run_dir

DISTRIBUTION = "baton-serving"
LOOPBACK = "127.0.0.1"
PORTS = (8080,)
COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_requirements() -> list[str]:
    """What this distribution says it needs; empty in a tree that was never installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def is_gateway(host: str, port: int) -> bool:
    """Whether a Baton gateway answers there."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
    try:
        return httpx.get(address, timeout=checks.HEALTH_TIMEOUT_S, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def check_model(name: str) -> Check:
    """The model is here and its bytes are the ones we know."""
    title = f"model {name}"
    try:
        path = models.locate(name)
        models.verify(name)
    except ServiceError as problem:
        # The message ends with its own remedy, which has a place of its own here.
        what, _, remedy = problem.message.partition("; ")
        return Check(name=title, status=Status.FAIL, detail=what, remedy=remedy)
    return Check(name=title, status=Status.OK, detail=f"SHA-256 as recorded ({path})")


def examine(host: str, ports: Iterable[int], arena_bytes: int, model: str) -> list[Check]:
    """Every check, in the order in which people set things up."""
    environment = dict(os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: list[Check] = [checks.check_python(tuple(sys.version_info[:3]))]
    found += checks.check_packages(own_requirements(), installed_version)
    found.append(checks.check_compiler(shutil.which, environment))
    found += [checks.check_port(host, port, is_gateway) for port in ports]
    found.append(
        checks.check_shared_memory(
            checks.free_shared_memory(), checks.memory_available(), arena_bytes
        )
    )
    disk = nearest(default_run_dir())
    found.append(check_disk_tier(disk, free_disk(disk), is_direct=takes_direct_io(disk)))
    found.append(checks.check_open_files(soft, hard))
    found.append(checks.check_shm_transport(SHM))
    found.append(checks.check_stream_transport(importlib.util.find_spec("grpc") is not None))
    found.append(checks.check_ucx_transport(ucx_problem(checks.ucx_import_problem)))
    found.append(check_model(model))
    found.append(checks.check_capability_key(environment))
    found.append(checks.check_bind_addresses(environment))
    found += check_scrub(Path(environment.get("BATON_UP_RUN_DIR") or default_run_dir()))
    return found


def check_decode_threads(model: str) -> Check:
    """One thread or two for decode, measured with the model; a few seconds."""
    try:
        path = models.locate(model)
    except ServiceError as problem:
        return thread_check.check_threads(problem.message)
    return thread_check.check_threads(thread_check.measure_threads(path))


def ucx_problem(try_import: Callable[[], str | None]) -> str | None:
    """Why UCX is not usable; the import is only tried when there is something to import."""
    if importlib.util.find_spec("ucxx") is None:
        return "ucxx is not installed"
    return try_import()


def as_json(found: list[Check]) -> str:
    """The report for programs."""
    rows = [
        {"name": c.name, "status": str(c.status), "detail": c.detail, "remedy": c.remedy or None}
        | ({} if c.figures is None else {"figures": dict(c.figures)})
        for c in found
    ]
    is_ok = all(check.status is not Status.FAIL for check in found)
    return json.dumps({"ok": is_ok, "checks": rows}, indent=2, ensure_ascii=False)


def as_table(found: list[Check]) -> Table:
    """The report for people; a remedy stands below what it is for."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    # Paths and commands are there to be copied: they are folded rather than cut.
    table.add_column(overflow="fold")
    for check in found:
        detail = Text(check.detail)
        if check.remedy and check.status is not Status.OK:
            detail.append(f"\n-> {check.remedy}", style="bold")
        table.add_row(Text(check.status, style=COLOURS[check.status]), Text(check.name), detail)
    return table


def summary(found: list[Check]) -> str:
    """How many of each."""
    counts = Counter(check.status for check in found)
    return ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])


def doctor(
    is_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            help="A port that must be free; repeatable. Default: 8080.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address the gateway will listen on.")
    ] = LOOPBACK,
    arena_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Host arena that must fit.")
    ] = 256,
    model: Annotated[str, typer.Option(metavar="NAME", help="The model to look for.")] = "smollm2",
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what is measured: the decode threads.")
    ] = False,
    probe_target: Annotated[
        str | None,
        typer.Option(
            "--probe",
            metavar="HOST[:PORT]",
            help="Only measure how fast KV would come from the kvstore there "
            f"(port {probe.PORT_DEFAULT} unless given).",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--cluster-key-file",
            envvar="BATON_KV_CLUSTER_KEY_FILE",
            show_default="the public development key",
            help="The cluster's key, for --probe.",
        ),
    ] = None,
) -> None:
    """Check this machine: versions, ports, memory, limits, transports, model, keys, addresses; and
    measure for a few seconds how many threads decode should have here.

    Leaves with 1 when a check says FAIL. Example: baton doctor --json
    """
    if probe_target is not None:
        probe.show(probe.probe(probe_target, key_file), is_json=is_json)
        return
    found = examine(host, port or PORTS, arena_mib * MIB, model)
    if not is_quick:
        found.append(check_decode_threads(model))
    if is_json:
        output().print(as_json(found), markup=False)
    else:
        output().print(as_table(found))
        output().print(summary(found))
    if any(check.status is Status.FAIL for check in found):
        raise typer.Exit(ExitCode.FAILED)
