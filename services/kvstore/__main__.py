"""Wires and runs the kvstore."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Final

import structlog

from baton.api.kvstore.v1 import device_pb2_grpc, operators_pb2_grpc, sessions_pb2_grpc
from baton.capability import CapabilitySigner, Claims, Right
from baton.client import ChannelPool
from baton.cluster_key import cluster_key
from baton.config import load_config_or_exit
from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.errors import ServiceError, StartupError
from baton.faults import faults
from baton.heartbeat import Heartbeats, Load, Record, Role
from baton.heartbeat_wire import gateway_beats
from baton.http_server import HttpServer
from baton.ids import new_incarnation
from baton.lifecycle import Service, run_service
from baton.log import configure_logging
from baton.memory import keep_freed_memory
from baton.metrics import Metrics
from baton.metrics_server import metrics_application
from baton.models import resolve
from baton.process_files import write_port_file
from baton.rpc.interceptor import CallLimits
from baton.rpc.measures import RpcMeasures
from baton.rpc.server import RpcServer, ServerOptions, build_server, is_loopback
from baton.text.bundle import TextBundle
from baton.tracing import start_tracing
from services.kvstore.assembly import Assembled, Plan, assemble
from services.kvstore.config import KVStoreConfig, default_arena_dir
from services.kvstore.device_rpc import FOLLOW_METHOD
from services.kvstore.device_rpc import SERVICE_NAME as DEVICE_SERVICE_NAME
from services.kvstore.identity import Identity
from services.kvstore.moving.assembly import open_planes
from services.kvstore.operator_rpc import SERVICE_NAME as OPERATOR_SERVICE_NAME
from services.kvstore.scrub import Pace
from services.kvstore.servicer import APPEND_METHOD, SERVICE_NAME, add_to_server
from services.kvstore.session_rpc import SERVICE_NAME as SESSION_SERVICE_NAME
from services.kvstore.tiers.demotion import Watermarks
from services.kvstore.tiers.nvme_tier import NvmePlan

NAME: Final = "kvstore"
DISTRIBUTION: Final = "baton-serving"
CALLS_MAX: Final = 2048
STREAMS: Final = frozenset({APPEND_METHOD, FOLLOW_METHOD})
OWN_CAPABILITY_TTL_S: Final = 10 * 365 * 86_400.0

_log = structlog.stdlib.get_logger("services.kvstore")


async def wire(service: Service, config: KVStoreConfig) -> None:
    """Builds the store and starts its parts."""
    faults.start_from(os.environ)
    metrics = Metrics(NAME)
    server = build_server(
        ServerOptions(
            bind=f"{config.host}:{config.port}",
            is_insecure_bind_allowed=config.insecure_bind,
            limits=CallLimits(calls_max=CALLS_MAX, unbounded_methods=STREAMS),
        ),
        RpcMeasures(metrics, "server"),
    )
    key = cluster_key(config.cluster_key_file)
    plan = await asyncio.get_running_loop().run_in_executor(
        None, lambda: _plan(config, key, lambda: config.advertise or server.target)
    )
    assembled = await assemble(service, plan, service.clock, metrics)
    server.register(add_to_server, assembled.servicer, SERVICE_NAME)
    server.register(
        operators_pb2_grpc.add_OperatorServiceServicer_to_server,
        assembled.operators,
        OPERATOR_SERVICE_NAME,
    )
    server.register(
        device_pb2_grpc.add_DeviceServiceServicer_to_server,
        assembled.devices,
        DEVICE_SERVICE_NAME,
    )
    server.register(
        sessions_pb2_grpc.add_SessionServiceServicer_to_server,
        assembled.sessions,
        SESSION_SERVICE_NAME,
    )
    await service.start("grpc", server)

    async def show_ready(is_ready: bool) -> None:
        await server.set_ready(is_ready=is_ready)
        if is_ready and config.port_file is not None:
            write_port_file(config.port_file, server.target)

    service.on_ready_changed(show_ready)
    metrics_address = await _start_metrics(service, config, metrics)
    await _start_heartbeats(service, config, _Beating(server, plan, assembled, metrics_address))


def _plan(config: KVStoreConfig, key: bytes, own_address: Callable[[], str]) -> Plan:
    """What the model's files and the settings come to. Reads the weights once, to hash them."""
    try:
        files = resolve(config.model)
        model = read_config(files.path)
        bundle = TextBundle.load(files.path)
        geometry = model.kv_geometry(config.block_tokens, config.dtype.kv)
        label = build_label(
            files.path,
            model,
            bundle.tokenizer_hash,
            geometry,
            torch_numeric_class(model, config.dtype.kv),
        )
    except ServiceError as error:
        raise StartupError(
            f"the model cannot be used: {error.message}", hint="check --model"
        ) from error
    identity = Identity(label=label, geometry=geometry, model=files.name, node_id=config.node_id)
    return Plan(
        identity=identity,
        vocabulary_size=model.vocabulary,
        tokens_max=model.max_context,
        arena_bytes=config.arena_bytes,
        arena_dir=config.arena_dir or default_arena_dir(),
        log_dir=config.log_dir,
        cluster_key=key,
        lease_s=config.lease_s,
        ttl_s=config.ttl_s,
        segments_max=config.log_segments_max,
        is_arena_removed=config.remove_arena,
        quotas=config.quotas,
        scrub=_scrub_pace(config),
        nvme=_nvme_plan(config),
        watermarks=Watermarks(low=config.demote_below, high=config.demote_until),
        own_address=own_address,
        planes=open_planes(
            config.transport.value,
            is_loopback=is_loopback(config.host),
            ports=config.ucx_ports,
            stall_s=config.transfer_stall_s,
        ),
    )


