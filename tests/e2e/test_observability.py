"""What a running cluster shows of itself: metrics, traces, logs; and what it must never show."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.metrics_families import Family, Kind
from baton.metrics_table import families_of
from baton.metrics_vllm import aliases_of
from baton.stages import FIRST_TOKEN_STAGES, STAGES
from baton.testing.cluster import RunningCluster, running_cluster
from baton.tracing_tree import TreeSpan, covered_s, spans_of, steps
from tests.unit.observability.expressions import metric_names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

_log = logging.getLogger(__name__)
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yml"
CHAT = "/v1/chat/completions"
KEY = "key-canary-k7Zq93xWvT"
SALT = "salt-canary-Rm4Jd82yLp"
WORDS = ("zorblax", "quiverfent", "mulgrathe", "ptorvanik")
TENANTS = f"""
tenants:
  - name: red
    keys: [{KEY}]
  - name: blue
    keys: [key-of-blue]
"""
TRACE_SHARE_MIN = 0.98
STAGE_ERROR_MAX = 0.05
SLACK_S = 0.002
"""The clock readings around a request that no stage can hold; 5% of a tiny prompt is less."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Prefill and decode apart, with a key, everything logged."""
    folder: Path = tmp_path_factory.mktemp("observed")
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    flags = ("--tenants-file", str(file), "--log-level", "debug")
    with running_cluster(folder / "run", *flags) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[httpx.Client]:
    """A client with the tenant's key."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(
        base_url=cluster.url, headers=headers, timeout=120.0, trust_env=False
    ) as made:
        yield made


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Everything aggregated: the decode worker prefills."""
    folder: Path = tmp_path_factory.mktemp("aggregated")
    with running_cluster(folder / "run", "--prefill-mode", "local") as running:
        yield running


def body(text: str, **more: Any) -> dict[str, Any]:
    """A chat request."""
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def targets(cluster: RunningCluster) -> dict[str, str]:
    """Every process's metrics address, as Prometheus finds it."""
    entries = json.loads((cluster.run_dir / "metrics-targets.json").read_text(encoding="utf-8"))
    return {entry["labels"]["process"]: entry["targets"][0] for entry in entries}


def scrape(address: str) -> str:
    """One process's /metrics."""
    answer = httpx.get(f"http://{address}/metrics", timeout=10.0, trust_env=False)
    assert answer.status_code == 200
    return answer.text


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def shown_names(family: Family) -> set[str]:
    """The sample names of a family."""
    if family.kind is Kind.HISTOGRAM:
        return {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return {family.shown_name}


# --- metrics -------------------------------------------------------------------------------------


def test_all_five_services_show_every_family_before_first_use(cluster: RunningCluster) -> None:
    """A board is never blank, and a rate over the first failure is right.

    First in the file: nothing was asked of the cluster yet.
    """
    seen: set[str] = set()
    for process, address in targets(cluster).items():
        service = process.rpartition("-")[0]
        seen.add(service)
        found = samples(scrape(address))
        names = {name for name, _labels in found}
        for family in families_of(service):
            if family.name.startswith("grpc_server_call") and not shown_names(family) & names:
                # A method has a series from its first call on; the family itself is there.
                assert f"# TYPE {family.shown_name}" in scrape(address)
                continue
            assert shown_names(family) <= names, (process, family.name)
            wanted = [label for label in family.labels if label.values]
            for label in wanted:
                values = {dict(labels).get(label.name) for name, labels in found
                          if name in shown_names(family)}  # fmt: skip
                assert set(label.values) <= values, (process, family.name, label.name)
        for alias in aliases_of(service):
            assert any(name.startswith(alias.name) for name in names), (process, alias.name)
    assert seen == {"gateway", "prefill", "decode", "kvstore", "merger"}


def test_the_gateways_own_port_shows_its_metrics_to_who_has_a_key(
    cluster: RunningCluster, client: httpx.Client
) -> None:
    """One door is enough for a small set-up; topology is not for strangers."""
    assert "baton_requests_total" in client.get("/metrics").text
    assert httpx.get(f"{cluster.url}/metrics", trust_env=False).status_code == 401


def test_rules_find_every_metric_they_name(cluster: RunningCluster) -> None:
    """A rule over a name that a live cluster does not show never fires."""
    names: set[str] = set()
    for address in targets(cluster).values():
        names |= {name for name, _labels in samples(scrape(address))}
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in metric_names(rule["expr"])}
    assert used - recorded <= names, used - recorded - names


