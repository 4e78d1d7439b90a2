"""What the replayed field reports share: one place where their names meet ours.

Owns an HTTP client on the standard library that sees raw bytes, broken connections and strict JSON;
readers of every process's metrics, log and command line; waiting on conditions with a deadline.
Never imports a service: a case stands outside, as the person who reported it did.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from baton.testing.cluster import RunningCluster

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODEL: Final = "SmolLM2-135M-Instruct"
KEY_A: Final = "key-a"
KEY_B: Final = "key-b"
TENANTS: Final = f"""
tenants:
  - name: alpha
    keys: [{KEY_A}]
  - name: beta
    keys: [{KEY_B}]
"""
BLOCK_TOKENS: Final = 16
SYSTEM_TURN_TOKENS: Final = 21
"""Tokens of the default system turn, which every chat without one of its own begins with."""

CONTEXT_TOKENS: Final = 8192
VOCABULARY: Final = 49_152
LETTER_A: Final = 253
"""The single token ` a`."""

CAPITAL: Final = "What is the capital of France?"
CAPITAL_ANSWER: Final = "The capital of France is Paris."
COUNTING: Final = "1 2 3 4 5 6 7 8 9 10 11 12"
COUNTED: Final = " 13 14 15 16"
"""Its greedy continuation, twelve tokens of one character each."""

POLL_S: Final = 0.05
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PARTS: Final = ("gateway-0", "kvstore-0", "prefill-0", "decode-0", "decode-1", "merger-0")
_Found = TypeVar("_Found")


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


def chat(content: str, **more: Any) -> dict[str, Any]:
    """A greedy chat body with one user turn."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "temperature": 0, "messages": messages, **more}


