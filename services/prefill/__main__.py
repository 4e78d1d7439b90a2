"""Wires and runs the prefill worker."""

from __future__ import annotations

import os
import sys
from typing import Final

from baton.api.prefill.v1 import prefill_pb2_grpc
from baton.config import load_config_or_exit
from baton.faults import faults
from baton.heartbeat import Load, Role
from baton.lifecycle import Service, run_service
from baton.log import configure_logging
from baton.tracing import start_tracing
from baton.worker.serving import open_shell, serve_worker
from services.prefill.config import PrefillConfig
from services.prefill.measures import PrefillMeasures
from services.prefill.pipeline import Pipeline
from services.prefill.scheduler import PromptScheduler
from services.prefill.servicer import PrefillServicer
from services.prefill.turns import Turns

SERVICE_NAME: Final = "baton.api.prefill.v1.PrefillService"
NAME: Final = "prefill"


async def wire(service: Service, config: PrefillConfig) -> None:
    """Builds the worker and starts its parts."""
    faults.start_from(os.environ)
    shell = await open_shell(service, config, Role.PREFILL)
    scheduler = PromptScheduler(
        queue_depth_max=config.queue_depth_max, interleave_max=config.interleave_max
    )
    pipeline = Pipeline(
        shell.parts,
        Turns(scheduler),
        PrefillMeasures(shell.metrics),
        service.clock,
        config.chunk_tokens,
    )
    shell.server.register(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(pipeline, shell.parts.tokenizer),
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

    await service.start("pipeline", pipeline)
    await serve_worker(shell, load, lambda: pipeline.is_draining)


def main() -> None:
    """The console script `baton-prefill`."""
    config = load_config_or_exit(PrefillConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
