"""The golden check: does this process compute the model as the reference did?

Owns the comparison of a fixed prompt's logits, with ten teacher-forced tokens after it, against a
reference shipped in `references/`. A reference holds sketches, not logits: a count sketch (every
logit added with a random sign to one of a few thousand buckets) keeps L2 distances to a few percent
and stays small. It never decides what to do about a failure: that is the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype

FORCED_TOKENS: Final = 10
SKETCH_BUCKETS: Final = 2048
# The largest relative L2 distance that passes. float32 is the promise; bfloat16 is twice the 2.5e-2
# measured on the bundled model.
BOUNDS: Final = {ComputeDtype.FLOAT32: 1e-3, ComputeDtype.BFLOAT16: 5e-2}

REFERENCES: Final = Path(__file__).parent / "references"
_SKETCH_KEY: Final = 0x736B65746368  # "sketch"

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenReference:
    """What one model must compute.

    `weight_hashes` are the BLAKE3 digests (32 bytes) of its weight files as stored. `sketches` is
    float32 [FORCED_TOKENS + 1, SKETCH_BUCKETS]: the logits after the prompt and after each forced
    token.
    """

    weight_hashes: tuple[bytes, ...]
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    sketches: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """The outcome: the largest relative L2 distance of any step, and the bound it had to meet."""

    is_passed: bool
    relative_l2: float
    bound: float
    numeric_class: str


def find_reference(
    weight_hashes: Sequence[bytes], folder: Path = REFERENCES
) -> GoldenReference | None:
    """The shipped reference of the model whose weight files hash so, or None when there is none."""
    for path in sorted(folder.glob("*.npz")):
        reference = read_reference(path)
        if reference.weight_hashes == tuple(weight_hashes):
            return reference
    return None


def read_reference(path: Path) -> GoldenReference:
    """The reference stored in `path`."""
    with np.load(path, allow_pickle=False) as arrays:
        return GoldenReference(
            weight_hashes=tuple(row.tobytes() for row in arrays["weight_hashes"]),
            prompt_ids=tuple(arrays["prompt_ids"].tolist()),
            forced_ids=tuple(arrays["forced_ids"].tolist()),
            sketches=arrays["sketches"],
        )


def write_reference(path: Path, reference: GoldenReference) -> None:
    """Store `reference`; what the oracle script does."""
    hashes = [np.frombuffer(digest, np.uint8) for digest in reference.weight_hashes]
    np.savez_compressed(
        path,
        weight_hashes=np.stack(hashes),
        prompt_ids=np.array(reference.prompt_ids, np.int64),
        forced_ids=np.array(reference.forced_ids, np.int64),
        sketches=reference.sketches.astype(np.float32),
    )


def run(transformer: Transformer, reference: GoldenReference) -> GoldenResult:
    """Compute the reference's prompt and forced tokens with this model, on pages of its own."""
    geometry = transformer.pages.geometry
    tokens = len(reference.prompt_ids) + len(reference.forced_ids)
    page_count = -(-tokens // geometry.block_tokens)
    own = Transformer(transformer.weights, KvPages.allocate(geometry, page_count))
    table = range(page_count)
    computed = [sketch(own.prefill_chunk(reference.prompt_ids, 0, table).numpy())]
    for index, token in enumerate(reference.forced_ids):
        logits = own.decode_step([token], [len(reference.prompt_ids) + index], [table])
        computed.append(sketch(logits[0].numpy()))
    distance = relative_l2(np.stack(computed), reference.sketches)
    bound = BOUNDS[transformer.weights.dtype]
    return GoldenResult(
        # A comparison with NaN is false: a broken computation never passes.
        is_passed=distance <= bound,
        relative_l2=distance,
        bound=bound,
        numeric_class=transformer.numeric_class(),
    )


def relative_l2(computed: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest over rows of |computed - expected| / |expected|."""
    difference = np.linalg.norm(computed.astype(np.float64) - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected.astype(np.float64), axis=-1)))


def sketch(logits: Floats) -> Floats:
    """The count sketch of logits [vocabulary]: float32 [SKETCH_BUCKETS]."""
    buckets, signs = _hashes(logits.size)
    sums = np.bincount(buckets, weights=signs * logits, minlength=SKETCH_BUCKETS)
    return sums.astype(np.float32)


@cache
def _hashes(vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A bucket and a sign for each token id, the same in every process and version."""
    words = np.random.Philox(key=_SKETCH_KEY).random_raw(vocabulary)
    buckets = (words % np.uint64(SKETCH_BUCKETS)).astype(np.int64)
    signs = np.where(words >> np.uint64(63), 1.0, -1.0)
    return buckets, signs
