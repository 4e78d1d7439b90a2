"""The bundled model, token for token, against golden files made with transformers.

`tests/oracle/make_golden.py` made them from the same GGUF, dequantised to float32. Here our engine
computes the same prompts over pages: greedy ids must be equal at every step whose top-2 logit gap
is over 1e-3, teacher-forced, so that one near tie does not hide what follows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from baton.engine import golden_check
from baton.engine.kv_pages import KvPages
from baton.engine.label import weight_hashes
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.errors import ServiceError
from baton.models import locate

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "oracle" / "golden_float32.json").read_text("utf-8")
)
CASES = {case["name"]: case for case in GOLDEN["cases"]}
SHORT = sorted(name for name, case in CASES.items() if len(case["prompt_ids"]) < 1000)
LONG = sorted(set(CASES) - set(SHORT))
# What an ordinary run computes; the rest is marked slow.
SAMPLE = ("chinese", "code_python", "chat_system", "exactly_16", "one_token")
CHUNKS = (16, 64, 384, 4096)
NEAR_TIE = 1e-3
BLOCK_TOKENS = 16
PAGES = 128


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many steps agreed, and how many were near ties that prove nothing."""

    compared: int
    near_ties: int


@pytest.fixture(scope="module")
def model_path():
    try:
        return locate("smollm2")
    except ServiceError as error:
        pytest.skip(f"THE ORACLE TESTS DID NOT RUN: {error}; run `baton models pull smollm2`")


@pytest.fixture(scope="module")
def exact(model_path):
    return build(model_path, ComputeDtype.FLOAT32)


def build(path: Path, dtype: ComputeDtype) -> Transformer:
    weights = load_weights(path, dtype)
    geometry = weights.config.kv_geometry(BLOCK_TOKENS, dtype.kv_dtype)
    return Transformer(weights, KvPages.allocate(geometry, PAGES))


def replay(transformer: Transformer, case: dict, chunk: int) -> Comparison:
    """Prefill in chunks, then force the golden ids; asserts our argmax at every clear step."""
    table = list(range(PAGES))[::-1]
    prompt, forced = case["prompt_ids"], case["greedy_ids"]
    last = (len(prompt) - 1) // chunk * chunk
    for first in range(0, last, chunk):
        transformer.prefill_kv(prompt[first : first + chunk], first, table)
    logits = transformer.prefill_chunk(prompt[last:], last, table).numpy()
    if "logits" in case:
        expected = np.array(case["logits"])
        assert golden_check.relative_l2(logits[case["logit_ids"]], expected) < 1e-3
    near_ties = 0
    for step, (token, gap) in enumerate(zip(forced, case["gaps"], strict=True)):
        if gap <= NEAR_TIE:
            near_ties += 1
        else:
            assert int(logits.argmax()) == token, f"step {step} of {case['name']}, gap {gap}"
        if step + 1 < len(forced):
            logits = transformer.decode_step([token], [len(prompt) + step], [table])[0].numpy()
    return Comparison(compared=len(forced) - near_ties, near_ties=near_ties)


def test_golden_file_covers_what_it_promises():
    """At least 24 prompts, the border lengths among them, and few steps that prove nothing."""
    lengths = {len(case["prompt_ids"]) for case in CASES.values()}
    assert len(CASES) >= 24
    assert {1, 15, 16, 17, 1500} <= lengths
    steps = [gap for case in CASES.values() for gap in case["gaps"]]
    near_ties = sum(gap <= NEAR_TIE for gap in steps)
    assert near_ties <= len(steps) // 100, f"{near_ties} near ties of {len(steps)}"


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_prompts_equal_oracle(exact, name):
    """The promise of class `exact`, on a few prompts in every run."""
    assert replay(exact, CASES[name], 4096).compared > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SHORT) - set(SAMPLE)))
def test_every_prompt_equals_oracle(exact, name):
    """The promise of class `exact`, on every other prompt."""
    assert replay(exact, CASES[name], 4096).compared > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["chat_turns", "english_story", "exactly_17", *LONG])
def test_chunk_size_does_not_show(exact, name, chunk):
    """Chunks of 16, 64, 384 and 4096 tokens give the oracle's tokens, up to 1,500 of prompt."""
    assert replay(exact, CASES[name], chunk).compared > 0


@pytest.mark.slow
def test_batched_decode_equals_oracle(exact):
    """Eight sequences of different lengths step together and still give their own tokens."""
    names = SHORT[:8]
    pages_each = 12
    tables = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(len(names))]
    chosen = [CASES[name] for name in names]
    for case, table in zip(chosen, tables, strict=True):
        logits = exact.prefill_chunk(case["prompt_ids"], 0, table)
        assert int(logits.argmax()) == case["greedy_ids"][0]
    for step in range(31):
        logits = exact.decode_step(
            [case["greedy_ids"][step] for case in chosen],
            [len(case["prompt_ids"]) + step for case in chosen],
            tables,
        )
        for row, case in zip(logits, chosen, strict=True):
            if case["gaps"][step + 1] > NEAR_TIE:
                assert int(row.argmax()) == case["greedy_ids"][step + 1], case["name"]


def test_golden_check_passes_in_float32(exact, model_path):
    """The shipped reference belongs to the bundled model, and float32 meets its promise."""
    reference = golden_check.find_reference(weight_hashes(model_path))
    assert reference is not None
    result = golden_check.run(exact, reference)
    assert result.is_passed, result
    assert result.relative_l2 < 1e-4


@pytest.mark.slow
def test_golden_check_passes_in_bfloat16(model_path):
    """The measured bound holds, and bfloat16 is really used: it is not as near as float32."""
    reference = golden_check.find_reference(weight_hashes(model_path))
    assert reference is not None
    result = golden_check.run(build(model_path, ComputeDtype.BFLOAT16), reference)
    assert result.is_passed, result
    assert result.relative_l2 > 1e-3