def total(found: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str) -> float:
    """The sum over all labels."""
    return sum(value for (shown, _labels), value in found.items() if shown == name)


def test_what_is_counted_is_conserved(cluster: RunningCluster, client: httpx.Client) -> None:
    """Pages and hand-offs add up, prompt tokens are found or computed, and the counters move."""
    for text in ("Name a river.", "Name a river.", "Name a lake."):
        assert client.post(CHAT, json=body(text)).status_code == 200
    assert client.post(CHAT, json=body("x", max_tokens=0)).status_code == 400
    at = targets(cluster)
    gateway, decode = samples(scrape(at["gateway-0"])), samples(scrape(at["decode-0"]))
    prefill, store = samples(scrape(at["prefill-0"])), samples(scrape(at["kvstore-0"]))
    assert total(store, "baton_kvstore_pages") == total(store, "baton_kvstore_arena_pages") > 0
    states = {dict(labels)["state"]: value for (name, labels), value in gateway.items()
              if name == "baton_handoffs_total"}  # fmt: skip
    ended = states["received"] + states["failed"] + states["cancelled"]
    assert states["handed_off"] == ended + total(gateway, "baton_handoffs_in_flight") >= 1
    # Until the prefill worker is heard, the decode worker prefills: that is no hand-off.
    local = sum(value for (name, labels), value in gateway.items()
                if name == "baton_answers_total" and ("mode", "aggregated") in labels)  # fmt: skip
    assert states["received"] + local == total(decode, "baton_decode_received_total")
    prompt = total(gateway, "baton_prompt_tokens_total")
    cached = total(gateway, "baton_cached_prompt_tokens_total")
    assert cached > 0
    assert prompt == cached + total(gateway, "baton_computed_prompt_tokens_total")
    assert cached == total(store, "baton_kvstore_hit_tokens_total")
    assert cached >= total(prefill, "baton_prefill_hit_tokens_total") > 0
    refused = frozenset({("outcome", "refused")})
    assert gateway[("baton_time_to_first_token_seconds_count", refused)] >= 1
    named = frozenset({("model_name", "SmolLM2-135M-Instruct"), ("engine", "0")})
    assert gateway[("vllm:prefix_cache_hits_total", named)] == cached
    assert total(decode, "vllm:generation_tokens_total") > 0
    assert total(decode, "baton_transfer_bytes_total") > 0


# --- traces --------------------------------------------------------------------------------------


def fetched(client: httpx.Client, request_id: str) -> dict[str, Any]:
    """A trace once it is complete: the root ends after its last byte was sent."""
    end_s = time.monotonic() + 10.0
    while True:
        answer = client.get(f"/debug/traces/{request_id}")
        if answer.status_code == 200:
            found: dict[str, Any] = answer.json()
            if any(span["name"] == "request" for span in found["processes"][0]["spans"]):
                return found
        assert time.monotonic() < end_s, answer.text


def stage_error(answer: Mapping[str, Any]) -> float:
    """How far the stages are from the time to the first token, as a part of it."""
    baton = answer["baton"]
    stages = baton["stage_seconds"]
    assert set(STAGES) <= set(stages), sorted(stages)
    ttft_s = baton["time_to_first_token_s"]
    added_s = sum(stages[name] for name in FIRST_TOKEN_STAGES)
    return max(0.0, abs(added_s - ttft_s) - SLACK_S) / ttft_s


