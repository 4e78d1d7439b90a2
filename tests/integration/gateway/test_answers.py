"""Answers over HTTP: shapes, streams, usage, failures, recovery, cancellation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton.errors import Reason, ServiceError
from services.gateway import inbox
from services.gateway.policy import PrefillMode
from tests.integration.gateway.conftest import RunningGateway, running_gateway

CHAT = "/v1/chat/completions"
COMP = "/v1/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}


def comp(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", **more}


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the last one must be [DONE]."""
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


async def test_chat_answer_has_text_exact_usage_and_where_it_ran(gateway: RunningGateway) -> None:
    """What every client reads first."""
    response = await gateway.post(CHAT, chat(max_tokens=3), headers={"X-Request-Id": "mine-1"})
    body = response.json()
    assert response.status_code == 200
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "one two three",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert response.headers["x-request-id"] == "mine-1"
    assert len(response.headers["x-baton-request-id"]) == 32
    assert response.headers["x-serving-mode"] == "disaggregated"
    assert response.headers["x-baton-exactness"] == "exact"
    assert response.headers["x-baton-kv-source"] == "remote"
    assert body["baton"]["prefill_worker"] == "prefill-0"
    log = gateway.workers.store.logs[bytes.fromhex(body["baton"]["log_id"])]
    await gateway.workers.until(lambda: log.closed)
    assert not log.cancelled
    assert not log.dropped


async def test_stream_has_role_content_finish_usage_done_in_this_order(
    gateway: RunningGateway,
) -> None:
    """Clients break on any other order."""
    options = {"include_usage": True}
    response = await gateway.post(CHAT, chat(max_tokens=2, stream=True, stream_options=options))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    role, one, two, finish, usage = events(response)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"] for c in (one, two)] == [
        {"content": "one"},
        {"content": " two"},
    ]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert finish["choices"][0]["delta"] == {}
    assert finish["baton"]["kv_source"] == "remote"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in (role, one, two, finish))


async def test_unrequested_usage_chunk_is_not_sent(gateway: RunningGateway) -> None:
    """A chunk without choices that nobody asked for crashes clients."""
    found = events(await gateway.post(CHAT, chat(max_tokens=1, stream=True)))
    assert all(chunk["choices"] for chunk in found)
    assert all("usage" not in chunk for chunk in found)


async def test_max_tokens_one_never_reaches_decode(gateway: RunningGateway) -> None:
    """Token 1 that ends the answer needs no hand-off."""
    body = (await gateway.post(COMP, comp(max_tokens=1))).json()
    assert body["choices"][0]["text"] == "one"
    assert body["usage"]["completion_tokens"] == 1
    assert all(not decode.starts for decode in gateway.workers.decodes)


async def test_completion_logprobs_agree_streamed_and_whole(gateway: RunningGateway) -> None:
    """The completion shape, first token included, and no infinity in JSON."""
    asked = comp(max_tokens=3, logprobs=2)
    whole = (await gateway.post(COMP, asked)).json()["choices"][0]["logprobs"]
    assert set(whole) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert whole["tokens"] == ["one", " two", " three"]
    assert whole["text_offset"] == [0, 3, 7]
    assert whole["top_logprobs"][0] == {"alt0": -0.5, "alt1": -9999.0}
    streamed = [
        choice["logprobs"]
        for chunk in events(await gateway.post(COMP, {**asked, "stream": True}))
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    for key in ("tokens", "text_offset"):
        assert [item for one in streamed for item in one[key]] == whole[key]


async def test_echo_repeats_the_prompt_before_the_text(gateway: RunningGateway) -> None:
    """With log probabilities of the prompt honestly null."""
    body = (await gateway.post(COMP, comp(max_tokens=1, echo=True, logprobs=1))).json()
    choice = body["choices"][0]
    assert choice["text"] == "helloone"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][-1] == -0.5
    assert "".join(choice["logprobs"]["tokens"]) == "helloone"


