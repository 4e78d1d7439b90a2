"""Talking to a gateway over HTTP, for the commands that do.

Owns: address and key options, timeouts, and reading an error answer into one line. Never does:
retry, or print.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer

from baton.cli.console import CommandFailed, ExitCode, checked_text

DEFAULT_URL = "http://127.0.0.1:8080"
CONNECT_TIMEOUT_S = 5.0
# Between two pieces of an answer: a queue and a long prompt may stand before the first one.
READ_TIMEOUT_S = 120.0

UrlOption = Annotated[
    str, typer.Option("--url", envvar="BATON_URL", help="Address of the gateway.")
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="BATON_API_KEY",
        show_default=False,
        help="Bearer key of the tenant; better given by the environment, which `ps` does not show.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """Where the gateway is and who asks."""

    url: str
    api_key: str | None

    def client(self) -> httpx.Client:
        """A client with our timeouts; the caller closes it."""
        if not is_http_address(self.url):
            raise CommandFailed(
                f"--url {self.url!r} is not an address",
                remedy=f"write it like {DEFAULT_URL}",
                exit_code=ExitCode.USAGE,
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise CommandFailed(
                "--api-key has characters that no header can hold",
                remedy="give the key as the tenants file has it",
                exit_code=ExitCode.USAGE,
            )
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # A proxy for the outside has no business between us and our own gateway.
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)


def is_http_address(url: str) -> bool:
    """Whether the text has a scheme that we speak, a host, and nothing malformed."""
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        is_ours = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        # What httpx cannot read, it cannot call.
        return is_ours and bool(httpx.URL(url).host)
    except (ValueError, httpx.InvalidURL):
        return False


def path_part(text: str) -> str:
    """An id or a name as a part of a path; refused when it is no text."""
    return quote(checked_text(text, "the name"), safe="")


@contextmanager
def translated_failures(url: str) -> Iterator[None]:
    """Turn what httpx raises into `CommandFailed` with a remedy."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
        raise CommandFailed(
            f"no gateway answers at {url}",
            remedy="start one with `baton up`, or name another with --url",
            exit_code=ExitCode.UNREACHABLE,
        ) from problem
    except httpx.TimeoutException as problem:
        raise CommandFailed(
            f"the gateway at {url} sent nothing for {READ_TIMEOUT_S:g} s",
            remedy="see whether it is overloaded: baton doctor",
            exit_code=ExitCode.UNREACHABLE,
        ) from problem
    except httpx.HTTPError as problem:
        raise CommandFailed(
            f"the connection to {url} broke: {str(problem) or type(problem).__name__}",
            exit_code=ExitCode.UNREACHABLE,
        ) from problem


def error_text(error: object) -> str:
    """One line of an OpenAI error object, or of whatever stands in its place."""
    if isinstance(error, Mapping):
        message = str(error.get("message") or "the gateway gave no message")
        code = error.get("code") or error.get("type")
        return f"{message} ({code})" if code else message
    return str(error)


def refuse_errors(response: httpx.Response) -> None:
    """Raise `CommandFailed` for an error answer; its body must have been read."""
    if response.is_success:
        return
    try:
        error: object = response.json().get("error", {})
    except (ValueError, AttributeError):
        text = response.text[:200].strip()
        error = {"message": text or response.reason_phrase or "no body", "code": None}
    message = f"{error_text(error)} [HTTP {response.status_code}]"
    raise CommandFailed(message, remedy=_remedy(response))


def _remedy(response: httpx.Response) -> str | None:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return "give a key by BATON_API_KEY or --api-key"
    retry_after = response.headers.get("retry-after")
    return f"try again in {retry_after} s" if retry_after else None


def call(address: GatewayAddress, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    """One JSON call; returns the parsed answer, None when it is empty."""
    with translated_failures(address.url), address.client() as client:
        response = client.request(method, path, json=body)
        refuse_errors(response)
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError as problem:
        raise CommandFailed(
            f"{address.url}{path} did not answer with JSON", remedy="is it a Baton gateway?"
        ) from problem
