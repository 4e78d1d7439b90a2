"""Starting a worker: model, label, arena, golden check, in that order.

Owns the sequence and its waits. A kvstore that is not there yet is waited for, saying so; one that
refuses this worker ends the start with its reason. Never serves a request: readiness is the
caller's to announce after `start_worker` returned.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from baton.arena.client import KVStoreClient, WorkerIdentity
from baton.arena.mapping import ArenaShape, MappedArena
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.clock import Clock, WaitingClock
from baton.engine import golden_check
from baton.engine.chunk_lanes import require_device
from baton.engine.config import ModelConfig, read_config
from baton.engine.finish import EndRule
from baton.engine.golden_check import GoldenCheck, GoldenReference, TorchPath
from baton.engine.kv_pages import KvPages
from baton.engine.label import build_label, torch_numeric_class, weight_hashes
from baton.engine.step_kernel import StepKernel
from baton.engine.transformer import Transformer, set_threads
from baton.engine.weights import ComputeDtype, ModelWeights, load_weights
from baton.errors import Reason, ServiceError, StartupError
from baton.ids import new_incarnation
from baton.kv.layout import KvDtype, KvGeometry
from baton.models import resolve
from baton.rpc.channel import Channel
from baton.text.bundle import TextBundle
from baton.worker.attachment import Waiting, attach_when_there
from baton.worker.config import STORE_PATIENCE_S
from baton.worker.engine import WorkerParts
from baton.worker.held_logs import HeldLogs
from baton.worker.kernel_choice import KernelWish
from baton.worker.kernel_engine import KernelEngine, OpenedKernel, open_kernel
from baton.worker.kv_stages import InPlace, KvStages
from baton.worker.memory import state_memory
from baton.worker.self_test import measured_prefill_rate
from baton.worker.staged_engine import StagedEngine
from baton.worker.threads import Progress, WorkThread
from baton.worker.torch_engine import TorchEngine

DISTRIBUTION: Final = "baton-serving"
TAKEN_PAGES: Final = 2
DEV_CAPABILITY_TTL_S: Final = 10 * 365 * 86_400.0

_log = structlog.stdlib.get_logger("baton.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDevice:
    """Where prompts are computed apart from the arena: torch's name of the device, its memory for
    KV, and the tokens of a chunk, which copies to the arena are made for.
    """

    name: str
    kv_bytes: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker's configuration says of it. `context_max` None: the model's own.

    `has_int8_kv`: KV is stored in int8, elsewhere in the type of computation. `device` None: all is
    computed in the arena. `pass_tokens`: prompt tokens computed in one go at most.
    """

    worker_id: str
    model: str
    dtype: str
    threads: int
    kvstore: str
    capability: str
    context_max: int | None = None
    kernel: KernelWish = field(default_factory=KernelWish)
    store_patience_s: float = STORE_PATIENCE_S
    has_int8_kv: bool = False
    device: PromptDevice | None = None
    pass_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    name: str
    path: Path
    config: ModelConfig
    weights: ModelWeights
    weight_hashes: list[bytes]
    bundle: TextBundle


def software_version() -> str:
    """The version of this software; carried and logged, never compared."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def capability_or_dev(capability: str | None, worker_id: str, clock: Clock) -> str:
    """The configured worker capability, or one of our own under the public development key."""
    if capability:
        return capability
    signer = CapabilitySigner(DEV_KEY, clock)
    _log.warning("development_capability_used", worker_id=worker_id)
    claims = Claims(
        tenant=None,
        scope=None,
        rights=frozenset({Right.ATTACH, Right.HEARTBEAT}),
        expiry_wall_s=signer.expiry_after(DEV_CAPABILITY_TTL_S),
        request_id=worker_id,
    )
    return signer.sign(claims)


async def start_worker(
    options: WorkerOptions, channel: Channel, clock: WaitingClock
) -> WorkerParts:
    """Everything the worker's service needs, ready to compute.

    Raises StartupError with the cause and a hint: model missing or damaged, kvstore of another
    model, golden check failed.
    """
    compute, packing = WorkThread(f"{options.worker_id}-compute"), WorkThread("packing")
    store = KVStoreClient(channel, options.worker_id, options.capability)
    try:
        model = await compute.run(lambda: _load(options))
        waiting = Waiting(options.kvstore, clock, asyncio.Event())
        geometry = _geometry(options, model, await _block_tokens(store, waiting))
        reference = _reference(model)
        opened = await compute.run(lambda: _kernel(options, model, geometry, reference))
        checked = opened.checked
        identity = _identity(options, model, geometry, None if checked is None else checked.kernel)
        attached = await attach_when_there(store, identity, waiting)
    except ServiceError as error:
        raise StartupError(
            f"{options.worker_id} cannot start: {error.message}", hint=_hint(error)
        ) from error
    transformer = Transformer(model.weights, _pages(options, attached.arena))
    check = await compute.run(lambda: _check_golden(transformer, reference))
    rate = await compute.run(lambda: measured_prefill_rate(transformer))
    _log.info("prefill_rate_measured", tokens_per_s=round(rate, 1))
    engine: TorchEngine | KernelEngine
    stages: KvStages = InPlace()
    if options.device is not None:
        chunk_tokens = options.device.chunk_tokens
        engine = stages = StagedEngine(transformer, attached.arena, chunk_tokens, check)
    elif checked is None:
        engine = TorchEngine(transformer, check)
    else:
        engine = KernelEngine(transformer, checked, check)
    state_memory(model.weights, checked, attached.arena, options.pass_tokens)
    rule = EndRule(
        end_token_ids=frozenset(model.config.end_token_ids) | frozenset(model.bundle.eos_ids),
        max_context=min(
            transformer.max_context,
            arena_tokens(attached.arena.shape),
            transformer.pages.page_count * identity.geometry.block_tokens,
        ),
    )
    return WorkerParts(
        identity=identity,
        model=model.name,
        engine=engine,
        tokenizer=model.bundle.tokenizer,
        rule=rule,
        vocabulary=model.config.vocabulary,
        arena=attached.arena,
        store=store,
        node_id=attached.node_id,
        lease_s=attached.lease_s,
        compute=compute,
        packing=packing,
        stages=stages,
        progress=Progress(),
        held=HeldLogs(),
        prefill_rate=rate,
        store_patience_s=options.store_patience_s,
        is_degraded=opened.has_failed,
    )


def arena_tokens(shape: ArenaShape) -> int:
    """The most tokens of a sequence that has the whole arena to itself: what can never fit is
    refused before anybody waits for it. A page more is needed when the log is taken, whose partial
    page is copied, and one for the first output.
    """
    return max(1, shape.page_count - TAKEN_PAGES) * shape.geometry.block_tokens


def _pages(options: WorkerOptions, arena: MappedArena) -> KvPages:
    """Where the torch forward keeps KV: in the arena, or in a device's memory."""
    if options.device is None:
        return KvPages.from_buffer(arena.slots, arena.geometry, arena.shape.page_count)
    count = options.device.kv_bytes // arena.geometry.slot_bytes
    if count == 0:
        raise StartupError(
            f"device_bytes: {options.device.kv_bytes} do not hold one page of "
            f"{arena.geometry.slot_bytes}",
            hint="give --device-bytes at least as much as the longest prompt's KV",
            exit_code=2,
        )
    try:
        return KvPages.allocate(arena.geometry, count, options.device.name)
    except RuntimeError as error:
        raise StartupError(
            f"device_bytes: the device does not give {count} pages ({type(error).__name__})",
            hint="lower --device-bytes, or compute on --device cpu",
        ) from error


