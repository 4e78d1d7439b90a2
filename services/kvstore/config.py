"""Settings of the kvstore.

Owns names, defaults and bounds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

from baton.config import setting
from baton.kv.layout import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, KvDtype
from baton.log import LEVELS

_NODE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,48}")


@unique
class Dtype(StrEnum):
    """What KV is stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def kv(self) -> KvDtype:
        """The page dtype."""
        return _KV_DTYPES[self]


_KV_DTYPES: Final = {
    Dtype.FLOAT32: KvDtype.F32,
    Dtype.BFLOAT16: KvDtype.BF16,
    Dtype.FLOAT16: KvDtype.F16,
}


def default_arena_dir() -> Path:
    """A directory of this user's own on the machine's tmpfs."""
    return Path(f"/dev/shm/baton-{os.getuid()}")  # noqa: S108 - 0700, made by us


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig:
    """Settings of the kvstore."""

    model: str = setting("name of a known model, or the path of a GGUF file or model directory")
    log_dir: Path = setting("directory of the log's segments, on a local disk")
    node_id: str = setting("name of this node, unique in the cluster", default="node-0")
    dtype: Dtype = setting("type KV is stored in", default=Dtype.BFLOAT16)
    block_tokens: int = setting(
        "token slots of one page",
        default=16,
        minimum=BLOCK_TOKENS_MIN,
        maximum=BLOCK_TOKENS_MAX,
    )
    arena_bytes: int = setting(
        "bytes of the host arena, allocated whole at start", default=1 << 30, minimum=1 << 16
    )
    arena_dir: Path | None = setting(
        "directory of the arena and its attach socket, on a tmpfs; none: /dev/shm/baton-<uid>",
        default=None,
    )
    log_segments_max: int = setting(
        "64 MiB segments of log to keep before old ones are compacted",
        default=16,
        minimum=2,
        maximum=65536,
    )
    lease_s: float = setting(
        "seconds a log stays owned without progress", default=10.0, minimum=0.2, maximum=3600.0
    )
    ttl_s: float = setting(
        "seconds a log is kept after its end, unless the request says",
        default=3600.0,
        minimum=1.0,
        maximum=7 * 86_400.0,
    )
    gateways: tuple[str, ...] = setting(
        "host:port of every gateway to send heartbeats to", default=()
    )
    cluster_key_file: Path | None = setting(
        "file with the cluster's key; none: the public development key", default=None
    )
    worker_capability: str | None = setting(
        "capability shown in heartbeats; none: one of our own under the cluster's key",
        default=None,
        is_secret=True,
    )
    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("gRPC port; 0 takes any free one", default=0, minimum=0, maximum=65535)
    advertise: str | None = setting(
        "host:port under which others reach this kvstore; none: the one listened on", default=None
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
    tracing: bool = setting("Measure spans and keep the last ones for /debug/traces.", default=True)
    insecure_bind: bool = setting(
        "allow plain text beyond loopback, where the network is trusted", default=False
    )

    def validate(self) -> list[str]:
        """Faults between settings."""
        faults = []
        if self.log_level.upper() not in LEVELS:
            faults.append(f"log_level: {self.log_level} is none of debug, info, warning, error")
        if not _NODE_ID.fullmatch(self.node_id):
            faults.append("node_id: must be 1 to 48 of letters, digits, dot, dash, underscore")
        return faults
