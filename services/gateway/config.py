"""The gateway's configuration: names, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.config import setting
from baton.log import LEVELS
from services.gateway.policy import PrefillMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gateway: OpenAI-compatible REST and gRPC for applications, heartbeats from workers."""

    model: str = setting("Known model name, GGUF file or model directory.", default="smollm2")
    gateway_id: str = setting("Name of this gateway, unique in the cluster.", default="gateway-0")
    host: str = setting("Address to listen on, for REST and gRPC.", default="127.0.0.1")
    http_port: int = setting("Port of REST; 0 takes any.", default=8080, minimum=0, maximum=65535)
    port: int = setting("Port of gRPC; 0 takes any.", default=8081, minimum=0, maximum=65535)
    insecure_bind: bool = setting(
        "Allow plain text beyond loopback, where the network is trusted.", default=False
    )
    port_file: Path | None = setting("File that gets host:port of gRPC once ready.", default=None)
    http_port_file: Path | None = setting(
        "File that gets host:port of REST once ready.", default=None
    )
    metrics_port: int | None = setting(
        "Port of /metrics without a key; 0 takes any, none serves it behind keys on REST alone.",
        default=None,
        minimum=0,
        maximum=65535,
    )
    log_level: str = setting("debug, info, warning or error.", default="info")
    vllm_metric_names: bool = setting(
        "Show the metrics under vLLM's names too, for routers that know those.", default=True
    )
    tracing: bool = setting("Measure spans and keep the last ones for /debug/traces.", default=True)
    run_dir: Path | None = setting("Directory for run-time files.", default=None)
    cluster_key_file: Path | None = setting(
        "File with the cluster key; without it the public development key is used.", default=None
    )
    tenants_file: Path | None = setting(
        "YAML file of tenants and keys; without it loopback callers are the tenant dev.",
        default=None,
    )
    redis_url: str | None = setting(
        "redis://[user:password@]host:port/0, rediss://... or unix://... of a Redis that gateways "
        "share; without one, or while it is away, each limits tenants by itself.",
        default=None,
        is_secret=True,
    )
    prefill_mode: PrefillMode = setting(
        "auto: remote, falling back to local; remote: never local; local: never remote.",
        default=PrefillMode.AUTO,
    )
    cors_origins: tuple[str, ...] = setting(
        "Origins that browsers may call from; * allows all.", default=()
    )
    sequences_max: int = setting(
        "Answers at once; more are refused with 503.", default=512, minimum=1, maximum=100_000
    )
    tenant_sequences_max: int = setting(
        "Answers at once per tenant, over all gateways of one Redis; more are refused with 429.",
        default=256,
        minimum=1,
        maximum=100_000,
    )
    answers_max: int = setting("Largest n of a request.", default=8, minimum=1, maximum=64)
    body_bytes_max: int = setting(
        "Largest HTTP body.", default=8 << 20, minimum=1024, maximum=64 << 20
    )
    request_timeout_s: float = setting(
        "Deadline of a request that names none, seconds.", default=600.0, minimum=0.1
    )
    request_timeout_s_max: float = setting(
        "Largest deadline that X-Request-Timeout may ask for, seconds.", default=3600.0, minimum=0.1
    )
    prefill_queue_max: int = setting(
        "A prefill worker with this many queued prompts gets no more.", default=64, minimum=1
    )
    interactive_slo_s: float = setting(
        "Seconds to the first token that interactive tenants are promised; counted, not enforced.",
        default=2.0,
        minimum=0.001,
    )
    batch_slo_s: float = setting("The same for batch tenants.", default=60.0, minimum=0.001)
    dead_after_s: float = setting(
        "Silence after which a worker counts as dead, seconds.", default=1.5, minimum=0.1
    )
    lease_s: float = setting(
        "Silence after which a worker's record is dropped, seconds.", default=3.0, minimum=0.1
    )

    def validate(self) -> list[str]:
        """Relations between settings."""
        faults: list[str] = []
        if self.log_level.upper() not in LEVELS:
            faults.append(f"log_level: must be one of {', '.join(LEVELS)}")
        if self.tenant_sequences_max > self.sequences_max:
            faults.append("tenant_sequences_max: must not exceed sequences_max")
        if self.lease_s < self.dead_after_s:
            faults.append("lease_s: must not be below dead_after_s")
        if self.request_timeout_s > self.request_timeout_s_max:
            faults.append("request_timeout_s: must not exceed request_timeout_s_max")
        return faults
