"""Determinism: a prompt of which most was computed before answers as one computed whole (C79).

In float32 the tokens are the same and log probabilities differ by less than `FLOAT32_BOUND`; in
the class that is served by default they may part where the two likeliest tokens are as good as
tied, and differ by less than `DEFAULT_BOUND` before. Both bounds are alarms: the largest measured
were 1.2e-5 and 0.03.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from baton.testing.cluster import running_cluster
from tests.cases.conftest import tenants_file
from tests.cases.door import Answer
from tests.cases.replay import COMPLETIONS, Replay, completion

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LENGTHS: Final = (17, 64, 300, 1000)
TOKENS: Final = 16
FLOAT32_BOUND: Final = 1e-4
DEFAULT_BOUND: Final = 0.1
NEAR_TIE: Final = 0.1
"""In the default class: how close the two likeliest tokens are where an answer may part."""


@pytest.fixture(scope="module")
def default_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    """What `baton up` starts without a word about numbers."""
    folder: Path = tmp_path_factory.mktemp("cases-default")
    with running_cluster(folder / "run", "--tenants-file", tenants_file(folder)) as cluster:
        yield Replay(cluster)


def answers(replay: Replay, length: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of an answer computed whole, and those of three that find more each time."""
    prompt = [(index * 31) % 3000 + 500 for index in range(length)]
    body = completion(prompt, max_tokens=TOKENS, logprobs=2, return_token_ids=True)

    def ask(headers: dict[str, str]) -> Answer:
        return replay.call(COMPLETIONS, body, headers=headers, timeout_s=200.0)

    cold = ask({"X-Cache": "off"})
    found = [ask({}) for _ in range(3)]
    assert cold.cached_tokens == 0
    # The last token is always computed; the last page is found with it, however full it is.
    assert [one.cached_tokens for one in found[1:]] == [length - 1] * 2
    return cold.body["choices"][0], [one.body["choices"][0] for one in found]


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float | None]:
    """(Largest difference of the log probability of the chosen token over the tokens that both
    have, by how little the likeliest one led where they part; None: they do not).
    """
    largest = 0.0
    for index, (mine, theirs) in enumerate(zip(one["token_ids"], other["token_ids"], strict=False)):
        if mine != theirs:
            leads = []
            for choice in (one, other):
                top = sorted(choice["logprobs"]["top_logprobs"][index].values(), reverse=True)
                leads.append(top[0] - top[1])
            return largest, min(leads)
        values = [choice["logprobs"]["token_logprobs"][index] for choice in (one, other)]
        largest = max(largest, abs(values[0] - values[1]))
    assert len(one["token_ids"]) == len(other["token_ids"])
    return largest, None


@pytest.mark.parametrize("length", LENGTHS)
def test_c79_a_warm_prompt_answers_as_a_cold_one(calm: Replay, length: int) -> None:
    """float32: the same tokens, and the same log probabilities but for rounding.

    llama.cpp#28527, llama.cpp#4902.
    """
    cold, found = answers(calm, length)
    for warm in found:
        assert warm["token_ids"] == cold["token_ids"]
        assert warm["text"] == cold["text"]
        largest, _ = difference(cold, warm)
        assert largest < FLOAT32_BOUND, (length, largest)


@pytest.mark.parametrize("length", LENGTHS)
def test_c79_in_the_default_class_it_differs_by_rounding_only(
    default_cluster: Replay, length: int
) -> None:
    """Same tokens up to a near tie; two warm answers, which begin with the same KV, are equal."""
    cold, found = answers(default_cluster, length)
    for warm in found:
        largest, lead = difference(cold, warm)
        assert largest < DEFAULT_BOUND, (length, largest)
        assert lead is None or lead < NEAR_TIE, (length, lead)
    assert found[1]["token_ids"] == found[2]["token_ids"]
    assert found[1]["logprobs"] == found[2]["logprobs"]
