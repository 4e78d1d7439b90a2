"""One peer engine in a process and an environment of its own: `PYTHON peer_process.py NAME ...`.

Owns nothing of Baton: it is run by the interpreter of the peer's own environment and imports only
the peer. Reads one JSON object a line, {"context": n, "tokens": n}, and answers one,
{"ms": milliseconds of one decode step}; the first line it writes says that it is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

PROMPT_TOKEN = 500
CONTEXT_MAX = 2048
CONTEXT_DRIFT = 256


def llama_cpp(path: str, threads: int) -> Callable[[int, int], float]:
    """llama.cpp: one `eval` a token, through its Python wrapper."""
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=CONTEXT_MAX, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def step(context: int, _: int) -> float:
        if not context <= model.n_tokens < context + CONTEXT_DRIFT:
            model.reset()
            model.eval([PROMPT_TOKEN] * context)
        began = time.perf_counter()
        model.eval([PROMPT_TOKEN])
        return (time.perf_counter() - began) * 1e3

    return step


def vllm(path: str, threads: int) -> Callable[[int, int], float]:
    """vLLM's CPU back end: the time of `tokens` more tokens, divided by them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    model = LLM(
        path,
        dtype="bfloat16",
        max_model_len=CONTEXT_MAX,
        enforce_eager=False,
        skip_tokenizer_init=True,
    )

    def timed(context: int, count: int) -> float:
        parameters = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        model.generate([{"prompt_token_ids": [PROMPT_TOKEN] * context}], parameters, use_tqdm=False)
        return time.perf_counter() - began

    def step(context: int, tokens: int) -> float:
        return (timed(context, 1 + tokens) - timed(context, 1)) / tokens * 1e3

    return step


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
    step = ENGINES[arguments.engine](arguments.path, arguments.threads)
    answers.write(json.dumps({"ready": arguments.engine}) + "\n")
    for line in sys.stdin:
        wish = json.loads(line)
        answers.write(json.dumps({"ms": step(wish["context"], wish["tokens"])}) + "\n")


if __name__ == "__main__":
    main()
