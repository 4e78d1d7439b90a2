"""Wires and runs the gateway."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Final

import structlog

from baton.api.gateway.v1 import gateway_pb2_grpc
from baton.api.gateway.v1 import sessions_pb2_grpc as gateway_sessions_pb2_grpc
from baton.capability import CapabilitySigner, CapabilityVerifier, is_dev_key
from baton.client import ChannelPool
from baton.cluster_key import cluster_key
from baton.config import load_config_or_exit
from baton.engine.config import read_config
from baton.engine.label import config_fields, rope_fields, weight_hashes
from baton.errors import ServiceError, StartupError
from baton.faults import faults
from baton.http_server import HttpServer
from baton.ids import new_incarnation
from baton.kv.digests import model_digest, rope_digest
from baton.lifecycle import Service, every, run_service
from baton.log import configure_logging
from baton.metrics import Metrics
from baton.metrics_server import metrics_application
from baton.metrics_vllm import show_vllm_names
from baton.models import resolve
from baton.process_files import write_port_file
from baton.rpc.interceptor import CallLimits
from baton.rpc.measures import RpcMeasures
from baton.rpc.server import RpcServer, ServerOptions, build_server, is_loopback
from baton.scheduling.claims import ServiceClass
from baton.text.bundle import TextBundle
from baton.tracing import start_tracing
from services.gateway.auth import Authenticator
from services.gateway.cleanup import Cleanup
from services.gateway.client_prefixes import PrefixClient
from services.gateway.clients import DecodeClient, MergerClient, PrefillClient, StoreClient
from services.gateway.config import GatewayConfig
from services.gateway.core import GatewayCore
from services.gateway.decode_streams import WATCH_INTERVAL_S, DecodeStreams
from services.gateway.hub import WorkerHub
from services.gateway.legs import CapabilityMint
from services.gateway.limits import Admission, RateLimits, RequestLimits
from services.gateway.measures import GatewayMeasures
from services.gateway.opening import SequenceParts
from services.gateway.planner import Planner, PlanRules
from services.gateway.prefix_cache import PrefixCache
from services.gateway.prompts import ServedModel
from services.gateway.redis_measures import RedisMeasures
from services.gateway.registry import Registry, WorkerRecord
from services.gateway.rest.application import RestApplication, with_cors
from services.gateway.rest.routes import RestLimits, Routes
from services.gateway.servicer import GatewayServicer
from services.gateway.servicer_registry import RegistryServicer
from services.gateway.servicer_sessions import SERVICE_NAME as SESSIONS_SERVICE
from services.gateway.servicer_sessions import SessionsServicer
from services.gateway.shared_limits import SharedLimits
from services.gateway.shared_store import SharedStore
from services.gateway.sharing import start_redis, start_sharing
from services.gateway.tenants_file import load_tenants
from services.gateway.traces import TraceGatherer

_log = structlog.stdlib.get_logger("baton.gateway")

NAME: Final = "gateway"
GATEWAY_SERVICE: Final = "baton.api.gateway.v1.GatewayService"
REGISTRY_SERVICE: Final = "baton.api.gateway.v1.RegistryService"


async def wire(service: Service, config: GatewayConfig) -> None:
    """Builds the gateway and starts its parts."""
    faults.start_from(os.environ)
    metrics, incarnation = Metrics(NAME), new_incarnation()
    key = cluster_key(config.cluster_key_file)
    hub = WorkerHub(
        Registry(dead_after_s=config.dead_after_s, lease_s=config.lease_s), service.clock
    )
    server = _server(config, metrics)
    authenticator = _authenticator(config)
    core, streams = await _core(
        service,
        config,
        metrics,
        hub=hub,
        key=key,
        incarnation=incarnation,
        requests_per_minute=authenticator.requests_per_minute(),
    )
    server.register(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        GatewayServicer(core, authenticator, hub),
        GATEWAY_SERVICE,
    )
    server.register(
        gateway_sessions_pb2_grpc.add_SessionsServiceServicer_to_server,
        SessionsServicer(core, authenticator),
        SESSIONS_SERVICE,
    )
    registry = RegistryServicer(
        hub,
        CapabilityVerifier(key, service.clock),
        identity=(config.gateway_id, incarnation),
        is_open=is_loopback(config.host) and is_dev_key(key),
    )
    server.register(
        gateway_pb2_grpc.add_RegistryServiceServicer_to_server, registry, REGISTRY_SERVICE
    )
    await service.start("grpc", server)
    http = await _http(service, config, metrics, core=core, authenticator=authenticator)

    async def watch() -> None:
        hub.expire()
        await streams.watch()

    service.spawn(
        "watch",
        every(WATCH_INTERVAL_S, watch, clock=service.clock, stopping=service.stopping),
    )

    async def show_ready(is_ready: bool) -> None:
        await server.set_ready(is_ready=is_ready)
        if is_ready:
            _write_ports(config, server, http)

    service.on_ready_changed(show_ready)


async def _core(
    service: Service,
    config: GatewayConfig,
    metrics: Metrics,
    *,
    hub: WorkerHub,
    key: bytes,
    incarnation: int,
    requests_per_minute: Mapping[str, int],
) -> tuple[GatewayCore, DecodeStreams]:
    model = load_model(config.model)
    channels = ChannelPool()
    await service.start("channels", channels)
    _connect_to_who_is_heard(service, hub, channels)
    stores, prefills, decodes = (
        StoreClient(channels),
        PrefillClient(channels),
        DecodeClient(channels),
    )
    prefix_client = PrefixClient(channels)
    mint = CapabilityMint(CapabilitySigner(key, service.clock))
    cleanup = Cleanup(stores, prefills, decodes, service.spawn, service.clock)
    await service.start("cleanup", cleanup)
    streams = DecodeStreams(
        channels,
        hub,
        clock=service.clock,
        spawn=service.spawn,
        hello=(config.gateway_id, incarnation),
    )
    await service.start("decode_streams", streams)
    rules = PlanRules(
        mode=config.prefill_mode,
        tokenizer_hash=model.tokenizer.tokenizer_hash(),
        model=model_digests(config.model),
        prefill_queue_max=config.prefill_queue_max,
    )
    parts = SequenceParts(
        planner=Planner(hub, rules),
        stores=stores,
        prefills=prefills,
        decodes=decodes,
        streams=streams,
        prefixes=PrefixCache(
            prefix_client, MergerClient(channels), hub, mint=mint, clock=service.clock
        ),
        prefix_client=prefix_client,
        mint=mint,
        cleanup=cleanup,
        clock=service.clock,
        template_digest=model.template_digest,
        until=hub.until,
    )
    limits = RequestLimits(
        sequences_max=config.sequences_max, tenant_sequences_max=config.tenant_sequences_max
    )
    parts.planner.is_below_share = limits.is_below_share
    measures = _measures(config, metrics, parts, hub)
    measures.follow_running(lambda: limits.running, lambda: cleanup.pending)
    if config.vllm_metric_names:
        show_vllm_names(metrics, model.name)
    link = await _redis(service, config, RedisMeasures(metrics))
    across = await _across_gateways(service, config, hub, channels, (link, key, incarnation))
    admission = Admission(limits, RateLimits(requests_per_minute, service.clock), across)
    core = GatewayCore(model, parts, hub, admission, measures, spawn=service.spawn)
    await service.start("prefixes", core.prefixes)
    return core, streams


def _measures(
    config: GatewayConfig, metrics: Metrics, parts: SequenceParts, hub: WorkerHub
) -> GatewayMeasures:
    measures = GatewayMeasures(metrics)
    measures.promise(
        {
            ServiceClass.INTERACTIVE: config.interactive_slo_s,
            ServiceClass.BATCH: config.batch_slo_s,
        }
    )
    measures.follow_handoffs(parts.handoffs)
    measures.follow_workers(hub)
    measures.follow_mismatched(parts.planner)
    return measures


def _connect_to_who_is_heard(service: Service, hub: WorkerHub, channels: ChannelPool) -> None:
    """Who is heard can be called: also where the last try to connect has just failed."""

    def connect_again(record: WorkerRecord) -> None:
        channel = channels.detach_failed(record.address)
        if channel is not None:
            service.spawn(f"close-channel-{record.worker_id}", channel.close())

    hub.on_heard(connect_again)


async def _redis(
    service: Service, config: GatewayConfig, measures: RedisMeasures
) -> SharedStore | None:
    """The link to Redis, if there is to be one."""
    if config.redis_url is None:
        return None
    return await start_redis(service, config.redis_url, measures)


async def _across_gateways(
    service: Service,
    config: GatewayConfig,
    hub: WorkerHub,
    channels: ChannelPool,
    identity: tuple[SharedStore | None, bytes, int],
) -> SharedLimits | None:
    """Limits and hints over Redis, if there is one. `identity`: link, cluster key, incarnation."""
    link, key, incarnation = identity
    if link is None:
        return None
    return await start_sharing(
        service,
        link,
        hub,
        channels,
        key=key,
        lease_s=config.lease_s,
        tenant_sequences_max=config.tenant_sequences_max,
        holder=f"{incarnation:x}",
    )


def load_model(name_or_path: str) -> ServedModel:
    """Tokenizer, template and context of a model; StartupError saying what to do."""
    try:
        files = resolve(name_or_path)
        bundle = TextBundle.load(files.path)
        context_max = read_config(files.path).max_context
    except ServiceError as error:
        raise StartupError(error.message, hint="`baton models` lists and fetches models") from error
    return ServedModel(
        name=files.name,
        aliases=() if files.known is None else files.known.aliases,
        tokenizer=bundle.tokenizer,
        template=bundle.template,
        context_max=context_max,
        created_wall_s=int(files.path.stat().st_mtime),
    )


def model_digests(name_or_path: str) -> tuple[bytes, bytes] | None:
    """(model digest, RoPE digest) that workers of this model state; None without its weights."""
    path = resolve(name_or_path).path
    try:
        config = read_config(path)
        digests = model_digest(config_fields(config), weight_hashes(path))
    except ServiceError as error:
        _log.warning("workers_believed", why=error.message)
        return None
    return digests, rope_digest(rope_fields(config))


def _authenticator(config: GatewayConfig) -> Authenticator:
    if config.tenants_file is not None:
        return Authenticator(load_tenants(config.tenants_file), is_open=False)
    return Authenticator((), is_open=is_loopback(config.host))


def _server(config: GatewayConfig, metrics: Metrics) -> RpcServer:
    heartbeat = f"/{REGISTRY_SERVICE}/Heartbeat"
    return build_server(
        ServerOptions(
            bind=f"{config.host}:{config.port}",
            is_insecure_bind_allowed=config.insecure_bind,
            limits=CallLimits(
                calls_max=config.sequences_max + 512,
                # Publishing a long prefix is unary and computes.
                unary_timeout_s=300.0,
                unbounded_methods=frozenset({heartbeat}),
                is_edge=True,
            ),
        ),
        RpcMeasures(metrics, "server"),
    )


async def _http(
    service: Service,
    config: GatewayConfig,
    metrics: Metrics,
    *,
    core: GatewayCore,
    authenticator: Authenticator,
) -> HttpServer:
    limits = RestLimits(
        body_bytes_max=config.body_bytes_max,
        answers_max=config.answers_max,
        timeout_s=config.request_timeout_s,
        timeout_s_max=config.request_timeout_s_max,
    )
    traces = TraceGatherer(config.gateway_id, core.hub.statuses)
    routes = Routes(core, limits, _version(), traces)
    application = with_cors(RestApplication(routes.table(), authenticator), config.cors_origins)
    http = HttpServer(
        application,
        f"{config.host}:{config.http_port}",
        service.spawn,
        is_insecure_bind_allowed=config.insecure_bind,
    )
    await service.start("http", http)
    if config.metrics_port is not None:
        page = HttpServer(
            metrics_application(metrics, core.is_ready, traces.find),
            f"{config.host}:{config.metrics_port}",
            service.spawn,
            is_insecure_bind_allowed=config.insecure_bind,
        )
        await service.start("metrics", page)
    return http


def _version() -> str:
    try:
        return importlib.metadata.version("baton-serving")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _write_ports(config: GatewayConfig, server: RpcServer, http: HttpServer) -> None:
    if config.http_port_file is not None:
        write_port_file(config.http_port_file, http.url.removeprefix("http://"))
    if config.port_file is not None:
        write_port_file(config.port_file, server.target)


def main() -> None:
    """The console script `baton-gateway`."""
    config = load_config_or_exit(GatewayConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
