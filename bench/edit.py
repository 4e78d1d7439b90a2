"""Editing a history of 1,000 tokens: its last few tokens, and its middle, beside a full prefill.

    python -m bench.edit [--quick]

Real services, the bundled model. Each figure is the median of several edits, over HTTP, in turn
with full prefills of as many tokens that nobody has computed before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from baton.testing.cluster import RunningCluster, running_cluster

CONTEXT_TOKENS = 1000
TAIL_TOKENS = 4
GOAL = 20.0


class Bench:
    """One cluster's sessions, timed."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._client = httpx.Client(base_url=cluster.url, timeout=120.0, trust_env=False)
        self._serial = 0

    def ids(self) -> list[int]:
        """A fresh context that begins like no other."""
        self._serial += 1
        return [1000 + (self._serial * 7919 + at * 31) % 40_000 for at in range(CONTEXT_TOKENS)]

    def call(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Milliseconds, and the answer."""
        began_s = time.perf_counter()
        answer = self._client.post(path, json=body)
        took_ms = (time.perf_counter() - began_s) * 1000
        assert answer.is_success, answer.text
        told: dict[str, Any] = answer.json()
        return took_ms, told

    def full_ms(self) -> float:
        """A prompt of as many tokens, all of it computed, to its first token."""
        body = {"model": "smollm2", "prompt": self.ids(), "max_tokens": 1, "temperature": 0}
        took_ms, told = self.call("/v1/completions", body)
        assert told["baton"]["cached_tokens"] == 0, told
        return took_ms

    def session(self) -> str:
        """A session of a fresh context."""
        body = {"model": "smollm2", "prompt": self.ids(), "max_tokens": 1, "temperature": 0}
        _, told = self.call("/v1/completions", {**body, "ignore_eos": True})
        _, made = self.call("/v1/sessions", {"from": told["id"]})
        session_id: str = made["id"]
        return session_id

    def edit_ms(self, session_id: str, start: int) -> tuple[float, int]:
        """A change of a few tokens at `start`; milliseconds, and tokens that were taken over."""
        self._serial += 1
        new = [2000 + (self._serial * 13 + at) % 30_000 for at in range(TAIL_TOKENS)]
        body = {
            "start": {"token": start},
            "end": {"token": start + TAIL_TOKENS},
            "replacement": {"token_ids": new},
        }
        took_ms, told = self.call(f"/v1/sessions/{session_id}/edit", body)
        reused: int = told["reused_tokens"]
        return took_ms, reused


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """Edits and full prefills in turn."""
    session_id = bench.session()
    bench.full_ms()
    tail: list[float] = []
    middle: list[float] = []
    full: list[float] = []
    for _ in range(rounds):
        full.append(bench.full_ms())
        for _ in range(3):
            took_ms, reused = bench.edit_ms(session_id, CONTEXT_TOKENS - TAIL_TOKENS)
            assert reused >= CONTEXT_TOKENS - TAIL_TOKENS - 1, reused
            tail.append(took_ms)
        middle.append(bench.edit_ms(session_id, CONTEXT_TOKENS // 2)[0])
    full_ms, edit_ms = statistics.median(full), statistics.median(tail)
    middle_ms = statistics.median(middle)
    return {
        "context_tokens": CONTEXT_TOKENS,
        "edit_ms_p50": round(edit_ms, 2),
        "middle_edit_ms_p50": round(middle_ms, 2),
        "full_prefill_ms_p50": round(full_ms, 2),
        "ratio": round(full_ms / edit_ms, 2),
        "middle_ratio": round(full_ms / middle_ms, 2),
    }


def main() -> None:
    """Run, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    rounds = 3 if parser.parse_args().quick else 9
    with tempfile.TemporaryDirectory() as folder:  # noqa: SIM117 - the folder outlives the cluster
        with running_cluster(Path(folder) / "run") as cluster:
            metrics = measure(Bench(cluster), rounds)
    print(f"{'what':<28}{'ms, median':>12}{'ratio':>9}")
    print(f"{'full prefill, 1,000 tokens':<28}{metrics['full_prefill_ms_p50']:>12}{1.0:>9}")
    print(f"{'edit of the last 4 tokens':<28}{metrics['edit_ms_p50']:>12}{metrics['ratio']:>9}")
    print(
        f"{'edit in the middle':<28}{metrics['middle_edit_ms_p50']:>12}{metrics['middle_ratio']:>9}"
    )
    print(f"goal: the last tokens at least {GOAL:g} times as fast")
    print(json.dumps({"bench": "edit", "metrics": metrics}))


if __name__ == "__main__":
    main()
