"""A real cluster on a tiny model whose parts are stopped, killed and frozen at chosen moments.

Owns the reach into a running cluster: fault points over HTTP, signals by process id, metrics, page
counts; and a client that notes what came when. Never reaches into a service's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.capability import CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.errors import ServiceError
from baton.faults.admin import PATH as FAULTS_PATH
from baton.faults.switchboard import ENABLED_VARIABLE
from baton.rpc.channel import open_channel
from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import TinyModel, write_directory

SERVICES: Final = ("gateway", "prefill", "decode", "kvstore", "merger")
POLL_S: Final = 0.05
WHOLE_TIMEOUT_S: Final = 60.0
ARENA_BYTES: Final = 32 << 20
CHUNK_TOKENS: Final = 16
_CLOCK: Final = SystemClock()
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+(\S+)$", re.MULTILINE)


@contextlib.contextmanager
def drilled_cluster(folder: Path, *flags: str) -> Iterator[RunningCluster]:
    """A float32 cluster on a tiny model, fault points enabled and none armed."""
    model = write_directory(folder / "tiny", TinyModel(max_context=2048))
    before = os.environ.get(ENABLED_VARIABLE)
    # Children copy the environment when they start, restarted ones too.
    os.environ[ENABLED_VARIABLE] = "1"
    sizes = ("--arena-bytes", str(ARENA_BYTES), "--chunk-tokens", str(CHUNK_TOKENS))
    try:
        with running_cluster(
            folder / "run",
            "--model",
            str(model),
            "--dtype",
            "float32",
            *sizes,
            *flags,
        ) as cluster:
            yield cluster
    finally:
        if before is None:
            os.environ.pop(ENABLED_VARIABLE, None)
        else:
            os.environ[ENABLED_VARIABLE] = before


def prompt_of(seed: int, tokens: int = 64) -> list[int]:
    """A prompt of plain byte tokens that shares no block with another seed's."""
    return [3 + (seed * 31 + index * 7 + seed * index) % 250 for index in range(tokens)]


