"""The tokenizer: text to token ids and back, over the `tokenizers` library.

Owns the guard between text and control tokens. Inside, every special token is renamed to a private
marker that holds a random number drawn at load, so that **no text can spell one**: a control token
comes out only where the caller says that one stands (`encode_rendered`, `encode_prompt`). The
library still sees the whole text in one pass, so the ids equal those of tokenising it at once.
Decoding is our own table of bytes, one entry a token. Never renders templates, imports no torch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from baton.engine.gguf_meta import read_metadata
from baton.errors import Reason, ServiceError
from baton.kv import digests
from baton.text import definition as definitions
from baton.text.byte_level import SPELLINGS
from baton.text.definition import TokenizerDefinition
from baton.text.rendered import RenderedPrompt, control_pattern

TEXT_BYTES_MAX: Final = 16 << 20
"""The longest text that is tokenised; the context limit of every model is far below."""


class Tokenizer:
    """One model's tokenizer. Safe to share between threads: nothing changes after construction.

    Ids at or above `vocab_size` (rows that pad a model's output) have no text.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._definition = definition
        nonce = secrets.token_hex(16)
        specials, texts = _token_texts(definition.document)
        self._specials: Mapping[str, int] = specials
        self._special_ids = frozenset(specials.values())
        # The marker is private-use characters, hex digits and a colon: no normaliser changes them.
        self._markers = {text: f"\ue000{nonce}:{item}\ue001" for text, item in specials.items()}
        self._special_pattern = control_pattern(specials)
        self._texts = texts
        spell = SPELLINGS[definition.spelling]
        added = {token["id"] for token in definition.document.get("added_tokens") or []}
        self._bytes = [
            text.encode("utf-8") if item in added else spell(text)
            for item, text in enumerate(texts)
        ]
        self._backend = _build(_guarded(definition.document, self._markers))
        self._hash = _hash(definition, texts, self._special_ids)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a `.gguf` file or a Hugging Face directory.

        Raises ServiceError MODEL_NOT_FOUND, UNSUPPORTED or INVALID_REQUEST, naming the field.
        """
        return cls.from_directory(path) if path.is_dir() else cls.from_gguf(path)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls(definitions.from_gguf_metadata(read_metadata(path)))

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """From `tokenizer.json` of a Hugging Face directory."""
        return cls(definitions.from_directory(directory))

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one."""
        return len(self._texts)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, ascending."""
        return self._definition.eos_ids

    @property
    def bos(self) -> int | None:
        """The id of the start token, where the model names one."""
        return self._definition.bos_id

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text to id of every special token."""
        return self._specials

    @property
    def template_variables(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and the like, as chat templates name them."""
        return self._definition.variables

    def tokenizer_hash(self) -> bytes:
        """8 bytes that are equal exactly when two tokenizers are defined alike."""
        return self._hash

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token."""
        return token_id in self._special_ids

    def encode(self, text: str, *, field: str = "prompt") -> list[int]:
        """Tokenise plain text: what spells a special token is text, and nothing is added.

        Raises ServiceError INVALID_REQUEST naming `field` for an unpaired surrogate,
        PROMPT_TOO_LONG above `TEXT_BYTES_MAX`.
        """
        check_text(text, field)
        return self._encode(text)

    def encode_prompt(self, text: str, *, field: str = "prompt") -> list[int]:
        """Tokenise a raw completion prompt as transformers does by default.

        Here the caller owns the whole prompt: special tokens written in it are recognised, and the
        start token is added where the model says so. Raises as `encode` does.
        """
        check_text(text, field)
        marked = self._special_pattern.sub(lambda match: self._markers[match.group()], text)
        return list(self._backend.encode(marked, add_special_tokens=True).ids)

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        """Tokenise a rendered chat prompt, whole and once.

        Control tokens come out exactly at `rendered.control_spans`. Raises as `encode` does,
        naming `messages`.
        """
        check_text(rendered.text, "messages")
        pieces: list[str] = []
        end = 0
        for start, stop in rendered.control_spans:
            pieces += (rendered.text[end:start], self._markers[rendered.text[start:stop]])
            end = stop
        pieces.append(rendered.text[end:])
        return self._encode("".join(pieces))

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of these tokens; bytes that are not UTF-8 become U+FFFD."""
        hidden = self._special_ids if skip_special else frozenset[int]()
        raw = b"".join(self.decode_bytes(item) for item in token_ids if item not in hidden)
        return raw.decode("utf-8", "replace")

    def decode_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token: a part of a character, perhaps."""
        assert token_id >= 0, token_id
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token decoded alone, as `logprobs` shows it."""
        return self.decode_bytes(token_id).decode("utf-8", "replace")

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def check_text(text: str, field: str) -> None:
    """Refuse text that cannot be tokenised, naming `field`."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{field} holds an unpaired surrogate, which is no Unicode text; send whole characters",
            field=field,
        ) from error
    if size > TEXT_BYTES_MAX:
        raise ServiceError(
            Reason.PROMPT_TOO_LONG,
            f"{field} is {size} bytes; at most {TEXT_BYTES_MAX} are read",
            field=field,
        )


def _token_texts(document: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The special tokens, and the text of every id ("" for an id nobody has)."""
    specials: dict[str, int] = {}
    by_id: dict[int, str] = {item: text for text, item in document["model"]["vocab"].items()}
    for token in document.get("added_tokens") or []:
        by_id[token["id"]] = token["content"]
        if token["special"]:
            specials[token["content"]] = token["id"]
    size = max(by_id, default=-1) + 1
    if not 0 < size <= definitions.VOCABULARY_MAX:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"the vocabulary's highest id is {size - 1}; at most {definitions.VOCABULARY_MAX}",
            field="model.vocab",
        )
    return specials, [by_id.get(item, "") for item in range(size)]


def _guarded(document: Mapping[str, Any], markers: Mapping[str, str]) -> dict[str, Any]:
    """The document with every special token renamed to its marker, ids unchanged."""
    model = dict(document["model"])
    vocabulary = dict(model["vocab"])
    added: list[dict[str, Any]] = []
    for token in document.get("added_tokens") or []:
        marker = markers.get(token["content"])
        if marker is None:
            added.append(token)
            continue
        vocabulary.pop(token["content"], None)
        vocabulary[marker] = token["id"]
        added.append({**token, "content": marker})
    model["vocab"] = vocabulary
    plain = {"truncation": None, "padding": None}
    return {**document, **plain, "model": model, "added_tokens": added}


def _build(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    # The library raises bare Exception for every fault in a definition.
    except Exception as error:
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"the tokenizers library cannot build this tokenizer: {str(error)[:200]}",
            field="tokenizer.json",
        ) from error


def _hash(definition: TokenizerDefinition, texts: list[str], special_ids: frozenset[int]) -> bytes:
    """The tokenizer hash: the tokens, the merges, and as settings all else that decides ids."""
    document = definition.document
    model = document["model"]
    settings = {
        "bos": definition.bos_id,
        "spelling": definition.spelling,
        "added": _canonical_json(document.get("added_tokens")),
        "normalizer": _canonical_json(document.get("normalizer")),
        "pre_tokenizer": _canonical_json(document.get("pre_tokenizer")),
        "post_processor": _canonical_json(document.get("post_processor")),
        "model": _canonical_json(
            {key: item for key, item in model.items() if key not in ("vocab", "merges")}
        ),
    }
    merges = [item if isinstance(item, str) else " ".join(item) for item in model["merges"]]
    return digests.tokenizer_hash("bpe", texts, merges, sorted(special_ids), settings)


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
