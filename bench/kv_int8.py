"""What does int8 KV cost, and what does it save? One table, one line of JSON.

Owns the measurement behind docs/int8-kv.md: the perplexity of the prose of this repository's own
documents, teacher-forced through the step kernel, with KV in float32, bfloat16 and int8, beside the
bytes of a token and the time of a step. Everything else is the same: packed weights, 16-bit
activations, the same tokens at the same positions. The text is cut into windows that run as one
batch; the types take turns at every position, so that what disturbs one disturbs all.

    make bench-kv_int8
    python -m bench.kv_int8 --windows 2 --window-tokens 128     a quick look
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.kv.layout import KvDtype
from baton.kv.sizing import pages_for
from baton.models import locate
from baton.text.bundle import TextBundle

ROOT: Final = Path(__file__).parents[1]
TYPES: Final = (KvDtype.F32, KvDtype.BF16, KvDtype.INT8)
BLOCK_TOKENS: Final = 16
# The share of the positions, the last ones, whose steps are timed: contexts near the window's end.
TIMED_SHARE: Final = 8

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Run:
    """One KV type: its kernel and what was seen of it."""

    kernel: StepKernel
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """e to the mean surprise of a token."""
        return math.exp(statistics.fmean(self.nll))


def prose(root: Path = ROOT) -> str:
    """The paragraphs of the documents, in the order of their names: no tables, code or titles."""
    paragraphs = []
    for path in [root / "ARCHITECTURE.md", *sorted((root / "docs").glob("*.md"))]:
        is_code = False
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("```"):
                is_code = not is_code
            elif not is_code and len(line) > 60 and line[0].isalnum():
                paragraphs.append(line)
    return "\n".join(paragraphs)


def windows_of(bundle: TextBundle, count: int, tokens: int) -> list[list[int]]:
    """The text's first tokens, cut into `count` windows."""
    ids = bundle.tokenizer.encode(prose())
    assert len(ids) >= count * tokens, f"the documents have {len(ids)} tokens only"
    return [ids[at * tokens : (at + 1) * tokens] for at in range(count)]


def open_run(path: Path, dtype: KvDtype, threads: int, shape: tuple[int, int]) -> Run:
    """A kernel with pages for `shape`, (windows, tokens of each)."""
    windows, tokens = shape
    geometry = read_config(path).kv_geometry(BLOCK_TOKENS, dtype)
    pages = KvPages.allocate(geometry, pages_for(tokens, BLOCK_TOKENS) * windows)
    options = KernelOptions(threads=threads, batch_max=windows, max_context=tokens)
    return Run(StepKernel(path, pages, options))


def advance(run: Run, windows: Sequence[Sequence[int]], position: int) -> Floats:
    """One step of every window; the log probabilities after it [windows, vocabulary]."""
    each = pages_for(len(windows[0]), BLOCK_TOKENS)
    tables = [range(index * each, (index + 1) * each) for index in range(len(windows))]
    tokens = [window[position] for window in windows]
    begun = time.perf_counter()
    logits = run.kernel.decode_step(tokens, [position] * len(windows), tables)
    taken = time.perf_counter() - begun
    if position >= len(windows[0]) * (TIMED_SHARE - 1) // TIMED_SHARE:
        run.step_s.append(taken)
    numbers = logits.astype(np.float64)
    numbers -= numbers.max(axis=-1, keepdims=True)
    scored: Floats = numbers - np.log(np.exp(numbers).sum(axis=-1, keepdims=True))
    return scored


def measure(runs: dict[KvDtype, Run], windows: Sequence[Sequence[int]]) -> None:
    """Every position but the last is scored by the token that follows it."""
    rows = np.arange(len(windows))
    for position in range(len(windows[0]) - 1):
        following = [window[position + 1] for window in windows]
        scores = {dtype: advance(run, windows, position) for dtype, run in runs.items()}
        exact = scores[KvDtype.F32]
        for dtype, run in runs.items():
            run.nll += (-scores[dtype][rows, following]).tolist()
            gap = np.exp(exact) * (exact - scores[dtype])
            run.kl += gap.sum(axis=-1).tolist()
            run.agreements += (scores[dtype].argmax(-1) == exact.argmax(-1)).tolist()


def metrics_of(runs: dict[KvDtype, Run]) -> dict[str, float]:
    """The figures of the last line."""
    exact, half, int8 = (runs[dtype] for dtype in TYPES)
    metrics: dict[str, float] = {"tokens": len(exact.nll)}
    for dtype, run in runs.items():
        name = dtype.text
        metrics[f"perplexity_{name}"] = run.perplexity
        metrics[f"kl_mean_{name}"] = statistics.fmean(run.kl)
        metrics[f"same_argmax_{name}"] = statistics.fmean(run.agreements)
        metrics[f"bytes_per_token_{name}"] = run.kernel.pages.geometry.token_bytes
        metrics[f"step_ms_{name}"] = 1e3 * statistics.median(run.step_s)
    metrics["perplexity_int8_over_bf16"] = int8.perplexity / half.perplexity
    metrics["bytes_int8_over_bf16"] = (
        metrics["bytes_per_token_int8"] / metrics["bytes_per_token_bf16"]
    )
    metrics["step_int8_over_bf16"] = metrics["step_ms_int8"] / metrics["step_ms_bf16"]
    return metrics


def print_table(metrics: dict[str, float]) -> None:
    """For people."""
    print(f"{'KV':6}{'perplexity':>12}{'KL mean':>11}{'argmax':>8}{'bytes':>9}{'step ms':>9}")
    for dtype in TYPES:
        name = dtype.text
        print(
            f"{name:6}{metrics[f'perplexity_{name}']:12.4f}{metrics[f'kl_mean_{name}']:11.2e}"
            f"{metrics[f'same_argmax_{name}']:8.3f}{metrics[f'bytes_per_token_{name}']:9.0f}"
            f"{metrics[f'step_ms_{name}']:9.2f}"
        )
    print(
        f"int8 over bf16: perplexity {metrics['perplexity_int8_over_bf16']:.4f}, "
        f"bytes {metrics['bytes_int8_over_bf16']:.3f}, step {metrics['step_int8_over_bf16']:.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file or the name of a model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    path = locate(arguments.model)
    shape = (arguments.windows, arguments.window_tokens)
    windows = windows_of(TextBundle.load(path), *shape)
    runs = {dtype: open_run(path, dtype, arguments.threads, shape) for dtype in TYPES}
    measure(runs, windows)
    metrics = metrics_of(runs)
    print_table(metrics)
    for run in runs.values():
        run.kernel.close()
    print(json.dumps({"bench": "kv_int8", "metrics": metrics}))


if __name__ == "__main__":
    main()
