"""The tokenizer: equal ids to the oracle, no control token from plain text, exact bytes back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.text.bundle import TextBundle
from baton.text.definition import from_gguf_metadata
from baton.text.rendered import RenderedPrompt
from baton.text.tokenizer import TEXT_BYTES_MAX, Tokenizer

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "token_ids.json").read_text(encoding="utf-8"))


@pytest.fixture
def tiny(tiny_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(from_gguf_metadata(tiny_metadata))


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_ids_equal_the_golden_ids(bundle: TextBundle, row: dict[str, Any]) -> None:
    """The ids come from transformers; a different one is a different prompt to the model."""
    assert bundle.tokenizer.encode(row["text"]) == row["ids"]
    assert bundle.tokenizer.decode(row["ids"]) == row["text"]


@pytest.mark.slow
def test_ids_equal_transformers_on_many_texts(
    bundle: TextBundle, model_path: Path, make_golden: Any
) -> None:
    """The live oracle, over the golden texts and 400 random ones of many scripts."""
    oracle = make_golden.load_oracle(model_path)
    texts = [*make_golden.TEXTS, *make_golden.random_texts(400, seed=7)]
    for text in texts:
        ids = bundle.tokenizer.encode(text)
        assert ids == make_golden.oracle_ids(oracle, text), text
        expected = oracle.decode(ids, clean_up_tokenization_spaces=False)
        assert bundle.tokenizer.decode(ids) == expected
        marked = f"{text}<|im_end|>{text}<file_sep>"
        assert bundle.tokenizer.encode_prompt(marked) == make_golden.oracle_ids(oracle, marked)


@pytest.mark.slow
def test_decoding_equals_transformers_on_random_ids(
    bundle: TextBundle, model_path: Path, make_golden: Any
) -> None:
    """Random ids are mostly broken UTF-8: the replacement characters must be the same ones."""
    oracle = make_golden.load_oracle(model_path)
    draw = random.Random(11)
    for _ in range(300):
        ids = [draw.choice([draw.randrange(49152), draw.randrange(300)]) for _ in range(20)]
        for hidden in (True, False):
            expected = oracle.decode(
                ids, skip_special_tokens=hidden, clean_up_tokenization_spaces=False
            )
            assert bundle.tokenizer.decode(ids, skip_special=hidden) == expected


def test_facts_of_the_bundled_tokenizer(bundle: TextBundle) -> None:
    """Sizes, ends and the byte splits that other tests rely on."""
    tokenizer = bundle.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.bos == 1
    assert [item for item in range(49152) if tokenizer.is_special(item)] == list(range(17))
    emoji = tokenizer.encode("😀")
    assert [tokenizer.decode_bytes(item).hex() for item in emoji] == ["f09f", "98", "80"]
    assert emoji == [10813, 242, 218]
    assert [tokenizer.decode_bytes(item).hex() for item in tokenizer.encode("ď")] == ["c4", "8f"]
    assert len(tokenizer.tokenizer_hash()) == 8


def test_control_tokens_in_plain_text_are_text(tiny: Tokenizer) -> None:
    """The security boundary: `encode` never makes an id that steers the model."""
    for text in ("<|im_end|>", "x<|im_start|>system\n", "<|endoftext|><|im_end|>"):
        ids = tiny.encode(text)
        assert not any(tiny.is_special(item) for item in ids)
        assert tiny.decode(ids) == text


def test_plain_text_cannot_spell_the_private_markers(tiny: Tokenizer) -> None:
    """Ids in a marker's form, without its random part, stay text."""
    text = "\ue000" + "0" * 32 + ":1\ue001"
    assert tiny.decode(tiny.encode(text)) == text
    assert not any(tiny.is_special(item) for item in tiny.encode(text))


@given(text=st.text(max_size=60))
@settings(max_examples=200)
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    """A byte-level vocabulary loses nothing."""
    tokenizer = _TINY
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_user_defined_tokens_are_matched_whole_but_are_not_special(tiny: Tokenizer) -> None:
    """`<think>` is an added token as transformers has it: one id, and shown in the text."""
    assert tiny.encode("a<think>b") == [4 + 97, 3, 4 + 98]
    assert not tiny.is_special(3)
    assert tiny.decode([3]) == "<think>"


def test_raw_prompts_may_hold_control_tokens_and_get_the_start_token(tiny: Tokenizer) -> None:
    """Completions give the whole prompt to the caller, as transformers does by default."""
    assert tiny.encode_prompt("ab<|im_end|>") == [0, 260, 1]
    assert tiny.encode("ab") == [260]


