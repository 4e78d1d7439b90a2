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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What the user chose. Sizes in bytes; threads None means: divide the cores."""

    model: str
    run_dir: Path
    arena_dir: Path
    http_port: int
    grpc_port: int
    dtype: str = "bfloat16"
    host: str = "127.0.0.1"
    prefill_workers: int = 1
    decode_workers: int = 1
    prefill_threads: int | None = None
    decode_threads: int | None = None
    arena_bytes: int | None = None
    block_tokens: int = 16
    chunk_tokens: int = 256
    prefill_mode: str = "auto"
    kernel: str = "auto"
    log_level: str = "info"
    tenants_file: Path | None = None
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine offers."""

    cores: int
    shm_free_bytes: int


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
    return min(ARENA_BYTES_MAX, int(machine.shm_free_bytes * ARENA_SHARE_OF_FREE))


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
    gateway_port, kvstore_port = options.grpc_port, next_port()
    gateways = f"{options.host}:{gateway_port}"
    kvstore = f"{options.host}:{kvstore_port}"
    specs = [
        builder.kvstore(kvstore_port, gateways, arena_bytes(options, machine)),
        builder.merger(next_port(), gateways),
    ]
    specs.extend(
        builder.worker("prefill", index, gateways, kvstore, prefill_threads)
        for index in range(options.prefill_workers)
    )
    specs.extend(
        builder.worker("decode", index, gateways, kvstore, decode_threads)
        for index in range(options.decode_workers)
    )
    return (*specs, builder.gateway(gateway_port))


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

    def kvstore(self, port: int, gateways: str, arena_size_bytes: int) -> ChildSpec:
        """The node's kvstore."""
        options = self._options
        flags = (
            *("--node-id", "node-0"),
            *("--model", options.model),
            *("--dtype", options.dtype),
            *("--block-tokens", str(options.block_tokens)),
            *("--arena-bytes", str(arena_size_bytes)),
            *("--arena-dir", str(options.arena_dir)),
            *("--log-dir", str(options.run_dir / "log")),
            *("--run-dir", str(options.run_dir)),
            *("--cluster-key-file", str(self._key_file)),
            *("--gateways", gateways),
        )
        return self._spec("kvstore-0", port, flags)

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
            *("--kvstore", kvstore),
            *("--gateways", gateways),
            *("--threads", str(threads)),
            *("--chunk-tokens", str(options.chunk_tokens)),
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
