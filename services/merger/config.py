"""The merger's configuration: names, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.config import setting
from baton.log import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerConfig:
    """The merger: splices cached segments into one history."""

    worker_id: str = setting("Stable name of this merger.", default="merger-0")
    gateways: tuple[str, ...] = setting(
        "host:port of every gateway to send heartbeats to.", default=()
    )
    worker_capability: str | None = setting(
        "Worker capability from the cluster's key; none: the development key's.",
        default=None,
        is_secret=True,
    )
    host: str = setting("Address to listen on.", default="127.0.0.1")
    port: int = setting("gRPC port; 0 takes any.", default=0, minimum=0, maximum=65535)
    advertise: str | None = setting(
        "host:port under which others reach this merger; none: the one listened on.", default=None
    )
    insecure_bind: bool = setting(
        "Allow plain text beyond loopback, where the network is trusted.", default=False
    )
    port_file: Path | None = setting("File that gets host:port once ready.", default=None)
    metrics_port: int | None = setting(
        "HTTP port of /metrics and health; 0 takes any, none turns it off.",
        default=None,
        minimum=0,
        maximum=65535,
    )
    run_dir: Path | None = setting("Directory for run-time files.", default=None)
    log_level: str = setting("debug, info, warning or error.", default="info")
    tracing: bool = setting("Measure spans and keep the last ones for /debug/traces.", default=True)

    def validate(self) -> list[str]:
        """Relations between settings."""
        faults: list[str] = []
        if self.log_level.upper() not in LEVELS:
            faults.append(f"log_level: must be one of {', '.join(LEVELS)}")
        if not 0 < len(self.worker_id) <= 128:
            faults.append("worker_id: must have 1 to 128 characters")
        return faults
