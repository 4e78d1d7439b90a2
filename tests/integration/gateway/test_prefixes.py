"""Published prefixes at the gateway's doors: in the background, versions, pins, staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.gateway.prefix_desk import TENANT_UNDER_WAY_MAX
from tests.integration.gateway.conftest import RunningGateway, running_gateway

CHAT = "/v1/chat/completions"
PREFIXES = "/v1/prefixes"
SYSTEM = {"role": "system", "content": "You answer briefly, in plain words, and never guess."}
OTHER = {"role": "system", "content": "You answer at great length, in rhymes, and always guess."}
ROUNDS = 2000
"""Questions before a test gives up; each takes a round trip."""


async def publish(gateway: RunningGateway, turn: Any = SYSTEM, **more: Any) -> httpx.Response:
    headers = more.pop("headers", None)
    body = {"name": "brief", "messages": [turn], **more}
    return await gateway.post(PREFIXES, body, headers=headers)


async def show(gateway: RunningGateway, wanted: str) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.client.get(f"{PREFIXES}/{wanted}")).json()
    return found


async def until(gateway: RunningGateway, wanted: str, *statuses: str) -> dict[str, Any]:
    """The prefix, once it has one of the statuses."""
    found: dict[str, Any] = {}
    for _ in range(ROUNDS):
        found = await show(gateway, wanted)
        if found.get("status") in statuses:
            break
    assert found.get("status") in statuses, found
    return found


async def ask(
    gateway: RunningGateway, turn: Any = SYSTEM, headers: dict[str, str] | None = None
) -> httpx.Response:
    messages = [turn, {"role": "user", "content": "hi"}]
    return await gateway.post(CHAT, {"messages": messages, "max_tokens": 1}, headers=headers or {})


async def cached(gateway: RunningGateway, turn: Any = SYSTEM) -> int:
    usage = (await ask(gateway, turn)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    "asked", [{"wait": False}, {"headers": {"prefer": "return=minimal, Respond-Async; wait=9"}}]
)
async def test_in_the_background_it_is_pending_computing_and_ready(
    gateway: RunningGateway, asked: dict[str, Any]
) -> None:
    """202 at once with the id it will have; the same order meanwhile is the same publication."""
    gateway.workers.prefill.script = ["hang"]
    first = await publish(gateway, name="stuck", wait=False)
    assert first.status_code == 202
    await until(gateway, first.json()["id"], "computing")
    answer = await publish(gateway, **asked)
    body = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"{PREFIXES}/{body['id']}"
    assert body["status"] in ("pending", "computing")
    assert body["version"] is None
    ready = await until(gateway, body["id"], "ready")
    assert ready["id"] == body["id"]
    assert ready["version"] == 1
    for name in ("text_hash", "ids_hash"):
        assert len(ready[name]) == 64
    assert await cached(gateway) == ready["tokens"]
    again = await publish(gateway, name="stuck", wait=False)
    assert again.json()["id"] == first.json()["id"]
    gone = await gateway.client.delete(f"{PREFIXES}/stuck")
    assert gone.status_code == 200
    assert (await gateway.client.get(f"{PREFIXES}/{first.json()['id']}")).status_code == 404


async def test_a_failure_is_told_with_its_reason_until_it_is_read_away(
    gateway: RunningGateway,
) -> None:
    """Two few tokens for a block: only tokenising can tell. Waiting for it is a 400."""
    short = {"name": "short", "text": "hi"}
    wanted = (await gateway.post(PREFIXES, {**short, "wait": False})).json()["id"]
    failed = await until(gateway, wanted, "failed")
    assert "INVALID_REQUEST" in failed["detail"]
    assert "needs at least" in failed["detail"]
    listed = (await gateway.client.get(PREFIXES)).json()["data"]
    assert [one["status"] for one in listed] == ["failed"]
    assert (await gateway.post(PREFIXES, short)).status_code == 400
    assert (await gateway.client.delete(f"{PREFIXES}/short")).status_code == 404


async def test_a_full_worker_only_puts_the_background_off(gateway: RunningGateway) -> None:
    """Who waits is told to come back; what nobody waits for is tried again."""
    gateway.workers.prefill.script = ["full"]
    refused = await publish(gateway)
    assert refused.status_code == 503
    gateway.workers.prefill.script = ["full"]
    wanted = (await publish(gateway, wait=False)).json()["id"]
    assert (await until(gateway, wanted, "ready", "failed"))["status"] == "ready"


async def test_only_so_many_are_under_way(gateway: RunningGateway) -> None:
    """429 with a time to come back; what is given up makes room."""
    gateway.workers.prefill.script = ["hang"] * 4
    for index in range(TENANT_UNDER_WAY_MAX):
        answer = await publish(gateway, name=f"n{index}", wait=False)
        assert answer.status_code == 202
    refused = await publish(gateway, name="more", wait=False)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    for index in range(TENANT_UNDER_WAY_MAX):
        # Those behind the four are computed as soon as one of these makes room.
        assert (await gateway.client.delete(f"{PREFIXES}/n{index}")).status_code == 200
    assert (await publish(gateway, name="more", wait=False)).status_code == 202


async def test_other_content_is_a_new_version_and_the_same_is_not(
    gateway: RunningGateway,
) -> None:
    """The old one serves nobody any more."""
    first = (await publish(gateway)).json()
    assert (await publish(gateway)).json() == first
    for more in ({"tenants": ["*"]}, {"ttl_s": 3600}):
        newer = (await publish(gateway, **more)).json()
        assert newer["version"] == first["version"] + 1
        assert (await publish(gateway, **more)).json()["id"] == newer["id"]
        first = newer
    second = (await publish(gateway, OTHER)).json()
    assert second["version"] == 4
    assert (await show(gateway, "brief"))["id"] == second["id"]
    assert (await gateway.client.get(f"{PREFIXES}/{first['id']}")).status_code == 404
    assert await cached(gateway) == 0
    assert await cached(gateway, OTHER) == second["tokens"]


async def test_a_pinned_version_stays_beside_the_new_one(gateway: RunningGateway) -> None:
    """Both serve; by name one means the newest; deleting the name ends both."""
    old = (await publish(gateway, pin=True)).json()
    assert old["pin"] is True
    new = (await publish(gateway, OTHER)).json()
    assert (await show(gateway, old["id"]))["superseded_by"] == new["version"] == 2
    assert (await show(gateway, "brief"))["id"] == new["id"]
    assert await cached(gateway) == old["tokens"]
    assert await cached(gateway, OTHER) == new["tokens"]
    assert (await gateway.client.delete(f"{PREFIXES}/brief")).status_code == 200
    assert (await gateway.client.get(PREFIXES)).json()["data"] == []


@pytest.mark.parametrize("field", ["tokenizer_hash", "template_digest"])
async def test_a_stale_prefix_says_so_serves_nobody_and_is_refused_by_name(
    gateway: RunningGateway, field: str
) -> None:
    """Both hashes are named; publishing again is the remedy."""
    made = (await publish(gateway)).json()
    served = made[field]
    store = gateway.workers.store
    (stored,) = store.prefixes.values()
    if field == "tokenizer_hash":
        stored.segment.tokenizer_hash = b"\xaa" * 8
    else:
        stored.template_digest = b"\xaa" * 16
    store.version += 1
    stale = await show(gateway, "brief")
    assert stale["status"] == "stale"
    assert served in stale["detail"]
    assert "aa" * 8 in stale["detail"]
    assert await cached(gateway) == 0
    refused = await ask(gateway, headers={"x-baton-prefix": "brief"})
    assert refused.status_code == 409
    assert served in refused.text
    assert "aa" * 8 in refused.text
    fresh = (await publish(gateway)).json()
    assert (fresh["status"], fresh["version"]) == ("ready", 2)
    assert await cached(gateway) == fresh["tokens"]


async def test_a_request_may_name_its_prefix(gateway: RunningGateway) -> None:
    """Served where it begins with it, else refused naming both hashes of both."""
    made = (await publish(gateway)).json()
    good = await ask(gateway, headers={"x-baton-prefix": made["id"]})
    assert good.status_code == 200
    assert good.json()["baton"]["prefix_id"] == made["id"]
    other = await ask(gateway, OTHER, headers={"x-baton-prefix": "brief"})
    assert other.status_code == 400
    assert made["text_hash"] in other.text
    assert made["ids_hash"] in other.text
    unknown = await ask(gateway, headers={"x-baton-prefix": "nobodys"})
    assert unknown.status_code == 404


async def test_what_is_revoked_at_one_gateway_is_gone_at_the_other(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Its list may be half a second old: the store refuses, and the prompt is computed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        running_gateway(tiny_model, tmp_path / "a") as one,
        running_gateway(tiny_model, tmp_path / "b", shared=one.workers) as other,
    ):
        made = (await publish(one)).json()
        assert await cached(other) == made["tokens"]
        assert (await one.client.delete(f"{PREFIXES}/brief")).status_code == 200
        assert await cached(other) == 0
        assert (await ask(other, headers={"x-baton-prefix": "brief"})).status_code == 404


async def test_the_same_over_grpc(gateway: RunningGateway) -> None:
    """Background, pin, status and hashes with stubs alone."""
    chat = gateway_pb2.ChatMessages()
    chat.messages.add(role="system", content=SYSTEM["content"])
    async with grpc.aio.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        order = gateway_pb2.CreatePrefixRequest(name="brief", chat=chat, pin=True, no_wait=True)
        pending = (await stub.CreatePrefix(order)).prefix
        assert pending.status in ("pending", "computing")
        found = pending
        for _ in range(ROUNDS):
            (found,) = (await stub.ListPrefixes(gateway_pb2.ListPrefixesRequest())).prefixes
            if found.status == "ready":
                break
        assert (found.id, found.version, found.pin) == (pending.id, 1, True)
        assert len(found.text_hash) == len(found.ids_hash) == 32
        await stub.DeletePrefix(gateway_pb2.DeletePrefixRequest(id=pending.id))
