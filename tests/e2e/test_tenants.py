"""Keys and tenants at a running cluster: who may call, and whose cache answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TENANTS = """
tenants:
  - name: red
    keys: [key-red-1]
  - name: blue
    keys: [key-blue-1]
"""
MESSAGES = [
    {"role": "user", "content": "Name three rivers of Europe and one lake, as a short list."}
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster with two tenants."""
    folder: Path = tmp_path_factory.mktemp("tenants")
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    with running_cluster(folder / "run", "--tenants-file", str(file)) as running:
        yield running


def ask(cluster: RunningCluster, key: str | None) -> httpx.Response:
    """The same question under a key."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    return httpx.post(
        f"{cluster.url}/v1/chat/completions",
        json=body,
        headers=headers,
        timeout=60.0,
        trust_env=False,
    )


@pytest.mark.parametrize("key", [None, "key-green", "key-red-1x", "KEY-RED-1"])
def test_an_unknown_key_is_refused(cluster: RunningCluster, key: str | None) -> None:
    """401 with the error body; health stays open."""
    answer = ask(cluster, key)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{cluster.url}/healthz", trust_env=False).status_code == 200


def test_one_tenants_cache_never_answers_another(cluster: RunningCluster) -> None:
    """The same text: a hit for the tenant that sent it before, none for the other."""
    cached = []
    for key in ("key-red-1", "key-red-1", "key-blue-1", "key-blue-1"):
        answer = ask(cluster, key)
        assert answer.status_code == 200, answer.text
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == 0
    assert cached[3] > 0
