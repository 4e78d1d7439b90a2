"""What the replayed field reports share: one place where their names meet ours.

Owns the names, the facts about the bundled model, and readers of every process's metrics, faults
and command line. Never imports a service: a case stands outside, as the person who reported it did.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from baton.testing.cluster import RunningCluster
from tests.cases.door import KEY_A, KEY_B, KEY_C, Door
from tests.cases.waiting import until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODEL: Final = "SmolLM2-135M-Instruct"
LIMITED_PER_MINUTE: Final = 6
"""Requests that the tenant of KEY_C has; the others have no limit."""

TENANTS: Final = f"""
tenants:
  - name: alpha
    keys: [{KEY_A}]
  - name: beta
    keys: [{KEY_B}]
  - name: gamma
    keys: [{KEY_C}]
    requests_per_minute: {LIMITED_PER_MINUTE}
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

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = list[tuple[str, dict[str, str], float]]
"""(name, labels, value) of each series."""

_PARTS: Final = ("gateway-0", "kvstore-0", "prefill-0", "decode-0", "decode-1", "merger-0")


def chat(content: str, **more: Any) -> dict[str, Any]:
    """A greedy chat body with one user turn."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "temperature": 0, "messages": messages, **more}


def completion(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    """A greedy completion body."""
    return {"model": MODEL, "temperature": 0, "prompt": prompt, **more}


class Replay(Door):
    """A running cluster as a case sees it."""

    def __init__(self, cluster: RunningCluster) -> None:
        super().__init__(cluster.url)
        self.cluster = cluster

    # --- what processes show -------------------------------------------------------------------

    def parts(self) -> list[str]:
        """Names of the processes of this cluster."""
        return [one for one in _PARTS if (self.cluster.run_dir / f"{one}.pid").exists()]

    def port_of(self, part: str, flag: str = "--metrics-port") -> int:
        """A port from the command line of a process."""
        raw = Path(f"/proc/{self.cluster.pid(part)}/cmdline").read_bytes()
        words = raw.decode().split("\0")
        return int(words[words.index(flag) + 1])

    def flag_of(self, part: str, flag: str) -> str:
        """The value of a flag of one part's command line."""
        return _flag(self.cluster.pid(part), flag)

    def samples(self, part: str) -> Samples:
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
        return total(self.samples(part), name, **labels)

    def leaks(self) -> dict[str, float]:
        """What must come back to nothing once nobody waits for an answer."""
        gateway, store = self.samples("gateway-0"), self.samples("kvstore-0")
        found = {
            "requests_in_flight": total(gateway, "baton_requests_in_flight"),
            "cleanups_pending": total(gateway, "baton_cleanups_pending"),
            "leases": total(store, "baton_kvstore_leases"),
            "pages_granted": total(store, "baton_kvstore_pages", state="granted"),
            "pages_quarantined": total(store, "baton_kvstore_pages", state="quarantined"),
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


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the series of that name and labels; a missing family is a failure."""
    found = [one for one in samples if one[0] == name]
    assert found, f"no {name}"
    return sum(value for _, has, value in found if labels.items() <= has.items())


def parse_metrics(text: str) -> Samples:
    """(name, labels, value) of Prometheus' text format."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not line.startswith("#"):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.append((match[1], labels, float(match[3])))
    return found


@functools.cache
def _flag(pid: int, flag: str) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index(flag) + 1]
