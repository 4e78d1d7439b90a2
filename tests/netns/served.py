"""A whole cluster over the lab: prefill and a kvstore on one side, decode and one on the other.

Owns the workers inside the namespaces, the gateway outside of them, and what a client sees of it.
The gateway and each side's workers have a link that is never touched; only the stores' link is.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from baton.clock import SystemClock
from baton.testing.cluster import free_port
from tests.integration.kvstore.harness import Model, ready_at
from tests.netns.lab import Network, NodeStore, node

KEY: Final = "key-lab"
READY_S: Final = 60.0
CHUNK_TOKENS: Final = 128
REQUEST_S: Final = 60.0
WORKER_PORT: Final = 7422
_TENANTS: Final = f"tenants:\n  - name: lab\n    keys: [{KEY}]\n"


@dataclass(slots=True, kw_only=True)
class Told:
    """An answer as its client, the log and the metrics tell of it."""

    token_ids: list[int]
    baton: dict[str, Any]
    usage: dict[str, Any]
    headers: httpx.Headers
    elapsed_s: float
    line: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were there."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


@dataclass(slots=True, kw_only=True)
class Served:
    """A running cluster."""

    url: str
    metrics_url: str
    log_file: Path
    stores: dict[str, NodeStore] = field(default_factory=dict)

    def ask(self, prompt: Sequence[int], tokens: int = 6) -> Told:
        """A greedy answer, and what was written about it."""
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        began_s = time.monotonic()
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=REQUEST_S,
            trust_env=False,
        )
        elapsed_s = time.monotonic() - began_s
        assert answer.status_code == 200, answer.text
        told = answer.json()
        return Told(
            token_ids=told["choices"][0]["token_ids"],
            baton=told["baton"],
            usage=told["usage"],
            headers=answer.headers,
            elapsed_s=elapsed_s,
            line=self._line(answer.headers["x-baton-request-id"]),
        )

    def answers(self, kv_source: str) -> float:
        """Finished answers by the source of their KV, as the metrics count them."""
        text = httpx.get(f"{self.metrics_url}/metrics", timeout=10.0, trust_env=False).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("baton_answers_total{") and f'kv_source="{kv_source}"' in line
        )

    def _line(self, request_id: str) -> dict[str, Any]:
        """The request's canonical log line: it is written when the request ends."""
        deadline_s = time.monotonic() + 5.0
        while True:
            for text in self.log_file.read_text("utf-8").splitlines():
                if request_id in text and '"request_finished"' in text:
                    found: dict[str, Any] = json.loads(text)
                    return found
            assert time.monotonic() < deadline_s, "no line of the request"


@contextmanager
def served(model: Model, folder: Path, net: Network) -> Iterator[Served]:
    """Prefill in side a, decode in side b, and a gateway that reaches both; ready."""
    gateway_port, http_port, metrics_port = free_port(), free_port(), free_port()
    logs = folder / "logs"
    logs.mkdir()
    (folder / "tenants.yaml").write_text(_TENANTS, encoding="ascii")
    with ExitStack() as stack:
        running = Served(
            url=f"http://127.0.0.1:{http_port}",
            metrics_url=f"http://127.0.0.1:{metrics_port}",
            log_file=logs / "gateway.log",
        )
        for side in ("a", "b"):
            own = folder / side
            own.mkdir()
            running.stores[side] = stack.enter_context(node(model, own, net, side))
        common = ("--model", str(model.path), "--log-level", "info")
        _start(
            stack,
            logs / "gateway.log",
            (
                *(sys.executable, "-m", "services.gateway", *common, "--gateway-id", "gateway-lab"),
                *("--host", "0.0.0.0", "--insecure-bind", "--port", str(gateway_port)),
                *("--http-port", str(http_port), "--metrics-port", str(metrics_port)),
                *("--tenants-file", str(folder / "tenants.yaml")),
            ),
        )
        for number, (side, service) in enumerate((("a", "prefill"), ("b", "decode")), start=1):
            store = running.stores[side]
            _start(
                stack,
                logs / f"{service}.log",
                (
                    *("ip", "netns", "exec", net.names[side]),
                    *(sys.executable, "-m", f"services.{service}", *common, "--dtype", "float32"),
                    *("--worker-id", f"{service}-{side}", "--kvstore", store.peer_address),
                    *("--gateways", f"10.77.{number}.1:{gateway_port}", "--threads", "1"),
                    *("--chunk-tokens", str(CHUNK_TOKENS), "--host", "0.0.0.0"),
                    *("--insecure-bind", "--port", str(WORKER_PORT)),
                    *("--advertise", f"10.77.{number}.2:{WORKER_PORT}"),
                ),
            )
        try:
            asyncio.run(_all_ready(gateway_port))
            _until_served(running.url)
        except (AssertionError, TimeoutError) as error:
            said = "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in logs.iterdir())
            raise AssertionError(f"the cluster is not ready\n{said}") from error
        yield running


def _start(stack: ExitStack, log_file: Path, argv: Sequence[str]) -> None:
    """A process until the stack ends; what runs in a namespace is `ip`'s own successor."""
    with log_file.open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)

    stack.callback(stop)


async def _all_ready(gateway_port: int) -> None:
    await ready_at(f"127.0.0.1:{gateway_port}")
    for number in (1, 2):
        await ready_at(f"10.77.{number}.2:{WORKER_PORT}")


def _until_served(url: str) -> None:
    """Both workers were heard: the gateway says that it could serve."""
    clock, deadline_s = SystemClock(), time.monotonic() + READY_S

    async def pause() -> None:
        await clock.wait(asyncio.Event(), 0.1)

    while httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False).status_code != 200:
        assert time.monotonic() < deadline_s, "not served in time"
        asyncio.run(pause())
