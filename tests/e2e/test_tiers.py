"""A conversation's KV on NVMe: the next turn is served from there, with the same tokens, also after
its kvstore was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from baton.api.kvstore.v1 import operators_pb2
from baton.cli.kv_store import Store, reach
from baton.testing.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(300)]

WAIT_S = 60.0
FIRST = [
    {
        "role": "user",
        "content": "Tell me in a few short sentences about the city of Lyon: its rivers, its food, "
        "its silk and its light. Then say which of the four you like best, and why that is so.",
    }
]
BODY = {"model": "smollm2", "temperature": 0, "max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module")
def cluster(
    bundled_model: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """One whose kvstore copies everything to NVMe as soon as nobody writes it."""
    run_dir = tmp_path_factory.mktemp("cluster-tiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_KVSTORE_DEMOTE_BELOW", "1")
        patch.setenv("BATON_KVSTORE_DEMOTE_UNTIL", "1")
        with running_cluster(run_dir, "--dtype", "float32", "--nvme-bytes", "268435456") as running:
            yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[httpx.Client]:
    """An HTTP client of it."""
    with httpx.Client(base_url=cluster.url, timeout=120.0, trust_env=False) as client:
        yield client


def logs(cluster: RunningCluster) -> list[operators_pb2.LogSummary]:
    """What `baton kv ls` shows."""

    async def listed(stores: Sequence[Store]) -> list[operators_pb2.LogSummary]:
        request = operators_pb2.ListLogsRequest(capability=stores[0].operator())
        return list((await stores[0].operators.ListLogs(request)).logs)

    return reach(cluster.run_dir, None, None).run(listed)


def wait_until(holds: Callable[[], bool]) -> None:
    """Each look is a call; nothing is waited for but its answer."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "did not come true"


def all_copied(cluster: RunningCluster) -> bool:
    """Every log's KV is on NVMe."""
    return all(log.cold_tokens >= max(log.committed_tokens, 1) for log in logs(cluster))


def evict_all(cluster: RunningCluster) -> None:
    """As `baton kv evict` does: nothing is in the host any more."""

    async def evict(stores: Sequence[Store]) -> None:
        for log in found:
            request = operators_pb2.EvictLogRequest(
                capability=stores[0].operator(), log_id=log.log_id
            )
            await stores[0].operators.EvictLog(request)

    found = logs(cluster)
    reach(cluster.run_dir, None, None).run(evict)
    assert all(log.host_pages == 0 for log in logs(cluster))


def ask(client: httpx.Client, messages: list[dict[str, str]], **headers: str) -> dict[str, Any]:
    """A greedy answer."""
    answer = client.post(
        "/v1/chat/completions", json={**BODY, "messages": messages}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def has_answered(client: httpx.Client, messages: list[dict[str, str]]) -> bool:
    """Whether the cluster serves again."""
    body = {**BODY, "messages": messages, "store": False}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code == 200


def cached(told: dict[str, Any]) -> int:
    """Prompt tokens that were not computed."""
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_demoted_conversation_goes_on_from_nvme(
    cluster: RunningCluster, client: httpx.Client
) -> None:
    """True cached tokens, the same greedy tokens, before and after a kill -9 of its kvstore."""
    one = ask(client, FIRST)
    text = one["choices"][0]["message"]["content"]
    second = [
        *FIRST,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And its food?"},
    ]
    fresh = ask(client, second, **{"X-Cache": "off"})
    assert cached(fresh) == 0
    wait_until(lambda: all_copied(cluster))
    evict_all(cluster)
    warm = ask(client, second)
    assert cached(warm) >= one["usage"]["prompt_tokens"]
    assert warm["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]

    wait_until(lambda: all_copied(cluster))
    evict_all(cluster)
    old = cluster.pid("kvstore-0")
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: cluster.pid("kvstore-0") != old)
    # The workers attach to it again in their own time.
    wait_until(lambda: has_answered(client, second))
    evict_all(cluster)
    again = ask(client, second)
    assert cached(again) >= one["usage"]["prompt_tokens"]
    assert again["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
