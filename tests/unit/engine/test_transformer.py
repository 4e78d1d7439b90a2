"""The forward pass against transformers' own Llama on tiny random models, in float32.

The oracle shares no code with ours: agreement on logits to rounding, over every way of cutting a
prompt into chunks, pages and batches, is what `exact` rests on.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from baton.engine.kv_pages import KvPages
from baton.engine.transformer import ComputeCancelled, Transformer
from baton.engine.weights import ComputeDtype, ModelWeights, load_weights
from baton.errors import Reason, ServiceError
from baton.testing.tiny_models import GQA_TIED, TINY_MODELS, write_directory, write_gguf

BLOCK_TOKENS = 16
PAGES = 24
SHUFFLED = [7, 3, 19, 0, 11, 5, 23, 2, 17, 9, 1, 21]
OTHER = [4, 6, 8, 10, 12, 13, 14, 15, 16, 18, 20, 22]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Our weights and the oracle's model of the same files."""

    weights: ModelWeights
    oracle: LlamaForCausalLM

    def transformer(self) -> Transformer:
        """A transformer on fresh pages."""
        geometry = self.weights.config.kv_geometry(BLOCK_TOKENS, self.weights.dtype.kv_dtype)
        return Transformer(self.weights, KvPages.allocate(geometry, PAGES))

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The oracle's logits after every token [tokens, vocabulary]."""
        return self.oracle(input_ids=torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def pair(request, tmp_path_factory):
    path = write_directory(tmp_path_factory.mktemp(request.param), TINY_MODELS[request.param])
    return load_pair(path)


@pytest.fixture(scope="module")
def one_pair(tmp_path_factory):
    return load_pair(write_directory(tmp_path_factory.mktemp("one"), GQA_TIED))


def load_pair(path, **oracle_options) -> Pair:
    oracle = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **oracle_options).eval()
    return Pair(weights=load_weights(path, ComputeDtype.FLOAT32), oracle=oracle)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def prefill(transformer: Transformer, tokens: list[int], chunk: int, table: list[int]):
    """The logits after the last token, computed in chunks of `chunk`."""
    last = (len(tokens) - 1) // chunk * chunk
    for first in range(0, last, chunk):
        transformer.prefill_kv(tokens[first : first + chunk], first, table)
    return transformer.prefill_chunk(tokens[last:], last, table)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64, 4096])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 150])
def test_prefill_matches_oracle_in_any_chunks(pair, chunk, count):
    """Where a prompt is cut must not show: chunk and page borders fall everywhere."""
    tokens = random_tokens(count)
    logits = prefill(pair.transformer(), tokens, chunk, SHUFFLED)
    torch.testing.assert_close(logits, pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4)


def test_decode_matches_oracle_at_every_position(pair):
    """KV written by prefill and by decode serve alike, across page borders."""
    tokens = random_tokens(70, seed=1)
    expected = pair.expected(tokens)
    transformer = pair.transformer()
    transformer.prefill_kv(tokens[:20], 0, SHUFFLED)
    for position in range(20, 70):
        logits = transformer.decode_step([tokens[position]], [position], [SHUFFLED])
        torch.testing.assert_close(logits[0], expected[position], rtol=1e-4, atol=1e-4)


def test_batched_decode_equals_single_decode(pair):
    """Who else is in the batch must not show beyond rounding; lengths differ on purpose."""
    one, other = random_tokens(33, seed=2), random_tokens(90, seed=3)
    transformer = pair.transformer()
    transformer.prefill_kv(one[:-1], 0, SHUFFLED)
    transformer.prefill_kv(other[:-1], 0, OTHER)
    logits = transformer.decode_step([one[-1], other[-1]], [32, 89], [SHUFFLED, OTHER])
    torch.testing.assert_close(logits[0], pair.expected(one)[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], pair.expected(other)[-1], rtol=1e-4, atol=1e-4)


def test_long_chunk_attends_in_query_blocks(one_pair):
    """A chunk longer than one query block, on top of earlier KV, crosses the block loop's seams."""
    tokens = random_tokens(300, seed=4)
    table = list(range(19))
    logits = prefill(one_pair.transformer(), tokens, 280, table)
    torch.testing.assert_close(logits, one_pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4)
    whole = one_pair.transformer()
    torch.testing.assert_close(
        whole.prefill_chunk(tokens, 0, table), one_pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rope_matches_oracle(tmp_path, rope):
    """Long-context Llamas scale their frequencies; a wrong blend only shows far from position 0."""
    path = write_directory(tmp_path, GQA_TIED, extra_config={"rope_scaling": rope})
    pair = load_pair(path)
    assert pair.weights.config.rope_scaling is not None
    tokens = random_tokens(180, seed=5)
    logits = prefill(pair.transformer(), tokens, 64, SHUFFLED)
    torch.testing.assert_close(logits, pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4)


def test_gguf_model_matches_oracle_of_directory(tmp_path):
    """llama.cpp stores Q and K rows in another order; undone, the model is the same."""
    pair = load_pair(write_directory(tmp_path / "hf", GQA_TIED))
    weights = load_weights(write_gguf(tmp_path / "tiny.gguf", GQA_TIED), ComputeDtype.FLOAT32)
    from_gguf = replace(pair, weights=weights)
    tokens = random_tokens(60, seed=6)
    logits = prefill(from_gguf.transformer(), tokens, 16, SHUFFLED)
    torch.testing.assert_close(logits, pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4)


def test_bfloat16_is_as_near_float32_as_the_oracles(tmp_path):
    """The `equivalent` class differs by rounding only.

    These random weights amplify rounding, so the measure is transformers' own bfloat16.
    """
    path = write_directory(tmp_path, GQA_TIED)
    pair = load_pair(path)
    coarse = replace(pair, weights=load_weights(path, ComputeDtype.BFLOAT16)).transformer()
    tokens = random_tokens(100, seed=7)
    expected = pair.expected(tokens)
    theirs = replace(pair, oracle=pair.oracle.to(torch.bfloat16)).expected(tokens).float()
    coarse.prefill_kv(tokens[:64], 0, SHUFFLED)
    rows = [
        coarse.decode_step([tokens[position]], [position], [SHUFFLED])[0]
        for position in range(64, 100)
    ]
    ours = torch.stack(rows)
    assert ours.dtype == torch.float32
    assert relative_l2(ours, expected[64:]) <= 1.2 * relative_l2(theirs[64:], expected[64:])
    assert coarse.numeric_class() == "weights=f32 act=bf16 acc=f32 kv=bf16 invariant=no"


def relative_l2(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).norm() / expected.norm())


