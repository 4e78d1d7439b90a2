"""Wires and runs the merger."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import sys
from dataclasses import replace
from typing import Final

from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.client import ChannelPool
from baton.clock import Clock
from baton.config import load_config_or_exit
from baton.faults import faults
from baton.heartbeat import Heartbeats, Record, Role
from baton.heartbeat_wire import gateway_beats
from baton.http_server import HttpServer
from baton.ids import new_incarnation
from baton.lifecycle import Service, run_service
from baton.log import configure_logging
from baton.metrics import Metrics
from baton.metrics_server import metrics_application
from baton.process_files import write_port_file
from baton.rpc.measures import RpcMeasures
from baton.rpc.server import ServerOptions, build_server
from baton.tracing import start_tracing
from services.merger.config import MergerConfig
from services.merger.materialise import Materialiser
from services.merger.measures import MergerMeasures
from services.merger.servicer import SERVICE_NAME, MergerServicer, add_to_server

NAME: Final = "merger"
DEV_CAPABILITY_TTL_S: Final = 10 * 365 * 86_400.0


async def wire(service: Service, config: MergerConfig) -> None:
    """Builds the merger and starts its parts."""
    faults.start_from(os.environ)
    metrics = Metrics(NAME)
    measures = MergerMeasures(metrics)
    server = build_server(
        ServerOptions(
            bind=f"{config.host}:{config.port}", is_insecure_bind_allowed=config.insecure_bind
        ),
        RpcMeasures(metrics, "server"),
    )
    channels = ChannelPool()
    await service.start("channels", channels)
    server.register(
        add_to_server,
        MergerServicer(Materialiser(channels), measures),
        SERVICE_NAME,
    )
    await service.start("grpc", server)
    metrics_address = await _metrics_page(service, config, metrics)

    async def show_ready(is_ready: bool) -> None:
        await server.set_ready(is_ready=is_ready)
        if is_ready and config.port_file is not None:
            write_port_file(config.port_file, server.target)

    service.on_ready_changed(show_ready)
    record = Record(
        worker_id=config.worker_id,
        role=Role.MERGER,
        incarnation=new_incarnation(),
        address=config.advertise or server.target,
        model="",
        version=_version(),
        metrics_address=metrics_address,
    )
    turns = itertools.count(1)

    def current() -> Record:
        is_leaving = service.stopping.is_set()
        return replace(
            record,
            is_ready=service.is_ready and not is_leaving,
            is_draining=is_leaving,
            progress=measures.count + next(turns),
        )

    capability = config.worker_capability or _dev_capability(service.clock)
    # What is there now stays: a collection that went through it all would hold splices up for tens
    # of milliseconds.
    gc.collect()
    gc.freeze()
    beats = Heartbeats(gateway_beats(channels, config.gateways, capability), current, service.clock)
    service.spawn("heartbeats", beats.run(service.stopping))


async def _metrics_page(service: Service, config: MergerConfig, metrics: Metrics) -> str:
    if config.metrics_port is None:
        return ""
    page = HttpServer(
        metrics_application(metrics, lambda: service.is_ready),
        f"{config.host}:{config.metrics_port}",
        service.spawn,
        is_insecure_bind_allowed=config.insecure_bind,
    )
    await service.start("metrics", page)
    return f"{config.host}:{page.port}"


def _dev_capability(clock: Clock) -> str:
    """A worker capability under the public development key: good on one machine only."""
    signer = CapabilitySigner(DEV_KEY, clock)
    return signer.sign(
        Claims(
            tenant=None,
            scope=None,
            rights=frozenset({Right.HEARTBEAT}),
            expiry_wall_s=signer.expiry_after(DEV_CAPABILITY_TTL_S),
            request_id=NAME,
        )
    )


def _version() -> str:
    try:
        return importlib.metadata.version("baton-serving")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main() -> None:
    """The console script `baton-merger`."""
    config = load_config_or_exit(MergerConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
