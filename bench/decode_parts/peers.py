"""The engines that decode is compared with, on the same weights in the same run.

Owns their start and end: transformers in this process, llama.cpp and vLLM each in an environment
of its own (scripts/bench_peers.sh makes them). A peer that is not installed is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch

from bench.decode_parts.cases import Case

PEERS_DIR: Final = Path(".peers")
PEER_PROCESS: Final = Path(__file__).with_name("peer_process.py")
PROMPT_TOKEN: Final = 500
LOAD_TIMEOUT_S: Final = 300.0
STEP_TIMEOUT_S: Final = 120.0
LLAMA_STEPS: Final = 40
NAMES: Final = {"llama.cpp": "llama.cpp Q4_1", "vllm": "vllm cpu bf16"}


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

    return Case(name="transformers bf16 generate", context=context, batch=batch, step=step, steps=1)


def load_transformers(path: Path) -> Any:
    """The same weights, dequantised by transformers, in bfloat16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    )
    return model.eval()


def model_folder(model: Any, folder: Path = PEERS_DIR / "model") -> Path:
    """The dequantised weights as a folder of safetensors, for engines that read no GGUF.

    The same folder each time: vLLM keeps what it compiles by the path of its model.
    """
    from safetensors.torch import save_file

    config = model.config.to_dict()
    # The weights were dequantised when they were read; what is written is plain bfloat16.
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, default=str), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A running peer process."""

    engine: str
    process: subprocess.Popen[str]
    threads: int

    def case(self, context: int, tokens: int) -> Case:
        """One sequence of `context` tokens."""
        is_stepwise = self.engine == "llama.cpp"
        return Case(
            name=NAMES[self.engine],
            context=context,
            batch=1,
            step=lambda: self._ask(context, tokens),
            steps=LLAMA_STEPS if is_stepwise else 1,
            process_id=self.process.pid,
            threads=self.threads,
        )

    def _ask(self, context: int, tokens: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"context": context, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return float(read_answer(self.process.stdout, STEP_TIMEOUT_S)["ms"])


def interpreter(engine: str) -> Path | None:
    """The interpreter of a peer's environment; None when there is none."""
    named = os.environ.get(f"BATON_PEER_{engine.replace('.', '').upper()}")
    path = Path(named) if named else PEERS_DIR / engine / "bin" / "python"
    return path if path.exists() else None


@contextlib.contextmanager
def running_peer(engine: str, path: Path, threads: int) -> Iterator[Peer | None]:
    """The peer until the block ends; None where it is not installed or does not start."""
    python = interpreter(engine)
    if python is None:
        yield None
        return
    command = [str(python), str(PEER_PROCESS), engine, str(path), "--threads", str(threads)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            try:
                read_answer(process.stdout, LOAD_TIMEOUT_S)
            except RuntimeError as problem:
                print(f"bench: {engine} is installed but does not start: {problem}")
                yield None
                return
            yield Peer(engine=engine, process=process, threads=threads)
        finally:
            process.kill()


def read_answer(stream: IO[str], timeout_s: float) -> dict[str, Any]:
    """The next answer of a peer; RuntimeError when it ends or is late."""
    if not select.select([stream], [], [], timeout_s)[0]:
        raise RuntimeError(f"no answer within {timeout_s:.0f} s")
    line = stream.readline()
    if not line:
        raise RuntimeError("its process ended")
    answer: dict[str, Any] = json.loads(line)
    return answer