def _nvme_plan(config: KVStoreConfig) -> NvmePlan | None:
    if not config.nvme_bytes:
        return None
    return NvmePlan(directory=config.nvme_dir or config.log_dir, nvme_bytes=config.nvme_bytes)


def _scrub_pace(config: KVStoreConfig) -> Pace | None:
    if not config.scrub_period_s:
        return None
    return Pace(period_s=config.scrub_period_s, bytes_per_s=config.scrub_bytes_per_s)


async def _start_metrics(service: Service, config: KVStoreConfig, metrics: Metrics) -> str:
    if config.metrics_port is None:
        return ""
    http = HttpServer(
        metrics_application(metrics, lambda: service.is_ready),
        f"{config.host}:{config.metrics_port}",
        service.spawn,
        is_insecure_bind_allowed=config.insecure_bind,
    )
    await service.start("metrics", http)
    return f"{config.host}:{http.port}"


class _Beating:
    """What a heartbeat says of this store."""

    def __init__(
        self, server: RpcServer, plan: Plan, assembled: Assembled, metrics_address: str
    ) -> None:
        self._server = server
        self._identity = plan.identity
        self._runtime = assembled.runtime
        self._metrics_address = metrics_address
        self._incarnation = new_incarnation()
        self.key = plan.cluster_key

    def record(self, config: KVStoreConfig, *, is_ready: bool) -> Record:
        """The record now."""
        core, identity = self._runtime.core, self._identity
        counts = core.pool.counts()
        address = config.advertise or self._server.target
        is_draining = self._runtime.store.is_draining
        return Record(
            worker_id=identity.node_id,
            role=Role.KVSTORE,
            incarnation=self._incarnation,
            node_id=identity.node_id,
            address=address,
            kvstore_address=address,
            label=identity.label,
            geometry=identity.geometry,
            model=identity.model,
            version=software_version(),
            is_draining=is_draining,
            is_ready=is_ready and not is_draining and self._runtime.writer.fault is None,
            progress=self._runtime.progress,
            load=Load(
                active=len(core.leases),
                pages_free=counts.free,
                pages_total=counts.total,
            ),
            metrics_address=self._metrics_address,
            context_max=core.limits.tokens_max,
        )


async def _start_heartbeats(service: Service, config: KVStoreConfig, beating: _Beating) -> None:
    if not config.gateways:
        return
    pool = ChannelPool()
    await service.start("channels", pool)
    capability = config.worker_capability or own_capability(beating.key, service)
    beats = Heartbeats(
        gateway_beats(pool, config.gateways, capability),
        lambda: beating.record(config, is_ready=service.is_ready),
        service.clock,
    )
    service.spawn("heartbeats", beats.run(service.stopping))


def own_capability(key: bytes, service: Service) -> str:
    """A tenant-less capability for heartbeats, under the key this store has anyway."""
    signer = CapabilitySigner(key, service.clock)
    return signer.sign(
        Claims(
            tenant=None,
            scope=None,
            rights=frozenset({Right.HEARTBEAT}),
            expiry_wall_s=signer.expiry_after(OWN_CAPABILITY_TTL_S),
            request_id=NAME,
        )
    )


def software_version() -> str:
    """The version of this software; carried and logged, never compared."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main() -> None:
    """The console script `baton-kvstore`."""
    config = load_config_or_exit(KVStoreConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    keep_freed_memory()
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
