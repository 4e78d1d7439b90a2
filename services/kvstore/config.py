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
_PORT_RANGE: Final = re.compile(r"(\d{1,5})-(\d{1,5})")


@unique
class Dtype(StrEnum):
    """What KV is stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"

    @property
    def kv(self) -> KvDtype:
        """The page dtype."""
        return _KV_DTYPES[self]


_KV_DTYPES: Final = {
    Dtype.FLOAT32: KvDtype.F32,
    Dtype.BFLOAT16: KvDtype.BF16,
    Dtype.FLOAT16: KvDtype.F16,
    Dtype.INT8: KvDtype.INT8,
}


def default_arena_dir() -> Path:
    """A directory of this user's own on the machine's tmpfs."""
    return Path(f"/dev/shm/baton-{os.getuid()}")  # noqa: S108 - 0700, made by us


@unique
class TransportSetting(StrEnum):
    """How pages come from other kvstores and go to them."""

    AUTO = "auto"
    STREAM = "stream"
    UCX = "ucx"


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
    remove_arena: bool = setting(
        "remove the arena's file at a clean stop; otherwise the next start finds its KV again",
        default=False,
    )
    nvme_bytes: int | None = setting(
        "bytes of the NVMe tier, one file allocated whole at start, where KV that nobody used "
        "lately is kept; none or 0: no such tier",
        default=None,
        minimum=0,
    )
    nvme_dir: Path | None = setting(
        "directory of the NVMe tier's file, on a local disk; none: that of the log", default=None
    )
    demote_below: float = setting(
        "share of the arena's pages: with fewer free, KV of logs that nobody writes is copied to "
        "the NVMe tier",
        default=0.15,
        minimum=0.0,
        maximum=1.0,
    )
    demote_until: float = setting(
        "share of the arena's pages that is then to be free, or to be had without losing KV",
        default=0.25,
        minimum=0.0,
        maximum=1.0,
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
    scrub_period_s: float = setting(
        "seconds in which every stored page is compared with its checksum once; 0 turns it off",
        default=3600.0,
        minimum=0.0,
        maximum=30 * 86_400.0,
    )
    scrub_bytes_per_s: int = setting(
        "most bytes a second that scrub reads; a pass takes longer where this is too little",
        default=256 << 20,
        minimum=1 << 20,
    )
    quotas: Path | None = setting(
        "YAML file of each tenant's bytes per tier, read again when it changes; none: no quotas",
        default=None,
    )
    transport: TransportSetting = setting(
        "how KV moves between kvstores: stream (gRPC), ucx (needs the extra), or auto, the best "
        "that both have",
        default=TransportSetting.AUTO,
    )
    ucx_ports: str | None = setting(
        "TCP ports that ucx may listen on, FIRST-LAST; none: any", default=None
    )
    transfer_stall_s: float = setting(
        "seconds without a byte after which a transfer is broken and tried again",
        default=3.0,
        minimum=0.1,
        maximum=600.0,
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
        if self.demote_below > self.demote_until:
            faults.append("demote_below: must be at most demote_until")
        if self.nvme_dir is not None and self.nvme_bytes is None:
            faults.append("nvme_dir: nothing is put there; give nvme_bytes too, or leave it out")
        if self.ucx_ports is not None and not _is_port_range(self.ucx_ports):
            faults.append(f"ucx_ports: {self.ucx_ports!r} is no range of ports like 7420-7451")
        return faults


def _is_port_range(text: str) -> bool:
    found = _PORT_RANGE.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= 65535
