"""The engines that Baton's is compared with, on the same weights in the same run.

Owns their start and end: transformers in this process, llama.cpp and vLLM each in an environment
of its own (scripts/bench_peers.sh makes them). A peer that is not installed is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

PEERS_DIR: Final = Path(".peers")
PROCESS: Final = Path(__file__).with_name("process.py")
LOAD_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 120.0
NAMES: Final = {"llama.cpp": "llama.cpp Q4_1", "vllm": "vllm cpu bf16"}


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

    def step_ms(self, context: int, tokens: int) -> float:
        """Milliseconds of one decode step at that context, the mean of so many where it cannot
        step by itself.
        """
        return self._ask({"context": context, "tokens": tokens})

    def read_ms(self, context: int) -> float:
        """Milliseconds of a whole prompt of so many tokens and its first token."""
        return self._ask({"context": context})

    def _ask(self, wish: dict[str, int]) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wish) + "\n")
        self.process.stdin.flush()
        return float(_read_answer(self.process.stdout, ANSWER_TIMEOUT_S)["ms"])


def interpreter(engine: str) -> Path | None:
    """The interpreter of a peer's environment; None when there is none."""
    named = os.environ.get(f"BATON_PEER_{engine.replace('.', '').upper()}")
    path = Path(named) if named else PEERS_DIR / engine / "bin" / "python"
    return path if path.exists() else None


@contextlib.contextmanager
def running_peer(engine: str, path: Path, threads: int) -> Iterator[Peer | None]:
    """The peer until the block ends; None, saying so, where it is not installed or does not
    start.
    """
    python = interpreter(engine)
    if python is None:
        print(f"bench: {engine} is not installed, so left out")
        yield None
        return
    command = [str(python), str(PROCESS), engine, str(path), "--threads", str(threads)]
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
                _read_answer(process.stdout, LOAD_TIMEOUT_S)
            except RuntimeError as problem:
                print(f"bench: {engine} is installed but does not start: {problem}")
                yield None
                return
            yield Peer(engine=engine, process=process, threads=threads)
        finally:
            process.kill()


def _read_answer(stream: IO[str], timeout_s: float) -> dict[str, Any]:
    """The next answer of a peer; RuntimeError when it ends or is late."""
    if not select.select([stream], [], [], timeout_s)[0]:
        raise RuntimeError(f"no answer within {timeout_s:.0f} s")
    line = stream.readline()
    if not line:
        raise RuntimeError("its process ended")
    answer: dict[str, Any] = json.loads(line)
    return answer
