"""A whole cluster with int8 KV: it says so in every answer, reuses its pages, and stays near."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster
from tests.e2e.test_oracle import complete

pytestmark = [pytest.mark.more, pytest.mark.cluster, pytest.mark.timeout(600)]

CASES: Final = 6
FIRST_TOKENS: Final = 8
ARENA_BYTES: Final = 96 << 20


@pytest.fixture(scope="module")
def cluster(
    bundled_model: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """Prefill by torch, decode by the step kernel where there is one, both over int8 pages."""
    flags = ("--kv-dtype", "int8", "--arena-bytes", str(ARENA_BYTES))
    with running_cluster(tmp_path_factory.mktemp("int8"), *flags) as running:
        yield running


def test_every_answer_says_approximate_and_stays_near(
    cluster: RunningCluster, golden_cases: list[dict[str, Any]]
) -> None:
    """Bfloat16 and int8 round; most answers still begin as transformers' do in float32."""
    alike = 0
    for case in golden_cases[:CASES]:
        answer = complete(cluster.url, case)
        assert answer["baton"]["exactness"] == "approximate"
        assert " kv=int8 " in answer["baton"]["exactness_reason"]
        said = answer["choices"][0]["token_ids"]
        assert len(said) == len(case["greedy_ids"])
        alike += said[:FIRST_TOKENS] == case["greedy_ids"][:FIRST_TOKENS]
    assert alike >= CASES // 2


def test_int8_pages_are_reused(cluster: RunningCluster) -> None:
    """The second of two equal prompts reads the first one's pages, scales and all."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name the planets, " * 40}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answers = []
    for _ in range(2):
        response = httpx.post(
            f"{cluster.url}/v1/chat/completions", json=body, timeout=300.0, trust_env=False
        )
        assert response.status_code == 200, response.text
        assert response.headers["x-baton-exactness"] == "approximate"
        answers.append(response.json())
    assert answers[0]["baton"]["cached_tokens"] == 0
    assert answers[1]["baton"]["cached_tokens"] > 64
    # The page that both begin with is the same; what is computed anew may round otherwise.
    assert answers[1]["choices"][0]["message"]["content"]
