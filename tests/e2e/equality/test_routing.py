"""Cache state is part of routing: of two nodes, a conversation goes on where its KV lies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import write_directory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PROMPT_TOKENS: Final = 150
BACK_WITHIN_S: Final = 30.0
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


@contextmanager
def away(cluster: RunningCluster, worker: str) -> Iterator[None]:
    """A prefill worker answers nothing: what begins now begins at the other node."""
    pid = cluster.pid(worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until_back(cluster: RunningCluster) -> None:
    """The first node's worker is used again, which is first by name where nothing else counts."""
    deadline_s = time.monotonic() + BACK_WITHIN_S
    probe, headers = [5, 6, 7], {"X-Cache": "off"}
    while complete(cluster.url, probe, headers)["baton"]["prefill_worker"] != "prefill-0":
        assert time.monotonic() < deadline_s, "prefill-0 is not used"


def test_the_next_turn_goes_to_the_node_that_has_the_conversation(
    cluster: RunningCluster,
) -> None:
    """One begins at the second node, one at the first. With every worker idle each goes back to its
    own, and all of its KV is reused. Without reuse the tokens are the same, from the first node.
    """
    prompts = [
        [4 + (number * 37 + index * (number + 3)) % 240 for index in range(PROMPT_TOKENS)]
        for number in range(2)
    ]
    with away(cluster, "prefill-0"):
        begun = [complete(cluster.url, prompts[0])]
    until_back(cluster)
    begun.append(complete(cluster.url, prompts[1]))
    for prompt, told, own in zip(prompts, begun, ("prefill-1", "prefill-0"), strict=True):
        assert told["baton"]["prefill_worker"] == own
        history = [*prompt, *told["choices"][0]["token_ids"]]
        turn = [*history, 9, 8, 7]
        again = complete(cluster.url, turn)
        assert again["baton"]["prefill_worker"] == own
        assert again["baton"]["cached_tokens"] == len(history) - 1
        assert again["baton"]["brought"] is None, "no log had to move"
        fresh = complete(cluster.url, turn, {"X-Cache": "off"})
        assert fresh["baton"]["prefill_worker"] == "prefill-0"
        assert fresh["baton"]["cached_tokens"] == 0
        assert again["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]


def test_a_named_answer_is_continued_where_it_lies(cluster: RunningCluster) -> None:
    """`previous_response_id`: the parent is at one node, and that is where it is forked."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True}

    def chat(text: str, **more: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{cluster.url}/v1/chat/completions",
            json={**body, "messages": [{"role": "user", "content": text}], **more},
            timeout=60.0,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    with away(cluster, "prefill-0"):
        begun = chat("A story of the second node, if you please. " * 3)
    until_back(cluster)
    assert begun["baton"]["prefill_worker"] == "prefill-1"
    again = chat("And then?", previous_response_id=begun["id"])
    assert again["baton"]["prefill_worker"] == "prefill-1"
    usage = begun["usage"]
    kept = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert again["baton"]["cached_tokens"] == kept
