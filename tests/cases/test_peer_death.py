"""Peer death and restart: a successor on the same address is another process, a stream goes on
where it stopped, and serving with one kind of worker gone follows the operator's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.testing.cluster import RunningCluster, running_cluster
from tests.cases.conftest import tenants_file
from tests.cases.replay import (
    CAPITAL,
    CAPITAL_ANSWER,
    CHAT,
    COMPLETIONS,
    COUNTING,
    Replay,
    chat,
    completion,
)
from tests.cases.waiting import background, together, until

pytestmark = [pytest.mark.more, pytest.mark.timeout(400)]

CAPITAL_BODY = chat(CAPITAL, max_tokens=16)


def assert_healthy(replay: Replay, times: int) -> None:
    """The right answer, several times in a row."""
    answers = [replay.call(CHAT, CAPITAL_BODY, timeout_s=30) for _ in range(times)]
    assert [one.text for one in answers] == [CAPITAL_ANSWER] * times


@pytest.mark.parametrize("part", ["decode-0", "prefill-0", "kvstore-0", "merger-0"])
def test_c45_a_restarted_part_is_met_as_a_new_one(drill: Replay, part: str) -> None:
    """Restart: one part is killed while nothing runs; nothing else needs a restart.

    smg#2382, sglang#33789, nixl#795, vllm#50047: peers went on with the dead process's data.
    """
    assert_healthy(drill, 1)
    pid = drill.kill(part)
    drill.restarted(part, pid)
    drill.is_whole(60)
    assert_healthy(drill, 4)


def test_c45_the_gateway_is_met_as_a_new_one(drill: Replay) -> None:
    """Restart: workers find a new gateway on the old address by their heartbeats."""
    pid = drill.kill("gateway-0")
    drill.restarted("gateway-0", pid)
    drill.is_whole(60)
    assert_healthy(drill, 4)


@pytest.mark.parametrize("part", ["prefill-0", "kvstore-0", "decode-0"])
def test_c45_a_part_killed_under_traffic(drill: Replay, part: str) -> None:
    """Restart: requests under way end with an answer or a reason; later ones are right."""

    def ask() -> Any:
        return drill.call(CHAT, CAPITAL_BODY, timeout_s=60)

    with background(lambda: together(*[ask] * 4)) as running:
        until(drill.is_busy, 20, "traffic")
        pid = drill.kill(part)
        answers = running.result(120)
    for answer in answers:
        if answer.status == 200:
            assert answer.text == CAPITAL_ANSWER
        else:
            assert answer.status in (502, 503, 504), answer
            assert answer.body["error"]["code"], answer
    drill.restarted(part, pid)
    drill.is_whole(60)
    assert_healthy(drill, 2)


RESUMED: list[tuple[str, int, dict[str, Any]]] = [
    ("early", 2, {}),
    ("late", 9, {}),
    # Seven characters are out; what comes next is the half of a stop string.
    ("stop across tokens", 7, {"stop": ["5 1"]}),
    ("frequency penalty", 5, {"frequency_penalty": 1}),
    ("seed", 5, {"seed": 11, "temperature": 1}),
    ("two samples", 6, {"n": 2, "seed": 5, "temperature": 0.8}),
]


@pytest.mark.parametrize(("name", "after", "extra"), RESUMED, ids=[name for name, _, _ in RESUMED])
def test_c47_a_resumed_stream_is_the_same_stream(
    drill: Replay, name: str, after: int, extra: dict[str, Any]
) -> None:
    """Resume: the decode worker dies; the text, the count and the end are as without the death.

    dynamo#13600, dynamo#7930: counters, stop buffers and penalties were not rebuilt.
    """
    body = completion(COUNTING, max_tokens=40, ignore_eos=True) | extra
    want = drill.call(COMPLETIONS, body, timeout_s=90)
    killed: dict[str, int] = {}

    def kill_once(count: int) -> None:
        if count == after:
            part = drill.decoding_part()
            killed[part] = drill.kill(part)

    asked = {**body, "stream_options": {"include_usage": True}}
    stream = drill.sse(COMPLETIONS, asked, timeout_s=90, on_event=kill_once)
    assert killed, "the answer was over before anybody died"
    assert not stream.errors
    for choice in want.body["choices"]:
        assert stream.text_of(choice["index"]) == choice["text"], name
        assert (choice["index"], choice["finish_reason"]) in stream.finishes
    assert stream.usage["completion_tokens"] == want.usage["completion_tokens"]
    for part, pid in killed.items():
        drill.restarted(part, pid)


def test_c49_without_prefill_decode_serves_and_says_so(drill: Replay) -> None:
    """Fallback: policy `auto` prefills where decode is; header and counter tell it.

    llm-d-router#2427, tt-inference-server#3213: silence in both directions.
    """
    name = "baton_prefill_fallbacks_total"
    before = drill.gauge("gateway-0", name)
    with drill.frozen("prefill-0"):
        answer = until(lambda: aggregated(drill), 30, "an aggregated answer")
        assert answer is not None
        assert answer.text == CAPITAL_ANSWER
        assert drill.gauge("gateway-0", name) > before
    until(lambda: aggregated(drill) is None, 20, "prefill and decode apart again")


def aggregated(replay: Replay) -> Any:
    """An answer that was not disaggregated, or None."""
    answer = replay.call(CHAT, CAPITAL_BODY, timeout_s=30)
    return answer if answer.headers.get("x-serving-mode") == "aggregated" else None


@pytest.fixture
def never_cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster whose operator wants prefill apart or not at all."""
    flags = ("--prefill-mode", "remote", "--tenants-file", tenants_file(tmp_path))
    with running_cluster(tmp_path / "run", *flags) as cluster:
        yield cluster


def test_c49_policy_remote_refuses_and_says_when_to_come_back(
    never_cluster: RunningCluster,
) -> None:
    """Fallback: policy `remote` is an error with a time, never a hang and never another mode."""
    replay = Replay(never_cluster)
    with replay.frozen("prefill-0"):
        refused = until(lambda: not_served(replay), 30, "a refusal")
        assert refused.status == 503, refused
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.body["error"]["code"]
    until(lambda: replay.call(CHAT, CAPITAL_BODY).status == 200, 20, "served again")


def not_served(replay: Replay) -> Any:
    """An answer that is no 200, or None."""
    answer = replay.call(CHAT, CAPITAL_BODY, timeout_s=20)
    return None if answer.status == 200 else answer
