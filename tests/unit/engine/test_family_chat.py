"""Chat with each family: its own template renders a prompt, its own tokens end an answer.

Both file formats. The templates here have the form that the family's models ship, without what
belongs to tools; what is rendered with a real one is the business of the template, not ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import pytest

from baton.engine.config import read_config
from baton.engine.finish import EndRule, TokenEnd
from baton.sampling_parameters import SamplingParameters
from baton.testing import tiny_models
from baton.text.bundle import TextBundle
from tests.unit.engine.family_models import VOCABULARY, family_of, oracle_of, write_as_gguf

CHATML: Final = (
    "{%- if messages[0].role != 'system' and has_default %}"
    "{{- '<|im_start|>system\n' + default + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + thinking }}{%- endif %}"
)


UNLESS_THINKING: Final = (
    "'<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else ''"
)


def chatml(has_default: bool, thinking: str) -> str:
    """Qwen's form: 2 brings a system turn of its own, 3 may be told not to think."""
    head = (
        f"{{%- set has_default = {str(has_default).lower()} %}}"
        "{%- set default = 'You are a helpful assistant.' %}"
        f"{{%- set thinking = {thinking} %}}"
    )
    return head + CHATML


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A family's text side: its control tokens, the ones that end, a template and a rendering."""

    controls: tuple[str, ...]
    ends: tuple[str, ...]
    template: str
    rendered: str
    # The one that a GGUF file names.
    gguf_end: str


CHATS: Final = {
    "qwen2": Chat(
        controls=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ends=("<|im_end|>", "<|endoftext|>"),
        gguf_end="<|im_end|>",
        template=chatml(True, "''"),
        rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3": Chat(
        controls=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ends=("<|im_end|>", "<|endoftext|>"),
        gguf_end="<|im_end|>",
        template=chatml(False, UNLESS_THINKING),
        rendered="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi3": Chat(
        controls=("<|endoftext|>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"),
        ends=("<|end|>", "<|endoftext|>"),
        # The end of a document, not of a turn: what Phi-3's own files say.
        gguf_end="<|endoftext|>",
        template="{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        rendered="<|user|>\nhi<|end|>\n<|assistant|>\n",
    ),
}


def tokens_of(chat: Chat) -> list[str]:
    """Control tokens, then the bytes, then fillers."""
    bytes_ = tiny_models.vocabulary_tokens()[3 : 3 + 256]
    used = [*chat.controls, *bytes_, "th"]
    return used + [f"<|unused_{index}|>" for index in range(VOCABULARY - len(used))]


def write_text(folder: Path, chat: Chat) -> None:
    """tokenizer.json and its configuration, as the family's directories have them."""
    definition = tiny_models.tokenizer_definition()
    tokens = tokens_of(chat)
    plain = definition["added_tokens"][0]
    definition["added_tokens"] = [
        plain | {"id": index, "content": text} for index, text in enumerate(chat.controls)
    ]
    definition["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    definition["model"]["merges"] = [["t", "h"]]
    config = {"eos_token": chat.gguf_end, "chat_template": chat.template}
    ends = {"eos_token_id": [tokens.index(text) for text in chat.ends]}
    for name, body in (
        ("tokenizer.json", definition),
        ("tokenizer_config.json", config),
        ("generation_config.json", ends),
    ):
        (folder / name).write_text(json.dumps(body), "utf-8")


def text_metadata(chat: Chat) -> Any:
    """What adds the same to a GGUF file."""

    def add(writer: gguf.GGUFWriter) -> None:
        tokens = tokens_of(chat)
        kinds = [gguf.TokenType.NORMAL] * len(tokens)
        for index in range(len(chat.controls)):
            kinds[index] = gguf.TokenType.CONTROL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(tokens.index(chat.gguf_end))
        writer.add_add_bos_token(False)
        writer.add_chat_template(chat.template)

    return add


@pytest.fixture(scope="module", params=sorted(CHATS))
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


@pytest.fixture(scope="module", params=["directory", "gguf"])
def path(request: pytest.FixtureRequest, name: str, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(name)
    model = oracle_of(name, folder)
    if request.param == "gguf":
        add = text_metadata(CHATS[name])
        return write_as_gguf(folder / "m.gguf", model, family_of(name), add_text=add)
    write_text(folder, CHATS[name])
    return folder


def test_a_chat_prompt_has_the_form_of_the_family(name: str, path: Path) -> None:
    """Rendered by the model's own template; its control tokens are ids, what users type is not."""
    chat, bundle = CHATS[name], TextBundle.load(path)
    rendered = bundle.chat_template().render([{"role": "user", "content": "hi"}])
    assert rendered.text == chat.rendered
    ids = bundle.encode_rendered(rendered)
    written = [bundle.tokenizer.decode([item], skip_special=False) for item in ids]
    assert "".join(written) == chat.rendered
    controls = [text for text in written if text in chat.controls]
    assert len(controls) == chat.rendered.count("<|")
    typed = bundle.chat_template().render([{"role": "user", "content": chat.ends[0]}])
    typed_ids = bundle.encode_rendered(typed)
    end = tokens_of(chat).index(chat.ends[0])
    assert typed_ids.count(end) == ids.count(end)


def test_an_answer_ends_at_the_familys_tokens(name: str, path: Path) -> None:
    """The end of a turn and the end of a document, whatever of the two the file names."""
    chat, bundle = CHATS[name], TextBundle.load(path)
    config = read_config(path)
    rule = EndRule(
        end_token_ids=frozenset(config.end_token_ids) | frozenset(bundle.eos_ids), max_context=256
    )
    tokens = tokens_of(chat)

    def end(text: str) -> TokenEnd | None:
        return rule.end_after(
            tokens.index(text), SamplingParameters(), output_tokens=1, total_tokens=9
        )

    assert [end(text) for text in chat.ends] == [TokenEnd.END_TOKEN] * 2
    others = [text for text in chat.controls if text not in chat.ends]
    assert [end(text) for text in (*others, "a")] == [None] * (len(others) + 1)


def test_qwen3_can_be_told_not_to_think(tmp_path: Path) -> None:
    """A variable of the request that the template looks at."""
    oracle_of("qwen3", tmp_path)
    write_text(tmp_path, CHATS["qwen3"])
    template = TextBundle.load(tmp_path).chat_template()
    messages = [{"role": "user", "content": "hi"}]
    rendered = template.render(messages, template_kwargs={"enable_thinking": False})
    assert rendered.text.endswith("assistant\n<think>\n\n</think>\n\n")
