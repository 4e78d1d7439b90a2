"""How fast are prompts read? One table, one line of JSON.

Owns the measurement behind docs/prefill.md: our engine's forward over pages, whole and in chunks,
beside transformers and, where they are installed, llama.cpp on the same file and vLLM, in turn in
one run; figures are medians. Then the same through real services: `commit_share` is what a prefill
worker spent on packing, checksumming and committing chunks over what it spent on computing them,
by its own metrics; `hidden_transfer_share` is the part of the KV that had reached the other node
when the prompt was sealed.

    make bench-prefill
    python -m bench.prefill --rounds 1 --lengths 128 512 --no-peers     the smallest form
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Mapping
from typing import Final

import torch

from baton.models import locate
from bench.peers.running import NAMES, load_transformers, model_folder, running_peer
from bench.prefill_parts.readers import Ours, Reader, transformers_reader
from bench.prefill_parts.service import commit_share, hidden_transfer_share

CHUNK: Final = 256
WHOLE: Final = "ours, whole"
CHUNKED: Final = f"ours, chunks of {CHUNK}"
HF: Final = "transformers bf16"
LLAMA: Final = NAMES["llama.cpp"]
VLLM: Final = NAMES["vllm"]
COMPARED: Final = 512
PEER_LONGEST: Final = 1024
ROUNDS_LONG: Final = 2

Samples = dict[tuple[str, int], list[float]]


def measure(readers: Mapping[str, Reader], lengths: list[int], rounds: int) -> Samples:
    """Milliseconds of every reader at every length, going round; the first round warms up."""
    found: Samples = {}
    for index in range(rounds + 1):
        for length in lengths:
            if length > PEER_LONGEST and index > ROUNDS_LONG:
                continue
            for name, read in readers.items():
                is_peer = name not in (WHOLE, CHUNKED)
                if (is_peer and length > PEER_LONGEST) or (name == WHOLE and length > 2048):
                    continue
                if index == 0 and length > PEER_LONGEST:
                    continue
                elapsed_ms = read(length)
                if index > 0:
                    found.setdefault((name, length), []).append(elapsed_ms)
    return found


def metrics(samples: Samples, ours: Ours, lengths: list[int]) -> dict[str, object]:
    """The figures by the names that the goals use."""
    p50 = {key: statistics.median(one) for key, one in samples.items()}
    found: dict[str, object] = {}
    for length in lengths:
        for name, suffix in ((WHOLE, ""), (CHUNKED, "_chunked")):
            if (name, length) in p50:
                found[f"tokens_per_s_{length}{suffix}"] = round(length / p50[name, length] * 1e3)
    whole, chunked = p50[WHOLE, COMPARED], p50[CHUNKED, COMPARED]
    for peer, name in ((HF, "hf"), (LLAMA, "llamacpp"), (VLLM, "vllm")):
        theirs = p50.get((peer, COMPARED))
        found[f"ratio_vs_{name}"] = None if theirs is None else round(theirs / whole, 2)
        found[f"ratio_vs_{name}_chunked"] = None if theirs is None else round(theirs / chunked, 2)
    longest = max(lengths)
    per_token = {
        length: (p50[CHUNKED, length] - ours.attention_ms(length, CHUNK)) / length
        for length in {COMPARED, longest}
    }
    found["time_per_token_ratio"] = round(per_token[longest] / per_token[COMPARED], 2)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-services", action="store_true")
    arguments = parser.parse_args()
    if COMPARED not in arguments.lengths:
        parser.error(f"--lengths needs {COMPARED}, the length that is compared")
    torch.set_num_threads(arguments.threads)
    path = locate(arguments.model)
    ours = Ours(path, max(arguments.lengths))
    with contextlib.ExitStack() as stack:
        readers = {WHOLE: ours.reader(), CHUNKED: ours.reader(CHUNK)}
        if not arguments.no_peers:
            model = load_transformers(path)
            readers[HF] = transformers_reader(model)
            for engine, name in NAMES.items():
                weights = model_folder(model) if engine == "vllm" else path
                peer = stack.enter_context(running_peer(engine, weights, arguments.threads))
                if peer is not None:
                    readers[name] = peer.read_ms
        samples = measure(readers, arguments.lengths, arguments.rounds)
    print(f"{'what':22} {'tokens':>7} {'p50 ms':>9} {'tok/s':>7} {'rounds':>6}")
    for (name, length), one in sorted(samples.items(), key=lambda item: item[0][1]):
        p50_ms = statistics.median(one)
        print(f"{name:22} {length:7} {p50_ms:9.1f} {length / p50_ms * 1e3:7.0f} {len(one):6}")
    found = metrics(samples, ours, arguments.lengths)
    if not arguments.no_services:
        found["commit_share"] = commit_share(arguments.model)
        found["hidden_transfer_share"] = hidden_transfer_share(arguments.model)
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{len(os.sched_getaffinity(0))} cores; load {loads}; {arguments.threads} threads")
    print(json.dumps({"bench": "prefill", "metrics": found}))


if __name__ == "__main__":
    main()
