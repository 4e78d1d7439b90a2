"""`baton up` and `baton down`: the whole cluster on this machine.

Owns what the user sees while it starts, runs and stops. Never starts a process by itself: that is
`baton.launcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shlex
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.live import Live
from rich.table import Table

from baton import models
from baton.cli.chunk_setup import with_chunk_profile
from baton.cli.console import CommandFailed, ExitCode, output
from baton.cli.models import pull_with_progress
from baton.engine.config import read_config
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype
from baton.launcher.cluster import (
    SHARED_MEMORY,
    arena_dir,
    prepare,
    remove_arena_dir,
    remove_nvme_files,
    this_machine,
)
from baton.launcher.plan import ClusterOptions, Machine, arena_bytes
from baton.launcher.ports import is_free
from baton.launcher.rundir import RunDir, RunDirBusy, default_run_dir, running_pid
from baton.launcher.supervisor import Child, ChildState, ClusterFailed, Supervisor
from baton.worker.chunk_profile import FILE_NAME
from baton.worker.chunker import Chunking

DOWN_TIMEOUT_S: Final = 60.0
MODEL_DEFAULT: Final = "smollm2"
ARENA_TOKENS_MIN: Final = 1024
KV_DTYPES: Final = {"bfloat16": KvDtype.BF16, "float32": KvDtype.F32, "int8": KvDtype.INT8}

_MARKS: Final = {
    ChildState.STARTING: ("yellow", "…"),
    ChildState.READY: ("green", "✓"),
    ChildState.RESTARTING: ("yellow", "↻"),
    ChildState.FAILED: ("red", "✗"),
    ChildState.STOPPED: ("dim", "■"),
}


class Dtype(StrEnum):
    """Compute and KV type of a cluster."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class KvType(StrEnum):
    """What KV is stored in."""

    COMPUTED = "computed"
    INT8 = "int8"


class PrefillMode(StrEnum):
    """Where prompts are computed."""

    REMOTE = "remote"
    LOCAL = "local"
    AUTO = "auto"


class Kernel(StrEnum):
    """What computes decode steps: torch, the native step kernel, or it where there is one."""

    TORCH = "torch"
    NATIVE = "native"
    AUTO = "auto"


RunDirOption = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_UP_RUN_DIR",
        show_default=str(default_run_dir()),
        help="Logs, process ids, key and KV log.",
    ),
]


