"""Loading from a GGUF and from a Hugging Face directory: the same tokenizer, the right template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from baton.text.bundle import TextBundle
from baton.text.definition import from_gguf_metadata
from baton.text.tokenizer import Tokenizer

TURN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write(path: Path, value: object) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path, tiny_metadata: dict[str, Any]) -> Path:
    """A model directory with the tiny tokenizer, as `save_pretrained` lays it out."""
    write(tmp_path / "tokenizer.json", from_gguf_metadata(tiny_metadata).document)
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "chat_template": TURN,
    }
    write(tmp_path / "tokenizer_config.json", config)
    write(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    return tmp_path


def test_a_directory_gives_the_same_ids_as_the_gguf(
    directory: Path, tiny_metadata: dict[str, Any]
) -> None:
    """One definition, two containers."""
    ours = TextBundle.load(directory)
    gguf = Tokenizer(from_gguf_metadata(tiny_metadata))
    for text in ("abc <think> é<|im_end|>", "", "a\n\nb"):
        assert ours.tokenizer.encode(text) == gguf.encode(text)
        assert ours.tokenizer.encode_prompt(text) == gguf.encode_prompt(text)
    assert ours.eos_ids == (1, 2)
    assert ours.tokenizer.bos == 0
    assert ours.tokenizer_hash == gguf.tokenizer_hash()


def test_chat_template_jinja_wins_over_the_configuration(directory: Path) -> None:
    """As in transformers."""
    assert TextBundle.load(directory).chat_template().source == TURN
    write(directory / "chat_template.jinja", "other")
    assert TextBundle.load(directory).chat_template().source == "other"


def test_of_several_templates_the_default_one_serves(directory: Path) -> None:
    """tokenizer_config.json may hold a list of named templates."""
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write(directory / "tokenizer_config.json", {"chat_template": named})
    assert TextBundle.load(directory).chat_template().source == "d"


def test_a_model_without_a_template_serves_completions_only(directory: Path) -> None:
    """Chat is refused with the way out."""
    write(directory / "tokenizer_config.json", {})
    bundle = TextBundle.load(directory)
    assert bundle.template is None
    assert bundle.template_digest is None
    with pytest.raises(ServiceError) as caught:
        bundle.chat_template()
    assert caught.value.reason is Reason.UNSUPPORTED


def test_special_tokens_map_names_what_the_configuration_does_not(directory: Path) -> None:
    """Older exports keep them there; without a generation config, config.json names the end."""
    write(directory / "tokenizer_config.json", {})
    write(directory / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    (directory / "generation_config.json").unlink()
    write(directory / "config.json", {"eos_token_id": 2})
    assert TextBundle.load(directory).eos_ids == (1, 2)


def test_byte_fallback_vocabularies_decode(tmp_path: Path) -> None:
    """SentencePiece-like BPE (Phi-3): word marks are spaces, `<0xE2>` is a byte."""
    vocab = {"<s>": 0, "<0xC3>": 1, "<0xA9>": 2, "\u2581": 3, "a": 4, "\u2581a": 5}
    document = {
        "added_tokens": [
            {
                "id": 0,
                "content": "<s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": True,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [["\u2581", "a"]],
        },
    }
    write(tmp_path / "tokenizer.json", document)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode(" aé") == [5, 1, 2]
    assert tokenizer.decode([5, 1, 2]) == " aé"
    # rstrip: the white space after a control token belongs to it, as the definition says.
    assert tokenizer.encode_prompt("<s>  a") == [0, 4]
    assert tokenizer.encode("<s>").count(0) == 0


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokenizer.json", "{", Reason.INVALID_REQUEST),
        ("tokenizer.json", "[]", Reason.INVALID_REQUEST),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, Reason.UNSUPPORTED),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}, "merges": []}}, Reason.INVALID_REQUEST),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}, "merges": []}}, Reason.UNSUPPORTED),
        (
            "tokenizer.json",
            {
                "model": {"vocab": {"a": 1 << 40}, "merges": []},
                "decoder": {"type": "ByteLevel"},
            },
            Reason.INVALID_REQUEST,
        ),
        (
            "tokenizer.json",
            {"model": {"vocab": {}, "merges": []}, "added_tokens": [{}]},
            Reason.INVALID_REQUEST,
        ),
        ("tokenizer_config.json", "{}}", Reason.INVALID_REQUEST),
        ("chat_template.jinja", "{% if", Reason.UNSUPPORTED),
    ],
)
def test_damaged_files_are_refused_by_name(
    directory: Path, name: str, value: object, reason: Reason
) -> None:
    """A model directory is input too."""
    write(directory / name, value)
    with pytest.raises(ServiceError) as caught:
        TextBundle.load(directory)
    assert caught.value.reason is reason
    assert caught.value.field is not None


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """With the remedy."""
    with pytest.raises(ServiceError) as caught:
        TextBundle.load(tmp_path)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_loading_imports_no_torch(model_path: Path) -> None:
    """The gateway loads this: neither torch nor transformers nor the slow gguf reader."""
    script = (
        "import sys; from pathlib import Path; from baton.text.bundle import TextBundle;"
        f"b = TextBundle.load(Path({str(model_path)!r}));"
        "print(len(b.tokenizer_hash), sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert answer.stdout.decode().strip() == "8 []"


def test_the_bundled_tokenizer_hash_is_pinned(bundle: TextBundle) -> None:
    """It stands in every blob header: a change makes old KV unreadable, so it must be meant."""
    assert bundle.tokenizer_hash.hex() == "d333bcb5d81e2030"
