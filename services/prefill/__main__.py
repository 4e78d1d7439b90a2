"""Wires and runs the prefill worker."""

from __future__ import annotations

import os
import sys
from typing import Final

from baton.api.prefill.v1 import prefill_pb2_grpc
from baton.config import load_config_or_exit
from baton.faults import faults
from baton.heartbeat import Load, Role
from baton.lifecycle import DRAIN_TIMEOUT_S, Service, run_service
from baton.log import configure_logging
from baton.tracing import start_tracing
from baton.worker.claims_wire import OperatorCheck
from baton.worker.draining import Draining
from baton.worker.serving import open_shell, serve_worker
from baton.worker.startup import PromptDevice
from services.prefill.config import DeviceKind, PrefillConfig
from services.prefill.measures import PrefillMeasures
from services.prefill.pipeline import Pipeline
from services.prefill.planning import ChunkPlanning
from services.prefill.scheduler import PromptScheduler
from services.prefill.servicer import PrefillServicer
from services.prefill.turns import Turns

SERVICE_NAME: Final = "baton.api.prefill.v1.PrefillService"
NAME: Final = "prefill"


async def wire(service: Service, config: PrefillConfig) -> None:
    """Builds the worker and starts its parts."""
    faults.start_from(os.environ)
    planning = ChunkPlanning(config)
    pass_tokens = max(planning.chunk_tokens_most, config.batch_tokens)
    shell = await open_shell(
        service,
        config,
        Role.PREFILL,
        pass_tokens=pass_tokens,
        device=_device(config, planning.chunk_tokens_most),
    )
    scheduler = PromptScheduler(
        queue_depth_max=config.queue_depth_max,
        interleave_max=config.interleave_max,
        batch_tokens=config.batch_tokens,
    )
    pipeline = Pipeline(
        shell.parts,
        Turns(scheduler),
        PrefillMeasures(shell.metrics),
        service.clock,
        planning.chunk_tokens(shell.parts.label),
        chunking=config.chunking,
    )
    operators = OperatorCheck(shell.pool.get(config.kvstore))
    draining = Draining(pipeline.drain_within, service.request_stop, operators.require)
    shell.server.register(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(pipeline, shell.parts.tokenizer, draining),
        SERVICE_NAME,
    )

    def load() -> Load:
        return Load(
            active=len(scheduler) - scheduler.queued,
            queued=scheduler.queued,
            queued_tokens=scheduler.pending_tokens,
            active_max=config.interleave_max,
            token_rate=pipeline.token_rate,
        )

    await service.start("runs", _Runs(draining))
    await serve_worker(shell, load, lambda: pipeline.is_draining)


def _device(config: PrefillConfig, chunk_tokens: int) -> PromptDevice | None:
    if config.device is DeviceKind.CPU:
        return None
    return PromptDevice(
        name="cuda" if config.device is DeviceKind.CUDA else "cpu",
        kv_bytes=config.device_bytes,
        chunk_tokens=chunk_tokens,
    )


class _Runs:
    """A part of the service: runs come by themselves, and end with their calls."""

    def __init__(self, draining: Draining) -> None:
        self._draining = draining

    async def start(self) -> None:
        """Nothing runs before the first call."""

    async def drain(self) -> None:
        """Take no new runs; returns when none is left."""
        await self._draining.at_stop(DRAIN_TIMEOUT_S)

    async def stop(self) -> None:
        """Runs still under way are cancelled with their calls."""


def main() -> None:
    """The console script `baton-prefill`."""
    config = load_config_or_exit(PrefillConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
