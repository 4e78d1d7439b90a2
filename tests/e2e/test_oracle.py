"""The whole path against transformers: greedy tokens equal in float32, wherever prefill runs.

A token is compared while the reference's top-2 logit gap is over 1e-3 at it and at all before it;
behind a near tie both continuations are right, so the rest of that prompt is counted as skipped.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

GAP_MIN = 1e-3
CASES_MIN = 24


def complete(url: str, case: dict[str, Any]) -> dict[str, Any]:
    """The greedy answer to a golden case's token ids."""
    body = {
        "model": "smollm2",
        "prompt": case["prompt_ids"],
        "temperature": 0,
        "max_tokens": len(case["greedy_ids"]),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    # No reuse between cases: each is a computation of its own.
    headers = {"X-Cache": "off"}
    response = httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=300.0, trust_env=False
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compare(case: dict[str, Any], token_ids: list[int]) -> int:
    """Assert equality up to the first near tie; returns how many tokens were compared."""
    safe = next((i for i, gap in enumerate(case["gaps"]) if gap <= GAP_MIN), len(case["gaps"]))
    assert token_ids[:safe] == case["greedy_ids"][:safe], case["name"]
    return safe


def run_all(url: str, cases: list[dict[str, Any]]) -> tuple[int, int]:
    """Ask for all cases, four at a time, and compare; returns (compared, skipped) tokens."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = list(pool.map(lambda case: complete(url, case), cases))
    compared = 0
    for case, answer in zip(cases, answers, strict=True):
        compared += compare(case, answer["choices"][0]["token_ids"])
        assert answer["usage"]["prompt_tokens"] == len(case["prompt_ids"])
        assert answer["usage"]["completion_tokens"] == len(case["greedy_ids"])
    total = sum(len(case["greedy_ids"]) for case in cases)
    return compared, total - compared


def test_disaggregated_equals_transformers(
    cluster_f32: RunningCluster, golden_cases: list[dict[str, Any]]
) -> None:
    """Every golden prompt, prefill and decode in two processes, class exact."""
    assert len(golden_cases) >= CASES_MIN
    compared, skipped = run_all(cluster_f32.url, golden_cases)
    assert compared > 10 * skipped, (compared, skipped)


def test_answers_state_their_class_and_mode(
    client_f32: httpx.Client, golden_cases: list[dict[str, Any]]
) -> None:
    """A caller can see that the answer is exact and that it was disaggregated."""
    body = {"model": "smollm2", "prompt": golden_cases[0]["prompt_ids"], "max_tokens": 2}
    response = client_f32.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-serving-mode"] == "disaggregated"
    assert response.json()["baton"]["exactness"] == "exact"


def test_local_prefill_equals_transformers(
    tmp_path: Path, golden_cases: list[dict[str, Any]]
) -> None:
    """The decode worker prefills by itself: the same tokens, and the answer says aggregated."""
    with running_cluster(tmp_path, "--dtype", "float32", "--prefill-mode", "local") as cluster:
        answer = complete(cluster.url, golden_cases[0])
        assert answer["baton"]["kv_source"] == "local"
        compared, skipped = run_all(cluster.url, golden_cases)
        assert compared > 10 * skipped, (compared, skipped)


@pytest.mark.parametrize(
    ("chunk_tokens", "chunking"),
    [
        (16, "fixed"),
        *(pytest.param(size, "fixed", marks=pytest.mark.more) for size in (64, 384, 4096)),
        *(pytest.param(size, "semantic", marks=pytest.mark.more) for size in (16, 64)),
    ],
)
def test_chunks_never_change_the_tokens(
    tmp_path: Path, golden_cases: list[dict[str, Any]], chunk_tokens: int, chunking: str
) -> None:
    """Chunks are a schedule, not a result: every chunk attends to all earlier KV."""
    flags = ("--dtype", "float32", "--chunk-tokens", str(chunk_tokens), "--chunking", chunking)
    with running_cluster(tmp_path, *flags) as cluster:
        compared, skipped = run_all(cluster.url, golden_cases)
        assert compared > 10 * skipped, (compared, skipped)
