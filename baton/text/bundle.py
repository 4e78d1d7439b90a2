"""Everything a service needs to turn messages into tokens and tokens into text, in one load.

Owns `TextBundle`. Reads the tokenizer, the chat template and the digests from a model's files; no
weights, no torch, well under a second for the bundled model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.engine.gguf_meta import read_metadata
from baton.errors import Reason, ServiceError
from baton.text import definition as definitions
from baton.text.rendered import RenderedPrompt
from baton.text.stream import TextOptions, TextStream
from baton.text.template import ChatTemplate
from baton.text.tokenizer import Tokenizer

TEMPLATE_FILE_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBundle:
    """A model's tokenizer and chat template with their digests.

    `template` is None when the model has none: then only raw completions can be served.
    `template_digest` is 16 bytes (None without a template), `tokenizer_hash` 8.
    """

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    tokenizer_hash: bytes
    template_digest: bytes | None

    @classmethod
    def load(cls, path: Path) -> TextBundle:
        """Load from a `.gguf` file or a Hugging Face directory.

        Raises ServiceError MODEL_NOT_FOUND, UNSUPPORTED or INVALID_REQUEST, naming the field.
        """
        if path.is_dir():
            tokenizer = Tokenizer.from_directory(path)
            source = _directory_template(path)
        else:
            metadata = read_metadata(path)
            tokenizer = Tokenizer(definitions.from_gguf_metadata(metadata))
            value = metadata.get("tokenizer.chat_template")
            source = value if isinstance(value, str) else None
        template = None if source is None else _template(source, tokenizer)
        return cls(
            path=path,
            tokenizer=tokenizer,
            template=template,
            eos_ids=tokenizer.eos_ids,
            tokenizer_hash=tokenizer.tokenizer_hash(),
            template_digest=None if template is None else template.template_digest(),
        )

    def chat_template(self) -> ChatTemplate:
        """The template. Raises ServiceError UNSUPPORTED naming `messages` when there is none."""
        if self.template is None:
            raise ServiceError(
                Reason.UNSUPPORTED,
                "this model has no chat template; send a prompt to /v1/completions",
                field="messages",
            )
        return self.template

    def encode_rendered(self, rendered: RenderedPrompt) -> list[int]:
        """The token ids of a rendered prompt; see `Tokenizer.encode_rendered`."""
        return self.tokenizer.encode_rendered(rendered)

    def stream(self, options: TextOptions | None = None) -> TextStream:
        """A new text stream over this tokenizer."""
        return TextStream(self.tokenizer, options)


def _template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(
        source,
        control_tokens=tokenizer.control_tokens.keys(),
        variables=tokenizer.template_variables,
    )


def _directory_template(directory: Path) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    try:
        with (directory / "chat_template.jinja").open("rb") as file:
            body = file.read(TEMPLATE_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return _configured_template(directory)
    except OSError as error:
        raise _bad_template(f"cannot be read ({error.strerror})") from error
    if len(body) > TEMPLATE_FILE_BYTES_MAX:
        raise _bad_template(f"is larger than {TEMPLATE_FILE_BYTES_MAX} bytes")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_template("is not UTF-8") from error


def _configured_template(directory: Path) -> str | None:
    path = directory / "tokenizer_config.json"
    config = definitions.read_json(path, definitions.SMALL_JSON_BYTES_MAX) or {}
    value = config.get("chat_template")
    if isinstance(value, list):
        # Several named templates: the one called `default` serves chat.
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _bad_template(remedy: str) -> ServiceError:
    message = f"chat_template.jinja {remedy}"
    return ServiceError(Reason.INVALID_REQUEST, message, field="chat_template.jinja")