def _geometry(options: WorkerOptions, model: _Model, block_tokens: int) -> KvGeometry:
    kv = KvDtype.INT8 if options.has_int8_kv else model.weights.dtype.kv_dtype
    return model.config.kv_geometry(block_tokens, kv)


def _reference(model: _Model) -> GoldenReference:
    """The shipped reference; where there is none, tokens by which a later change can be seen."""
    shipped = golden_check.find_reference(model.weight_hashes)
    if shipped is None:
        _log.warning(
            "golden_reference_missing",
            model=model.name,
            cause="none is shipped for this model; checks compare with the start's own results",
        )
        return golden_check.own_reference(model.weight_hashes, model.config.vocabulary)
    return shipped


def _kernel(
    options: WorkerOptions, model: _Model, geometry: KvGeometry, reference: GoldenReference
) -> OpenedKernel:
    """The step kernel this worker decodes with, if it wants one; in the compute thread."""
    is_float32 = model.weights.dtype is ComputeDtype.FLOAT32
    wish = replace(options.kernel, is_float32=is_float32)
    return open_kernel(model.path, geometry, reference, wish, options.context_max)


def _identity(
    options: WorkerOptions, model: _Model, geometry: KvGeometry, kernel: StepKernel | None
) -> WorkerIdentity:
    own = model.weights.dtype.kv_dtype
    torch_class = torch_numeric_class(model.config, geometry.dtype, own)
    label = build_label(
        model.path,
        model.config,
        model.bundle.tokenizer_hash,
        geometry,
        torch_class if kernel is None else kernel.class_,
    )
    return WorkerIdentity(
        worker_id=options.worker_id,
        incarnation=new_incarnation(),
        label=label,
        geometry=geometry,
        capability=options.capability,
        software_version=software_version(),
    )


def _load(options: WorkerOptions) -> _Model:
    """Reads everything of the model; seconds, in the compute thread."""
    set_threads(options.threads)
    device = "cpu" if options.device is None else options.device.name
    require_device(device)
    files = resolve(options.model)
    config = read_config(files.path)
    _log.info("model_loading", model=files.name, dtype=options.dtype, threads=options.threads)
    return _Model(
        name=files.name,
        path=files.path,
        config=config,
        bundle=TextBundle.load(files.path),
        weights=load_weights(
            files.path,
            ComputeDtype(options.dtype),
            max_context=options.context_max,
            device=device,
        ),
        weight_hashes=weight_hashes(files.path),
    )


async def _block_tokens(store: KVStoreClient, waiting: Waiting) -> int:
    """The page size of the node's arena; a worker has no say in it."""
    while True:
        try:
            return (await store.describe_arena()).shape.geometry.block_tokens
        except ServiceError as error:
            await waiting.pause(error)


def _check_golden(transformer: Transformer, reference: GoldenReference) -> GoldenCheck:
    """The torch path's check, passed once."""
    check = GoldenCheck(TorchPath(transformer, reference), reference)
    result = check.run()
    if not result.is_passed:
        raise StartupError(
            f"the golden check failed: relative L2 {result.relative_l2:.2e} is over "
            f"{result.bound:.0e} in class {result.numeric_class}",
            hint="the model file or the engine is damaged; run `baton models pull` again",
        )
    _log.info("golden_check_passed", relative_l2=result.relative_l2, bound=result.bound)
    return check


def _hint(error: ServiceError) -> str | None:
    if error.reason in (Reason.COMPAT_MISMATCH, Reason.TOKENIZER_MISMATCH):
        return "give kvstore and workers the same --model and --dtype"
    if error.reason is Reason.UNSUPPORTED and error.field == "device":
        return "compute on --device cpu, or install a build of torch for this machine's device"
    return None
