"""The settings that prefill and decode share.

Owns names, defaults and bounds. Each service adds its own in its `config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

from baton.config import setting
from baton.log import LEVELS

STORE_PATIENCE_S: Final = 4.0
"""Less than the gateways' own patience: a client hears of a store that stays away within 5 s."""


@unique
class Dtype(StrEnum):
    """What matrices and KV are computed and stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@unique
class KvType(StrEnum):
    """What KV is stored in: as it is computed, or in a byte an element."""

    COMPUTED = "computed"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a prefill or decode worker."""

    worker_id: str = setting("stable name of this worker, unique in the cluster")
    model: str = setting("name of a known model, or the path of a GGUF file or model directory")
    kvstore: str = setting("host:port of this node's kvstore")
    gateways: tuple[str, ...] = setting(
        "host:port of every gateway to send heartbeats to", default=()
    )
    dtype: Dtype = setting("type of computation and KV", default=Dtype.BFLOAT16)
    kv_dtype: KvType = setting(
        "type KV is stored in: as computed, or int8, which halves it and makes every answer "
        "approximate; the kvstore's --dtype has to say so, too",
        default=KvType.COMPUTED,
    )
    threads: int = setting("compute threads", default=1, minimum=1, maximum=1024)
    context_max: int | None = setting(
        "most tokens of a sequence; none: the model's own limit", default=None, minimum=32
    )
    worker_capability: str | None = setting(
        "worker capability from the cluster's key; none: the development key's",
        default=None,
        is_secret=True,
    )
    kvstore_patience_s: float = setting(
        "seconds that work waits for a kvstore that died and may come back",
        default=STORE_PATIENCE_S,
        minimum=0.1,
        maximum=600.0,
    )
    golden_interval_s: float = setting(
        "seconds between golden checks of the live weights", default=300.0, minimum=0.05
    )
    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("gRPC port; 0 takes any free one", default=0, minimum=0, maximum=65535)
    advertise: str | None = setting(
        "host:port under which others reach this worker; none: the one listened on", default=None
    )
    port_file: Path | None = setting("file that gets host:port once ready", default=None)
    metrics_port: int | None = setting(
        "HTTP port of /metrics and health; 0 takes any free one, none turns it off",
        default=None,
        minimum=0,
        maximum=65535,
    )
    run_dir: Path | None = setting("directory for this process's files", default=None)
    log_level: str = setting("debug, info, warning or error", default="info")
    vllm_metric_names: bool = setting(
        "Show the metrics under vLLM's names too, for routers that know those.", default=True
    )
    tracing: bool = setting("Measure spans and keep the last ones for /debug/traces.", default=True)
    insecure_bind: bool = setting(
        "allow plain text beyond loopback, where the network is trusted", default=False
    )

    def validate(self) -> list[str]:
        """Faults between settings."""
        faults = []
        if self.log_level.upper() not in LEVELS:
            faults.append(f"log_level: {self.log_level} is none of debug, info, warning, error")
        if not 0 < len(self.worker_id) <= 128:
            faults.append("worker_id: must have 1 to 128 characters")
        faults += [
            f"{name}: {address} is not host:port"
            for name, addresses in (("kvstore", (self.kvstore,)), ("gateways", self.gateways))
            for address in addresses
            if not _is_address(address)
        ]
        return faults


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535
