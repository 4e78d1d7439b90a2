"""From the last computed chunk to decode ready to step, one host, real services.

A client streams answers to prompts of 1,000 tokens from a real cluster. Owns the measurement:
`handoff_ms` is the sum of the stages that follow the last chunk's computation, as each process
measures them: pack, first token and seal in the prefill worker, transfer, unpack and the wait for
a step in the decode worker. Beside it the gap before the second event that the client sees.

    make bench-handoff
    python -m bench.handoff --answers 5     the smallest form
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from baton.stages import (
    DECODE_QUEUE_WAIT,
    FIRST_TOKEN_SAMPLE,
    KV_PACK,
    KV_TRANSFER,
    KV_UNPACK,
    SEAL,
)
from baton.testing.cluster import running_cluster

PROMPT_TOKENS: Final = 1000
ANSWER_TOKENS: Final = 24
TIMEOUT_S: Final = 120.0
HAND_OFF: Final = (
    KV_PACK,
    FIRST_TOKEN_SAMPLE,
    SEAL,
    KV_TRANSFER,
    KV_UNPACK,
    DECODE_QUEUE_WAIT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer: milliseconds of the gap before token 2, of the usual gap, and of stages."""

    second_gap_ms: float
    usual_gap_ms: float
    stages_ms: dict[str, float]

    @property
    def handoff_ms(self) -> float:
        """From the last chunk's end to where decode can step."""
        return sum(self.stages_ms.get(name, 0.0) for name in HAND_OFF)


def ask(client: httpx.Client, model: str, seed: int) -> Answer:
    """Stream one answer to a prompt that no other begins with."""
    order = random.Random(seed)
    body = {
        "model": model,
        "prompt": [order.randrange(100, 40000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times_s: list[float] = []
    stages: dict[str, float] = {}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if event.get("choices"):
                    times_s.append(time.perf_counter())
                stages |= find_stages(event)
    gaps_ms = np.diff(times_s) * 1e3
    return Answer(
        second_gap_ms=float(gaps_ms[0]),
        usual_gap_ms=float(np.median(gaps_ms[1:])),
        stages_ms={name: seconds * 1e3 for name, seconds in stages.items()},
    )


def find_stages(event: Any) -> dict[str, float]:
    """The `stage_seconds` of an event, wherever they stand in it."""
    if not isinstance(event, dict):
        return {}
    found = event.get("stage_seconds")
    if isinstance(found, dict):
        return found
    for part in event.values():
        if stages := find_stages(part):
            return stages
    return {}


def metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures by the names that the goals use."""
    handoffs = [one.handoff_ms for one in answers]
    found = {
        "handoff_ms_p50": float(np.percentile(handoffs, 50)),
        "handoff_ms_p99": float(np.percentile(handoffs, 99)),
        "second_token_gap_ms_p50": statistics.median(one.second_gap_ms for one in answers),
        "usual_gap_ms_p50": statistics.median(one.usual_gap_ms for one in answers),
    }
    for name in sorted({name for one in answers for name in one.stages_ms}):
        found[f"{name}_ms"] = statistics.median(one.stages_ms.get(name, 0.0) for one in answers)
    return {name: round(number, 2) for name, number in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=40)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_cluster(
            Path(folder) / "run", "--model", arguments.model, "--prefill-mode", "remote"
        ) as cluster,
        httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        for seed in range(2):
            ask(client, arguments.model, -1 - seed)  # the first ones warm everything
        answers = [ask(client, arguments.model, seed) for seed in range(arguments.answers)]
    found = metrics(answers)
    for name, number in found.items():
        print(f"{name:28} {number:9.2f}")
    print(json.dumps({"bench": "handoff", "metrics": found}))


if __name__ == "__main__":
    main()