class LogLevel(StrEnum):
    """From which level on the services log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ClusterView:
    """One line per service: redrawn in place on a terminal, printed at each change elsewhere."""

    def __init__(self, *, is_live: bool) -> None:
        self._children: dict[str, Child] = {}
        self._live = Live(console=output(), auto_refresh=False) if is_live else None

    def __enter__(self) -> ClusterView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Leave the lines as they are and stop redrawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, child: Child) -> None:
        """A child changed. A terminal that went away stops no cluster."""
        self._children[child.spec.name] = child
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.update(self._table(), refresh=True)
            elif child.state is not ChildState.STARTING:
                output().print(_line(child), markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in sorted(self._children):
            child = self._children[name]
            style, mark = _MARKS[child.state]
            table.add_row(f"[{style}]{mark}[/]", name, child.state.value, _detail(child))
        return table


def _line(child: Child) -> str:
    return f"{child.spec.name:12} {child.state.value:10} {_detail(child)}".rstrip()


def _detail(child: Child) -> str:
    if child.state is ChildState.READY and child.ready_after_s is not None:
        pid = child.process.pid if child.process else 0
        return f"{child.ready_after_s:.1f} s   {child.spec.grpc_address}   process {pid}"
    if child.state in (ChildState.RESTARTING, ChildState.FAILED):
        return f"log: {child.log_path}"
    return ""


def ensure_model(name: str) -> None:
    """Fetch a known model that is not cached; another missing model is refused."""
    try:
        models.locate(name)
    except ServiceError as problem:
        if problem.reason is not Reason.MODEL_NOT_FOUND or not models.is_known(name):
            raise
        pull_with_progress(name)


def check_ports(options: ClusterOptions) -> None:
    """Refuse a port that is given twice or that somebody else has, before anything is started."""
    if options.http_port == options.grpc_port:
        raise CommandFailed(
            f"--http-port and --grpc-port are both {options.http_port}",
            remedy="give two ports",
            exit_code=ExitCode.USAGE,
        )
    for flag, port in (("--http-port", options.http_port), ("--grpc-port", options.grpc_port)):
        if not is_free(options.host, port):
            raise CommandFailed(
                f"port {port} on {options.host} is taken",
                remedy=f"stop the other program (`baton down` for a cluster), or give {flag}",
                exit_code=ExitCode.USAGE,
            )


def check_arena(options: ClusterOptions, machine: Machine) -> None:
    """Refuse an arena that could not hold even one conversation, before anything is started."""
    config = read_config(models.resolve(options.model).path)
    geometry = config.kv_geometry(options.block_tokens, KV_DTYPES[options.stored_dtype])
    wanted = min(ARENA_TOKENS_MIN, config.max_context)
    needed_bytes = -(-wanted // options.block_tokens) * geometry.slot_bytes
    size_bytes = arena_bytes(options, machine)
    if size_bytes >= needed_bytes:
        return
    tokens = size_bytes // geometry.slot_bytes * options.block_tokens
    remedy = f"give --arena-bytes {needed_bytes} or more"
    if options.arena_bytes is None:
        remedy = f"free shared memory ({SHARED_MEMORY}), or mount it larger; {remedy}"
    raise CommandFailed(
        f"an arena of {size_bytes} bytes holds {tokens} tokens of this model, "
        f"fewer than {wanted}: prompts would be refused",
        remedy=remedy,
        exit_code=ExitCode.USAGE,
    )


async def run_cluster(cluster: Supervisor, view: ClusterView, options: ClusterOptions) -> None:
    """Start, say where it serves, watch it until SIGINT or SIGTERM, stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(stop.wait())
        served = group.create_task(_serve(cluster, view, stop, options, started_s))
        await asyncio.wait((stopped, served), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not served.done():
            view.settle()
            output().print("stopping ...")
            await cluster.stop()
            served.cancel()


async def _serve(
    cluster: Supervisor,
    view: ClusterView,
    stop: asyncio.Event,
    options: ClusterOptions,
    started_s: float,
) -> None:
    http_url = f"http://{options.host}:{options.http_port}"
    try:
        async with cluster:
            view.settle()
            output().print(f"ready in {time.monotonic() - started_s:.1f} s: {http_url}/v1")
            # Soft: a wrapped command line could not be copied.
            output().print(_invitation(http_url, options.run_dir), markup=False, soft_wrap=True)
            await cluster.wait()
    except ClusterFailed:
        # Children that end because the user said so are no failure.
        if not stop.is_set():
            raise


def _down_command(run_dir: Path) -> str:
    """The `baton down` that stops the cluster in `run_dir`."""
    if run_dir == default_run_dir():
        return "baton down"
    return f"baton down --run-dir {shlex.quote(str(run_dir.absolute()))}"


def _invitation(http_url: str, run_dir: Path) -> str:
    body = (
        '{"model": "smollm2", "stream": true, "max_tokens": 100, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return (
        f"  talk:  baton chat --url {http_url}\n"
        f"  curl:  curl -N {http_url}/v1/chat/completions "
        f"-H 'content-type: application/json' -d '{body}'\n"
        f"  stop:  Ctrl-C, or `{_down_command(run_dir)}` in another terminal"
    )


def raise_cluster_failure(group: BaseExceptionGroup[BaseException]) -> None:
    """Turn what a task group raised into one line for people."""
    for problem in group.exceptions:
        if isinstance(problem, ClusterFailed):
            raise CommandFailed(str(problem), remedy="`baton doctor` checks the usual causes")
    raise group


def run_until_stopped(options: ClusterOptions) -> None:
    """Prepare, run and stop a cluster; raises CommandFailed for what the user can mend."""
    check_ports(options)
    ensure_model(options.model)
    try:
        with (
            RunDir(options.run_dir) as held,
            ClusterView(is_live=sys.stdout.isatty()) as view,
        ):
            check_arena(options, this_machine(options.arena_dir))
            options = with_chunk_profile(options, KV_DTYPES[options.stored_dtype])
            cluster = prepare(options, held, on_change=view.show)
            try:
                asyncio.run(run_cluster(cluster, view, options))
            finally:
                # While the run directory is ours: nobody's kvstore is between two lives.
                remove_arena_dir(options.arena_dir)
                remove_nvme_files(options)
    except RunDirBusy as problem:
        raise CommandFailed(
            str(problem),
            remedy=f"stop it with `{_down_command(options.run_dir)}`, or give another --run-dir",
        ) from problem
    except BaseExceptionGroup as group:
        raise_cluster_failure(group)


ArenaBytesOption = Annotated[
    int | None,
    typer.Option(
        envvar="BATON_UP_ARENA_BYTES",
        min=1 << 20,
        show_default="half of free shared memory, at most 1 GiB",
        help="Bytes of the KV arena.",
    ),
]

QuotasOption = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_UP_QUOTAS",
        exists=True,
        help="Each tenant's bytes of KV per tier; read again when it changes.",
    ),
]
NodesOption = Annotated[
    int,
    typer.Option(
        envvar="BATON_UP_NODES",
        min=1,
        max=8,
        help="Kvstores, each with an arena and workers of its own, as on so many machines.",
    ),
]
NvmeBytesOption = Annotated[
    int | None,
    typer.Option(
        envvar="BATON_UP_NVME_BYTES",
        min=0,
        show_default="a tenth of the free disk, at most 1 GiB",
        help="Bytes of the NVMe tier, for KV that nobody used lately; 0: none.",
    ),
]
NvmeDirOption = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_UP_NVME_DIR",
        show_default="in the run directory, removed at the end",
        help="Where it lies; what stands there is found again by the next start.",
    ),
]

