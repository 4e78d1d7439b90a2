"""The real gateway, in this process, over real sockets, with fake workers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.lifecycle import Service
from baton.testing.tiny_models import write_directory
from baton.text.tokenizer import Tokenizer
from services.gateway.__main__ import model_digests, wire
from services.gateway.config import GatewayConfig
from tests.integration.gateway.fakes import FakeWorkers, beat, fake_workers


@dataclass(slots=True)
class RunningGateway:
    """A gateway that believes its fake workers. Its silence limit is long: one beat is enough."""

    url: str
    grpc_target: str
    workers: FakeWorkers
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """POST JSON."""
        return await self.client.post(path, json=body, **more)

    async def beat(self) -> None:
        """All records again, as they are now."""
        await beat(self.grpc_target, list(self.workers.records.values()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory, once."""
    return write_directory(tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def running_gateway(
    model: Path, folder: Path, *, shared: FakeWorkers | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """Starts everything and stops it again; over `shared` workers of another gateway, if given."""
    config = GatewayConfig(
        model=str(model),
        port=0,
        http_port=0,
        port_file=folder / "grpc.port",
        http_port_file=folder / "http.port",
        dead_after_s=60.0,
        lease_s=120.0,
        **settings,
    )
    service = Service("gateway", drain_timeout_s=1.0)
    digests = model_digests(str(model))
    assert digests is not None
    tokenizer_hash = Tokenizer.load(model).tokenizer_hash()
    async with (
        fake_workers(tokenizer_hash, digests) if shared is None else nullcontext(shared) as workers,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(service.run(lambda one: wire(one, config), has_signals=False))
        assert await service.wait_ready(30.0)
        target = (folder / "grpc.port").read_text().strip()
        url = "http://" + (folder / "http.port").read_text().strip()
        async with httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as client:
            gateway = RunningGateway(url, target, workers, client)
            await gateway.beat()
            try:
                yield gateway
            finally:
                service.request_stop()


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """The gateway with default settings."""
    async with running_gateway(tiny_model, tmp_path) as running:
        yield running
