"""How fast is decode, and how near to what memory allows? One table, one line of JSON.

Owns the measurement behind docs/step_kernel.md: the step kernel in its weight modes at several
contexts and batches, beside transformers (bfloat16 `generate`) and, where they can be imported,
llama.cpp on the same GGUF and vLLM, all in one run. The floor is the bytes of weights and KV that a
step reads over the read bandwidth measured in the same run. Rounds alternate between the
configurations, so that a passing disturbance does not fall on one of them; figures are medians of
the samples kept: of each configuration's blocks the third in which other processes took the least
CPU time. That time is reported, too: above a few percent of a core the figures say more about those
processes than about decode. Never measures a service: its own figures stay empty here.

    make bench-decode
    python bench/decode.py --rounds 3 --steps 20 --no-peers      a quick look
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from baton.engine.config import ModelConfig, read_config
from baton.engine.kernel_weights import WeightMode
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.engine.step_kernel_abi import Activation, load
from baton.kv.layout import KvDtype
from baton.models import locate

BLOCK_TOKENS: Final = 16
WARM_STEPS: Final = 5
READ_BYTES: Final = 512 << 20
READ_ROUNDS: Final = 5
PROMPT_TOKEN: Final = 500
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive steps: their milliseconds, and the cores that other processes took meanwhile."""

    samples_ms: tuple[float, ...]
    foreign_cores: float


@dataclass(slots=True, kw_only=True)
class Case:
    """One configuration and its samples, in milliseconds a step."""

    name: str
    context: int
    batch: int
    step: Callable[[], float]
    floor_bytes: int | None = None
    blocks: list[Block] = field(default_factory=list)
    python_shares: list[float] = field(default_factory=list)

    @property
    def kept(self) -> list[Block]:
        """The quietest third of the blocks."""
        quietest = sorted(self.blocks, key=lambda block: block.foreign_cores)
        return quietest[: -(-len(quietest) // 3)]

    @property
    def samples_ms(self) -> list[float]:
        """The samples of the kept blocks."""
        return [sample for block in self.kept for sample in block.samples_ms]

    @property
    def foreign_cores(self) -> float:
        """What other processes took during the kept blocks, on average."""
        return statistics.mean(block.foreign_cores for block in self.kept)

    @property
    def p50_ms(self) -> float:
        """The median step."""
        return statistics.median(self.samples_ms)

    @property
    def p99_ms(self) -> float:
        """The step that one in a hundred exceeds."""
        return float(np.percentile(self.samples_ms, 99))


class KernelRun:
    """A step kernel over shuffled pages of random KV."""

    def __init__(self, path: Path, options: KernelOptions, kv: KvDtype, pages: int) -> None:
        self.config: ModelConfig = read_config(path)
        geometry = self.config.kv_geometry(BLOCK_TOKENS, kv)
        self.token_bytes = geometry.token_bytes
        store = KvPages.allocate(geometry, pages)
        for layer in range(geometry.layers):
            store.layer(layer).normal_()
        self.kernel = StepKernel(path, store, options)
        self.order = np.random.default_rng(0).permutation(pages).tolist()

    def case(self, name: str, context: int, batch: int) -> Case:
        """A case that steps `batch` sequences of `context` tokens."""
        per = context // BLOCK_TOKENS + 1
        tables = [self.order[index * per : (index + 1) * per] for index in range(batch)]
        tokens, positions = [PROMPT_TOKEN] * batch, [context] * batch
        shares: list[float] = []

        def step() -> float:
            began = time.perf_counter()
            self.kernel.decode_step(tokens, positions, tables)
            elapsed_s = time.perf_counter() - began
            native_s = self.kernel.take_profile()["total"] / 1e9
            shares.append(1.0 - native_s / elapsed_s)
            return elapsed_s * 1e3

        floor = self.kernel.memory.weight_bytes + batch * context * self.token_bytes
        return Case(
            name=name,
            context=context,
            batch=batch,
            step=step,
            floor_bytes=floor,
            python_shares=shares,
        )


def read_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory, the best of a few passes."""
    ffi, library = load()
    data = np.ones(READ_BYTES, dtype=np.uint8)
    part = READ_BYTES // threads
    views = [ffi.from_buffer(data[index * part : (index + 1) * part]) for index in range(threads)]
    rates = []
    for _ in range(READ_ROUNDS):
        readers = [
            threading.Thread(target=library.bt_read_all, args=(view, part)) for view in views
        ]
        began = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        rates.append(part * threads / (time.perf_counter() - began))
    return max(rates)


class TokenClock:
    """A streamer of `generate` that only notes when each token came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _: object) -> None:
        """Called with the prompt, then with every token."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def transformers_case(model: Any, context: int, batch: int, tokens: int) -> Case:
    """`generate` in bfloat16: the median time between two tokens."""
    prompt = torch.full((batch, context), PROMPT_TOKEN)

    def step() -> float:
        clock = TokenClock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        # The first time is the prompt's, the second the first token's, which prefill made.
        return float(np.median(np.diff(clock.times_s[1:]))) * 1e3

    return Case(name="transformers bf16 generate", context=context, batch=batch, step=step)


def load_transformers(path: Path) -> Any:
    """The same weights, dequantised by transformers, in bfloat16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    )
    return model.eval()


