"""What defines a tokenizer: one in-memory form, read from a GGUF file or a model directory.

Owns `TokenizerDefinition` and its two readers. The form is that of `tokenizer.json`, because the
`tokenizers` library builds from it; a GGUF's metadata is translated into it. Never tokenises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.errors import Reason, ServiceError
from baton.text.byte_level import is_byte_level, to_byte_level

Json = dict[str, Any]

TOKENIZER_JSON_BYTES_MAX: Final = 128 << 20
SMALL_JSON_BYTES_MAX: Final = 16 << 20
VOCABULARY_MAX: Final = 1 << 22

_CONTROL_TYPE: Final = 3
_USER_DEFINED_TYPE: Final = 4

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """How text is cut before merging. `split` None: GPT-2's own rule.

    `ignore_merges`: a piece that is a token as a whole is taken without merging.
    """

    split: str | None = None
    ignore_merges: bool = False


_GPT2: Final = _PreTokenizer()
_LLAMA3: Final = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True)
_QWEN2: Final = _PreTokenizer(split=_QWEN2_SPLIT)

# tokenizer.ggml.pre -> rule. `smollm` cuts as transformers' conversion does, which is the oracle
# of the token ids: GPT-2's rule. The vocabulary has no merge with a digit in it, so that digits
# stay single either way; white space right before a digit is where an isolated-digits rule differs.
_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """A tokenizer as data.

    `document` has the form of `tokenizer.json`; `spelling` names how tokens spell bytes (a key of
    `byte_level.SPELLINGS`); `variables` are the named special tokens that templates may use
    (`bos_token`, `eos_token`, ...).
    """

    document: Json
    spelling: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    variables: Mapping[str, str]


# --- GGUF ------------------------------------------------------------------------------------


def from_gguf_metadata(metadata: Mapping[str, object]) -> TokenizerDefinition:
    """Translate a GGUF file's metadata.

    Raises ServiceError UNSUPPORTED for a kind of tokenizer that is not read, INVALID_REQUEST for
    metadata that contradicts itself; both name the key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _unsupported("tokenizer.ggml.model", f"is {kind!r}; only byte-level BPE (gpt2) is")
    pre_name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    pre = _PRE_TOKENIZERS.get(pre_name) if isinstance(pre_name, str) else None
    if pre is None:
        raise _unsupported("tokenizer.ggml.pre", f"is {pre_name!r}; {sorted(_PRE_TOKENIZERS)} are")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = _strings(metadata, "tokenizer.ggml.merges")
    bos_id = _token_id(metadata, "bos", len(tokens))
    does_add_bos = metadata.get("tokenizer.ggml.add_bos_token") is True
    document: Json = {
        "version": "1.0",
        "added_tokens": _gguf_added_tokens(metadata, tokens),
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": (
            _add_bos(tokens[bos_id], bos_id) if does_add_bos and bos_id is not None else None
        ),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": _gguf_vocabulary(tokens),
            "merges": [list(pair) for pair in map(_merge_pair, merges)],
        },
    }
    eos_ids = {_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")} - {None}
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    named = {f"{short}_token": _token_id(metadata, name, len(tokens)) for short, name in names}
    return TokenizerDefinition(
        document=document,
        spelling="byte_level",
        bos_id=bos_id,
        eos_ids=tuple(sorted(item for item in eos_ids if item is not None)),
        variables={name: tokens[item] for name, item in named.items() if item is not None},
    )


def _gguf_vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {
        token if is_byte_level(token) else to_byte_level(token): index
        for index, token in enumerate(tokens)
    }


def _gguf_added_tokens(metadata: Mapping[str, object], tokens: Sequence[str]) -> list[Json]:
    """Control tokens are special; user-defined ones (`<think>`) are matched whole, but are not."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise _malformed("tokenizer.ggml.token_type", "must have one entry for each token")
    return [
        _added_token(index, tokens[index], is_special=kind == _CONTROL_TYPE)
        for index, kind in enumerate(types)
        if kind in (_CONTROL_TYPE, _USER_DEFINED_TYPE) and is_byte_level(tokens[index])
    ]


def _added_token(token_id: int, content: str, *, is_special: bool) -> Json:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def _byte_level(*, use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _pre_tokenizer(pre: _PreTokenizer) -> Json:
    if pre.split is None:
        return _byte_level(use_regex=True)
    split = {
        "type": "Split",
        "pattern": {"Regex": pre.split},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _add_bos(content: str, token_id: int) -> Json:
    first = {"SpecialToken": {"id": content, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {content: {"id": content, "ids": [token_id], "tokens": [content]}},
    }


def _merge_pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise _malformed("tokenizer.ggml.merges", "must hold pairs with one space between")
    return left, right


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise _malformed(key, "must be a list of strings; the file has no usable tokenizer")
    if len(value) > VOCABULARY_MAX:
        raise _malformed(key, f"may hold at most {VOCABULARY_MAX} entries")
    return value


def _token_id(metadata: Mapping[str, object], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise _malformed(key, f"must be a token id below {vocab_size}")
    return value


# --- A model directory -----------------------------------------------------------------------


def from_directory(directory: Path) -> TokenizerDefinition:
    """Read `tokenizer.json` and what stands beside it in a Hugging Face model directory.

    Raises ServiceError MODEL_NOT_FOUND when there is no tokenizer.json, UNSUPPORTED for a kind
    that is not read, INVALID_REQUEST for files that are not the JSON they should be.
    """
    document = read_json(directory / "tokenizer.json", TOKENIZER_JSON_BYTES_MAX)
    if document is None:
        raise ServiceError(
            Reason.MODEL_NOT_FOUND,
            f"{directory} has no tokenizer.json; export one with `save_pretrained`",
            field="tokenizer.json",
        )
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise _unsupported("model.type", "of tokenizer.json is not BPE; only BPE is")
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not _is_vocabulary(vocabulary) or not isinstance(merges, list):
        raise _malformed("model", "of tokenizer.json must hold vocab (text to id) and merges")
    if not all(_is_added_token(token) for token in document.get("added_tokens") or []):
        raise _malformed("added_tokens", "of tokenizer.json must hold id, content and special")
    config = read_json(directory / "tokenizer_config.json", SMALL_JSON_BYTES_MAX) or {}
    named = read_json(directory / "special_tokens_map.json", SMALL_JSON_BYTES_MAX) or {}
    variables = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _content(config.get(key, named.get(key)))) is not None
    }
    ids = _all_ids(document)
    eos_ids = _directory_eos(directory, ids, variables.get("eos_token"))
    return TokenizerDefinition(
        document=document,
        spelling=_spelling(document),
        bos_id=ids.get(variables.get("bos_token", "")),
        eos_ids=tuple(sorted(eos_ids)),
        variables=variables,
    )


def _is_vocabulary(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(item, int) and item >= 0 for item in value.values()
    )


def _is_added_token(token: object) -> bool:
    return (
        isinstance(token, dict)
        and isinstance(token.get("id"), int)
        and token["id"] >= 0
        and isinstance(token.get("content"), str)
        and token["content"] != ""
        and isinstance(token.get("special"), bool)
    )


def read_json(path: Path, bytes_max: int) -> Json | None:
    """Read a JSON object of at most `bytes_max` bytes; None when there is no such file."""
    try:
        with path.open("rb") as file:
            body = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _malformed(path.name, f"cannot be read ({error.strerror})") from error
    if len(body) > bytes_max:
        raise _malformed(path.name, f"is larger than {bytes_max} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _malformed(path.name, "is not valid JSON") from error
    if not isinstance(value, dict):
        raise _malformed(path.name, "must be a JSON object")
    return value


def _content(value: object) -> str | None:
    """A special token is named by its text, or by an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _all_ids(document: Json) -> dict[str, int]:
    ids: dict[str, int] = dict(document["model"]["vocab"])
    for token in document.get("added_tokens") or []:
        ids[token["content"]] = token["id"]
    return ids


def _directory_eos(directory: Path, ids: Mapping[str, int], eos_token: str | None) -> set[int]:
    """The tokenizer's end token and those that generation_config.json adds (else config.json)."""
    found = {ids[eos_token]} if eos_token is not None and eos_token in ids else set()
    for name in ("generation_config.json", "config.json"):
        value = (read_json(directory / name, SMALL_JSON_BYTES_MAX) or {}).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        declared = {item for item in listed if isinstance(item, int)}
        if declared:
            return found | declared
    return found


def _spelling(document: Json) -> str:
    decoder = document.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step.get("type") for step in steps if isinstance(step, dict)}
    if "ByteLevel" in kinds:
        return "byte_level"
    if "ByteFallback" in kinds:
        return "byte_fallback"
    raise _unsupported("decoder", "of tokenizer.json is neither ByteLevel nor ByteFallback; these")


def _unsupported(field: str, what: str) -> ServiceError:
    message = f"{field} {what} supported; give a Hugging Face directory with a BPE tokenizer.json"
    return ServiceError(Reason.UNSUPPORTED, message, field=field)


def _malformed(field: str, remedy: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"{field} {remedy}", field=field)
