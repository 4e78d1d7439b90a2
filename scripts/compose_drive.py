"""Drive the cluster of docker-compose.yml on a real engine and time every step.

Up, all healthy, one streamed chat through the published port, two decode workers, a decode
container killed under its streams, a Redis restart, stop within the grace period. Each step has a
deadline; the first that fails ends the run with 1 and the end of the containers' logs. Leaves
nothing running. Called by scripts/compose_test.sh, which brings engine and images.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

PROJECT = "baton-compose-test"
KEY = "dev"
SERVICES = ("redis", "kvstore", "merger", "gateway", "prefill", "decode")
STREAMS = 4
"""Streams at once when a decode worker is killed: enough that both have some."""

STREAM_TOKENS = 1200
"""Long enough to be met in the middle by commands that take seconds, at a few ms a token."""

COMMAND_TIMEOUT_S = 120.0
HEALTHY_TIMEOUT_S = 240.0
CHAT_TIMEOUT_S = 60.0
BROKEN_TIMEOUT_S = 15.0
"""A stream whose worker died has ended or gone on by then."""

STREAM_END_TIMEOUT_S = 240.0
"""For whole answers of several streams at once, where one machine does everything."""

SERVED_TIMEOUT_S = 30.0
GRACE_S = 30.0
"""As stop_grace_period says; later, Docker kills."""

KILLED_STATUS = 137
POLL_S = 0.25

_Value = TypeVar("_Value")


class StepFailed(Exception):
    """A step did not do what it must; the message says what was seen."""


@dataclass(slots=True)
class Stream:
    """What one streamed chat did, while it does it."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False
    first_piece_s: float | None = None
    longest_gap_s: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def outcome(self) -> str:
        """One word or two for the report."""
        if self.error is not None:
            return f"error {self.error}"
        return str(self.finish_reason) if self.is_done else "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The compose project and its gateway's port."""

    compose: tuple[str, ...]
    http_port: int

    def run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run compose; its stdout, or StepFailed with the end of what it said."""
        return command([*self.compose, "-p", PROJECT, *arguments], timeout_s)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, also of those that do not run."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={PROJECT}"
        return docker("ps", "-aq", "--filter", project, "--filter", label).split()

    def up(self, decode: int = 1) -> str:
        """Start whatever does not run yet."""
        self.run("up", "-d", "--no-build", "--scale", f"decode={decode}")
        return f"decode={decode}"


def command(words: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """The stdout of a program; StepFailed if it fails or takes too long."""
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{' '.join(words)} took over {timeout_s:g} s") from error
    if result.returncode != 0:
        raise StepFailed(f"{' '.join(words)} failed: {result.stderr[-1500:]}")
    return result.stdout


def docker(*arguments: str) -> str:
    """The stdout of docker."""
    return command(["docker", *arguments])


def until(what: str, timeout_s: float, look: Callable[[], _Value | None]) -> _Value:
    """The first answer of `look` that is not None, or StepFailed after `timeout_s`."""
    pause, begin_s = threading.Event(), time.monotonic()
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() - begin_s > timeout_s:
            raise StepFailed(f"{what}: not within {timeout_s:g} s")
        pause.wait(POLL_S)


# --- The gateway as its clients see it -----------------------------------------------------------


def chat(cluster: Cluster, stream: Stream, prompt: str, max_tokens: int) -> Stream:
    """Stream one answer into `stream`; a gateway that refuses or is silent is an error of it."""
    body = {
        "model": "smollm2",
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
        # A model this small ends early at times; a killed worker must find its stream running.
        "ignore_eos": max_tokens > 100,
    }
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port, timeout=CHAT_TIMEOUT_S)
    begin_s = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            text = answer.read(500).decode("utf-8", "replace")
            stream.error = f"HTTP {answer.status} {text}"
        else:
            _read_events(answer, stream, begin_s)
    except (OSError, http.client.HTTPException) as error:
        stream.error = f"connection: {error!r}"
    finally:
        connection.close()
        stream.ended.set()
    return stream


def _read_events(answer: http.client.HTTPResponse, stream: Stream, begin_s: float) -> None:
    last_s = time.monotonic()
    for line in answer:
        text = line.decode("utf-8").strip()
        if not text.startswith("data:"):
            continue
        now_s = time.monotonic()
        stream.longest_gap_s = max(stream.longest_gap_s, now_s - last_s)
        last_s = now_s
        payload = text.removeprefix("data:").strip()
        if payload == "[DONE]":
            stream.is_done = True
            return
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            stream.error = str(event["error"].get("code"))
            continue
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                stream.pieces.append(choice["delta"]["content"])
                if stream.first_piece_s is None:
                    stream.first_piece_s = now_s - begin_s
            stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def one_chat(cluster: Cluster, prompt: str = "What is the capital of France?") -> Stream:
    """A short answer that must come whole."""
    stream = chat(cluster, Stream(), prompt, 16)
    if stream.error is not None or not stream.is_done or not stream.pieces:
        raise StepFailed(f"the chat did not end well: {stream.outcome}, pieces {stream.pieces}")
    return stream


# --- Steps ---------------------------------------------------------------------------------------


def wait_healthy(cluster: Cluster, counts: dict[str, int]) -> str:
    """Until every container of `counts` is healthy; a container that left is a failure."""

    def look() -> bool | None:
        for service, count in counts.items():
            ids = cluster.containers(service)
            template = "{{.State.Status}} {{.State.Health.Status}}"
            states = docker("inspect", "--format", template, *ids).split("\n") if ids else []
            if any(state.startswith(("exited", "restarting", "dead")) for state in states):
                raise StepFailed(f"{service} does not stay up")
            if [state for state in states if state] != ["running healthy"] * count:
                return None
        return True

    until(f"healthy: {counts}", HEALTHY_TIMEOUT_S, look)
    return ", ".join(f"{service} x{count}" for service, count in counts.items())


def active_sequences(container: str) -> int:
    """Sequences a decode container works on, by its own metrics."""
    code = (
        "import urllib.request as u;"
        "print(u.urlopen('http://127.0.0.1:9464/metrics', timeout=3).read().decode())"
    )
    for line in docker("exec", container, "python3", "-c", code).splitlines():
        if line.startswith("baton_decode_active_sequences "):
            return int(float(line.rpartition(" ")[2]))
    raise StepFailed("decode exports no baton_decode_active_sequences")


def kill_mid_stream(cluster: Cluster) -> str:
    """Kill a decode container that has streams; each of them goes on or says why it ends."""
    streams = [Stream() for _ in range(STREAMS)]
    prompts = [f"Count from {index} upwards, slowly." for index in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running: list[Future[Stream]] = [
            pool.submit(chat, cluster, stream, prompt, STREAM_TOKENS)
            for stream, prompt in zip(streams, prompts, strict=True)
        ]

        def busy() -> dict[str, int] | None:
            ended = [stream.outcome for stream in streams if stream.ended.is_set()]
            if ended:
                raise StepFailed(f"streams ended before anything was killed: {ended}")
            if any(len(stream.pieces) < 2 for stream in streams):
                return None
            return {one: active_sequences(one) for one in cluster.containers("decode")}

        spread = until("every stream runs", CHAT_TIMEOUT_S, busy)
        if not all(spread.values()):
            raise StepFailed(f"a decode worker has none of {STREAMS} streams: {spread}")
        victim, victims = max(spread.items(), key=lambda item: item[1])
        docker("kill", "--signal", "KILL", victim)
        killed_s = time.monotonic()
        tries: list[str] = []
        served = until(
            "the next request is served", SERVED_TIMEOUT_S, lambda: _served(cluster, tries)
        )
        served_s = time.monotonic() - killed_s
        _wait_for(running)
    _judge(streams)
    if served_s > SERVED_TIMEOUT_S:
        raise StepFailed(f"the next request was served only after {served_s:.1f} s: {tries}")
    broken = [stream.outcome for stream in streams if stream.error is not None]
    return (
        f"{victims} of {STREAMS} streams were on it (spread {sorted(spread.values())}): "
        f"{STREAMS - len(broken)} went on, "
        f"{len(broken)} ended with {sorted(set(broken)) or 'nothing'}; longest silence "
        f"{max(stream.longest_gap_s for stream in streams):.1f} s; next request served after "
        f"{served_s:.1f} s ({served.outcome}; tries {', '.join(tries)})"
    )


def _wait_for(running: Sequence[Future[Stream]]) -> None:
    """Until all streams ended; each is bound by its own silence, all of them by a deadline."""
    done, pending = wait(running, timeout=STREAM_END_TIMEOUT_S)
    if pending:
        raise StepFailed(f"{len(pending)} streams still run after {STREAM_END_TIMEOUT_S:g} s")
    for future in done:
        future.result()


def _served(cluster: Cluster, tries: list[str]) -> Stream | None:
    begin_s, stream = time.monotonic(), Stream()
    chat(cluster, stream, "What is the capital of Spain?", 8)
    tries.append(f"{stream.outcome} in {time.monotonic() - begin_s:.1f} s")
    return stream if stream.error is None and stream.is_done else None


def _judge(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if stream.outcome == "cut":
            raise StepFailed("a stream just stopped, without an end and without an error")
        if stream.error is not None and stream.error.startswith(("connection", "None")):
            raise StepFailed(f"a stream broke without a reason: {stream.error}")
        if stream.longest_gap_s > BROKEN_TIMEOUT_S:
            raise StepFailed(f"a stream was silent for {stream.longest_gap_s:.1f} s")


def restart_redis(cluster: Cluster) -> str:
    """Restart Redis under a stream, which must not notice."""
    stream = Stream()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, cluster, stream, "Tell me about Redis.", STREAM_TOKENS)
        until("the stream runs", CHAT_TIMEOUT_S, lambda: True if stream.pieces else None)
        cluster.run("restart", "-t", "10", "redis")
        _wait_for([running])
    if stream.error is not None or not stream.is_done:
        raise StepFailed(f"the stream over the restart ended as {stream.outcome}")
    wait_healthy(cluster, {"redis": 1, "gateway": 1})
    return f"stream over it: {len(stream.pieces)} pieces, {stream.outcome}"


def stop(cluster: Cluster) -> str:
    """Stop everything within the grace period; nobody had to be killed."""
    killed_before = {
        container for container in cluster.containers("decode") if _exit_status(container) != 0
    }
    begin_s = time.monotonic()
    cluster.run("stop")
    took_s = time.monotonic() - begin_s
    statuses = {
        f"{service} {container[:6]}": _exit_status(container)
        for service in SERVICES
        for container in cluster.containers(service)
        if container not in killed_before
    }
    if KILLED_STATUS in statuses.values():
        raise StepFailed(f"killed after the grace period: {statuses}")
    if took_s > GRACE_S:
        raise StepFailed(f"stopping took {took_s:.1f} s, over {GRACE_S:g} s")
    bad = {name: status for name, status in statuses.items() if status != 0}
    if bad:
        raise StepFailed(f"did not leave with 0: {bad}")
    return f"{len(statuses)} containers left with 0 in {took_s:.1f} s"


def _exit_status(container: str) -> int:
    return int(docker("inspect", "--format", "{{.State.ExitCode}}", container))


def describe(stream: Stream) -> str:
    """A chat for the report: numbers and not what it said."""
    assert stream.first_piece_s is not None
    return f"first token {stream.first_piece_s:.2f} s, {len(stream.pieces)} pieces"


def scale(cluster: Cluster) -> str:
    """A second decode worker, then a chat."""
    cluster.up(decode=2)
    wait_healthy(cluster, {"decode": 2})
    return describe(one_chat(cluster))


def replace(cluster: Cluster) -> str:
    """The killed container comes back."""
    cluster.up(decode=2)
    return wait_healthy(cluster, {"decode": 2})


def steps(cluster: Cluster) -> list[tuple[str, Callable[[], str]]]:
    """What is done, in order."""
    first = dict.fromkeys(SERVICES, 1)
    return [
        ("config", lambda: cluster.run("config", "-q")),
        ("up", cluster.up),
        ("all healthy", lambda: wait_healthy(cluster, first)),
        ("streamed chat", lambda: describe(one_chat(cluster))),
        ("scale decode=2, chat", lambda: scale(cluster)),
        ("kill decode mid-stream", lambda: kill_mid_stream(cluster)),
        ("replace it", lambda: replace(cluster)),
        ("restart redis mid-stream", lambda: restart_redis(cluster)),
        ("chat", lambda: describe(one_chat(cluster))),
        ("stop", lambda: stop(cluster)),
    ]


def drive(cluster: Cluster) -> bool:
    """Every step until one fails; prints a line for each."""
    for name, step in steps(cluster):
        begin_s = time.monotonic()
        try:
            detail = step()
        except StepFailed as problem:
            print(f"FAILED  {time.monotonic() - begin_s:6.1f} s  {name}: {problem}", flush=True)
            return False
        print(f"ok      {time.monotonic() - begin_s:6.1f} s  {name}  {detail}", flush=True)
    return True


def free_port() -> int:
    """A loopback port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Exit status 0 when every step did what it must, else 1."""
    port = free_port()
    # The file's own defaults are under test: no .env of somebody's, and a port that is free.
    os.environ["BATON_HTTP_PORT"] = str(port)
    compose = ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")
    cluster = Cluster(compose=(*compose, "--env-file", ".env.example"), http_port=port)
    try:
        is_good = drive(cluster)
        if not is_good:
            print(cluster.run("logs", "--no-color", "--tail", "40"), flush=True)
    finally:
        begin_s = time.monotonic()
        cluster.run("down", "-v", "--remove-orphans")
        print(f"ok      {time.monotonic() - begin_s:6.1f} s  down -v", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
