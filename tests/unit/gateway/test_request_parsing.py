"""Bodies to requests: every surprise is refused by name, everything understood arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from services.gateway.request import Role, TextPrompt, TokensPrompt, derived_seed
from services.gateway.rest.chat_request import read_chat_request
from services.gateway.rest.completion_request import read_completion_request
from services.gateway.rest.json_body import NESTING_MAX, parse_object

USER = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> Any:
    return read_chat_request({"messages": USER, **more}, answers_max=8)


def completion(**more: Any) -> Any:
    return read_completion_request({"prompt": "hi", **more}, answers_max=8)


def fault(action: Any) -> str | None:
    with pytest.raises(ServiceError) as refused:
        action()
    assert refused.value.reason is Reason.INVALID_REQUEST
    return refused.value.field


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", None),
        (b"5", None),
        (b'"x"', None),
        (b"{", None),
        (b"\xff{}", None),
        (b'{"a": NaN}', None),
        (b'{"a": -Infinity}', None),
        (b'{"a": 1e400}', None),
        (b'{"a": ' + b"9" * 5000 + b"}", None),
        (b'{"a": 1, "a": 2}', "a"),
        (b'{"b": [{"c": "\\ud800"}]}', "b[0].c"),
        (b'{"b": {"\\udc00": 1}}', "b"),
    ],
)
def test_surprising_json_is_refused_naming_the_field(raw: bytes, field: str | None) -> None:
    """What other parsers let pass."""
    assert fault(lambda: parse_object(raw)) == field


def test_nesting_is_bounded_exactly() -> None:
    """At the limit it passes, one past it does not, and far past it nothing overflows."""
    for depth, is_fine in ((NESTING_MAX, True), (NESTING_MAX + 1, False), (100_000, False)):
        raw = b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)
        if is_fine:
            parse_object(raw)
        else:
            fault(lambda raw=raw: parse_object(raw))


def test_paired_surrogate_escapes_are_one_character() -> None:
    """An emoji written as escapes is fine."""
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_a_byte_order_mark_is_named() -> None:
    """Editors put it there unseen; "expecting value at column 1" helps nobody."""
    with pytest.raises(ServiceError, match="byte order mark"):
        parse_object(b'\xef\xbb\xbf{"a": 1}')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(
    ["messages", "model", "n", "stop", "stream", "stream_options", "logit_bias", "seed", "tools",
     "temperature", "max_tokens", "logprobs", "top_logprobs", "cache_salt", "metadata", "user"]
), json_values))  # fmt: skip
def test_no_body_makes_the_parser_fail_in_another_way(body: dict[str, Any]) -> None:
    """A request, or an INVALID_REQUEST; never a TypeError."""
    readers: list[Any] = [read_chat_request, read_completion_request]
    for read in readers:
        reason = Reason.INVALID_REQUEST
        try:
            read(parse_object(json.dumps(body).encode()), answers_max=8)
        except ServiceError as error:
            reason = error.reason
        assert reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0].text",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
        ),
        ([*USER, {"role": "user", "content": "x", "name": 5}], "messages[1].name"),
    ],
)
def test_message_faults_name_their_path(messages: Any, path: str) -> None:
    """`messages[2].content` tells a developer where to look."""
    assert fault(lambda: read_chat_request({"messages": messages}, answers_max=8)) == path


def test_text_parts_are_joined_and_developer_is_system() -> None:
    """As OpenAI's newer clients send them."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = read_chat_request(
        {"messages": [{"role": "developer", "content": parts}, *USER]}, answers_max=8
    )
    assert asked.prompt.turns[0].role is Role.SYSTEM
    assert asked.prompt.turns[0].content == "ab"


def test_every_sampling_field_arrives() -> None:
    """Nothing that changes output is dropped on the way."""
    sampling = chat(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
        frequency_penalty=0.2, presence_penalty=0.3, seed=7, max_tokens=9, min_tokens=2,
        stop=["x", "yy"], stop_token_ids=[3], ignore_eos=True, logprobs=True, top_logprobs=4,
        logit_bias={"5": -3}, include_stop_str_in_output=True,
    ).common.sampling  # fmt: skip
    assert sampling.temperature == 0.5
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 5, 0.1)
    assert sampling.repetition_penalty == 1.1
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, 0.3)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (7, 9, 2)
    assert sampling.stop_strings == ("x", "yy")
    assert sampling.stop_token_ids == (3,)
    assert (sampling.ignore_eos, sampling.include_stop_string) == (True, True)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 4)
    assert sampling.logit_bias == {5: -3.0}


def test_newer_max_tokens_name_wins_and_unlimited_top_k_is_none() -> None:
    """vLLM writes -1 and 0 for no limit."""
    common = chat(max_tokens=5, max_completion_tokens=6, top_k=-1).common
    assert (common.sampling.max_tokens, common.max_tokens_field) == (6, "max_completion_tokens")
    assert common.sampling.top_k is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 1 << 63}, "seed"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"guided_json": {}}, "guided_json"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
    ],
)
def test_chat_field_faults_are_named(body: dict[str, Any], field: str) -> None:
    """Out of range, of the wrong type, or not supported and not ignorable."""
    assert fault(lambda: chat(**body)) == field


def test_neutral_values_of_unsupported_fields_pass() -> None:
    """Clients send the defaults of everything."""
    asked = chat(
        tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"],
        functions=None, best_of=1, parallel_tool_calls=True, skip_special_tokens=True,
        store=False, metadata={"a": "b"}, user="u", stream_options=None, service_tier="auto",
    )  # fmt: skip
    assert asked.ignored == ()
    assert asked.common.is_dropped_at_end


def test_unknown_fields_are_listed_also_inside_messages() -> None:
    """So that a typo is seen."""
    asked = read_chat_request(
        {"messages": [{"role": "user", "content": "x", "mood": 1}], "temprature": 1}, answers_max=8
    )
    assert asked.ignored == ("temprature", "messages[0].mood")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokensPrompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [TokensPrompt(token_ids=(1,)), TokensPrompt(token_ids=(2, 3))]),
    ],
)
def test_prompt_comes_in_four_shapes(prompt: Any, expected: Any) -> None:
    """String, strings, ids, lists of ids."""
    assert list(completion(prompt=prompt).prompts) == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([5279552648203111001], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        (["a"] * 65, "prompt"),
    ],
)
def test_prompt_faults_are_named(prompt: Any, field: str) -> None:
    """Nothing is used as an index unchecked."""
    assert fault(lambda: completion(prompt=prompt)) == field


def test_completion_logprobs_are_a_number_and_suffix_is_refused() -> None:
    """0 asks for the chosen token alone."""
    assert completion(logprobs=0).common.sampling.logprobs
    assert not completion().common.sampling.logprobs
    assert fault(lambda: completion(logprobs=21)) == "logprobs"
    assert fault(lambda: completion(suffix="x")) == "suffix"


def test_derived_seeds_differ_and_the_first_is_the_given_one() -> None:
    """n samples are n different draws, the same ones each time."""
    seeds = [derived_seed(7, index) for index in range(8)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds == [derived_seed(7, index) for index in range(8)]


def test_an_empty_model_name_is_a_mistake() -> None:
    """Left out it means the one model; empty it is a template that was not filled in."""
    assert chat().common.model is None
    assert fault(lambda: chat(model="")) == "model"
    assert fault(lambda: completion(model="")) == "model"
