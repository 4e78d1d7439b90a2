"""The plan of a cluster on one machine: which processes, with which flags, threads and ports.

Pure: options in, child specifications out. Never starts anything, never looks at the machine; core
count, free shared memory and ports are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ARENA_BYTES_MAX: Final = 1 << 30
"""Arena size where the machine has plenty: about 46,000 tokens of the bundled model in bf16."""

ARENA_SHARE_OF_FREE: Final = 0.5
"""An arena is touched whole at start; half of what is free leaves room for everybody else."""

NVME_BYTES_MAX: Final = 1 << 30
NVME_SHARE_OF_FREE: Final = 0.1
NVME_BYTES_MIN: Final = 64 << 20
"""A disk with so little left is for other things: then there is no NVMe tier."""


FIXED: Final = "fixed"
"""Chunks end at multiples of their size."""

COMPUTED: Final = "computed"
"""KV is stored in the type of computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What the user chose. Sizes in bytes, arenas and NVMe tiers per node; threads None means:
    divide the cores. `nvme_bytes` 0: no NVMe tier; `nvme_dir` None: in the run directory.

    `chunk_tokens` None: what `chunk_profile` says, else the workers' own default.

    `nodes`: kvstores with arenas of their own, as if on so many machines. Prefill workers are dealt
    to them in turn from the first, decode workers from the last.
    """

    model: str
    run_dir: Path
    arena_dir: Path
    http_port: int
    grpc_port: int
    dtype: str = "bfloat16"
    kv_dtype: str = COMPUTED
    host: str = "127.0.0.1"
    nodes: int = 1
    prefill_workers: int = 1
    decode_workers: int = 1
    prefill_threads: int | None = None
    decode_threads: int | None = None
    arena_bytes: int | None = None
    nvme_bytes: int | None = None
    nvme_dir: Path | None = None
    block_tokens: int = 16
    chunk_tokens: int | None = None
    chunking: str = FIXED
    chunk_profile: Path | None = None
    prefill_mode: str = "auto"
    kernel: str = "auto"
    log_level: str = "info"
    tenants_file: Path | None = None
    quotas: Path | None = None
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def stored_dtype(self) -> str:
        """What pages hold, as the kvstore calls it."""
        return self.dtype if self.kv_dtype == COMPUTED else self.kv_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine offers."""

    cores: int
    shm_free_bytes: int
    disk_free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One child process. `arguments` follow the module; `environment` is added to ours."""

    name: str
    module: str
    arguments: tuple[str, ...]
    grpc_address: str
    metrics_address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None


def divide_cores(cores: int, prefill_workers: int, decode_workers: int) -> tuple[int, int]:
    """Threads of each prefill and of each decode worker.

    One thread each on two cores: two compute processes with two threads each are slower than one
    thread each for both. Prefill scales with threads, decode is bound by memory beyond two.
    """
    assert cores >= 1, cores
    per_worker = max(1, cores // max(1, prefill_workers + decode_workers))
    decode = min(2, per_worker)
    left = cores - decode * decode_workers
    return max(1, left // max(1, prefill_workers)), decode


def arena_bytes(options: ClusterOptions, machine: Machine) -> int:
    """Size of the host arena: as asked for, else what fits beside everybody else."""
    if options.arena_bytes is not None:
        return options.arena_bytes
    share = ARENA_SHARE_OF_FREE / options.nodes
    return min(ARENA_BYTES_MAX, int(machine.shm_free_bytes * share))


def nvme_bytes(options: ClusterOptions, machine: Machine) -> int:
    """Size of each NVMe tier: as asked for, else a modest part of the disk; 0: none."""
    if options.nvme_bytes is not None:
        return options.nvme_bytes
    share = int(machine.disk_free_bytes * NVME_SHARE_OF_FREE / options.nodes)
    return min(NVME_BYTES_MAX, share) if share >= NVME_BYTES_MIN else 0


def nvme_dir(options: ClusterOptions) -> Path:
    """The directory of the NVMe tiers' files."""
    return options.nvme_dir or options.run_dir / "nvme"


def kvstore_port_file(run_dir: Path, node: int) -> Path:
    """The file that gets one node's kvstore's host:port once it is ready."""
    return run_dir / f"kvstore-{node}.port"


def build_plan(
    options: ClusterOptions,
    machine: Machine,
    *,
    next_port: Callable[[], int],
    key_file: Path,
    worker_capability: str,
) -> tuple[ChildSpec, ...]:
    """All children, in the order in which they are listed; they start together.

    `next_port` gives a free port each time; `key_file` holds the cluster key, which only gateway
    and kvstore read; workers get `worker_capability`.
    """
    builder = _Builder(options, next_port, key_file, worker_capability)
    threads = divide_cores(machine.cores, options.prefill_workers, options.decode_workers)
    prefill_threads = options.prefill_threads or threads[0]
    decode_threads = options.decode_threads or threads[1]
    gateway_port = options.grpc_port
    gateways = f"{options.host}:{gateway_port}"
    ports = [next_port() for _ in range(options.nodes)]
    kvstores = [f"{options.host}:{port}" for port in ports]
    sizes = StoreSizes(
        arena_bytes=arena_bytes(options, machine), nvme_bytes=nvme_bytes(options, machine)
    )
    specs = [builder.kvstore(node, port, gateways, sizes) for node, port in enumerate(ports)]
    specs.append(builder.merger(next_port(), gateways))
    specs.extend(
        builder.worker("prefill", index, gateways, kvstores[index % options.nodes], prefill_threads)
        for index in range(options.prefill_workers)
    )
    specs.extend(
        builder.worker(
            "decode", index, gateways, kvstores[-1 - index % options.nodes], decode_threads
        )
        for index in range(options.decode_workers)
    )
    return (*specs, builder.gateway(gateway_port))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSizes:
    """What one kvstore may take; `nvme_bytes` 0: no NVMe tier."""

    arena_bytes: int
    nvme_bytes: int


