"""What the parts share: a kvstore process with pages as SmolLM2's are, KV to store, and the sizes.

Owns no measurement. The model is a tiny one but for what decides a page: 30 layers, 3 KV heads of
64, bf16, 16 tokens, so 368,640 bytes; the store reads its files as any model's. KV is random bytes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.kv.blob import BlobHeader
from baton.kv.layout import KvDtype
from baton.kv.numeric import TORCH_BF16
from baton.testing.tiny_models import TinyModel, write_directory
from baton.text.bundle import TextBundle
from tests.integration.kvstore.harness import BLOCK, Model, StoreProcess

SHAPE: Final = TinyModel(layers=30, hidden=64, heads=3, kv_heads=3, head_dim=64, max_context=8192)
TOKENS: Final = {1: 45, 24: 1092, 128: 5824}
"""MiB -> tokens whose KV comes nearest to it; the first ends in a partial page."""

QUICK: Final = {1: 45}
ARENA_BYTES: Final = 640 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    """KV of some positions: `payload` are the packed pages, one after the other."""

    mebibytes: int
    payload: npt.NDArray[np.uint8]
    token_ids: npt.NDArray[np.uint32]

    @property
    def size_bytes(self) -> int:
        """Bytes of KV, token ids not counted."""
        return int(self.payload.size)


def sizes(quick: bool) -> dict[int, int]:
    """MiB -> tokens of a run."""
    return QUICK if quick else TOKENS


def kv_of(model: Model, mebibytes: int, tokens: int) -> Kv:
    """Random KV."""
    draw = np.random.default_rng(mebibytes)
    return Kv(
        mebibytes=mebibytes,
        payload=draw.integers(0, 256, tokens * model.geometry.token_bytes, dtype=np.uint8),
        token_ids=(5 + np.arange(tokens, dtype=np.uint32) % 150).astype(np.uint32),
    )


def header_of(model: Model, log_id: bytes, first: int, tokens: int) -> BlobHeader:
    """The header of a blob of positions [first, first + tokens), without sizes and CRCs."""
    geometry = model.geometry
    return BlobHeader(
        tokenizer_hash=model.label.tokenizer,
        dtype=geometry.dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        head_dim_v=geometry.head_dim_v,
        block_tokens=geometry.block_tokens,
        first_position=first,
        total_tokens=tokens,
        generation=1,
        model_digest=model.label.model,
        kv_digest=model.label.kv_digest(),
        log_id=log_id,
        numeric_class_id=TORCH_BF16.id,
        layers_total=geometry.layers,
        kv_heads_total=geometry.kv_heads,
    )


@contextmanager
def running_site() -> Iterator[tuple[StoreProcess, Model]]:
    """A ready kvstore and its model until the block ends."""
    with tempfile.TemporaryDirectory(prefix="baton-store-") as folder:
        directory = Path(folder)
        path = write_directory(directory / "model", SHAPE)
        config = read_config(path)
        geometry = config.kv_geometry(BLOCK, KvDtype.BF16)
        label = build_label(
            path,
            config,
            TextBundle.load(path).tokenizer_hash,
            geometry,
            torch_numeric_class(config, KvDtype.BF16),
        )
        model = Model(path=path, label=label, geometry=geometry)
        store = StoreProcess(
            model=model, directory=directory, arena_bytes=ARENA_BYTES, dtype="bfloat16"
        )
        try:
            store.start()
            yield store, model
        finally:
            store.stop()
            shutil.rmtree(store.arena_dir, ignore_errors=True)


def rounds(mebibytes: int, quick: bool) -> int:
    """How often a size is measured."""
    if quick:
        return 3
    return {1: 60, 24: 25}.get(mebibytes, 11)


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def median(seconds: Sequence[float]) -> float:
    """Of the rounds but the first, which touches memory for the first time."""
    return statistics.median(seconds[1:] or seconds)


def gbps(size_bytes: int, seconds: float) -> float:
    """10^9 bytes a second."""
    return size_bytes / seconds / 1e9