@dataclass(slots=True)
class Outcome:
    """What a client saw. Times are seconds after the request was sent."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    has_done: bool = False
    is_broken: bool = False
    resumed: int = 0
    log_id: str | None = None
    prefix_id: str | None = None
    cached_tokens: int = 0
    longest_gap_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """An answer to its end."""
        return self.finish is not None and self.error is None and self.has_done


class Drill:
    """One test's hold on a cluster."""

    def __init__(self, cluster: RunningCluster, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.client = client
        self.last_headers: dict[str, str] = {}
        self._frozen: list[int] = []

    # --- processes ----------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Process id of a child now."""
        return self.cluster.pid(name)

    def kill(self, name: str) -> int:
        """End a child as the kernel would; the launcher starts another. Returns its pid."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def freeze(self, name: str) -> int:
        """Stop a child without its knowing; returns its pid for `thaw`."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        self._frozen.append(pid)
        return pid

    def thaw(self, pid: int) -> None:
        """Let a frozen child go on."""
        self._frozen.remove(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def thaw_all(self) -> None:
        """At the end of a test, whatever happened."""
        for pid in tuple(self._frozen):
            self.thaw(pid)

    def flag(self, name: str, flag: str) -> str:
        """The value of a child's command line flag."""
        words = Path(f"/proc/{self.pid(name)}/cmdline").read_text().split("\0")
        return words[words.index(flag) + 1]

    def rss_kib(self, name: str) -> int:
        """Memory of a child without the arena it maps."""
        text = Path(f"/proc/{self.pid(name)}/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    async def running_decode(self) -> str:
        """The decode worker that has a sequence."""
        for name in self.decodes():
            if await self.metric(name, "baton_decode_active_sequences"):
                return name
        raise AssertionError("no decode worker runs a sequence")

    async def pace(self, seconds: float, names: Sequence[str] | None = None) -> None:
        """Make every decode step from the next on take so long, so that a stream can be met in its
        middle. In one call: steps in between would run free.
        """
        for name in self.decodes() if names is None else names:
            await self.arm(name, f"decode.step:pause:{seconds}")

    # --- fault points -------------------------------------------------------------------------

    async def arm(self, name: str, spec: str) -> None:
        """Arm faults in one child."""
        response = await self.client.put(self._faults_url(name), content=spec)
        assert response.status_code == 200, response.text

    async def disarm(self, name: str) -> None:
        """Disarm all faults of a child and let paused work go; a dead child has none."""
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
            await self.client.delete(self._faults_url(name))

    async def hits(self, name: str, point: str) -> int:
        """How often a child has reached a point."""
        state = (await self.client.get(self._faults_url(name))).json()
        return int(state["hits"].get(point, 0))

    async def until_hit(self, names: Sequence[str], point: str, above: Sequence[int]) -> str:
        """The first of the children that reaches the point more often than before."""
        found: list[str] = []

        async def is_hit() -> bool:
            for name, before in zip(names, above, strict=True):
                if await self.hits(name, point) > before:
                    found.append(name)
                    return True
            return False

        await until(is_hit, 20.0, f"{point} in {names}")
        return found[0]

    def _faults_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.flag(name, '--metrics-port')}{FAULTS_PATH}"

    # --- what is held -------------------------------------------------------------------------

    async def metric(self, name: str, family: str) -> float:
        """The sum of a family's samples in one child."""
        url = f"http://127.0.0.1:{self.flag(name, '--metrics-port')}/metrics"
        text = (await self.client.get(url)).text
        values = [float(m[3]) for m in _SAMPLE.finditer(text) if m[1] == family]
        assert values, f"{name} has no {family}"
        return sum(values)

    async def arena(self) -> kvstore_pb2.DescribeArenaResponse:
        """Page counts of the node."""
        channel = open_channel(f"127.0.0.1:{self.flag('kvstore-0', '--port')}")
        try:
            stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
            request = kvstore_pb2.DescribeArenaRequest(capability=self._capability(bytes(16)))
            return await stub.DescribeArena(request, timeout=2.0)
        finally:
            await channel.close()

    async def held(self) -> dict[str, float]:
        """Everything that a request may hold, by name; all zero at rest. Asserts conservation."""
        arena = await self.arena()
        states = (
            arena.pages_free,
            arena.pages_granted,
            arena.pages_live,
            arena.pages_shared,
            arena.pages_quarantined,
        )
        assert sum(states) == arena.arena.page_count, states
        found = {
            "granted": float(arena.pages_granted),
            "leases": float(arena.leases),
            "transfers": float(arena.transfers_open),
            "in_flight": await self.metric("gateway-0", "baton_requests_in_flight"),
            "cleanups": await self.metric("gateway-0", "baton_cleanups_pending"),
            "prefill_pending": await self.metric("prefill-0", "baton_prefill_pending_requests"),
        }
        for name in self.decodes():
            found[name] = await self.metric(name, "baton_decode_active_sequences")
        return found

    def decodes(self) -> list[str]:
        """Names of the decode workers."""
        return sorted(path.stem for path in self.cluster.run_dir.glob("decode-*.pid"))

    async def settles(self, timeout_s: float = 20.0) -> float:
        """Waits until nothing is held; returns the seconds that took."""
        began_s = time.monotonic()
        last: dict[str, float] | Exception = {}

        async def is_at_rest() -> bool:
            nonlocal last
            try:
                last = held = await self.held()
            except (httpx.HTTPError, ServiceError, OSError) as error:
                last = error
                return False
            return not any(held.values())

        await until(is_at_rest, timeout_s, lambda: f"nothing held, last seen {last}")
        return time.monotonic() - began_s

    async def is_whole(self) -> None:
        """Waits until every part could serve again."""

        async def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                for service in SERVICES:
                    if (await self.client.get(f"/readyz/{service}")).status_code != 200:
                        return False
                response = await self.client.get("/readyz")
                routable = await self._routable_decodes()
                return response.status_code == 200 and routable == len(self.decodes())
            return False

        await until(is_ready, WHOLE_TIMEOUT_S, "every part ready")

    async def _routable_decodes(self) -> int:
        """Decode workers that answer their own /readyz."""
        count = 0
        for name in self.decodes():
            with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
                url = f"http://127.0.0.1:{self.flag(name, '--metrics-port')}/readyz"
                count += (await self.client.get(url)).status_code == 200
        return count

    async def log_image(self, log_id: str) -> tuple[list[bytes], list[bytes]]:
        """A log as it is: its replay, and the bytes of every page that it refers to."""
        channel = open_channel(f"127.0.0.1:{self.flag('kvstore-0', '--port')}")
        try:
            stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
            request = kvstore_pb2.ReplayLogRequest(
                log_id=bytes.fromhex(log_id), capability=self._capability(bytes.fromhex(log_id))
            )
            pieces = [piece async for piece in stub.ReplayLog(request, timeout=5.0)]
        finally:
            await channel.close()
        told = [
            piece.SerializeToString(deterministic=True)
            for piece in pieces
            if piece.WhichOneof("content") != "end"
        ]
        rows = [entry.page for piece in pieces for entry in piece.pages.pages]
        return told, await self._page_bytes(rows)

    async def _page_bytes(self, pages: Sequence[int]) -> list[bytes]:
        shape = (await self.arena()).arena
        node, folder = self.flag("kvstore-0", "--node-id"), self.flag("kvstore-0", "--arena-dir")
        with (Path(folder) / f"arena-{node}.kv").open("rb") as file:
            found = []
            for page in pages:
                file.seek(shape.data_offset + page * shape.slot_bytes)
                found.append(file.read(shape.page_bytes))
        return found

    def operator(self) -> str:
        """An operator's capability."""
        return self._signed(None, Right.ADMIN, None)

    def _capability(self, log_id: bytes) -> str:
        """What the gateway would mint for a look at one log."""
        return self._signed("dev", Right.READ, log_id)

    def _signed(self, tenant: str | None, right: Right, log_id: bytes | None) -> str:
        key = bytes.fromhex((self.cluster.run_dir / "cluster.key").read_text().strip())
        signer = CapabilitySigner(key, _CLOCK)
        return signer.sign(
            Claims(
                tenant=tenant,
                scope=None if tenant is None else "",
                rights=frozenset({right}),
                expiry_wall_s=signer.expiry_after(60.0),
                request_id="drill",
                log_id=log_id,
            )
        )

    # --- requests -----------------------------------------------------------------------------

    async def ask(
        self,
        prompt: Sequence[int] | str,
        *,
        tokens: int = 24,
        is_streamed: bool = True,
        is_cached: bool = False,
        on_token: Callable[[int], Awaitable[None]] | None = None,
        timeout_s: float | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """One answer, greedy unless `sampling` says otherwise, noted as the client sees it; never
        raises for what the server does.
        """
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": is_streamed,
            **(sampling or {}),
        }
        headers = {} if is_cached else {"X-Cache": "off"}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        outcome, began_s = Outcome(), time.monotonic()
        try:
            async with asyncio.timeout(60.0 + (timeout_s or 0.0)):
                async with self.client.stream(
                    "POST", "/v1/completions", json=body, headers=headers
                ) as response:
                    outcome.status, outcome.headers = response.status_code, dict(response.headers)
                    self.last_headers = outcome.headers
                    if is_streamed and response.status_code == 200:
                        await self._read(response, outcome, began_s, on_token)
                    else:
                        _note_whole(json.loads(await response.aread()), outcome)
        except httpx.HTTPError:
            outcome.is_broken = True
        outcome.ended_s = time.monotonic() - began_s
        return outcome

    async def _read(
        self,
        response: httpx.Response,
        outcome: Outcome,
        began_s: float,
        on_token: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                outcome.has_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                outcome.error = event["error"]["code"]
                continue
            if "baton" in event:
                _note_answer(event["baton"], outcome)
            for choice in event["choices"]:
                outcome.token_ids += choice.get("token_ids") or []
                outcome.text += choice.get("text") or ""
                outcome.finish = choice.get("finish_reason") or outcome.finish
                if choice.get("token_ids"):
                    now_s = time.monotonic() - began_s
                    if outcome.first_s:
                        outcome.longest_gap_s = max(outcome.longest_gap_s, now_s - outcome.last_s)
                    outcome.last_s = now_s
                    outcome.first_s = outcome.first_s or outcome.last_s
                    if on_token is not None:
                        await on_token(len(outcome.token_ids))


def _note_whole(body: dict[str, Any], outcome: Outcome) -> None:
    if "error" in body:
        outcome.error = body["error"]["code"]
        return
    outcome.token_ids = body["choices"][0]["token_ids"]
    outcome.text = body["choices"][0]["text"]
    outcome.finish = body["choices"][0]["finish_reason"]
    _note_answer(body["baton"], outcome)
    outcome.has_done = True


def _note_answer(baton: dict[str, Any], outcome: Outcome) -> None:
    outcome.resumed = baton["resumed"]
    outcome.log_id = baton["log_id"]
    outcome.prefix_id = baton.get("prefix_id")
    outcome.cached_tokens = baton.get("cached_tokens", 0)


async def until(
    is_met: Callable[[], Awaitable[bool]], timeout_s: float, what: str | Callable[[], str]
) -> None:
    """Looks again and again; AssertionError says what did not come true in time."""
    never = asyncio.Event()
    try:
        async with asyncio.timeout(timeout_s):
            while not await is_met():
                await _CLOCK.wait(never, POLL_S)
    except TimeoutError:
        text = what if isinstance(what, str) else what()
        raise AssertionError(f"not within {timeout_s:g} s: {text}") from None


@contextlib.asynccontextmanager
async def drill_on(cluster: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster whole before and after, faults disarmed, nothing frozen, nothing held."""
    limits = httpx.Limits(max_connections=128, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=30.0, trust_env=False, limits=limits
    ) as client:
        drill = Drill(cluster, client)
        await drill.is_whole()
        try:
            yield drill
        finally:
            drill.thaw_all()
            for name in ("gateway-0", "kvstore-0", "prefill-0", "merger-0", *drill.decodes()):
                await drill.disarm(name)
        await drill.is_whole()
        await drill.settles()
