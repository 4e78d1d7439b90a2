"""Talks to a running gateway with the official OpenAI client, streaming and not.

pip install openai
python examples/openai_client.py [http://127.0.0.1:8080]
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are a helpful AI assistant named SmolLM."},
    {"role": "user", "content": "What is the capital of France?"},
]


def main() -> None:
    """One answer at once, then one token by token."""
    # Without a tenants file any key will do: loopback callers are the tenant `dev`.
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BATON_API_KEY", "unused"))
    model = client.models.list().data[0].id
    print("model:", model)

    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=32, temperature=0
    )
    print("answer:", answer.choices[0].message.content)
    if answer.usage is not None:
        details = answer.usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        print(f"tokens: {answer.usage.prompt_tokens} in ({cached} cached), ", end="")
        print(f"{answer.usage.completion_tokens} out")

    print("streamed: ", end="", flush=True)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=32, temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
