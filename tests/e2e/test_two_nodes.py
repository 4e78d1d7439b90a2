"""Prefill on one node, decode on another: the log moves, and no token changes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from baton.metrics_families import PAGE_STATES
from baton.testing.cluster import RunningCluster, running_cluster
from tests.e2e.test_oracle import compare, complete

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CASES: Final = 8
SETTLE_S: Final = 20.0
ARENA_BYTES: Final = 192 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill worker on the first node, one decode worker on the second."""
    flags = ("--nodes", "2", "--dtype", "float32", "--arena-bytes", str(ARENA_BYTES))
    with running_cluster(tmp_path_factory.mktemp("two-nodes"), *flags) as running:
        yield running


def metrics_address(cluster: RunningCluster, name: str) -> str:
    """Where a process shows its metrics."""
    targets = json.loads((cluster.run_dir / "metrics-targets.json").read_text(encoding="ascii"))
    (address,) = (t["targets"][0] for t in targets if t["labels"]["process"] == name)
    return str(address)


def metric(cluster: RunningCluster, name: str, sample: str) -> float:
    """One sample of one process's metrics, by its whole name with labels."""
    address = metrics_address(cluster, name)
    text = httpx.get(f"http://{address}/metrics", timeout=10.0, trust_env=False).text
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(sample)]
    assert len(values) == 1, (sample, values)
    return float(values[0])


def pages(cluster: RunningCluster, name: str) -> dict[str, float]:
    """Pages of a store by state; they add up."""
    counts = {
        state: metric(cluster, name, f'baton_kvstore_pages{{state="{state}"}}')
        for state in PAGE_STATES
    }
    assert sum(counts.values()) == metric(cluster, name, "baton_kvstore_arena_pages"), counts
    return counts


def test_output_equals_the_one_node_run_token_for_token(
    cluster: RunningCluster, golden_cases: list[dict[str, Any]]
) -> None:
    """Every answer's log moved, its transfer is counted, and its tokens are transformers'."""
    before = metric(cluster, "kvstore-1", 'baton_kvstore_moves_total{outcome="ok"}')
    cases = golden_cases[:CASES]
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = list(pool.map(lambda case: complete(cluster.url, case), cases))
    compared = 0
    for case, answer in zip(cases, answers, strict=True):
        compared += compare(case, answer["choices"][0]["token_ids"])
        told = answer["baton"]
        assert told["brought"] == "moved", told
        assert told["kv_source"] == "remote"
        assert told["exactness"] == "exact"
        assert 0.0 <= told["hidden_transfer_share"] <= 1.0
    assert compared > 0
    after = metric(cluster, "kvstore-1", 'baton_kvstore_moves_total{outcome="ok"}')
    assert after - before == len(cases)
    labels = 'source="remote",target="local",transport="stream"'
    assert metric(cluster, "kvstore-1", f"baton_transfer_bytes_total{{{labels}}}") > 0


def test_a_long_prompt_is_mostly_copied_while_it_is_computed(cluster: RunningCluster) -> None:
    """Chunk by chunk: what is left for the move itself is the last chunk at most."""
    body = {
        "model": "smollm2",
        "prompt": [100 + index % 900 for index in range(700)],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=body, timeout=300.0, trust_env=False
    ).json()
    assert answer["baton"]["brought"] == "moved"
    assert answer["baton"]["hidden_transfer_share"] >= 0.6


def test_no_page_is_held_twice_once_the_new_homes_have_said_so(cluster: RunningCluster) -> None:
    """The old home keeps nothing of what moved, and both stores' pages add up."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        counts = pages(cluster, "kvstore-0")
        if not counts["live"] + counts["shared"] + counts["granted"]:
            break
        assert time.monotonic() < deadline_s, counts
    assert metric(cluster, "kvstore-0", "baton_kvstore_moves_unconfirmed") == 0
    assert metric(cluster, "kvstore-1", "baton_kvstore_replicas") == 0
    assert pages(cluster, "kvstore-1")["granted"] == 0
    assert metric(cluster, "kvstore-1", "baton_kvstore_leases") == 0


def test_traces_tell_of_the_move(cluster: RunningCluster) -> None:
    """The new home's span says how much was hidden."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"model": "smollm2", "prompt": "The river", "max_tokens": 3, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json=body,
        headers=headers,
        timeout=120.0,
        trust_env=False,
    )
    assert answer.json()["baton"]["brought"] == "moved", answer.text
    address = metrics_address(cluster, "kvstore-1")
    url = f"http://{address}/debug/traces/{trace_id}"
    assert "hidden_transfer_share" in httpx.get(url, timeout=10.0, trust_env=False).text