def test_a_rendered_prompt_has_control_tokens_only_at_its_spans(tiny: Tokenizer) -> None:
    """The second `<|im_end|>` is not in a span, so it is text."""
    text = "<|im_start|>abc<|im_end|><|im_end|>"
    rendered = RenderedPrompt(text=text, control_spans=((0, 12), (25, 35)))
    ids = tiny.encode_rendered(rendered)
    assert ids[0] == 0
    assert ids[1] == 261
    assert ids[-1] == 1
    assert [item for item in ids if tiny.is_special(item)] == [0, 1]
    assert tiny.decode(ids, skip_special=False) == text


def test_a_rendered_prompt_is_tokenised_as_one_text(bundle: TextBundle) -> None:
    """Without control tokens in the content, ids equal tokenising the whole text at once."""
    conversation = [{"role": "user", "content": "First point. \n\n\n\nSecond  12"}]
    rendered = bundle.chat_template().render(conversation)
    ids = bundle.tokenizer.encode_rendered(rendered)
    assert ids == bundle.tokenizer.encode_prompt(rendered.text)


def test_an_unpaired_surrogate_is_refused_naming_the_field(tiny: Tokenizer) -> None:
    """JSON can spell one; the library below would raise a type error."""
    for text in ("\ud83d", "a\ud800", "\udc00x"):
        for call in (tiny.encode, tiny.encode_prompt):
            with pytest.raises(ServiceError) as caught:
                call(text, field="prompt[1]")
            assert caught.value.reason is Reason.INVALID_REQUEST
            assert caught.value.field == "prompt[1]"


def test_text_at_the_bound_is_read_and_above_it_refused(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is checked before the library sees the text."""
    assert TEXT_BYTES_MAX == 16 << 20
    monkeypatch.setattr("baton.text.tokenizer.TEXT_BYTES_MAX", 8)
    assert len(tiny.encode("x" * 8)) == 8
    with pytest.raises(ServiceError) as caught:
        tiny.encode("x" * 9)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


def test_ids_beyond_the_vocabulary_have_no_text(tiny: Tokenizer) -> None:
    """Models pad their output rows; a padding id must not break a stream."""
    assert tiny.decode_bytes(tiny.vocab_size) == b""
    assert tiny.decode([tiny.vocab_size + 5]) == ""


def test_the_hash_names_the_definition(tiny_metadata: dict[str, Any]) -> None:
    """Equal definitions have equal hashes; a change of one merge, kind or rule shows."""
    first = Tokenizer(from_gguf_metadata(tiny_metadata)).tokenizer_hash()
    assert Tokenizer(from_gguf_metadata(tiny_metadata)).tokenizer_hash() == first
    changes = (
        {"tokenizer.ggml.merges": ["a b"]},
        {"tokenizer.ggml.pre": "qwen2"},
        {"tokenizer.ggml.token_type": [3, 3, 4, 4] + [1] * 258},
        {"tokenizer.ggml.add_bos_token": False},
    )
    hashes = {
        Tokenizer(from_gguf_metadata({**tiny_metadata, **change})).tokenizer_hash()
        for change in changes
    }
    assert len(hashes | {first}) == len(changes) + 1


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model", Reason.UNSUPPORTED),
        ({"tokenizer.ggml.pre": "mystery"}, "tokenizer.ggml.pre", Reason.UNSUPPORTED),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens", Reason.INVALID_REQUEST),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges", Reason.INVALID_REQUEST),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type", Reason.INVALID_REQUEST),
        (
            {"tokenizer.ggml.eos_token_id": 9999},
            "tokenizer.ggml.eos_token_id",
            Reason.INVALID_REQUEST,
        ),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "tokenizer.json", Reason.UNSUPPORTED),
    ],
)
def test_bad_metadata_is_refused_naming_the_key(
    tiny_metadata: dict[str, Any], change: dict[str, Any], field: str, reason: Reason
) -> None:
    """A model file is input as well: it fails by name, not by a traceback."""
    with pytest.raises(ServiceError) as caught:
        Tokenizer(from_gguf_metadata({**tiny_metadata, **change}))
    assert caught.value.reason is reason
    assert caught.value.field == field


def _tiny() -> Tokenizer:
    """For property tests, which cannot take a function-scoped fixture."""
    from baton.text.byte_level import BYTE_TO_CHAR

    alphabet = [BYTE_TO_CHAR[byte] for byte in range(256)]
    return Tokenizer(
        from_gguf_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["<|im_end|>", *alphabet, "ab"],
                "tokenizer.ggml.token_type": [3] + [1] * 257,
                "tokenizer.ggml.merges": ["a b"],
            }
        )
    )


_TINY = _tiny()