def _nvme_flags(options: ClusterOptions, size_bytes: int) -> tuple[str, ...]:
    if not size_bytes:
        return ()
    return ("--nvme-bytes", str(size_bytes), "--nvme-dir", str(nvme_dir(options)))


def _chunk_flags(options: ClusterOptions, role: str) -> tuple[str, ...]:
    """What the user said of chunks; without a size the profile's, or the worker's own."""
    flags: tuple[str, ...] = ()
    if options.chunk_tokens is not None:
        flags = ("--chunk-tokens", str(options.chunk_tokens))
    if options.chunk_profile is not None:
        flags = (*flags, "--chunk-profile", str(options.chunk_profile))
    if role == "prefill" and options.chunking != FIXED:
        flags = (*flags, "--chunking", options.chunking)
    return flags


class _Builder:
    """Spells the flags of each service once."""

    def __init__(
        self,
        options: ClusterOptions,
        next_port: Callable[[], int],
        key_file: Path,
        worker_capability: str,
    ) -> None:
        self._options = options
        self._next_port = next_port
        self._key_file = key_file
        self._worker_capability = worker_capability

    def _spec(
        self,
        name: str,
        port: int,
        flags: tuple[str, ...],
        *,
        environment: Mapping[str, str] | None = None,
        ready_url: str | None = None,
    ) -> ChildSpec:
        options = self._options
        service, metrics_port = name.rpartition("-")[0], self._next_port()
        common = (
            *("--host", options.host),
            *("--port", str(port)),
            *("--metrics-port", str(metrics_port)),
            *("--log-level", options.log_level),
        )
        return ChildSpec(
            name=name,
            module=f"services.{service}",
            arguments=(*common, *flags, *options.extra.get(service, ())),
            grpc_address=f"{options.host}:{port}",
            metrics_address=f"{options.host}:{metrics_port}",
            environment=dict(environment or {}),
            ready_url=ready_url,
        )

    def kvstore(self, node: int, port: int, gateways: str, sizes: StoreSizes) -> ChildSpec:
        """One node's kvstore."""
        options = self._options
        log_dir = options.run_dir / ("log" if node == 0 else f"log-{node}")
        flags = (
            *("--node-id", f"node-{node}"),
            *("--model", options.model),
            *("--dtype", options.stored_dtype),
            *("--block-tokens", str(options.block_tokens)),
            *("--arena-bytes", str(sizes.arena_bytes)),
            *("--arena-dir", str(options.arena_dir)),
            *_nvme_flags(options, sizes.nvme_bytes),
            *("--log-dir", str(log_dir)),
            *("--run-dir", str(options.run_dir)),
            # Where `baton kv` finds it.
            *("--port-file", str(kvstore_port_file(options.run_dir, node))),
            *("--cluster-key-file", str(self._key_file)),
            *("--gateways", gateways),
            *(() if options.quotas is None else ("--quotas", str(options.quotas))),
        )
        return self._spec(f"kvstore-{node}", port, flags)

    def merger(self, port: int, gateways: str) -> ChildSpec:
        """The merger."""
        environment = {"BATON_MERGER_WORKER_CAPABILITY": self._worker_capability}
        return self._spec("merger-0", port, ("--gateways", gateways), environment=environment)

    def worker(self, role: str, index: int, gateways: str, kvstore: str, threads: int) -> ChildSpec:
        """A prefill or decode worker."""
        options = self._options
        flags: tuple[str, ...] = (
            *("--worker-id", f"{role}-{index}"),
            *("--model", options.model),
            *("--dtype", options.dtype),
            *("--kv-dtype", options.kv_dtype),
            *("--kvstore", kvstore),
            *("--gateways", gateways),
            *("--threads", str(threads)),
            *_chunk_flags(options, role),
        )
        if role == "decode":
            flags = (*flags, "--kernel", options.kernel)
        environment = {
            # A capability is a secret: not in the process list.
            f"BATON_{role.upper()}_WORKER_CAPABILITY": self._worker_capability,
            "OMP_NUM_THREADS": str(threads),
        }
        return self._spec(f"{role}-{index}", self._next_port(), flags, environment=environment)

    def gateway(self, port: int) -> ChildSpec:
        """The gateway."""
        options = self._options
        flags: tuple[str, ...] = (
            *("--gateway-id", "gateway-0"),
            *("--model", options.model),
            *("--http-port", str(options.http_port)),
            *("--prefill-mode", options.prefill_mode),
            *("--cluster-key-file", str(self._key_file)),
        )
        if options.tenants_file is not None:
            flags = (*flags, "--tenants-file", str(options.tenants_file))
        ready_url = f"http://{options.host}:{options.http_port}/readyz"
        return self._spec("gateway-0", port, flags, ready_url=ready_url)