def streamed(client: httpx.Client, asked: Mapping[str, Any]) -> tuple[str, dict[str, Any], float]:
    """(request id, the chunk with the `baton` object, seconds as the client saw them)."""
    began_s = time.monotonic()
    with client.stream("POST", CHAT, json={**asked, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        seconds = time.monotonic() - began_s
        request_id = response.headers["x-baton-request-id"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return request_id, next(chunk for chunk in chunks if "baton" in chunk), seconds


def covered(spans: tuple[TreeSpan, ...]) -> tuple[float, TreeSpan]:
    """The part of the request's time that named steps explain, and its root."""
    root = next(span for span in spans if span.name == "request")
    return covered_s(steps(spans), root.start_s, root.end_s) / root.duration_s, root


def test_one_trace_covers_a_request_and_its_stages_add_up(client: httpx.Client) -> None:
    """Nothing of a request's time is in the dark, streamed or not."""
    client.get("/v1/models")
    asked = body("Tell me in some detail how rain comes to be, step by step.", max_tokens=24)
    request_id, last, seconds = streamed(client, asked)
    share, root = covered(spans_of(fetched(client, request_id)))
    error = stage_error(last)
    whole = client.post(CHAT, json=body("Tell me in some detail how snow comes to be."))
    whole_share, _root = covered(spans_of(fetched(client, whole.headers["x-baton-request-id"])))
    whole_error = stage_error(whole.json())
    _log.info("covered %.4f streamed, %.4f whole", share, whole_share)
    _log.info("stages off by %.4f streamed, %.4f whole", error, whole_error)
    _log.info("the root is %.4f of what the client saw", root.duration_s / seconds)
    assert share >= TRACE_SHARE_MIN
    assert whole_share >= TRACE_SHARE_MIN
    assert root.duration_s >= TRACE_SHARE_MIN * seconds - 0.01
    assert error <= STAGE_ERROR_MAX
    assert whole_error <= STAGE_ERROR_MAX


def test_a_trace_reaches_into_every_service_that_worked(client: httpx.Client) -> None:
    """The caller's own trace goes on: one tree, from HTTP to group commits."""
    trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    asked = body("A long question, so that it has chunks. " * 36, max_tokens=4)
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    answer = client.post(CHAT, json=asked, headers=headers)
    found = fetched(client, answer.headers["x-baton-request-id"])
    assert found["trace_id"] == trace_id
    assert found["missing"] == []
    spans = spans_of(found)
    names = {(span.process, span.name) for span in spans}
    wanted = {
        ("gateway-0", name)
        for name in ("request", "auth", "receive", "tokenise", "sequence", "route", "open",
                     "splice", "prefill_rpc", "decode", "handoff", "respond")
    } | {
        ("prefill-0", name)
        for name in ("Run", "log_replay", "prefill_compute", "kv_pack", "first_token_sample",
                     "seal")
    } | {
        ("node-0", name)
        for name in ("Open", "CommitCheckpoint", "Seal", "Take", "ReplayLog", "Append", "log_ack")
    } | {
        ("decode-0", name)
        for name in ("Prepare", "join", "kv_transfer", "kv_unpack", "decode_queue_wait",
                     "decode_step", "append")
    }  # fmt: skip
    assert wanted <= names, wanted - names
    chunks = sum(span.name == "prefill_compute" for span in spans)
    assert chunks >= 2
    # The last chunk comes with the seal.
    assert sum(span.name == "CommitCheckpoint" for span in spans) == chunks - 1
    root = next(span for span in spans if span.name == "request")
    assert root.parent_span_id == caller
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span is not root)


def test_stages_add_up_where_the_decode_worker_prefills(local_cluster: RunningCluster) -> None:
    """Aggregated serving has no call to prefill, but the same stages."""
    with httpx.Client(base_url=local_cluster.url, timeout=120.0, trust_env=False) as client:
        request_id, last, _seconds = streamed(client, body("Say how wind comes to be, please."))
        share, _root = covered(spans_of(fetched(client, request_id)))
    assert last["baton"]["mode"] == "aggregated"
    assert stage_error(last) <= STAGE_ERROR_MAX
    assert share >= TRACE_SHARE_MIN


def test_refusals_are_kept_though_the_caller_sampled_nothing(client: httpx.Client) -> None:
    """What failed is worth a look, always; what went well is the caller's choice."""
    fine, failed = "5" * 32, "6" * 32
    for trace_id, timeout in ((fine, "60"), (failed, "0.02")):
        headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-00", "x-request-timeout": timeout}
        answer = client.post(CHAT, json=body("Hi " * 400, max_tokens=1), headers=headers)
        assert answer.status_code == (200 if trace_id == fine else 504), answer.text
    assert client.get(f"/debug/traces/{fine}").status_code == 404
    found = fetched(client, failed)
    root = next(one for one in found["processes"][0]["spans"] if one["name"] == "request")
    assert root["is_error"]


def test_another_tenant_sees_no_trace(cluster: RunningCluster, client: httpx.Client) -> None:
    """Times and sizes of somebody's requests are theirs."""
    answer = client.post(CHAT, json=body("Hi", max_tokens=1))
    request_id = answer.headers["x-baton-request-id"]
    fetched(client, request_id)
    url = f"{cluster.url}/debug/traces/{request_id}"
    assert httpx.get(url, trust_env=False).status_code == 401
    other = {"authorization": "Bearer key-of-blue"}
    assert httpx.get(url, headers=other, trust_env=False).status_code == 404
    assert client.get(url).status_code == 200
    assert client.get("/debug/traces/nobody").status_code == 404


def test_baton_trace_prints_the_waterfall(cluster: RunningCluster, client: httpx.Client) -> None:
    """Without any collector, by the id that the answer carries."""
    answer = client.post(CHAT, json=body("Hi there", max_tokens=3))
    fetched(client, answer.headers["x-baton-request-id"])
    argv = [sys.executable, "-m", "baton.cli.main", "trace", answer.json()["id"]]
    argv += ["--url", cluster.url, "--api-key", KEY]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for word in ("prefill-0", "decode-0", "node-0", "prefill_compute", "handoff", "█"):
        assert word in shown.stdout, shown.stdout
    raw = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60)
    assert json.loads(raw.stdout)["processes"]


# --- logs, and what is never shown ---------------------------------------------------------------


def lines_of(cluster: RunningCluster) -> list[dict[str, Any]]:
    """The gateway's log."""
    return [json.loads(line) for line in cluster.log("gateway-0").splitlines() if line[:1] == "{"]


def test_a_request_leaves_one_line_that_answers_most_questions(
    cluster: RunningCluster, client: httpx.Client
) -> None:
    """Ids, workers, decision, source, counts, times, outcome."""
    answer = client.post(CHAT, json=body("How far is the moon?"), headers={"x-request-id": "mine"})
    request_id = answer.headers["x-baton-request-id"]
    fetched(client, request_id)
    lines = [line for line in lines_of(cluster) if line["event"] == "request_finished"]
    (line,) = [line for line in lines if line["request_id"] == request_id]
    usage = answer.json()["usage"]
    assert line["client_request_id"] == "mine"
    assert (line["outcome"], line["tenant"], line["route"]) == ("ok", "red", "chat")
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["transfer_bytes"] > 0
    assert line["transport"] == "shm"
    for name in ("log_id", "trace_id", "routing", "is_fallback", "kv_source", "exactness",
                 "finish_reason", "ttft_ms", "tpot_ms", "e2e_ms", "transfer_ms"):  # fmt: skip
        assert name in line, name


def provoked(client: httpx.Client) -> tuple[list[str], list[str]]:
    """Requests with canaries in every place; (what came back of those that failed, request ids)."""
    text = " ".join(WORDS)
    good = body(f"Say {text} again, please.", cache_salt=SALT, user=WORDS[0], stop=[WORDS[1]])
    asked: list[tuple[str, Any, dict[str, str]]] = [
        (CHAT, good, {}),
        (CHAT, {**good, "stream": True}, {}),
        (CHAT, {**good, "messages": [{"role": "system", "content": text}, *good["messages"]]}, {}),
        ("/v1/completions", {"model": "smollm2", "prompt": text, "max_tokens": 2}, {}),
        (CHAT, {**good, "model": f"model-{text}"}, {}),
        (CHAT, {**good, "messages": [{"role": text, "content": text}]}, {}),
        (CHAT, {**good, "messages": text}, {}),
        (CHAT, {**good, "temperature": text}, {}),
        (CHAT, {**good, "max_tokens": 10**6}, {}),
        (CHAT, {**good, "messages": [{"role": "user", "content": f"{text} " * 4000}]}, {}),
        (CHAT, good, {"x-request-timeout": "0.01"}),
        (CHAT, good, {"authorization": f"Bearer {KEY}-{WORDS[2]}"}),
        (CHAT, good, {"traceparent": text, "x-request-id": text, "x-request-timeout": text}),
        ("/v1/prefixes", {"name": "canary", "text": f"{text} " * 20}, {}),
        ("/v1/prefixes", {"name": "canary", "text": text, "ttl_s": text}, {}),
        ("/tokenize", {"model": "smollm2", "prompt": text, "messages": text}, {}),
        ("/detokenize", {"model": "smollm2", "tokens": [text]}, {}),
    ]
    errors, request_ids = [], []
    for path, json_body, headers in asked:
        answer = client.post(path, json=json_body, headers=headers)
        request_ids.append(answer.headers["x-baton-request-id"])
        if answer.status_code != 200:
            errors.append(answer.text)
    broken = client.post(
        CHAT, content=f'{{"messages": "{text}', headers={"content-type": "application/json"}
    )
    errors.append(broken.text)
    with client.stream("POST", CHAT, json={**good, "stream": True, "max_tokens": 200}) as left:
        request_ids.append(left.headers["x-baton-request-id"])
    assert len(errors) >= 10, "too little was provoked"
    return errors, request_ids


def found_in(text: str, canaries: list[str], token_ids: list[int]) -> list[str]:
    """Which canaries a text has, without case; token ids as a run of four, however written."""
    lowered = text.lower()
    hits = [canary for canary in canaries if canary.lower() in lowered]
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    runs = {tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)}
    hits += [str(run) for run in zip(*(numbers[i:] for i in range(4)), strict=False) if run in runs]
    return hits


