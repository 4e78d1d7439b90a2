"""How fast is decode, and how near to what memory allows? One table, one line of JSON.

Owns the measurement behind docs/step_kernel.md: the step kernel in its weight modes at several
contexts and batches, beside transformers (bfloat16 `generate`) and, where they are installed in
environments of their own (scripts/bench_peers.sh), llama.cpp on the same file and vLLM, all in one
run; the tail of one thread, alone and beside one busy process, over the machine's own; and the
stream that a client sees. The floor is the bytes of weights and KV that a step reads over the read
bandwidth measured in the same run. Rounds
alternate between the configurations, so that a passing disturbance does not fall on one of them;
figures are medians of the samples kept: of each configuration's blocks the third in which other
processes took the least CPU time. That time is reported, too: above a few percent of a core the
figures say more about those processes than about decode.

    make bench-decode
    python -m bench.decode --rounds 3 --steps 20 --no-peers --no-service     a quick look
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from baton.engine.kernel_weights import WeightMode
from baton.engine.step_kernel_abi import Activation
from baton.models import locate
from bench.decode_parts.cases import Case, find, measure, ratio
from bench.decode_parts.kernel import BLOCK_TOKENS, KernelRun, Mode, read_bandwidth
from bench.decode_parts.peers import peer_case, transformers_case
from bench.decode_parts.service import Served, measure_service
from bench.decode_parts.tail import Tail, measure_tails, print_tails, tail_metrics
from bench.peers.running import interpreter, load_transformers, model_folder, running_peer

DEFAULT: Final = "kernel q4_1 int16"
SAME_PRECISION: Final = "kernel bf16"
NO_PREFETCH: Final = "kernel q4_1 int16, prefetch off"
ONE_THREAD: Final = "kernel q4_1 int16, one thread"
ALL_BATCHES: Final = (DEFAULT, SAME_PRECISION)
MODES: Final = (
    (DEFAULT, WeightMode.PACKED, Activation.INT16),
    ("kernel q4_1 int8", WeightMode.PACKED, Activation.INT8),
    ("kernel int8", WeightMode.INT8, Activation.INT16),
    (SAME_PRECISION, WeightMode.BFLOAT16, Activation.INT16),
)


def kernel_cases(path: Path, arguments: argparse.Namespace) -> list[Case]:
    """All step kernel configurations."""
    longest = max(arguments.contexts)
    pages = (longest // BLOCK_TOKENS + 1) * max(arguments.batches)
    modes = [
        Mode(name=name, weights=weights, activation=activation, threads=arguments.threads)
        for name, weights, activation in MODES[: 1 if arguments.default_mode_only else None]
    ]
    cases = []
    few = sorted({1, 8} & set(arguments.batches)) or arguments.batches[:1]
    for mode in modes:
        run = KernelRun(path, mode, pages)
        batches = arguments.batches if mode.name in ALL_BATCHES else few
        for context in arguments.contexts:
            cases += [run.case(context, batch) for batch in batches]
    off = replace(modes[0], name=NO_PREFETCH, prefetch_pages=0)
    run = KernelRun(path, off, pages)
    cases += [run.case(longest, batch) for batch in few]
    run = KernelRun(path, replace(modes[0], name=ONE_THREAD, threads=1), pages)
    cases.append(run.case(min(arguments.contexts), 1))
    return cases


@contextlib.contextmanager
def peer_cases(path: Path, arguments: argparse.Namespace) -> Iterator[list[Case]]:
    """What is installed of the others, until the block ends."""
    if arguments.no_peers:
        yield []
        return
    model = load_transformers(path)
    batches = sorted({1, 8} & set(arguments.batches))
    with contextlib.ExitStack() as stack:
        cases = [
            transformers_case(model, context, batch, arguments.peer_tokens)
            for context in arguments.contexts
            for batch in batches
        ]
        for engine in ("llama.cpp", "vllm"):
            if interpreter(engine) is None:
                print(f"bench: {engine} is not installed, so left out")
                continue
            weights = model_folder(model) if engine == "vllm" else path
            peer = stack.enter_context(running_peer(engine, weights, arguments.threads))
            if peer is not None:
                cases += [
                    peer_case(peer, context, arguments.peer_tokens)
                    for context in arguments.contexts
                ]
        yield cases


def metrics(
    cases: Sequence[Case], bandwidth: float, tails: list[Tail], served: Served | None
) -> dict[str, object]:
    """The figures by the names that the goals use; 128 is the context unless the name says so."""
    short = min(case.context for case in cases)
    long = max(case.context for case in cases)
    one = find(cases, DEFAULT, short, 1)
    eight = find(cases, DEFAULT, short, 8)
    assert one is not None
    assert one.floor_bytes is not None
    found: dict[str, object] = {
        "tpot_ms_b1": round(one.p50_ms, 3),
        "tpot_ms_b8": round(eight.p50_ms / 8, 3) if eight else None,
        "step_ms_b8": round(eight.p50_ms, 3) if eight else None,
        "tokens_per_s_b1": round(1e3 / one.p50_ms, 1),
        "tokens_per_s_b8": round(8e3 / eight.p50_ms, 1) if eight else None,
        "kernel_p99_over_p50": round(one.p99_ms / one.p50_ms, 3),
        **tail_metrics(tails),
        "service_p99_over_p50": round(served.p99_ms / served.p50_ms, 3) if served else None,
        "service_tpot_ms": round(served.p50_ms, 2) if served else None,
        "ratio_to_floor": round(one.p50_ms / (one.floor_bytes / bandwidth * 1e3), 3),
        "python_share_of_step": round(statistics.median(one.python_shares), 4),
        "read_gb_per_s": round(bandwidth / 1e9, 1),
        "foreign_cores": round(statistics.mean(case.foreign_cores for case in cases), 2),
    }
    long_eight = find(cases, DEFAULT, long, 8)
    found[f"step_ms_b8_{long}"] = round(long_eight.p50_ms, 2) if long_eight else None
    for batch, suffix in ((1, ""), (8, "_b8")):
        found[f"prefetch_gain_{long}{suffix}"] = ratio(
            find(cases, NO_PREFETCH, long, batch), find(cases, DEFAULT, long, batch)
        )
    found["tpot_ms_b1_one_thread"] = (
        round(alone.p50_ms, 3) if (alone := find(cases, ONE_THREAD, short, 1)) else None
    )
    for context, suffix in ((short, ""), (long, f"_{long}")):
        ours = find(cases, DEFAULT, context, 1)
        theirs = find(cases, "transformers", context, 1)
        found[f"ratio_vs_hf{suffix}"] = ratio(theirs, ours)
        same = find(cases, SAME_PRECISION, context, 1)
        found[f"ratio_vs_hf_same_precision{suffix}"] = ratio(theirs, same)
        found[f"ratio_vs_hf_b8{suffix}"] = ratio(
            find(cases, "transformers", context, 8), find(cases, DEFAULT, context, 8)
        )
        found[f"ratio_vs_llamacpp{suffix}"] = ratio(find(cases, "llama", context, 1), ours)
        found[f"ratio_vs_vllm{suffix}"] = ratio(find(cases, "vllm", context, 1), ours)
    return found


def print_table(cases: Sequence[Case], bandwidth: float) -> None:
    """One line a case."""
    print(
        f"{'what':33} {'context':>7} {'batch':>5} {'p50 ms':>8} {'p99 ms':>8} {'tok/s':>8} "
        f"{'foreign':>7} floor"
    )
    for case in cases:
        floor = ""
        if case.floor_bytes is not None:
            floor = f"{case.p50_ms / (case.floor_bytes / bandwidth * 1e3):.2f}x"
        print(
            f"{case.name:33} {case.context:7} {case.batch:5} {case.p50_ms:8.2f} "
            f"{case.p99_ms:8.2f} {case.batch * 1e3 / case.p50_ms:8.0f} "
            f"{case.foreign_cores:7.2f} {floor}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tail-steps", type=int, default=200)
    parser.add_argument("--peer-tokens", type=int, default=16)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-service", action="store_true")
    parser.add_argument("--default-mode-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = locate(arguments.model)
    bandwidth = read_bandwidth(arguments.threads)
    cases = kernel_cases(path, arguments)
    with peer_cases(path, arguments) as peers:
        cases += peers
        measure(cases, arguments.rounds, arguments.steps)
    bandwidth = max(bandwidth, read_bandwidth(arguments.threads))
    tails = measure_tails(path, min(arguments.contexts), arguments.tail_steps)
    served = None if arguments.no_service else measure_service(arguments.model)
    print_table(cases, bandwidth)
    print_tails(tails)
    if served is not None:
        print(
            f"served, one stream: {served.p50_ms:.2f} ms a token, p99 {served.p99_ms:.2f} "
            f"({served.samples} gaps)"
        )
    found = metrics(cases, bandwidth, tails, served)
    print(json.dumps({"bench": "decode", "metrics": found}))


if __name__ == "__main__":
    main()