ChunkTokensOption = Annotated[
    int | None,
    typer.Option(
        envvar="BATON_UP_CHUNK_TOKENS",
        min=1,
        max=8192,
        show_default=f"what {FILE_NAME} in the run directory says, else 256",
        help="Prefill chunk.",
    ),
]

ChunkingOption = Annotated[
    Chunking,
    typer.Option(
        envvar="BATON_UP_CHUNKING",
        help="Where chunks end; semantic: at sentences, lines and blocks near the size.",
    ),
]

KvTypeOption = Annotated[
    KvType,
    typer.Option(
        envvar="BATON_UP_KV_DTYPE", help="int8 halves KV; every answer is then approximate."
    ),
]


def up(
    model: Annotated[str, typer.Option(envvar="BATON_UP_MODEL", help="Name or path.")] = (
        MODEL_DEFAULT
    ),
    dtype: Annotated[Dtype, typer.Option(envvar="BATON_UP_DTYPE")] = Dtype.BFLOAT16,
    kv_dtype: KvTypeOption = KvType.COMPUTED,
    http_port: Annotated[
        int, typer.Option(envvar="BATON_UP_HTTP_PORT", min=1, max=65535, help="REST port.")
    ] = 8080,
    grpc_port: Annotated[
        int, typer.Option(envvar="BATON_UP_GRPC_PORT", min=1, max=65535, help="gRPC port.")
    ] = 8081,
    prefill: Annotated[
        int, typer.Option(envvar="BATON_UP_PREFILL", min=1, max=16, help="Prefill workers.")
    ] = 1,
    decode: Annotated[
        int, typer.Option(envvar="BATON_UP_DECODE", min=1, max=16, help="Decode workers.")
    ] = 1,
    nodes: NodesOption = 1,
    arena_bytes: ArenaBytesOption = None,
    nvme_bytes: NvmeBytesOption = None,
    nvme_dir: NvmeDirOption = None,
    kernel: Annotated[
        Kernel, typer.Option(envvar="BATON_UP_KERNEL", help="What computes decode steps.")
    ] = Kernel.AUTO,
    chunk_tokens: ChunkTokensOption = None,
    chunking: ChunkingOption = Chunking.FIXED,
    prefill_mode: Annotated[
        PrefillMode,
        typer.Option(
            envvar="BATON_UP_PREFILL_MODE",
            help="auto: apart, else where decode is; remote: apart only; local: never apart.",
        ),
    ] = PrefillMode.AUTO,
    run_dir: RunDirOption = None,
    tenants_file: Annotated[
        Path | None,
        typer.Option(envvar="BATON_UP_TENANTS_FILE", exists=True, help="Tenants and their keys."),
    ] = None,
    quotas: QuotasOption = None,
    log_level: Annotated[LogLevel, typer.Option(envvar="BATON_UP_LOG_LEVEL")] = LogLevel.INFO,
) -> None:
    """Run the whole cluster on this machine until Ctrl-C.

    Example: baton up --http-port 9000 --dtype float32
    """
    options = ClusterOptions(
        model=model,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        http_port=http_port,
        grpc_port=grpc_port,
        nodes=nodes,
        prefill_workers=prefill,
        decode_workers=decode,
        arena_bytes=arena_bytes,
        nvme_bytes=nvme_bytes,
        nvme_dir=nvme_dir,
        chunk_tokens=chunk_tokens,
        chunking=chunking.value,
        kernel=kernel.value,
        prefill_mode=prefill_mode.value,
        run_dir=run_dir or default_run_dir(),
        arena_dir=arena_dir(run_dir or default_run_dir()),
        tenants_file=tenants_file,
        quotas=quotas,
        log_level=log_level.value,
    )
    run_until_stopped(options)


def down(
    run_dir: RunDirOption = None,
) -> None:
    """Stop the cluster that `baton up` runs in another terminal.

    Example: baton down
    """
    where = run_dir or default_run_dir()
    pid = running_pid(where)
    if pid is None:
        output().print(f"no cluster runs in {where}; --run-dir names another")
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        output().print(f"no cluster runs in {where}; --run-dir names another")
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        # A pidfd becomes readable when its process ends: no polling, no recycled process id.
        ended, _, _ = select.select([handle], [], [], DOWN_TIMEOUT_S)
    finally:
        os.close(handle)
    if not ended:
        raise CommandFailed(
            f"process {pid} has not stopped within {DOWN_TIMEOUT_S:g} s",
            remedy=f"see the logs in {where}",
        )
    output().print(f"stopped (process {pid})")