def test_nothing_that_is_emitted_shows_what_a_tenant_wrote(
    cluster: RunningCluster, client: httpx.Client
) -> None:
    """Logs at debug level, metrics, traces and errors; prompt text, token ids, keys and salts."""
    text = f"Say {' '.join(WORDS)} again, please."
    tokenised = client.post("/tokenize", json={"model": "smollm2", "prompt": " ".join(WORDS)})
    token_ids: list[int] = tokenised.json()["tokens"]
    assert len(token_ids) >= 8
    canaries = [*WORDS, KEY, SALT]
    errors, request_ids = provoked(client)
    emitted: dict[str, str] = {f"error {i}": error for i, error in enumerate(errors)}
    for log in sorted(cluster.run_dir.glob("*.log")):
        emitted[log.name] = log.read_text(encoding="utf-8", errors="replace")
    assert len([name for name in emitted if name.endswith(".log")]) >= 5
    for process, address in targets(cluster).items():
        emitted[f"metrics of {process}"] = scrape(address)
    traces = 0
    for request_id in request_ids:
        answer = client.get(f"/debug/traces/{request_id}")
        traces += answer.status_code == 200
        emitted[f"trace of {request_id}"] = answer.text
    assert traces >= 10
    leaks = {name: found_in(shown, canaries, token_ids) for name, shown in emitted.items()}
    assert {name: hits for name, hits in leaks.items() if hits} == {}
    # The same search finds them where they are: in the tenant's own answer and key file.
    echo = {"model": "smollm2", "prompt": text, "max_tokens": 1, "echo": True}
    own = client.post("/v1/completions", json=echo).text
    assert set(WORDS) <= set(found_in(own, canaries, token_ids))
    assert found_in(tokenised.text, canaries, token_ids)
    assert found_in(TENANTS, canaries, token_ids) == [KEY]
