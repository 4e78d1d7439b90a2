"""The official OpenAI client against the running cluster, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from baton.testing.cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(cluster_f32: RunningCluster) -> Iterator[openai.OpenAI]:
    """The official client, without its own retries: a failure must show."""
    with openai.OpenAI(
        base_url=f"{cluster_f32.url}/v1", api_key="dev", max_retries=0, timeout=120.0
    ) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI) -> None:
    """User interfaces begin with this call."""
    listed = client.models.list()
    assert [model.id for model in listed] == ["SmolLM2-135M-Instruct"]
    assert client.models.retrieve("SmolLM2-135M-Instruct").object == "model"


def test_chat_without_streaming(client: openai.OpenAI) -> None:
    """The whole answer at once, with exact usage."""
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # The end token was sampled, so it counts.
    assert answer.usage.completion_tokens == 9 - 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_chat_streaming(client: openai.OpenAI) -> None:
    """The same text in pieces: role first, a finish reason once, usage last as asked for."""
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len([c for c in chunks if c.usage]) == 1


def test_text_completion(client: openai.OpenAI) -> None:
    """The older endpoint, which some frameworks use by default."""
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.choices[0].text == " Paris.\n\n"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_seed_repeats_the_answer(client: openai.OpenAI) -> None:
    """Randomness is a function of seed and position, so the same seed says the same."""
    texts = [
        client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=1.0, seed=seed, max_tokens=24
        )
        .choices[0]
        .message.content
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_errors_become_the_clients_own_types(client: openai.OpenAI) -> None:
    """A wrong model and a wrong field arrive as the exceptions that callers catch."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="smollm2", messages=[])
    assert empty.value.param == "messages"
