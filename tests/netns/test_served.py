"""Prefill and decode in two network namespaces: the same tokens, and where KV came from is said.

A healthy link moves the log while its prompt is computed. A link that is cut or too slow costs the
move's own deadline and no more; then the decode side computes the prompt again and says so, in the
body, the header, the log line and the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import pytest

from baton.sampling_parameters import SamplingParameters
from services.gateway.moving import MOVE_TIMEOUT_S
from tests.integration.kvstore.harness import Model
from tests.integration.workers.harness import Direct
from tests.netns.lab import Network
from tests.netns.served import Served, Told, served

pytestmark = [pytest.mark.more, pytest.mark.timeout(180)]

TOKENS: Final = 600
"""7.4 MB of KV: 0.6 s at 100 Mbit/s, a minute at 1 Mbit/s."""

GREEDY: Final = SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True)
BUDGET_S: Final = MOVE_TIMEOUT_S + 5.0
"""The move's deadline, and a prompt computed again on a machine that others use."""

HEALED_WITHIN_S: Final = 30.0


@pytest.fixture(scope="module")
def cluster(
    model: Model, lab: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One for all tests here; each leaves the link healthy."""
    with served(model, tmp_path_factory.mktemp("served"), lab) as running:
        yield running


@pytest.fixture(scope="module")
def direct(model: Model) -> Direct:
    """What a fresh computation answers."""
    return Direct(model.path)


def prompt_of(seed: int) -> list[int]:
    """A prompt that begins like no other."""
    return [4 + (seed * 17 + index * (7 + seed)) % 200 for index in range(TOKENS)]


def check(told: Told, direct: Direct, prompt: list[int], kv_source: str) -> None:
    """The right tokens, and one word on where the KV came from, everywhere."""
    assert told.token_ids == [one.sampled.token_id for one in direct.tokens(prompt, GREEDY)]
    said = (told.baton["kv_source"], told.headers["x-baton-kv-source"], told.line["kv_source"])
    assert said == (kv_source,) * 3
    assert told.baton["exactness"] == "exact"


@pytest.mark.parametrize("rate", [None, "100mbit"], ids=["uncapped", "100mbit"])
def test_a_log_moves_while_its_prompt_is_computed(
    cluster: Served, lab: Network, direct: Direct, rate: str | None
) -> None:
    """The same tokens as on one node; of the bytes a part was there before the move began."""
    prompt = prompt_of(1 if rate is None else 2)
    before = cluster.answers("remote")
    if rate is not None:
        lab.cap(rate)
    try:
        told = cluster.ask(prompt)
    finally:
        if rate is not None:
            lab.uncap()
    check(told, direct, prompt, "remote")
    assert told.baton["brought"] == "moved"
    assert 0.0 < told.baton["hidden_transfer_share"] <= 1.0
    assert told.line["transfer_bytes"] >= TOKENS * 12_288
    assert cluster.answers("remote") == before + 1


def test_a_cut_link_costs_the_moves_deadline_and_the_prompt_is_computed_again(
    cluster: Served, lab: Network, direct: Direct
) -> None:
    """Nobody waits longer, no token is lost; when the link is back, logs move again."""
    prompt, before = prompt_of(3), cluster.answers("recomputed")
    lab.cut()
    try:
        told = cluster.ask(prompt)
    finally:
        lab.heal()
    check(told, direct, prompt, "recomputed")
    assert told.baton["brought"] == "reopened"
    assert told.elapsed_s < BUDGET_S
    assert cluster.answers("recomputed") == before + 1
    deadline_s, seed = time.monotonic() + HEALED_WITHIN_S, 10
    while (again := cluster.ask(prompt_of(seed))).baton["brought"] != "moved":
        assert time.monotonic() < deadline_s, again.baton
        seed += 1
    check(again, direct, prompt_of(seed), "remote")


def test_a_link_that_is_too_slow_does_too(cluster: Served, lab: Network, direct: Direct) -> None:
    """What came in time is used, the rest is computed again."""
    prompt, before = prompt_of(4), cluster.answers("recomputed")
    lab.cap("1mbit")
    try:
        told = cluster.ask(prompt)
    finally:
        lab.uncap()
    check(told, direct, prompt, "recomputed")
    assert told.elapsed_s < BUDGET_S
    assert cluster.answers("recomputed") == before + 1
