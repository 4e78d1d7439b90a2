"""A whole gateway with a Redis that comes, goes, freezes and forgets: requests do not notice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.integration.gateway.conftest import RunningGateway, running_gateway
from tests.integration.gateway.conftest import tiny_model as tiny_model
from tests.integration.redis.conftest import RedisServer, until

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BURST = 8
PROMPT_S = 5.0
"""What a burst of tiny answers takes on a loaded machine; a hang would be far longer."""


async def answered(gateway: RunningGateway) -> None:
    """A burst of requests, all answered in full and without a wait."""
    began_s = time.monotonic()
    responses = await asyncio.gather(*(gateway.post(CHAT, BODY) for _ in range(BURST)))
    assert time.monotonic() - began_s < PROMPT_S
    assert [response.status_code for response in responses] == [200] * BURST
    texts = {response.json()["choices"][0]["message"]["content"] for response in responses}
    assert texts == {"one two three"}


async def test_requests_go_on_whatever_redis_does(
    tiny_model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Up, wiped, frozen, thawed, killed, started again: each burst is answered; readiness stays."""
    with capture_logs() as logs:

        def redis_lines() -> list[str]:
            return [line["event"] for line in logs if line["event"].startswith("redis_")]

        async with running_gateway(tiny_model, tmp_path, redis_url=redis_server.url) as gateway:
            await until(lambda: "redis_connected" in redis_lines())
            await answered(gateway)
            async with redis_server.client() as client:
                await client.flushall()
            await answered(gateway)
            redis_server.freeze()
            await answered(gateway)
            assert (await gateway.client.get("/readyz")).status_code == 200
            await until(lambda: redis_lines().count("redis_lost") == 1)
            await answered(gateway)
            redis_server.thaw()
            await until(lambda: redis_lines().count("redis_back") == 1)
            await answered(gateway)
            await redis_server.kill()
            await answered(gateway)
            assert (await gateway.client.get("/readyz")).status_code == 200
            await redis_server.start()
            await until(lambda: redis_lines().count("redis_back") == 2)
            await answered(gateway)
    lost_and_back = ["redis_lost", "redis_back"]
    assert redis_lines() == ["redis_connected", *lost_and_back, *lost_and_back]


async def test_a_gateway_starts_without_the_redis_it_was_told_of(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Redis is no dependency, not even of the start."""
    nowhere = f"unix://{tmp_path}/nothing.sock"
    async with running_gateway(tiny_model, tmp_path, redis_url=nowhere) as gateway:
        await answered(gateway)
        assert (await gateway.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("has_redis", [True, False], ids=["shared", "alone"])
async def test_requests_a_minute_are_limited_with_and_without_redis(
    tiny_model: Path, tmp_path: Path, redis_server: RedisServer, has_redis: bool
) -> None:
    """429 says when to come back; other tenants and keys of other tenants are not touched."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        "tenants:\n"
        "  - name: few\n"
        "    keys: [few-1]\n"
        "    teams: [{name: t, keys: [few-2]}]\n"
        "    requests_per_minute: 2\n"
        "  - {name: many, keys: [many]}\n"
    )
    settings = {"tenants_file": tenants, "redis_url": redis_server.url if has_redis else None}
    async with running_gateway(tiny_model, tmp_path, **settings) as gateway:

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            response = await gateway.post(CHAT, BODY, headers=headers)
            if response.status_code == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 60
            return response.status_code

        assert [await ask(key) for key in ("few-1", "few-2", "few-1", "few-2")] == [
            *(200, 200),
            *(429, 429),
        ]
        assert [await ask("many") for _ in range(4)] == [200] * 4
