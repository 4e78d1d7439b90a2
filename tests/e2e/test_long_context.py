"""A prompt of 32K tokens end to end, in stated memory: pages in use, and the buffers of a pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.prefill_plan import pass_bytes
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.kv.layout import KvDtype, KvGeometry
from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import TinyModel, write_directory

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(600)]

LONG: Final = TinyModel(heads=2, kv_heads=1, max_context=33_280)
PROMPT_TOKENS: Final = 32_768
ANSWER_TOKENS: Final = 4
CHUNK: Final = 256
BATCH_TOKENS: Final = 512
BLOCK: Final = 16
SPARE_BYTES: Final = 24 << 20
"""What an allocator, the interpreter and gRPC may grow by in the meantime."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a long context."""
    return write_directory(tmp_path_factory.mktemp("long") / "model", LONG)


@pytest.fixture(scope="module")
def geometry(model: Path) -> KvGeometry:
    """The shape of its pages."""
    return read_config(model).kv_geometry(BLOCK, KvDtype.F32)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model: Path, geometry: KvGeometry
) -> Iterator[RunningCluster]:
    """Real services with an arena for one and a half such prompts."""
    arena = PROMPT_TOKENS // BLOCK * 3 // 2 * geometry.slot_bytes
    flags = ("--model", str(model), "--dtype", "float32", "--arena-bytes", str(arena))
    run_dir = tmp_path_factory.mktemp("long-context")
    with running_cluster(run_dir, *flags, "--prefill-mode", "remote") as running:
        yield running


def prompt_of(length: int, seed: int) -> list[int]:
    """Random text tokens."""
    return [int(one) for one in np.random.default_rng(seed).integers(3, 250, length)]


def served_model(cluster: RunningCluster) -> str:
    """What the cluster calls its model."""
    answer = httpx.get(f"{cluster.url}/v1/models", timeout=30.0, trust_env=False)
    return str(answer.json()["data"][0]["id"])


def complete(cluster: RunningCluster, prompt: list[int]) -> dict[str, Any]:
    """The whole answer."""
    body = {
        "model": served_model(cluster),
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "store": False,
    }
    with httpx.Client(base_url=cluster.url, timeout=300.0, trust_env=False) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def status_bytes(pid: int) -> dict[str, int]:
    """VmHWM, VmRSS, RssAnon, RssShmem of a process."""
    rows = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    parts = [row.split() for row in rows if row.startswith(("VmHWM", "VmRSS", "Rss"))]
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in parts}


def forget_peak(pid: int) -> None:
    """The peak counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5\n", "ascii")


def stated(cluster: RunningCluster, name: str) -> dict[str, int]:
    """What a worker said of its memory at its start."""
    rows = [json.loads(row) for row in cluster.log(name).splitlines() if '"memory_budget"' in row]
    assert len(rows) == 1
    found: dict[str, int] = rows[0]
    return found


def direct(model: Path, geometry: KvGeometry, prompt: list[int]) -> list[int]:
    """Greedy tokens computed here, the prompt in longer pieces than the workers'."""
    weights = load_weights(model, ComputeDtype.FLOAT32)
    pages = -(-(len(prompt) + ANSWER_TOKENS) // BLOCK)
    transformer = Transformer(weights, KvPages.allocate(geometry, pages))
    table = range(pages)
    logits = torch.empty(0)
    for first in range(0, len(prompt), 4 * CHUNK):
        logits = transformer.prefill_chunk(prompt[first : first + 4 * CHUNK], first, table)
    tokens = [int(logits.argmax())]
    while len(tokens) < ANSWER_TOKENS:
        position = len(prompt) + len(tokens) - 1
        tokens.append(int(transformer.decode_step([tokens[-1]], [position], [table])[0].argmax()))
    return tokens


def test_a_prompt_of_32k_tokens_in_stated_memory(
    cluster: RunningCluster, model: Path, geometry: KvGeometry
) -> None:
    """The right answer, at a peak of what was resident before, the pages of the prompt and the
    buffers that the worker stated; a second such prompt adds nothing to them.
    """
    complete(cluster, prompt_of(1024, 1))
    pid = cluster.pid("prefill-0")
    budget = stated(cluster, "prefill-0")["prompt_buffer_bytes"]
    assert budget == pass_bytes(read_config(model), KvDtype.F32, 4, BATCH_TOKENS, LONG.max_context)
    prompt_bytes = PROMPT_TOKENS // BLOCK * geometry.slot_bytes
    at_start = status_bytes(pid)
    for seed in (2, 3):
        before = status_bytes(pid)
        forget_peak(pid)
        prompt = prompt_of(PROMPT_TOKENS, seed)
        answer = complete(cluster, prompt)
        after = status_bytes(pid)
        assert answer["usage"]["prompt_tokens"] == PROMPT_TOKENS
        if seed == 2:
            assert answer["choices"][0]["token_ids"] == direct(model, geometry, prompt)
        grown = after["VmHWM"] - before["VmRSS"]
        assert grown <= prompt_bytes + budget + SPARE_BYTES, (grown, prompt_bytes, budget)
        assert after["RssShmem"] - before["RssShmem"] <= prompt_bytes + SPARE_BYTES
        # What an allocator keeps of the first prompt's buffers serves the second's.
        assert after["RssAnon"] - at_start["RssAnon"] <= budget + SPARE_BYTES
