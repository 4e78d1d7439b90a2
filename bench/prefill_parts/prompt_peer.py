"""One peer engine that only reads prompts, in an environment of its own: see `peers`.

Owns nothing of Baton: the interpreter of the peer's environment runs it. Reads {"context": n} a
line and answers {"ms": milliseconds of a whole prompt of n tokens and its first token}; the first
line it writes says that it is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

PROMPT_TOKENS = 40000
CONTEXT_MAX = 2048


def prompt(context: int, seed: int) -> list[int]:
    """Tokens that no prefix cache has seen."""
    return [(index * 7919 + seed * 104729) % PROMPT_TOKENS + 100 for index in range(context)]


def llama_cpp(path: str, threads: int) -> Callable[[int, int], float]:
    """llama.cpp: one `eval` of the whole prompt."""
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=CONTEXT_MAX, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def read(context: int, seed: int) -> float:
        model.reset()
        tokens = prompt(context, seed)
        began = time.perf_counter()
        model.eval(tokens)
        return (time.perf_counter() - began) * 1e3

    return read


def vllm(path: str, threads: int) -> Callable[[int, int], float]:
    """vLLM's CPU back end: a request of one token."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    model = LLM(path, dtype="bfloat16", max_model_len=CONTEXT_MAX, skip_tokenizer_init=True)
    one = SamplingParams(
        temperature=0.0, max_tokens=1, min_tokens=1, ignore_eos=True, detokenize=False
    )

    def read(context: int, seed: int) -> float:
        tokens = prompt(context, seed)
        began = time.perf_counter()
        model.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        return (time.perf_counter() - began) * 1e3

    return read


ENGINES = {"llama.cpp": llama_cpp, "vllm": vllm}


def main() -> None:
    """Load the engine, then answer until the input ends."""
    parser = argparse.ArgumentParser(description="one peer engine, driven over its input")
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # Engines print; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    read = ENGINES[arguments.engine](arguments.path, arguments.threads)
    answers.write(json.dumps({"ready": arguments.engine}) + "\n")
    for seed, line in enumerate(sys.stdin):
        answers.write(json.dumps({"ms": read(json.loads(line)["context"], seed)}) + "\n")


if __name__ == "__main__":
    main()
