"""What this gateway shares with others, wired: nothing where no Redis is configured.

Owns the order of the parts. The gateway is ready without any of them.
"""

from __future__ import annotations

from baton.client import ChannelPool
from baton.errors import StartupError
from baton.lifecycle import Service
from services.gateway.hub import WorkerHub
from services.gateway.redis_measures import RedisMeasures
from services.gateway.registry_hints import RecordSeal, RegistryHints
from services.gateway.shared_limits import SharedLimits
from services.gateway.shared_store import KeySpace, SharedStore


async def start_redis(service: Service, url: str, measures: RedisMeasures) -> SharedStore:
    """Begin to connect; StartupError without the extra or with a URL that is none."""
    try:
        # An extra: the gateway starts without it where no Redis is configured.
        from services.gateway.registry_store import RedisLink
    except ImportError as error:
        raise StartupError(
            "redis_url is set, but the package redis is not installed",
            hint="pip install 'baton-serving[redis]'",
            exit_code=2,
        ) from error
    link = RedisLink(url, service.clock, service.spawn, measures)
    await service.start("redis", link)
    return link


async def start_sharing(
    service: Service,
    store: SharedStore,
    hub: WorkerHub,
    channels: ChannelPool,
    *,
    key: bytes,
    lease_s: float,
    tenant_sequences_max: int,
    holder: str,
) -> SharedLimits:
    """Hints are read and written, places are claimed and renewed, from now on."""
    keys = KeySpace(key)
    hints = RegistryHints(
        store,
        hub,
        channels,
        seal=RecordSeal(keys, lease_s),
        pattern=keys.pattern("worker"),
        clock=service.clock,
        spawn=service.spawn,
    )
    await service.start("hints", hints)
    limits = SharedLimits(
        store,
        keys,
        service.clock,
        tenant_sequences_max=tenant_sequences_max,
        holder=holder,
        spawn=service.spawn,
    )
    await service.start("shared_limits", limits)
    return limits
