"""Cache state is part of routing: of two nodes, a conversation goes on where its KV lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import write_directory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CONVERSATIONS: Final = 6
BATCHES_MAX: Final = 10
NODES: Final = {"prefill-0", "prefill-1"}
PROMPT_TOKENS: Final = 150
ARENA_BYTES: Final = 24 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two nodes, each with a kvstore, a prefill and a decode worker."""
    folder = tmp_path_factory.mktemp("routing")
    model = write_directory(folder / "tiny")
    flags = ("--nodes", "2", "--prefill", "2", "--decode", "2", "--dtype", "float32")
    sizes = ("--arena-bytes", str(ARENA_BYTES), "--nvme-bytes", "0")
    with running_cluster(folder / "run", "--model", str(model), *flags, *sizes) as running:
        yield running


def complete(url: str, prompt: list[int], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """A greedy answer, its ids and where it ran."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def begun_on_both(begin: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations by number, begun at the same time, so that they are spread over the nodes.

    How many go where depends on who is quicker: more are begun until both nodes have one.
    """
    begun: list[dict[str, Any]] = []
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        for batch in range(BATCHES_MAX):
            numbers = range(batch * CONVERSATIONS, (batch + 1) * CONVERSATIONS)
            begun += pool.map(begin, numbers)
            if {told["baton"]["prefill_worker"] for told in begun} == NODES:
                return begun
    raise AssertionError(f"{len(begun)} conversations, all on one node")


def test_the_next_turn_goes_to_the_node_that_has_the_conversation(
    cluster: RunningCluster,
) -> None:
    """Begun at the same time they are spread over both nodes; then one at a time, with every worker
    idle, each goes back to its own, and all of its KV is reused. Without reuse the tokens are the
    same.
    """
    prompts = [
        [4 + (number * 37 + index * (number + 3)) % 240 for index in range(PROMPT_TOKENS)]
        for number in range(BATCHES_MAX * CONVERSATIONS)
    ]
    begun = begun_on_both(lambda number: complete(cluster.url, prompts[number]))
    for prompt, told in zip(prompts, begun, strict=False):
        history = [*prompt, *told["choices"][0]["token_ids"]]
        turn = [*history, 9, 8, 7]
        again = complete(cluster.url, turn)
        assert again["baton"]["prefill_worker"] == told["baton"]["prefill_worker"]
        assert again["baton"]["cached_tokens"] == len(history) - 1
        assert again["baton"]["brought"] is None, "no log had to move"
        fresh = complete(cluster.url, turn, {"X-Cache": "off"})
        assert fresh["baton"]["cached_tokens"] == 0
        assert again["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]


def test_a_named_answer_is_continued_where_it_lies(cluster: RunningCluster) -> None:
    """`previous_response_id`: the parent is at one node, and that is where it is forked."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True}

    def chat(**more: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{cluster.url}/v1/chat/completions",
            json={**body, **more},
            timeout=60.0,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    begun = begun_on_both(
        lambda number: chat(messages=[{"role": "user", "content": f"{number} is one. " * 9}])
    )
    for told in begun:
        again = chat(
            messages=[{"role": "user", "content": "And then?"}], previous_response_id=told["id"]
        )
        assert again["baton"]["prefill_worker"] == told["baton"]["prefill_worker"]
        usage = told["usage"]
        kept = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert again["baton"]["cached_tokens"] == kept
