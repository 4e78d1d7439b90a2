"""Fault points over HTTP: arm, look, disarm; nothing where they are off."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from baton.faults import Faults
from baton.faults.admin import PATH, fault_routes
from baton.faults.spec import SPEC_CHARS_MAX


@pytest.fixture
def made() -> Faults:
    """Faults that may act, nothing armed."""
    return Faults(is_enabled=True)


@pytest.fixture
async def client(made: Faults) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to an application with the route."""
    transport = httpx.ASGITransport(app=Starlette(routes=fault_routes(made)))
    async with httpx.AsyncClient(transport=transport, base_url="http://local") as speaking:
        yield speaking


def test_a_process_without_fault_points_has_no_route() -> None:
    """Nothing to find, nothing to misuse."""
    assert fault_routes(Faults()) == []


async def test_armed_faults_act_and_are_shown(made: Faults, client: httpx.AsyncClient) -> None:
    """A drill arms, waits for the count, and disarms."""
    armed = await client.put(PATH, content="kv.get:absent:once,decode.step:pause:1\n")
    assert armed.status_code == 200
    assert made.is_absent("kv.get")
    await made.reach("decode.first_token")
    state = (await client.get(PATH)).json()
    assert state["armed"] == [{"point": "decode.step", "action": "pause", "once": False}]
    assert state["hits"] == {"decode.first_token": 1}
    assert state["fired"]["kv.get"] == 1
    await client.delete(PATH, params={"point": "kv.get"})
    assert len(made.armed) == 1
    assert (await client.delete(PATH)).json()["armed"] == []
    assert not made.armed


@pytest.mark.parametrize("body", [b"", b"nowhere:fail", b"\xff", b"x" * (5 * SPEC_CHARS_MAX)])
async def test_a_wrong_body_arms_nothing(
    made: Faults, client: httpx.AsyncClient, body: bytes
) -> None:
    """And says why."""
    refused = await client.put(PATH, content=body)
    assert refused.status_code == 400
    assert refused.json()["faults"]
    assert made.armed == ()


async def test_an_unknown_point_is_not_disarmed_in_silence(client: httpx.AsyncClient) -> None:
    """The drill would go on with its fault armed."""
    refused = await client.delete(PATH, params={"point": "nowhere"})
    assert refused.status_code == 400
    assert "decode.step" in refused.text
