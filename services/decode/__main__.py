"""Wires and runs the decode worker."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Final

from baton.api.decode.v1 import decode_pb2_grpc
from baton.arena.append_stream import AppendLimits, AppendStream
from baton.config import load_config_or_exit
from baton.faults import faults
from baton.heartbeat import Load, Role
from baton.lifecycle import DRAIN_TIMEOUT_S, Service, run_service
from baton.log import configure_logging
from baton.metrics_families import STEP_KERNELS
from baton.tracing import start_tracing
from baton.worker.chunk_profile import (
    chunk_tokens_for,
    load_profile,
    most_chunk_tokens,
    this_machine,
)
from baton.worker.claims_wire import OperatorCheck
from baton.worker.draining import Draining
from baton.worker.engine import WorkerParts
from baton.worker.kernel_choice import KernelWish
from baton.worker.serving import (
    STARTING_LEASE_S,
    Background,
    WorkerShell,
    open_shell,
    serve_worker,
)
from services.decode.config import DecodeConfig
from services.decode.device import DeviceKeeper, open_device
from services.decode.joining import Joiner
from services.decode.local_lane import LocalPrefills, budget_terms
from services.decode.measures import DecodeMeasures
from services.decode.runner import Runner, RunnerTools
from services.decode.scheduler import SlotScheduler
from services.decode.servicer import DecodeServicer

SERVICE_NAME: Final = "baton.api.decode.v1.DecodeService"
NAME: Final = "decode"


async def wire(service: Service, config: DecodeConfig) -> None:
    """Builds the worker and starts its parts."""
    faults.start_from(os.environ)
    kernel = KernelWish(
        choice=config.kernel, threads=config.threads, batch_max=config.active_sequences_max
    )
    profile = load_profile(config.chunk_profile)
    role, wanted = Role.DECODE, config.chunk_tokens
    pass_tokens = most_chunk_tokens(role.value, profile, wanted)
    shell = await open_shell(service, config, role, pass_tokens=pass_tokens, kernel=kernel)
    measures = _measures(shell)
    slots = SlotScheduler(config.active_sequences_max, config.queue_max)
    appends = AppendStream(
        shell.parts.store.open_append,
        (config.worker_id, shell.capability),
        service.clock,
        AppendLimits(
            entries_max=config.active_sequences_max,
            give_up_s=shell.parts.lease_s or STARTING_LEASE_S,
            unreachable_s=config.kvstore_patience_s,
        ),
    )
    machine = (shell.parts.label, this_machine(config.threads))
    chunk_tokens = chunk_tokens_for(role.value, profile, wanted, machine)
    terms = budget_terms(shell.parts, config.local_prefill_gap, chunk_tokens)
    prefills = LocalPrefills(shell.parts, terms, service.clock, config.threads)
    prefills.show(shell.metrics)
    joiner = Joiner(shell.parts, service.clock, measures, prefills)
    runner = Runner(
        RunnerTools(
            parts=shell.parts,
            slots=slots,
            appends=appends,
            joiner=joiner,
            measures=measures,
            clock=service.clock,
            step_tokens_max=config.step_tokens_max,
        )
    )
    operators = OperatorCheck(shell.pool.get(config.kvstore))
    draining = Draining(runner.drain_within, service.request_stop, operators.require)
    shell.server.register(
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        DecodeServicer(runner, shell.parts, draining),
        SERVICE_NAME,
    )

    def load() -> Load:
        return Load(
            active=slots.active,
            queued=slots.reserved + slots.waiting,
            active_max=slots.active_max,
            queue_max=slots.queue_max,
            token_rate=measures.token_rate,
            tpot_s=measures.tpot_s,
            prefill_token_rate=measures.compute_rate,
        )

    async def drain() -> None:
        await draining.at_stop(DRAIN_TIMEOUT_S)

    await serve_worker(shell, load, lambda: runner.is_draining)
    if config.device_bytes:
        keeper = DeviceKeeper(
            shell.parts, open_device(config, shell.parts.geometry), shell.pool.get(config.kvstore)
        )
        shell.parts.before_unmap.append(keeper.stop_reading)
        await service.start("device", Background(service, "device", keeper.run))
    # Started last, so stopped first: sequences are handed back while their streams still stand.
    await service.start("sequences", Background(service, "sequences", runner.run, drain))


def _measures(shell: WorkerShell) -> DecodeMeasures:
    measures = DecodeMeasures(shell.metrics, shell.parts.prefill_rate)
    for name in STEP_KERNELS:
        measures.kernel.follow(partial(_is_kernel, shell.parts, name), kernel=name)
    return measures


def _is_kernel(parts: WorkerParts, name: str) -> float:
    """1 for what computes the steps now."""
    return float(parts.engine.steps_by == name)


def main() -> None:
    """The console script `baton-decode`."""
    config = load_config_or_exit(DecodeConfig, NAME, sys.argv[1:], os.environ)
    configure_logging(NAME, level=config.log_level.upper())
    start_tracing(NAME, is_enabled=config.tracing)
    sys.exit(run_service(NAME, lambda service: wire(service, config)))


if __name__ == "__main__":
    main()