async def test_samples_and_prompts_are_counted_and_indexed_as_one_answer(
    gateway: RunningGateway,
) -> None:
    """n samples share a prompt, which counts once; seeds differ."""
    asked = comp(prompt=["aa", "bbb"], n=2, max_tokens=2, seed=7)
    body = (await gateway.post(COMP, asked)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 8
    opened = [log.request for log in gateway.workers.store.logs.values()]
    assert body["usage"]["prompt_tokens"] == sum(len(r.prompt_token_ids) for r in opened) // 2
    assert len({request.sampling.seed for request in opened}) == 2
    assert len({request.request_id for request in opened}) == 4


async def test_official_client_streams_and_does_not(gateway: RunningGateway) -> None:
    """The client that everybody has."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        assert whole.choices[0].message.content == "one two three four"
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "one two three four"
        assert (await client.models.list()).data[0].id == "tiny"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="nope", messages=messages)
        assert refused.value.code == "model_not_found"


async def test_failed_prefill_is_tried_once_more_with_a_new_log(gateway: RunningGateway) -> None:
    """The client sees a later first token and where the KV came from; the old log is fenced."""
    gateway.workers.prefill.script = ["lost"]
    response = await gateway.post(CHAT, chat(max_tokens=2))
    assert response.status_code == 200
    assert response.headers["x-baton-kv-source"] == "recomputed"
    logs = list(gateway.workers.store.logs.values())
    assert len(logs) == 2
    await gateway.workers.until(lambda: logs[0].cancelled and logs[1].closed)


async def test_full_prefill_queue_falls_back_to_local_prefill(gateway: RunningGateway) -> None:
    """The answer says that it was served aggregated."""
    gateway.workers.prefill.script = ["full"]
    response = await gateway.post(CHAT, chat(max_tokens=2))
    assert response.headers["x-serving-mode"] == "aggregated"
    assert response.headers["x-baton-kv-source"] == "local"
    assert response.json()["choices"][0]["message"]["content"] == "one two"


async def test_stream_that_ends_without_a_seal_counts_as_lost(gateway: RunningGateway) -> None:
    """A prefill stream must say how it ended."""
    gateway.workers.prefill.script = ["end"]
    assert (await gateway.post(CHAT, chat(max_tokens=2))).status_code == 200
    assert len(gateway.workers.prefill.runs) == 1


async def test_refusal_before_the_first_byte_is_an_http_error_even_for_streams(
    gateway: RunningGateway,
) -> None:
    """With a status, a code and a time to come back."""
    gateway.workers.prefill.script = ["refuse"]
    response = await gateway.post(CHAT, chat(max_tokens=2, stream=True))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "pages_exhausted"
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-should-retry"] == "true"


async def test_failure_in_mid_stream_is_an_error_event_then_done(gateway: RunningGateway) -> None:
    """A stream never just stops and never looks finished."""
    for decode in gateway.workers.decodes:
        decode.error_at = 2
    found = events(await gateway.post(CHAT, chat(max_tokens=4, stream=True)))
    assert found[-1]["error"]["code"] == "checksum_mismatch"
    assert all(not c.get("finish_reason") for e in found[:-1] for c in e["choices"])
    whole = await gateway.post(CHAT, chat(max_tokens=4))
    assert whole.status_code == 500


async def test_broken_decode_stream_goes_on_elsewhere_without_repeating(
    gateway: RunningGateway,
) -> None:
    """Each token is delivered once; the usage stays exact."""
    for decode in gateway.workers.decodes:
        decode.break_at = 3
    # Whoever gets it second must not break too.
    gateway.workers.decodes[1].break_at = None
    gateway.workers.decodes[0].break_at = 3
    body = (await gateway.post(CHAT, chat(max_tokens=6))).json()
    assert body["choices"][0]["message"]["content"] == "one two three four five six"
    assert body["usage"]["completion_tokens"] == 6
    assert body["baton"]["resumed"] == 1
    assert gateway.workers.decodes[1].starts[-1].next_index == 3


async def test_a_worker_whose_stream_broke_is_not_asked_again_before_it_is_heard(
    gateway: RunningGateway,
) -> None:
    """No beat has told of its death yet; the next requests go elsewhere all the same."""
    first, second = gateway.workers.decodes
    first.break_at = 3
    body = (await gateway.post(CHAT, chat(max_tokens=6))).json()
    assert body["baton"]["resumed"] == 1
    asked, reserved = len(first.starts), len(first.prepared)
    for _ in range(3):
        body = (await gateway.post(CHAT, chat(max_tokens=4))).json()
        assert body["baton"]["resumed"] == 0
    assert (len(first.starts), len(first.prepared)) == (asked, reserved)
    served = len(second.starts)
    # The doubt ends with a beat that cannot have been sent before the stream broke.
    async with asyncio.timeout(10.0):
        while len(first.starts) == asked:
            await gateway.beat()
            assert (await gateway.post(CHAT, chat(max_tokens=4))).status_code == 200
    assert len(second.starts) >= served


async def test_a_sequence_that_its_living_worker_forgot_goes_on_elsewhere(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stands, heartbeats come, and nothing is heard of this one sequence."""
    monkeypatch.setattr(inbox, "SILENCE_MAX_S", 0.5)
    first, second = gateway.workers.decodes
    first.pause_at = 2
    response = await gateway.post(CHAT, chat(max_tokens=4))
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "one two three four"
    assert body["baton"]["resumed"] == 1
    assert second.starts[-1].next_index == 2
    await gateway.workers.until(lambda: first.stopped)


async def test_requests_at_once_are_spread_over_the_decode_workers(
    gateway: RunningGateway,
) -> None:
    """No beat comes between them: what this gateway gave away counts by itself."""
    for decode in gateway.workers.decodes:
        decode.pause_at = 2
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(gateway.post(CHAT, chat(max_tokens=4))) for _ in range(4)]
        async with asyncio.timeout(10.0):
            while sum(len(decode.starts) for decode in gateway.workers.decodes) < 4:
                await asyncio.wait(asking, timeout=0.05)
        for decode in gateway.workers.decodes:
            decode.resumed.set()
    assert [one.result().status_code for one in asking] == [200] * 4
    assert [len(decode.starts) for decode in gateway.workers.decodes] == [2, 2]


