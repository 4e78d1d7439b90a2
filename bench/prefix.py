"""What reuse saves: questions behind shared system prompts, and chats of eight turns.

(a) 80% of the requests begin with one of 4 system prompts of about 400 tokens, the others with one
of their own; 60-token questions, 16-token answers. The same load with `X-Cache: off`, in turn.
(b) Chats whose every turn repeats what was said: of the tokens that have KV and are in the new
prompt at the same place, how many were reused.

    make bench-prefix                         about five minutes
    python -m bench.prefix --quick            one short round of each, about one
    python -m bench.prefix --rounds 5         more of them

A real cluster, the bundled model, over HTTP. Owns the numbers; the loads stand in `prefix_parts`.
More flags are those of `baton up`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import httpx

from baton.testing.cluster import RunningCluster, running_cluster
from bench.prefix_parts.load import (
    Chats,
    Message,
    Run,
    Texts,
    asked,
    chatted,
    questions,
    warm_questions,
)
from bench.prefix_parts.usage import spent

ROUNDS: Final = 3
REQUESTS: Final = 40
CLIENTS: Final = 8
CHATS: Final = 3
GOALS: Final = {"prefill_tokens_saved_pct": 60.0, "qps_ratio": 2.0, "reused_token_pct": 95.0}

_Item = TypeVar("_Item")


def _one_run(cluster: RunningCluster, load: list[list[Message]], *, is_shared: bool) -> Run:
    with spent(cluster) as used:
        run = asyncio.run(asked(cluster.url, load, CLIENTS, is_shared=is_shared))
    run.cpu_s = used
    return run


def measure(cluster: RunningCluster, rounds: int, requests: int) -> dict[str, float]:
    """Both loads; medians over the rounds."""
    with httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False) as client:
        texts = Texts(client)
    warm = warm_questions(texts, "warm")
    # Everything is warm: the processes from the first run, the shared prompts from the second.
    asyncio.run(asked(cluster.url, warm, CLIENTS, is_shared=False))
    asyncio.run(asked(cluster.url, warm, CLIENTS, is_shared=True))
    off: list[Run] = []
    on: list[Run] = []
    chats: list[Chats] = []
    for number in range(rounds):
        load = questions(texts, requests, f"round {number}")
        off.append(_one_run(cluster, load, is_shared=False))
        on.append(_one_run(cluster, load, is_shared=True))
        chats.append(asyncio.run(chatted(cluster.url, texts, CHATS, f"round {number}")))
    assert not any(one.cached_tokens for one in off), "sharing was off"
    pairs = list(zip(on, off, strict=True))
    ratios = [shared.rate / alone.rate for shared, alone in pairs]
    cpu_ratios = [alone.cpu_per_request_s / shared.cpu_per_request_s for shared, alone in pairs]
    _print_cpu(on, off)
    return {
        "prefill_tokens_saved_pct": _median(on, lambda r: 100 * r.cached_tokens / r.prompt_tokens),
        "qps_ratio": round(statistics.median(ratios), 2),
        "cpu_ratio": round(statistics.median(cpu_ratios), 2),
        "cpu_on_ms": _median(on, lambda run: 1e3 * run.cpu_per_request_s),
        "cpu_off_ms": _median(off, lambda run: 1e3 * run.cpu_per_request_s),
        "qps_on": _median(on, lambda run: run.rate),
        "qps_off": _median(off, lambda run: run.rate),
        "first_token_on_ms_p50": _median(on, lambda r: 1e3 * statistics.median(r.first_token_s)),
        "first_token_off_ms_p50": _median(off, lambda r: 1e3 * statistics.median(r.first_token_s)),
        "prompt_tokens_mean": _median(on, lambda run: run.prompt_tokens / run.requests),
        "reused_token_pct": _median(chats, lambda chat: 100 * chat.reused / chat.reusable),
        "reused_history_pct": _median(chats, lambda chat: 100 * chat.reused / chat.history),
        "turn_first_token_ms_p50": _median(
            chats, lambda chat: 1e3 * statistics.median(chat.first_token_s)
        ),
    }


def _print_cpu(on: list[Run], off: list[Run]) -> None:
    """What a request costs each process, in CPU milliseconds: the median run's."""
    print(f"\n{'CPU ms a request':<36}{'shared':>10}{'off':>10}")
    for name in on[0].cpu_s:
        shared, alone = (
            round(statistics.median(1e3 * run.cpu_s[name] / run.requests for run in runs), 1)
            for runs in (on, off)
        )
        print(f"{name:<36}{shared:>10}{alone:>10}")


def _median(items: list[_Item], of: Callable[[_Item], float]) -> float:
    return round(statistics.median(of(item) for item in items), 2)


def main() -> None:
    """Run, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each round")
    options, flags = parser.parse_known_args()
    rounds, requests = (1, 20) if options.quick else (options.rounds, options.requests)
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_cluster(Path(folder) / "run", *flags) as cluster,
    ):
        metrics = measure(cluster, rounds, requests)
    print(f"\n{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f} a minute ago")
    print(f"{rounds} rounds of {requests} requests, {CLIENTS} clients; {CHATS} chats beside it\n")
    print(f"{'questions behind shared prompts':<36}{'shared':>10}{'off':>10}{'goal':>8}")
    for title, shared, alone, goal in (
        ("requests a second", metrics["qps_on"], metrics["qps_off"], ""),
        ("ratio", metrics["qps_ratio"], 1.0, f">={GOALS['qps_ratio']:g}"),
        ("CPU ms a request", metrics["cpu_on_ms"], metrics["cpu_off_ms"], ""),
        ("ratio", metrics["cpu_ratio"], 1.0, ""),
        ("first token, ms p50", *(metrics[f"first_token_{w}_ms_p50"] for w in ("on", "off")), ""),
        (
            "prompt tokens not computed, %",
            metrics["prefill_tokens_saved_pct"],
            0.0,
            f">={GOALS['prefill_tokens_saved_pct']:g}",
        ),
    ):
        print(f"{title:<36}{shared:>10}{alone:>10}{goal:>8}")
    print(f"\n{'chats of eight turns':<36}{'':>20}{'goal':>8}")
    print(
        f"{'reusable tokens reused, %':<36}{metrics['reused_token_pct']:>10}{'':>10}"
        f"{'>=95':>8}\n"
        f"{'all tokens with KV reused, %':<36}{metrics['reused_history_pct']:>10}\n"
        f"{'first token, ms p50':<36}{metrics['turn_first_token_ms_p50']:>10}"
    )
    print(json.dumps({"bench": "prefix", "metrics": metrics}))


if __name__ == "__main__":
    main()
