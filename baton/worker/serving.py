"""Serving as a worker: server, metrics page, heartbeats and lease renewal around a role's own code.

Owns the order of these parts and their end: heartbeats and leases go on while the worker drains,
so that nobody takes a draining worker for a dead one. Never knows what the role does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from baton.client import ChannelPool
from baton.errors import ServiceError
from baton.heartbeat import Heartbeats, Load, Record, Role
from baton.heartbeat_wire import gateway_beats
from baton.http_server import HttpServer
from baton.lifecycle import Service
from baton.metrics import Metrics
from baton.metrics_server import metrics_application
from baton.metrics_table import gauge
from baton.metrics_vllm import show_vllm_names
from baton.process_files import write_port_file
from baton.rpc.interceptor import CallLimits
from baton.rpc.measures import RpcMeasures
from baton.rpc.server import RpcServer, ServerOptions, build_server
from baton.worker.attachment import Attachment
from baton.worker.config import KvType, WorkerConfig
from baton.worker.engine import WorkerParts
from baton.worker.golden_watch import GoldenMeasures, GoldenWatch, WatchTools
from baton.worker.held_logs import RENEWAL_INTERVAL_MAX_S, RENEWALS_PER_LEASE, renew_once
from baton.worker.kernel_choice import KernelWish
from baton.worker.startup import (
    PromptDevice,
    WorkerOptions,
    capability_or_dev,
    software_version,
    start_worker,
)

_log = structlog.stdlib.get_logger("baton.worker")
STARTING_LEASE_S: Final = 10.0
UNREACHABLE_INTERVAL_S: Final = 0.25
PEER_STREAMS: Final = frozenset({"/baton.api.decode.v1.DecodeService/Run"})
"""Streams that live as long as a gateway; they count against no limit on calls."""


class Background:
    """A long-running task as a part: it ends when the part is stopped, not when draining begins."""

    def __init__(
        self,
        service: Service,
        name: str,
        run: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
        drain: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._service = service
        self._name = name
        self._run = run
        self._drain = drain
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Begins."""
        self._service.spawn(self._name, self._work())

    async def drain(self) -> None:
        """Whatever the task's owner wants finished first."""
        if self._drain is not None:
            await self._drain()

    async def stop(self) -> None:
        """Asks the task to end and waits for it."""
        self._stopping.set()
        await self._ended.wait()

    async def _work(self) -> None:
        try:
            await self._run(self._stopping)
        finally:
            self._ended.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShell:
    """What a worker process has before its role's own code runs."""

    service: Service
    config: WorkerConfig
    role: Role
    metrics: Metrics
    server: RpcServer
    pool: ChannelPool
    parts: WorkerParts
    capability: str


async def open_shell(
    service: Service,
    config: WorkerConfig,
    role: Role,
    *,
    pass_tokens: int,
    kernel: KernelWish | None = None,
    device: PromptDevice | None = None,
) -> WorkerShell:
    """Binds the port (so that a conflict is reported at once), then loads and attaches.

    `pass_tokens`: prompt tokens that the role computes in one go at most.
    """
    metrics = Metrics(role.value)
    server = build_server(
        ServerOptions(
            bind=f"{config.host}:{config.port}",
            is_insecure_bind_allowed=config.insecure_bind,
            limits=CallLimits(calls_max=4096, unbounded_methods=PEER_STREAMS),
        ),
        RpcMeasures(metrics, "server"),
    )
    pool = ChannelPool()
    await service.start("channels", pool)
    capability = capability_or_dev(config.worker_capability, config.worker_id, service.clock)
    options = WorkerOptions(
        worker_id=config.worker_id,
        model=config.model,
        dtype=config.dtype.value,
        threads=config.threads,
        kvstore=config.kvstore,
        capability=capability,
        context_max=config.context_max,
        kernel=kernel or KernelWish(),
        store_patience_s=config.kvstore_patience_s,
        has_int8_kv=config.kv_dtype is KvType.INT8,
        device=device,
        pass_tokens=pass_tokens,
    )
    parts = await start_worker(options, pool.get(config.kvstore), service.clock)
    return WorkerShell(
        service=service,
        config=config,
        role=role,
        metrics=metrics,
        server=server,
        pool=pool,
        parts=parts,
        capability=capability,
    )


class PageCounts:
    """The arena's pages as last seen; refreshed beside lease renewals."""

    def __init__(self, parts: WorkerParts) -> None:
        self.pages_free = 0
        self.pages_total = parts.arena.shape.page_count

    @property
    def used(self) -> float:
        """The used part, 0 to 1."""
        return 1.0 - self.pages_free / max(self.pages_total, 1)


