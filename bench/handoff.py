"""From the last computed chunk to decode ready to step, one host, real services.

A client streams answers to prompts of 1,000 tokens from a real cluster, one after the other. Owns
the measurement: `handoff_ms` is the time from the end of the last chunk's computation in the
prefill worker to where the decode worker may step, both read on the host's one monotonic clock from
the answer's trace; it is no sum of stages, and whatever happens between them counts. Beside it
what it was spent on, the time to the first step, and the gap before the second token that the
client sees.

    make bench-handoff
    python -m bench.handoff --answers 5     the smallest form
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from baton.stages import (
    DECODE_QUEUE_WAIT,
    KV_PACK,
    KV_TRANSFER,
    KV_UNPACK,
    PREFILL_COMPUTE,
    SEAL,
)
from baton.testing.cluster import running_cluster
from baton.tracing_tree import TreeSpan, spans_of

HAND_OFF: Final = "handoff"
PROMPT_TOKENS: Final = 1000
ANSWER_TOKENS: Final = 24
TIMEOUT_S: Final = 120.0
TRACE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, in milliseconds. `parts_ms` follow each other and add up to `handoff_ms`."""

    handoff_ms: float
    first_step_ms: float
    parts_ms: dict[str, float]
    second_gap_ms: float
    usual_gap_ms: float


def ask(client: httpx.Client, model: str, seed: int) -> Answer | None:
    """Stream one answer to a prompt that no other begins with, and read its trace; None where the
    answer fell back to local prefill, so that nothing was handed off.
    """
    order = random.Random(seed)
    body = {
        "model": model,
        "prompt": [order.randrange(100, 40000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    times_s: list[float] = []
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if event.get("choices"):
                    times_s.append(time.perf_counter())
    gaps_ms = np.diff(times_s) * 1e3
    trace = read_trace(client, trace_id)
    if len({process["clock"] for process in trace["processes"]}) != 1:
        raise SystemExit("bench: the processes have different clocks; run all of them on one host")
    spans = spans_of(trace)
    if not any(span.name == HAND_OFF for span in spans):
        return None
    moments_s = moments(spans)
    names, at_s = list(moments_s), list(moments_s.values())
    parts = zip(names[1:], pairwise(at_s), strict=True)
    return Answer(
        handoff_ms=(moments_s["decode ready"] - moments_s["computed"]) * 1e3,
        first_step_ms=(moments_s["first step"] - moments_s["computed"]) * 1e3,
        parts_ms={name: (end_s - begin_s) * 1e3 for name, (begin_s, end_s) in parts},
        second_gap_ms=float(gaps_ms[0]),
        usual_gap_ms=float(np.median(gaps_ms[1:])),
    )


def read_trace(client: httpx.Client, trace_id: str) -> dict[str, Any]:
    """A trace that is whole: its request's own span ends behind the last event of the answer."""
    deadline_s = time.monotonic() + TRACE_TIMEOUT_S
    while True:
        answer = client.get(f"/debug/traces/{trace_id}")
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
        if time.monotonic() > deadline_s:
            answer.raise_for_status()


def moments(spans: Sequence[TreeSpan]) -> dict[str, float]:
    """When each part of a hand-off was over, in their order, in seconds on the trace's clock."""
    last = {span.name: span for span in spans}
    computed_s = max(span.end_s for span in spans if span.name == PREFILL_COMPUTE)
    ready = last[DECODE_QUEUE_WAIT]
    return {
        "computed": computed_s,
        "pack": max(span.end_s for span in spans if span.name == KV_PACK),
        "commit and seal": last[SEAL].end_s,
        "to gateway": last[HAND_OFF].start_s,
        "to decode": last["join"].start_s,
        "take": last[KV_TRANSFER].end_s,
        "unpack": last[KV_UNPACK].end_s,
        "decode ready": ready.start_s,
        "first step": ready.end_s,
    }


def metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures by the names that the goals use."""
    handoffs = [one.handoff_ms for one in answers]
    found = {
        "handoff_ms_p50": float(np.percentile(handoffs, 50)),
        "handoff_ms_p99": float(np.percentile(handoffs, 99)),
        "handoff_ms_best": min(handoffs),
        "first_step_ms_p50": statistics.median(one.first_step_ms for one in answers),
        "second_token_gap_ms_p50": statistics.median(one.second_gap_ms for one in answers),
        "second_token_gap_ms_p99": float(np.percentile([one.second_gap_ms for one in answers], 99)),
        "usual_gap_ms_p50": statistics.median(one.usual_gap_ms for one in answers),
    }
    for name in answers[0].parts_ms:
        key = "part_" + name.replace(" ", "_") + "_ms"
        found[key] = statistics.median(one.parts_ms[name] for one in answers)
    return {name: round(number, 2) for name, number in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=100)
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
        asked = [ask(client, arguments.model, seed) for seed in range(arguments.answers)]
    answers = [one for one in asked if one is not None]
    if not answers:
        raise SystemExit("bench: no answer was handed off; is the machine overloaded?")
    found = metrics(answers)
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{len(os.sched_getaffinity(0))} cores; load {loads}")
    print(f"{len(answers)} of {len(asked)} answers were handed off")
    for name, number in found.items():
        print(f"{name:28} {number:9.2f}")
    print(json.dumps({"bench": "handoff", "metrics": found}))


if __name__ == "__main__":
    main()