async def test_worker_lost_for_good_ends_the_stream_with_a_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Within seconds, with the tokens so far, never a hang."""
    async with running_gateway(tiny_model, tmp_path) as gateway:
        gateway.workers.records["decode-1"].ready = False
        await gateway.beat()
        gateway.workers.decode.break_at = 2
        found = events(await gateway.post(CHAT, chat(max_tokens=6, stream=True)))
        assert found[-1]["error"]["code"] == "worker_lost"
        text = "".join(c["delta"].get("content", "") for e in found[:-1] for c in e["choices"])
        assert text == "one two"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_leaving_client_fences_the_log_and_stops_the_worker(
    gateway: RunningGateway, is_stream: bool
) -> None:
    """Streaming or not: nobody reads, so nobody computes."""
    workers = gateway.workers
    for decode in workers.decodes:
        decode.pause_at = 2
    with pytest.raises(httpx.ReadTimeout):
        await gateway.post(CHAT, chat(max_tokens=8, stream=is_stream), timeout=0.5)
    (log,) = workers.store.logs.values()
    await workers.until(lambda: log.cancelled and log.closed)
    await workers.until(lambda: any(decode.stopped for decode in workers.decodes))
    await workers.until(lambda: any(decode.cancelled for decode in workers.decodes))


async def test_leaving_client_during_prefill_cancels_it(gateway: RunningGateway) -> None:
    """Before the first token too."""
    workers = gateway.workers
    workers.prefill.script = ["hang"]
    with pytest.raises(httpx.ReadTimeout):
        await gateway.post(CHAT, chat(max_tokens=8), timeout=0.5)
    (log,) = workers.store.logs.values()
    await workers.until(lambda: log.cancelled and bool(workers.prefill.cancelled))


async def test_request_timeout_header_bounds_the_whole_request(gateway: RunningGateway) -> None:
    """504 with the reason; the work is stopped."""
    gateway.workers.prefill.script = ["hang"]
    response = await gateway.post(CHAT, chat(), headers={"X-Request-Timeout": "0.3"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    bad = await gateway.post(CHAT, chat(), headers={"X-Request-Timeout": "soon"})
    assert bad.status_code == 400


async def test_store_false_drops_the_log_and_cache_off_reaches_the_store(
    gateway: RunningGateway,
) -> None:
    """Nothing is kept that the client did not want kept."""
    await gateway.post(CHAT, chat(max_tokens=1, store=False), headers={"X-Cache": "off"})
    (log,) = gateway.workers.store.logs.values()
    await gateway.workers.until(lambda: log.closed)
    assert log.dropped
    assert log.request.cache_mode == 2


async def test_open_refusal_reaches_the_client_with_its_reason(gateway: RunningGateway) -> None:
    """Out of pages at Open is 503, and nothing is left behind."""
    gateway.workers.store.open_error = ServiceError(Reason.PAGES_EXHAUSTED, "no pages left")
    response = await gateway.post(CHAT, chat())
    assert response.status_code == 503
    assert (await gateway.client.get("/healthz")).status_code == 200


async def test_a_stores_refusal_of_the_prompt_names_the_clients_own_field(
    gateway: RunningGateway,
) -> None:
    """`prompt_token_ids` is a field that no client ever sent."""
    asks = ((CHAT, chat(), "messages"), ("/v1/completions", {"prompt": "hi"}, "prompt"))
    for path, body, field in asks:
        gateway.workers.store.open_error = ServiceError(
            Reason.PROMPT_TOO_LONG, "needs 9 pages, the arena has 2", field="prompt_token_ids"
        )
        response = await gateway.post(path, {"model": "tiny", **body})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


async def test_limits_give_slots_back_and_say_when_to_return(
    tiny_model: Path, tmp_path: Path
) -> None:
    """After failures, refusals and disconnects the same number of requests fits again."""
    settings = {"sequences_max": 2, "tenant_sequences_max": 2}
    async with running_gateway(tiny_model, tmp_path, **settings) as gateway:
        too_many = await gateway.post(COMP, comp(n=3, max_tokens=1))
        assert too_many.status_code == 429
        assert int(too_many.headers["retry-after"]) >= 1
        for _ in range(3):
            gateway.workers.prefill.script = ["refuse"]
            assert (await gateway.post(CHAT, chat())).status_code == 503
            assert (await gateway.post(CHAT, chat(temperature=99))).status_code == 400
        for decode in gateway.workers.decodes:
            decode.pause_at = 1
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await gateway.post(CHAT, chat(max_tokens=4), timeout=0.3)
        for decode in gateway.workers.decodes:
            decode.pause_at = None
        assert (await gateway.post(COMP, comp(n=2, max_tokens=2))).status_code == 200


async def test_local_mode_never_uses_a_prefill_worker(tiny_model: Path, tmp_path: Path) -> None:
    """One switch turns everything aggregated."""
    async with running_gateway(tiny_model, tmp_path, prefill_mode=PrefillMode.LOCAL) as gateway:
        response = await gateway.post(CHAT, chat(max_tokens=3))
        assert response.headers["x-serving-mode"] == "aggregated"
        assert response.json()["choices"][0]["message"]["content"] == "one two three"
        assert not gateway.workers.prefill.runs


async def test_no_worker_is_503_with_a_time_to_come_back(gateway: RunningGateway) -> None:
    """Never a hang; readiness says the same."""
    for record in gateway.workers.records.values():
        record.ready = False
    await gateway.beat()
    response = await gateway.post(CHAT, chat())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert "retry-after" in response.headers
    assert (await gateway.client.get("/readyz")).status_code == 503
    assert (await gateway.client.get("/healthz")).status_code == 200
