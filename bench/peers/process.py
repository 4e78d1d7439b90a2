"""One peer engine in a process and an environment of its own: `PYTHON process.py NAME PATH ...`.

Owns nothing of Baton: it is run by the interpreter of the peer's own environment and imports only
the peer. The first line it writes says that it is ready; then it reads one JSON object a line and
answers {"ms": milliseconds}: {"context": n, "tokens": m} asks for one decode step at a context of
n, {"context": n} for a whole prompt of n tokens and its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

STEP_TOKEN = 500
PROMPT_TOKENS = 40000
CONTEXT_MAX = 2048
CONTEXT_DRIFT = 256


def prompt(context: int, seed: int) -> list[int]:
    """Tokens that no prefix cache has seen."""
    return [(index * 7919 + seed * 104729) % PROMPT_TOKENS + 100 for index in range(context)]


class LlamaCpp:
    """llama.cpp through its Python wrapper."""

    def __init__(self, path: str, threads: int) -> None:
        from llama_cpp import Llama

        self._model = Llama(
            path, n_ctx=CONTEXT_MAX, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def step(self, context: int, _: int) -> float:
        """One `eval` of a token."""
        if not context <= self._model.n_tokens < context + CONTEXT_DRIFT:
            self._model.reset()
            self._model.eval([STEP_TOKEN] * context)
        return self._timed([STEP_TOKEN])

    def read(self, context: int, seed: int) -> float:
        """One `eval` of the whole prompt."""
        self._model.reset()
        return self._timed(prompt(context, seed))

    def _timed(self, tokens: list[int]) -> float:
        began = time.perf_counter()
        self._model.eval(tokens)
        return (time.perf_counter() - began) * 1e3


class Vllm:
    """vLLM's CPU back end."""

    def __init__(self, path: str, threads: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM

        self._model = LLM(
            path,
            dtype="bfloat16",
            max_model_len=CONTEXT_MAX,
            enforce_eager=False,
            skip_tokenizer_init=True,
        )

    def step(self, context: int, tokens: int) -> float:
        """The time of `tokens` more tokens, divided by them."""
        long_ms = self._timed([STEP_TOKEN] * context, 1 + tokens)
        return (long_ms - self._timed([STEP_TOKEN] * context, 1)) / tokens

    def read(self, context: int, seed: int) -> float:
        """A request of one token."""
        return self._timed(prompt(context, seed), 1)

    def _timed(self, tokens: list[int], count: int) -> float:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        self._model.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        return (time.perf_counter() - began) * 1e3


ENGINES: dict[str, Any] = {"llama.cpp": LlamaCpp, "vllm": Vllm}


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
    engine = ENGINES[arguments.engine](arguments.path, arguments.threads)
    answers.write(json.dumps({"ready": arguments.engine}) + "\n")
    for seed, line in enumerate(sys.stdin):
        wish = json.loads(line)
        if "tokens" in wish:
            spent_ms = engine.step(wish["context"], wish["tokens"])
        else:
            spent_ms = engine.read(wish["context"], seed)
        answers.write(json.dumps({"ms": spent_ms}) + "\n")


if __name__ == "__main__":
    main()