def llama_cpp_case(path: Path, context: int, threads: int) -> Case:
    """llama.cpp on the same file, one `eval` a token through its Python wrapper."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def step() -> float:
        if not context <= model.n_tokens < context + 256:
            model.reset()
            model.eval([PROMPT_TOKEN] * context)
        began = time.perf_counter()
        model.eval([PROMPT_TOKEN])
        return (time.perf_counter() - began) * 1e3

    return Case(name="llama.cpp Q4_1", context=context, batch=1, step=step)


def vllm_case(path: Path, context: int, tokens: int) -> Case:
    """vLLM's CPU back end on the same file."""
    from vllm import LLM, SamplingParams

    model = LLM(str(path), dtype="bfloat16", max_model_len=2048)
    prompt = {"prompt_token_ids": [PROMPT_TOKEN] * context}

    def timed(count: int) -> float:
        began = time.perf_counter()
        parameters = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        model.generate([prompt], parameters, use_tqdm=False)
        return time.perf_counter() - began

    def step() -> float:
        return (timed(1 + tokens) - timed(1)) / tokens * 1e3

    return Case(name="vllm cpu bf16", context=context, batch=1, step=step)


def kernel_cases(path: Path, arguments: argparse.Namespace) -> list[Case]:
    """All step kernel configurations."""
    longest = max(arguments.contexts)
    pages = (longest // BLOCK_TOKENS + 1) * max(arguments.batches)
    cases = []
    modes = [
        ("kernel q4_1 int16", WeightMode.PACKED, Activation.INT16),
        ("kernel q4_1 int8", WeightMode.PACKED, Activation.INT8),
        ("kernel int8", WeightMode.INT8, Activation.INT16),
        ("kernel bf16", WeightMode.BFLOAT16, Activation.INT16),
    ]
    for name, mode, activation in modes[: 1 if arguments.default_mode_only else None]:
        options = KernelOptions(
            weight_mode=mode,
            activation=activation,
            threads=arguments.threads,
            prefetch_pages=arguments.prefetch_pages,
            max_context=2048,
        )
        run = KernelRun(path, options, KvDtype.BF16, pages)
        for context in arguments.contexts:
            cases += [run.case(name, context, batch) for batch in arguments.batches]
    return cases


def peer_cases(path: Path, arguments: argparse.Namespace) -> list[Case]:
    """What is installed of the others."""
    model = load_transformers(path)
    cases = [
        transformers_case(model, context, batch, arguments.peer_tokens)
        for context in arguments.contexts
        for batch in sorted({1, 8} & set(arguments.batches))
    ]
    for context in arguments.contexts:
        if importlib.util.find_spec("llama_cpp") is not None:
            cases.append(llama_cpp_case(path, context, arguments.threads))
        if importlib.util.find_spec("vllm") is not None:
            cases.append(vllm_case(path, context, arguments.peer_tokens))
    return cases


def cpu_ticks() -> tuple[int, int]:
    """(busy ticks of the whole machine, ticks of this process) so far."""
    fields = [int(item) for item in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    used = os.times()
    own = int((used.user + used.system) * CLOCK_TICKS)
    return sum(fields) - fields[3] - fields[4], own


def measure(cases: Sequence[Case], rounds: int, steps: int) -> None:
    """Add `rounds` blocks to every case, going round; a third as many to the slow peers."""
    for index in range(rounds):
        for case in cases:
            is_kernel = case.floor_bytes is not None
            if not is_kernel and index % 3:
                continue  # a peer's block is a whole answer with its prefill
            for _ in range(WARM_STEPS if is_kernel else 0):
                case.step()
            count = steps if is_kernel or case.name.startswith("llama") else 1
            case.blocks.append(measure_block(case, count))


def measure_block(case: Case, count: int) -> Block:
    """`count` steps on end."""
    busy, own = cpu_ticks()
    began = time.perf_counter()
    samples = tuple(case.step() for _ in range(count))
    elapsed_ticks = (time.perf_counter() - began) * CLOCK_TICKS
    busy_after, own_after = cpu_ticks()
    foreign = max(0, (busy_after - busy) - (own_after - own)) / elapsed_ticks
    return Block(samples_ms=samples, foreign_cores=foreign)


def find(cases: Sequence[Case], name: str, context: int, batch: int) -> Case | None:
    """The case that starts so."""
    for case in cases:
        if case.name.startswith(name) and (case.context, case.batch) == (context, batch):
            return case
    return None


def ratio(slow: Case | None, fast: Case | None) -> float | None:
    """How many times faster; None when either was not measured."""
    return None if slow is None or fast is None else round(slow.p50_ms / fast.p50_ms, 2)


def metrics(cases: Sequence[Case], bandwidth: float) -> dict[str, object]:
    """The figures by the names that the goals use; 128 is the context unless the name says so."""
    short = min(case.context for case in cases)
    long = max(case.context for case in cases)
    one = find(cases, "kernel q4_1 int16", short, 1)
    eight = find(cases, "kernel q4_1 int16", short, 8)
    assert one is not None
    assert one.floor_bytes is not None
    found: dict[str, object] = {
        "tpot_ms_b1": round(one.p50_ms, 3),
        "tpot_ms_b8": round(eight.p50_ms, 3) if eight else None,
        "tokens_per_s_b1": round(1e3 / one.p50_ms, 1),
        "tokens_per_s_b8": round(8e3 / eight.p50_ms, 1) if eight else None,
        "kernel_p99_over_p50": round(one.p99_ms / one.p50_ms, 3),
        "service_p99_over_p50": None,
        "ratio_to_floor": round(one.p50_ms / (one.floor_bytes / bandwidth * 1e3), 3),
        "python_share_of_step": round(statistics.median(one.python_shares), 4),
        "read_gb_per_s": round(bandwidth / 1e9, 1),
        "foreign_cores": round(statistics.mean(case.foreign_cores for case in cases), 2),
    }
    for context, suffix in ((short, ""), (long, f"_{long}")):
        ours = find(cases, "kernel q4_1 int16", context, 1)
        theirs = find(cases, "transformers", context, 1)
        found[f"ratio_vs_hf{suffix}"] = ratio(theirs, ours)
        same = find(cases, "kernel bf16", context, 1)
        found[f"ratio_vs_hf_same_precision{suffix}"] = ratio(theirs, same)
        found[f"ratio_vs_hf_b8{suffix}"] = ratio(
            find(cases, "transformers", context, 8), find(cases, "kernel q4_1 int16", context, 8)
        )
        found[f"ratio_vs_llamacpp{suffix}"] = ratio(find(cases, "llama", context, 1), ours)
        found[f"ratio_vs_vllm{suffix}"] = ratio(find(cases, "vllm", context, 1), ours)
    return found


def print_table(cases: Sequence[Case], bandwidth: float) -> None:
    """One line a case."""
    print(
        f"{'what':28} {'context':>7} {'batch':>5} {'p50 ms':>8} {'p99 ms':>8} {'tok/s':>8} "
        f"{'foreign':>7} floor"
    )
    for case in cases:
        floor = ""
        if case.floor_bytes is not None:
            floor = f"{case.p50_ms / (case.floor_bytes / bandwidth * 1e3):.2f}x"
        print(
            f"{case.name:28} {case.context:7} {case.batch:5} {case.p50_ms:8.2f} "
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peer-tokens", type=int, default=16)
    parser.add_argument("--prefetch-pages", type=int, default=1)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--default-mode-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = locate(arguments.model)
    bandwidth = read_bandwidth(arguments.threads)
    cases = kernel_cases(path, arguments)
    if not arguments.no_peers:
        cases += peer_cases(path, arguments)
    measure(cases, arguments.rounds, arguments.steps)
    bandwidth = max(bandwidth, read_bandwidth(arguments.threads))
    print_table(cases, bandwidth)
    print(json.dumps(metrics(cases, bandwidth)))


if __name__ == "__main__":
    main()