def test_chunk_touches_only_its_own_slots(one_pair):
    """Pages of other sequences, and later slots of the own page, belong to somebody else."""
    transformer = one_pair.transformer()
    transformer.prefill_kv(random_tokens(20), 0, [5, 2])
    layers = [transformer.pages.layer(i) for i in range(one_pair.weights.config.layers)]
    for layer in layers:
        written = {int(page) for page in layer.flatten(1).abs().sum(1).nonzero()}
        assert written == {5, 2}
        assert layer[2, :, :, 4:].abs().sum() == 0
        assert layer[2, :, :, :4].abs().amin(-1).min() > 0


def test_pages_hold_layout_of_the_kv_package(one_pair):
    """What torch writes, `baton.kv.layout` must find: slots wider than pages, offsets by layer."""
    geometry = one_pair.weights.config.kv_geometry(BLOCK_TOKENS, ComputeDtype.FLOAT32.kv_dtype)
    buffer = bytearray(64 + 3 * geometry.slot_bytes)
    pages = KvPages.from_buffer(memoryview(buffer), geometry, 3, offset=64)
    pages.layer(1)[2, 1, 0, 7] = torch.arange(geometry.head_dim)
    at = 64 + 2 * geometry.slot_bytes
    at += ((1 * 2 + 1) * geometry.kv_heads * BLOCK_TOKENS + 7) * geometry.head_dim * 4
    found = np.frombuffer(buffer, np.float32, geometry.head_dim, at)
    np.testing.assert_array_equal(found, np.arange(geometry.head_dim))
    assert np.count_nonzero(np.frombuffer(buffer, np.uint8)) == np.count_nonzero(
        found.view(np.uint8)
    )


def test_hand_off_over_shared_memory_moves_no_bytes(one_pair):
    """Prefill writes an arena, decode continues from its own mapping of it: the whole idea."""
    geometry = one_pair.weights.config.kv_geometry(BLOCK_TOKENS, ComputeDtype.FLOAT32.kv_dtype)
    with mmap.mmap(-1, PAGES * geometry.slot_bytes) as arena:
        first, second = (
            Transformer(one_pair.weights, KvPages.from_buffer(arena, geometry, PAGES))
            for _ in range(2)
        )
        tokens = random_tokens(40, seed=8)
        first.prefill_kv(tokens[:39], 0, SHUFFLED)
        logits = second.decode_step([tokens[39]], [39], [SHUFFLED])[0]
        # The mapping cannot be closed while a tensor still looks into it.
        del first, second
    torch.testing.assert_close(logits, one_pair.expected(tokens)[-1], rtol=1e-4, atol=1e-4)


def test_cancel_is_seen_between_layers(one_pair):
    """A fence must stop a long prefill within a layer, not at its end."""
    asked = []

    def should_cancel() -> bool:
        asked.append(None)
        return len(asked) == 2

    with pytest.raises(ComputeCancelled):
        one_pair.transformer().prefill_kv([1, 2, 3], 0, [0], should_cancel)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("tokens", "first", "table", "field"),
    [
        ([], 0, [0], "tokens"),
        ([100_000], 0, [0], "tokens"),
        ([-1], 0, [0], "tokens"),
        ([1], 512, list(range(24)), "first_position"),
        ([1], -1, [0], "first_position"),
        ([1] * 17, 0, [0], "page_table"),
        ([1], 0, [24], "page_table"),
        ([1], 0, [-1], "page_table"),
    ],
)
def test_bad_arguments_name_the_field(one_pair, tokens, first, table, field):
    """A wrong page number would read another sequence's memory; it is refused before any work."""
    with pytest.raises(ServiceError) as caught:
        one_pair.transformer().prefill_chunk(tokens, first, table)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == field


def test_pages_of_another_geometry_are_refused(one_pair):
    """A worker must not attach to an arena that another model's pages are laid out for."""
    geometry = replace(
        one_pair.weights.config.kv_geometry(BLOCK_TOKENS, ComputeDtype.FLOAT32.kv_dtype), layers=3
    )
    with pytest.raises(ServiceError) as caught:
        Transformer(one_pair.weights, KvPages.allocate(geometry, 1))
    assert caught.value.reason is Reason.COMPAT_MISMATCH


def test_readonly_or_short_buffer_is_refused(one_pair):
    """torch would write through a read-only map and crash the process."""
    geometry = one_pair.weights.config.kv_geometry(BLOCK_TOKENS, ComputeDtype.FLOAT32.kv_dtype)
    for buffer in (bytes(geometry.slot_bytes), bytearray(geometry.slot_bytes - 1)):
        with pytest.raises(ServiceError) as caught:
            KvPages.from_buffer(memoryview(buffer), geometry, 1)
        assert caught.value.field == "buffer"
