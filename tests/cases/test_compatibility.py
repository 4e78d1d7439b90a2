"""Compatibility mismatch: a worker whose KV or answers would be wrong never serves with the others.

A stranger joins a cluster that serves: a decode worker of its own node (its own kvstore), started
with the cluster's own command line and one thing changed. Then every other decode worker stands
still. What is asked meanwhile is answered rightly and by one worker alone, or refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from baton import models
from tests.cases.replay import CAPITAL, CAPITAL_ANSWER, CHAT, Replay, chat, total
from tests.cases.waiting import until

JOINED_WITHIN_S: Final = 120.0
STOPPED_WITHIN_S: Final = 60.0
ASKED: Final = 5
U32: Final = struct.Struct("<I")
FLOAT32: Final = struct.Struct("<f")
FLOAT32_TYPE: Final = 6
"""GGUF's number for a float32 value."""


def other_rope(model: Path) -> None:
    """The base of the rotary embedding."""
    _patch(model, b"llama.rope.freq_base" + U32.pack(FLOAT32_TYPE), FLOAT32.pack(10_000.0))


def other_weights(model: Path) -> None:
    """The last byte of the last tensor: another revision under the same name."""
    with model.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def other_tokenizer(model: Path) -> None:
    """Another text of one special token, of the same length."""
    _patch(model, struct.pack("<Q", len(b"<file_sep>")), b"<file_sap>", before=b"<file_sep>")


def _patch(model: Path, after: bytes, value: bytes, before: bytes = b"") -> None:
    """Writes `value` behind `after`, where `before` stands now, near the file's beginning."""
    with model.open("r+b") as file:
        head = file.read(8 << 20)
        at = head.index(after + before) + len(after)
        file.seek(at)
        file.write(value)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is other about a stranger, and the field that the gateway should name (None: none of
    its own model's: a pair is refused, not the worker).
    """

    name: str
    block_tokens: str = "16"
    dtype: str = "float32"
    to_model: Callable[[Path], None] | None = None
    field: str | None = None


CHANGES: Final = (
    Change(name="block_tokens", block_tokens="32"),
    Change(name="dtype", dtype="bfloat16"),
    Change(name="rope", to_model=other_rope, field="rope"),
    Change(name="weights", to_model=other_weights, field="model"),
    Change(name="tokenizer", to_model=other_tokenizer, field="tokenizer"),
)


@contextlib.contextmanager
def stranger(drill: Replay, folder: Path, change: Change) -> Iterator[None]:
    """A kvstore and a decode worker of its own node, heard by the gateway, until the block ends."""
    model = folder / "smollm2.gguf"
    if change.to_model is not None:
        shutil.copyfile(models.locate("smollm2"), model)
        change.to_model(model)
    pid = drill.cluster.pid("decode-0")
    environment = dict(
        item.split("=", 1)
        for item in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        if "=" in item
    )
    shared = [
        *("--model", "smollm2" if change.to_model is None else str(model)),
        *("--dtype", change.dtype),
        *("--gateways", drill.flag_of("decode-0", "--gateways")),
        *("--run-dir", str(folder)),
    ]
    store_at, worker_at = folder / "store.at", folder / "worker.at"
    store = [
        *("-m", "services.kvstore", *shared, "--node-id", "stranger"),
        *("--block-tokens", change.block_tokens, "--arena-bytes", str(64 << 20)),
        *("--arena-dir", str(folder), "--log-dir", str(folder / "log")),
        *("--cluster-key-file", drill.flag_of("kvstore-0", "--cluster-key-file")),
        *("--port-file", str(store_at)),
    ]
    with _running(store, environment, folder / "store.log"):
        until(lambda: _read(store_at), JOINED_WITHIN_S, "the stranger's kvstore")
        worker = [
            *("-m", "services.decode", *shared, "--worker-id", "stranger"),
            *("--kvstore", _read(store_at), "--kernel", "torch"),
            *("--port-file", str(worker_at)),
        ]
        with _running(worker, environment, folder / "worker.log"):
            until(lambda: _read(worker_at), JOINED_WITHIN_S, "the stranger")
            yield


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip() if file.exists() else ""


@contextlib.contextmanager
def _running(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOPPED_WITHIN_S)
            finally:
                process.kill()
                process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("change", CHANGES, ids=[one.name for one in CHANGES])
def test_c51_an_unequal_worker_takes_no_part(drill: Replay, tmp_path: Path, change: Change) -> None:
    """Compatibility: nothing is paired that would be read wrongly, also when nobody else is left.

    vllm#42895: block sizes differed, health was green and every transfer failed.
    """
    body = chat(CAPITAL, max_tokens=16)

    def ask() -> tuple[int, str, str]:
        answer = drill.call(CHAT, body, timeout_s=60)
        text = answer.text if answer.status == 200 else ""
        return answer.status, text, answer.headers.get("x-serving-mode", "")

    def decodes() -> float:
        return total(drill.samples("gateway-0"), "baton_workers", role="decode", routable="yes")

    def mismatched() -> float:
        samples = drill.samples("gateway-0")
        return total(samples, "baton_workers_mismatched", role="decode")

    with stranger(drill, tmp_path, change):
        until(lambda: decodes() == 3, JOINED_WITHIN_S, "the gateway hearing the stranger")
        assert mismatched() == (change.field is not None)
        # While its own workers serve, the stranger is asked for nothing.
        for _ in range(ASKED):
            assert ask() == (200, CAPITAL_ANSWER, "disaggregated")
        with drill.frozen("decode-0", "decode-1"):
            until(lambda: decodes() == 1, 30.0, "the frozen workers counting as dead")
            status, text, mode = ask()
            if change.field is None:
                # The same model: it may answer alone, and then rightly.
                assert (status, text, mode) == (200, CAPITAL_ANSWER, "aggregated")
            else:
                assert status == 503
        until(lambda: decodes() == 3, 60.0, "the workers coming back")
    until(lambda: decodes() == 2, 30.0, "the stranger gone")
