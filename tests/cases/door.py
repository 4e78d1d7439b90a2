"""The REST door as a client sees it that keeps to no library's habits.

Owns an HTTP client on the standard library that sees raw bytes, broken connections and strict JSON.
Never retries and never hides an error.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.cases.waiting import until

KEY_A: Final = "key-a"
KEY_B: Final = "key-b"
KEY_C: Final = "key-c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole response; header names in lower case; `body` is parsed JSON, else text."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def text(self) -> str:
        """The text of the first choice."""
        assert self.status == 200, self
        return choice_text(self.body["choices"][0])

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        assert self.status == 200, self
        usage: dict[str, Any] = self.body["usage"]
        return usage

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came out of the cache."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def finish(self) -> str:
        """Finish reason of the first choice."""
        return str(self.body["choices"][0]["finish_reason"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A streamed response, read to its end. `is_whole` is False if the connection broke."""

    status: int
    headers: Mapping[str, str]
    events: Sequence[dict[str, Any]]
    has_done: bool
    is_whole: bool = True

    @property
    def choices(self) -> list[dict[str, Any]]:
        """All choices of all events, in order."""
        return [choice for one in self.events for choice in one.get("choices") or []]

    def text_of(self, index: int = 0) -> str:
        """The joined text of one sample."""
        return "".join(choice_text(one) for one in self.choices if one.get("index", 0) == index)

    @property
    def text(self) -> str:
        """The joined text of the first sample."""
        return self.text_of()

    @property
    def finishes(self) -> list[tuple[int, str]]:
        """(sample, reason) of every finish."""
        return [
            (one.get("index", 0), one["finish_reason"])
            for one in self.choices
            if one.get("finish_reason")
        ]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Error objects in the stream."""
        return [one["error"] for one in self.events if "error" in one]

    @property
    def usage(self) -> dict[str, Any]:
        """The last usage that the stream told."""
        found = [one["usage"] for one in self.events if one.get("usage")]
        assert found, self.events[-2:]
        usage: dict[str, Any] = found[-1]
        return usage


def choice_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice in any of the four shapes."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


class Door:
    """The REST door of a gateway."""

    def __init__(self, url: str) -> None:
        parsed = urllib.parse.urlsplit(url)
        assert parsed.hostname is not None
        assert parsed.port is not None
        self._address = (parsed.hostname, parsed.port)

    @contextlib.contextmanager
    def _exchange(
        self,
        path: str,
        body: Any,
        *,
        key: str | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        method: str | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        verb = method or ("GET" if raw is None else "POST")
        try:
            connection.request(verb, path, raw, _headers(key, headers))
            yield connection.getresponse()
        finally:
            connection.close()

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        key: str | None = KEY_A,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        method: str | None = None,
    ) -> Answer:
        """One exchange; GET without a body. JSON with NaN or infinities is a failure."""
        with self._exchange(
            path, body, key=key, headers=headers, timeout_s=timeout_s, method=method
        ) as response:
            raw = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=found, body=_parsed(raw, found))

    def sse(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        key: str | None = KEY_A,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_event: Callable[[int], None] = lambda count: None,
    ) -> Stream:
        """A streamed exchange, read to the end; `on_event` is told how many events there were."""
        events: list[dict[str, Any]] = []
        has_done, is_whole = False, True
        with self._exchange(
            path, {**body, "stream": True}, key=key, headers=headers, timeout_s=timeout_s
        ) as response:
            named = {name.lower(): value for name, value in response.getheaders()}
            if response.status != 200:
                events.append(_parsed(response.read(), named))
            else:
                assert named["content-type"].startswith("text/event-stream"), named
                try:
                    for data in _event_data(response):
                        assert not has_done, f"after [DONE]: {data}"
                        has_done = data == "[DONE]"
                        if not has_done:
                            events.append(json.loads(data, parse_constant=_refuse))
                            on_event(len(events))
                except (http.client.IncompleteRead, ConnectionError):
                    is_whole = False
        return Stream(
            status=response.status, headers=named, events=events, has_done=has_done,
            is_whole=is_whole,
        )  # fmt: skip

    def drop_after(
        self,
        path: str,
        body: Mapping[str, Any],
        events: int,
        *,
        when: Callable[[], bool] = lambda: True,
        timeout_s: float = 60.0,
    ) -> bytes:
        """Send, read until so many events came and `when` holds, then reset the connection."""
        with self.held(path, body, timeout_s=timeout_s) as connection:
            buffer = bytearray()
            while buffer.count(b"data:") < events:
                part = connection.recv(65_536)
                assert part, f"ended early: {bytes(buffer)!r}"
                buffer += part
            until(when, timeout_s, "the moment to leave")
            reset(connection)
        return bytes(buffer)

    @contextlib.contextmanager
    def held(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        key: str = KEY_A,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Iterator[socket.socket]:
        """A connection with the request sent and nothing read; closed at the end."""
        raw = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: case", f"Content-Length: {len(raw)}"]
        head += [f"{name}: {value}" for name, value in _headers(key, headers).items()]
        with socket.create_connection(self._address, timeout_s) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + raw)
            yield connection


def reset(connection: socket.socket) -> None:
    """Close with RST: the peer learns at once that nobody reads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _headers(key: str | None, more: Mapping[str, str] | None) -> dict[str, str]:
    named = {"Content-Type": "application/json"}
    if key is not None:
        named["Authorization"] = f"Bearer {key}"
    return {**named, **(more or {})}


def _event_data(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event as it comes; strict UTF-8 over whole events."""
    pending = bytearray()
    for line in iter(response.readline, b""):
        pending += line
        if line in (b"\n", b"\r\n"):
            text = bytes(pending).decode("utf-8")
            pending.clear()
            data = [one[5:].lstrip(" ") for one in text.splitlines() if one.startswith("data:")]
            if data:
                yield "\n".join(data)


def _parsed(raw: bytes, headers: Mapping[str, str]) -> Any:
    if headers.get("content-type", "").startswith("application/json"):
        return json.loads(raw, parse_constant=_refuse)
    return raw.decode("utf-8", "replace")


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON number")