def _show_arena(shell: WorkerShell, counts: PageCounts) -> None:
    """What both roles export of the node's arena, and vLLM's names for it all if wanted."""
    metrics, parts = shell.metrics, shell.parts
    gauge(metrics, "baton_worker_held_logs").follow(lambda: float(len(parts.held)))
    gauge(metrics, "baton_worker_kv_cache_usage").follow(lambda: counts.used)
    gauge(metrics, "baton_worker_arena_info").set(
        1.0, block_tokens=str(parts.geometry.block_tokens), pages=str(counts.pages_total)
    )
    if shell.role is Role.PREFILL:
        gauge(metrics, "baton_prefill_free_pages").follow(lambda: float(counts.pages_free))
    if shell.config.vllm_metric_names:
        show_vllm_names(metrics, parts.model)


async def serve_worker(
    shell: WorkerShell, load: Callable[[], Load], is_draining: Callable[[], bool]
) -> None:
    """Starts server, metrics, leases and heartbeats; the role's servicer is registered already."""
    service, config, parts = shell.service, shell.config, shell.parts
    await service.start("grpc", shell.server)

    async def show_ready(is_ready: bool) -> None:
        await shell.server.set_ready(is_ready=is_ready)
        if is_ready and config.port_file is not None:
            write_port_file(config.port_file, shell.server.target)

    service.on_ready_changed(show_ready)
    metrics_address = await _start_metrics(shell)
    counts = PageCounts(parts)
    _show_arena(shell, counts)
    attachment = Attachment(parts, config.kvstore, service.clock)
    leases = _leases(shell, counts, attachment)
    await service.start("leases", Background(service, "leases", leases))
    if parts.engine.checks:
        tools = WatchTools(
            parts=parts,
            attachment=attachment,
            kvstore=config.kvstore,
            clock=service.clock,
            measures=GoldenMeasures(shell.metrics, parts),
            interval_s=config.golden_interval_s,
        )
        await service.start("golden", Background(service, "golden", GoldenWatch(tools).run))
    record = Record(
        worker_id=parts.worker_id,
        role=shell.role,
        incarnation=parts.identity.incarnation,
        node_id=parts.node_id,
        address=config.advertise or shell.server.target,
        kvstore_address=config.kvstore,
        label=parts.label,
        geometry=parts.geometry,
        model=parts.model,
        version=software_version(),
        metrics_address=metrics_address,
        context_max=parts.context_max,
    )

    def current() -> Record:
        _idle(parts)
        is_leaving = service.stopping.is_set() or is_draining()
        return replace(
            record,
            label=parts.label,
            is_degraded=parts.is_degraded,
            is_draining=is_leaving,
            is_ready=service.is_ready and attachment.is_usable and not is_leaving,
            progress=parts.progress.value,
            load=replace(load(), pages_free=counts.pages_free, pages_total=counts.pages_total),
        )

    beats = Heartbeats(
        gateway_beats(shell.pool, config.gateways, shell.capability), current, service.clock
    )
    await service.start("heartbeats", Background(service, "heartbeats", beats.run))


async def _start_metrics(shell: WorkerShell) -> str:
    config, service = shell.config, shell.service
    if config.metrics_port is None:
        return ""
    http = HttpServer(
        metrics_application(shell.metrics, lambda: service.is_ready),
        f"{config.host}:{config.metrics_port}",
        service.spawn,
        is_insecure_bind_allowed=config.insecure_bind,
    )
    await service.start("metrics", http)
    return f"{config.host}:{http.port}"


def _leases(
    shell: WorkerShell, counts: PageCounts, attachment: Attachment
) -> Callable[[asyncio.Event], Coroutine[Any, Any, None]]:
    parts = shell.parts

    async def tick(stopping: asyncio.Event) -> None:
        _idle(parts)
        async with attachment.exclusive:
            try:
                incarnation = parts.identity.incarnation
                await renew_once(parts.held, parts.store, incarnation, parts.progress)
            except ServiceError:
                await attachment.restore(stopping)
        try:
            counts.pages_free = (await parts.store.describe_arena()).pages_free
            attachment.heard()
        except ServiceError as error:
            _log.warning("kvstore_unreachable", reason=error.reason.value)
            attachment.heard(error)

    async def run(stopping: asyncio.Event) -> None:
        lease_s = parts.lease_s or STARTING_LEASE_S
        interval_s = min(lease_s / RENEWALS_PER_LEASE, RENEWAL_INTERVAL_MAX_S)
        while not stopping.is_set():
            await tick(stopping)
            # A store that died is back in a moment: then its logs wait for us.
            pause_s = interval_s if attachment.is_usable else UNREACHABLE_INTERVAL_S
            await shell.service.clock.wait(stopping, pause_s)

    return run


def _idle(parts: WorkerParts) -> None:
    """An idle loop makes progress by coming round; a busy one only by its work."""
    if not any(thread.running for thread in (parts.compute, *parts.beside)):
        parts.progress.idled()
