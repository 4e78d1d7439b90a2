"""`baton chat`: talk to a running gateway in the terminal.

Owns: the conversation, its commands and its look. Never does: read the wire (`chat_stream`), or
keep anything after it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from baton.cli.chat_stream import Answer, read_answer
from baton.cli.console import (
    CommandFailed,
    ExitCode,
    checked_text,
    errors,
    read_stdin,
    show_error,
)
from baton.cli.gateway_http import (
    DEFAULT_URL,
    GatewayAddress,
    KeyOption,
    UrlOption,
    call,
    refuse_errors,
    translated_failures,
)
from baton.clock import Clock, SystemClock

MESSAGE_CHARS_MAX = 1_000_000
HELP = (
    "/quit leaves, /reset forgets the conversation, /help shows this. "
    "Ctrl-C stops an answer; on an empty line it leaves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What every request of a conversation carries."""

    model: str
    system: str | None
    max_tokens: int | None
    temperature: float | None
    seed: int | None

    def opening(self) -> list[dict[str, str]]:
        """The messages a fresh conversation begins with."""
        return [{"role": "system", "content": self.system}] if self.system else []

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request body for the conversation so far."""
        optional = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }


class Conversation:
    """Messages so far and the connection they go over."""

    def __init__(
        self, address: GatewayAddress, client: httpx.Client, settings: ChatSettings, clock: Clock
    ) -> None:
        self.messages = settings.opening()
        self._address = address
        self._client = client
        self._settings = settings
        self._clock = clock

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = self._settings.opening()

    def ask(self, text: str) -> str:
        """Send `text`, print the answer as it comes; returns a line of figures about it.

        Ctrl-C leaves the answer as far as it came and raises KeyboardInterrupt; closing the stream
        is what cancels it at the gateway. A failed turn is forgotten and can be asked again.
        """
        self.messages.append({"role": "user", "content": checked_text(text, "the message")})
        answer = Answer()
        begin_s = self._clock.monotonic_s()
        first_s: float | None = None
        try:
            with closing(self._pieces(answer)) as pieces:
                for piece in pieces:
                    first_s = first_s if first_s is not None else self._clock.monotonic_s()
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except CommandFailed:
            self.messages.pop()
            _end_line(answer)
            raise
        except KeyboardInterrupt:
            self._keep(answer)
            raise
        self._keep(answer)
        return figures(answer, begin_s, first_s, self._clock.monotonic_s())

    def _keep(self, answer: Answer) -> None:
        """What was said stays said, also after Ctrl-C."""
        _end_line(answer)
        self.messages.append({"role": "assistant", "content": answer.text})

    def _pieces(self, answer: Answer) -> Generator[str, None, None]:
        body = self._settings.body(self.messages)
        with (
            translated_failures(self._address.url),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if not response.is_success:
                response.read()
                refuse_errors(response)
            yield from read_answer(response.iter_lines(), answer)


def _end_line(answer: Answer) -> None:
    if answer.pieces:
        sys.stdout.write("\n")
        sys.stdout.flush()


def figures(answer: Answer, begin_s: float, first_s: float | None, end_s: float) -> str:
    """Tokens and times of one answer, as this terminal saw them."""
    parts = []
    if answer.prompt_tokens is not None:
        cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
        parts.append(f"{answer.prompt_tokens} in{cached}")
    if answer.output_tokens is not None:
        parts.append(f"{answer.output_tokens} out")
    if first_s is not None:
        parts.append(f"first token {first_s - begin_s:.2f} s")
        if answer.output_tokens and answer.output_tokens > 1 and end_s > first_s:
            parts.append(f"{(answer.output_tokens - 1) / (end_s - first_s):.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut at max_tokens")
    return ", ".join(parts)


def first_model(address: GatewayAddress) -> str:
    """The first model that the gateway lists."""
    answer = call(address, "GET", "/v1/models", None)
    names = [m.get("id") for m in answer.get("data", [])] if isinstance(answer, dict) else []
    if not names:
        raise CommandFailed("the gateway serves no model", remedy="see `baton doctor`")
    return str(names[0])


def read_piped() -> str:
    """All of stdin as one message."""
    text = read_stdin(MESSAGE_CHARS_MAX + 1)
    if len(text) > MESSAGE_CHARS_MAX:
        raise CommandFailed(f"stdin holds over {MESSAGE_CHARS_MAX} characters")
    if not text.strip():
        raise CommandFailed(
            "stdin is empty", remedy="pipe a message in, or use --message", exit_code=ExitCode.USAGE
        )
    return text.strip()


def talk(conversation: Conversation) -> None:
    """The interactive loop: returns on /quit, end of input, or Ctrl-C on an empty line."""
    errors().print(HELP, style="dim", markup=False)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if line in {"/quit", "/exit"}:
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            errors().print(HELP, style="dim", markup=False)
        elif line:
            _answer_one(conversation, line)


def _answer_one(conversation: Conversation, line: str) -> None:
    try:
        errors().print(conversation.ask(line), style="dim", markup=False)
    except KeyboardInterrupt:
        errors().print("(stopped)", style="dim")
    except CommandFailed as problem:
        show_error(problem.one_line())


def chat(
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this one thing and leave.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens an answer has.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.2,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Talk to a running gateway; piped input is one message, its answer goes to stdout.

    Example: baton chat --temperature 0, or: echo "What is a baton?" | baton chat
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() line editing and history
    address = GatewayAddress(url=url, api_key=api_key)
    is_interactive = message is None and sys.stdin.isatty()
    if not is_interactive:
        message = message if message is not None else read_piped()
    settings = ChatSettings(
        model=model or first_model(address),
        system=None if system is None else checked_text(system, "--system"),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    with address.client() as client:
        conversation = Conversation(address, client, settings, SystemClock())
        if message is None:
            talk(conversation)
        else:
            conversation.ask(message)