def completion(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    """A greedy completion body."""
    return {"model": MODEL, "temperature": 0, "prompt": prompt, **more}


@dataclass(slots=True)
class Replay:
    """A running cluster as a case sees it."""

    cluster: RunningCluster
    _address: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        parsed = urllib.parse.urlsplit(self.cluster.url)
        assert parsed.hostname is not None
        assert parsed.port is not None
        self._address = (parsed.hostname, parsed.port)

    # --- the door ------------------------------------------------------------------------------

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

    # --- what processes show -------------------------------------------------------------------

    def parts(self) -> list[str]:
        """Names of the processes of this cluster."""
        return [one for one in _PARTS if (self.cluster.run_dir / f"{one}.pid").exists()]

    def port_of(self, part: str, flag: str = "--metrics-port") -> int:
        """A port from the command line of a process."""
        raw = Path(f"/proc/{self.cluster.pid(part)}/cmdline").read_bytes()
        words = raw.decode().split("\0")
        return int(words[words.index(flag) + 1])

    def samples(self, part: str) -> list[tuple[str, dict[str, str], float]]:
        """(name, labels, value) of every series of a process."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port_of(part), timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return parse_metrics(text)

    def gauge(self, part: str, name: str, **labels: str) -> float:
        """Sum of a process's series of that name and labels; a missing family is a failure."""
        found = [one for one in self.samples(part) if one[0] == name]
        assert found, f"{part} has no {name}"
        return sum(value for _, has, value in found if labels.items() <= has.items())

    def leaks(self) -> dict[str, float]:
        """What must come back to where it was once nobody waits for an answer."""
        found = {
            "requests_in_flight": self.gauge("gateway-0", "baton_requests_in_flight"),
            "cleanups_pending": self.gauge("gateway-0", "baton_cleanups_pending"),
            "leases": self.gauge("kvstore-0", "baton_kvstore_leases"),
            "pages_granted": self.pages()["granted"],
            "pages_quarantined": self.pages()["quarantined"],
        }
        for part in self.parts():
            if part.startswith("decode"):
                found[part] = self.gauge(part, "baton_decode_active_sequences")
            elif part.startswith("prefill"):
                found[part] = self.gauge(part, "baton_prefill_pending_requests")
        return found

    def pages(self) -> dict[str, float]:
        """Pages by state."""
        return {
            labels["state"]: value
            for name, labels, value in self.samples("kvstore-0")
            if name == "baton_kvstore_pages"
        }

    def pages_total(self) -> int:
        """Pages of the arena, from its size and never from the counters."""
        arena = int(_flag(self.cluster.pid("kvstore-0"), "--arena-bytes"))
        dtype = _flag(self.cluster.pid("kvstore-0"), "--dtype")
        token_bytes = 46_080 if dtype == "float32" else 23_040
        slot = -(-token_bytes * BLOCK_TOKENS // 4096) * 4096
        return (arena - 4096) // slot

    def settles(self, seconds: float = 10.0) -> None:
        """Everything that a request holds is given back in time."""
        last: dict[str, float] = {}

        def is_quiet() -> bool:
            nonlocal last
            last = self.leaks()
            return not any(last.values())

        try:
            until(is_quiet, seconds, "")
        except AssertionError:
            raise AssertionError(f"still held after {seconds:g} s: {last}") from None

    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self.gauge("gateway-0", "baton_requests_in_flight") > 0

    def decoding_part(self) -> str:
        """The decode worker that has a sequence."""

        def find() -> str | None:
            for part in self.parts():
                if part.startswith("decode") and self.gauge(part, "baton_decode_active_sequences"):
                    return part
            return None

        found = until(find, 10, "a decode worker at work")
        assert found is not None
        return found

    # --- fault points --------------------------------------------------------------------------

    @contextlib.contextmanager
    def armed(self, part: str, spec: str) -> Iterator[None]:
        """Faults of a process that are armed during the block; what pauses then goes on."""
        self._faults(part, "PUT", spec)
        try:
            yield
        finally:
            # A process that died in the block has no armed faults, and its successor none either.
            with contextlib.suppress(OSError):
                self._faults(part, "DELETE", None)

    def fired(self, part: str, point: str) -> int:
        """How often a fault acted at a point of a process."""
        return int(self._faults(part, "GET", None)["fired"].get(point, 0))

    def _faults(self, part: str, method: str, spec: str | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port_of(part), timeout=10)
        try:
            connection.request(method, "/debug/faults", spec)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        assert response.status == 200, raw
        found: dict[str, Any] = json.loads(raw)
        return found

    # --- processes -----------------------------------------------------------------------------

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal; returns the process id it went to."""
        pid = self.cluster.pid(part)
        os.kill(pid, number)
        return pid

    @contextlib.contextmanager
    def frozen(self, *parts: str) -> Iterator[None]:
        """These processes stand still during the block, as if their host hung."""
        pids = [self.kill(part, signal.SIGSTOP) for part in parts]
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def is_whole(self, seconds: float) -> None:
        """Wait until every part serves, nothing is held and prefill and decode are apart again."""

        def serves() -> bool:
            try:
                if not all(self.samples(part) for part in self.parts()):
                    return False
                answer = self.call(CHAT, chat("hi", max_tokens=2), timeout_s=10)
            except OSError:
                return False
            mode = answer.headers.get("x-serving-mode")
            return answer.status == 200 and mode == "disaggregated"

        until(serves, seconds, "the whole cluster serving")
        self.settles(seconds)

    def is_back(self, part: str, old_pid: int) -> bool:
        """Whether the supervisor's new process is up and the cluster could serve."""
        pid = self.cluster.pid(part)
        if pid == old_pid or not Path(f"/proc/{pid}").exists():
            return False
        try:
            return self.call("/readyz", timeout_s=5).status == 200 and bool(self.samples(part))
        except OSError:
            return False

    def restarted(self, part: str, old_pid: int, seconds: float = 60.0) -> None:
        """Wait until the killed process's successor serves."""
        until(lambda: self.is_back(part, old_pid), seconds, f"{part} back")


def reset(connection: socket.socket) -> None:
    """Close with RST: the peer learns at once that nobody reads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until(condition: Callable[[], _Found], seconds: float, what: str) -> _Found:
    """The first true value of `condition`; AssertionError when there is none in time."""
    end_s = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        # Polling another process: there is no event to wait on.
        pause.wait(POLL_S)


def together(*thunks: Callable[[], _Found]) -> list[_Found]:
    """Run all at once; their results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(thunks)) as pool:
        return [one.result() for one in [pool.submit(thunk) for thunk in thunks]]


@contextlib.contextmanager
def background(thunk: Callable[[], _Found]) -> Iterator[concurrent.futures.Future[_Found]]:
    """Run beside the block; its result is there when the block asks."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(thunk)


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of Prometheus' text format."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not line.startswith("#"):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.append((match[1], labels, float(match[3])))
    return found


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


@functools.cache
def _flag(pid: int, flag: str) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index(flag) + 1]
