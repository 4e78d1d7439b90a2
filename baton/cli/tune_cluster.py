"""The cluster that `baton tune` measures on: one worker of it is started again for each size.

Owns its options, its life and the order of measurements. The load stands in `tune_load`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

import httpx

from baton.cli.console import CommandFailed
from baton.cli.tune_choice import point_of
from baton.cli.tune_load import STREAM_PROMPT_TOKENS, Load, measure, prompt_text
from baton.cli.up import check_arena
from baton.launcher.cluster import arena_dir, prepare, remove_arena_dir, this_machine
from baton.launcher.plan import ChildSpec, ClusterOptions
from baton.launcher.ports import PortReservation
from baton.launcher.rundir import RunDir
from baton.launcher.supervisor import STEADY_S, Child, ChildState, ClusterFailed, Supervisor
from baton.text.tokenizer import Tokenizer
from baton.worker.chunk_profile import CurvePoint
from baton.worker.chunker import Chunking

RESTART_TIMEOUT_S: Final = 120.0
WORDS_A_TOKEN: Final = 1.2
"""More than any tokenizer's: the text is cut to the tokens that are wanted."""
CHUNK_FLAG: Final = "--chunk-tokens"

STARTS_MAX: Final = 3
"""Ports are chosen before they are bound: on a busy machine somebody else may take one."""

OnPoint = Callable[[CurvePoint], None]


class PortTaken(CommandFailed):
    """A port that was free when it was chosen was not when a service came to bind it."""


@unique
class Worker(StrEnum):
    """Whose chunks: a prefill worker's, or those of a decode worker that prefills itself."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be measured. `quiet_s`: how long no prompt comes before each one."""

    role: Worker
    sizes: tuple[int, ...]
    prompt_tokens: int
    rounds: int
    streams: int
    quiet_s: float
    chunking: Chunking


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Token ids to ask with: `prompts` for each size, the first of them to warm up with."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    streams: tuple[tuple[int, ...], ...]


def make_texts(tokenizer: Tokenizer, wanted: Wanted) -> Texts:
    """Prompts that share no beginning, so that none finds another's KV."""

    def ids(seed: int, tokens: int) -> tuple[int, ...]:
        words = max(8, int(tokens * WORDS_A_TOKEN))
        return tuple(tokenizer.encode(prompt_text(seed, words))[:tokens])

    count = wanted.rounds + 1
    firsts = range(1000, 1000 + len(wanted.sizes) * count, count)
    return Texts(
        prompts=tuple(
            tuple(ids(first + index, wanted.prompt_tokens) for index in range(count))
            for first in firsts
        ),
        streams=tuple(ids(100 + index, STREAM_PROMPT_TOKENS) for index in range(wanted.streams)),
    )


def cluster_options(
    folder: Path, wanted: Wanted, *, model: str, dtype: str, kernel: str
) -> ClusterOptions:
    """A cluster that prefills as `wanted` says, on ports that are free now."""
    ports = PortReservation("127.0.0.1")
    http_port, grpc_port = ports.next_port(), ports.next_port()
    ports.release()
    return ClusterOptions(
        model=model,
        dtype=dtype,
        http_port=http_port,
        grpc_port=grpc_port,
        run_dir=folder,
        arena_dir=arena_dir(folder),
        # The folder may be memory itself, and nothing of it is found again.
        nvme_bytes=0,
        chunk_tokens=wanted.sizes[0],
        chunking=wanted.chunking.value,
        prefill_mode="remote" if wanted.role is Worker.PREFILL else "local",
        kernel=kernel,
        log_level="warning",
    )


def measured_curve(
    options: ClusterOptions, wanted: Wanted, texts: Texts, on_point: OnPoint
) -> tuple[CurvePoint, ...]:
    """Start the cluster, measure every size, stop it; points are told as they are known.

    Raises CommandFailed for what went wrong.
    """
    ready = asyncio.Event()
    name = f"{wanted.role.value}-0"

    def changed(child: Child) -> None:
        if child.spec.name == name and child.state is ChildState.READY:
            ready.set()

    check_arena(options, this_machine(options.arena_dir))
    with RunDir(options.run_dir) as held:
        cluster = prepare(options, held, on_change=changed)
        url = f"http://{options.host}:{options.http_port}"
        bench = _Bench(cluster=cluster, child=cluster.child(name), ready=ready, url=url)
        try:
            return asyncio.run(bench.run(wanted, texts, on_point))
        except ClusterFailed as problem:
            raise _failed(problem) from problem
        except BaseExceptionGroup as group:
            raise _failed(next(_leaves(group))) from group
        finally:
            remove_arena_dir(options.arena_dir)


def measured_in_folder(
    wanted: Wanted, texts: Texts, on_point: OnPoint, *, flags: Mapping[str, str]
) -> tuple[ClusterOptions, tuple[CurvePoint, ...]]:
    """As `measured_curve`, in a folder that is removed again, with other ports where one was taken;
    with the options of the cluster. `flags`: model, dtype and kernel.
    """
    for left in reversed(range(STARTS_MAX)):
        with tempfile.TemporaryDirectory(prefix="baton-tune-") as folder:
            options = cluster_options(Path(folder), wanted, **flags)
            try:
                return options, measured_curve(options, wanted, texts, on_point)
            except PortTaken:
                if not left:
                    raise
    raise AssertionError("the last start returns or raises")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for problem in group.exceptions:
        if isinstance(problem, BaseExceptionGroup):
            yield from _leaves(problem)
        else:
            yield problem


def _failed(problem: BaseException) -> BaseException:
    """What people are told; a fault of ours stays what it is."""
    if isinstance(problem, ClusterFailed):
        kind = PortTaken if os.strerror(errno.EADDRINUSE) in str(problem) else CommandFailed
        return kind(str(problem), remedy="`baton doctor` checks the usual causes")
    if isinstance(problem, TimeoutError):
        return CommandFailed("the cluster did not answer in time", remedy="try fewer --streams")
    if isinstance(problem, httpx.HTTPError):
        return CommandFailed(f"the gateway broke off: {str(problem) or type(problem).__name__}")
    return problem


def with_chunk(spec: ChildSpec, chunk_tokens: int) -> ChildSpec:
    """The same process with another chunk size."""
    arguments = list(spec.arguments)
    arguments[arguments.index(CHUNK_FLAG) + 1] = str(chunk_tokens)
    return replace(spec, arguments=tuple(arguments))


@dataclass(slots=True, kw_only=True)
class _Bench:
    """The cluster, its one worker that changes, and where it answers."""

    cluster: Supervisor
    child: Child
    ready: asyncio.Event
    url: str

    async def run(self, wanted: Wanted, texts: Texts, on_point: OnPoint) -> tuple[CurvePoint, ...]:
        """The whole curve, while the cluster runs and is watched."""
        points: list[CurvePoint] = []
        async with self.cluster, asyncio.TaskGroup() as group:
            watching = group.create_task(self.cluster.wait())
            model, context_max = await self._served()
            for size, prompts in zip(wanted.sizes, texts.prompts, strict=True):
                await self._use(size)
                load = Load(
                    url=self.url,
                    model=model,
                    context_max=context_max,
                    prompts=prompts,
                    streams=texts.streams,
                    quiet_s=wanted.quiet_s,
                )
                points.append(point_of(size, await measure(load)))
                on_point(points[-1])
            watching.cancel()
        return tuple(points)

    async def _served(self) -> tuple[str, int]:
        """The model's name at the gateway, and the most tokens of a sequence."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            told = (await client.get("/v1/models")).json()["data"][0]
        return str(told["id"]), int(told["max_model_len"])

    async def _use(self, chunk_tokens: int) -> None:
        """The worker serves with this size when it returns."""
        spec = with_chunk(self.child.spec, chunk_tokens)
        if spec == self.child.spec:
            return
        process, ready_s = self.child.process, self.child.ready_s
        assert process is not None, "the cluster runs"
        assert ready_s is not None, "it serves"
        # One that ends sooner counts as one that keeps dying.
        left_s = max(0.0, ready_s + STEADY_S - time.monotonic())
        await asyncio.sleep(left_s)  # noqa: TID251 - pacing, as the supervisor wants it
        self.child.spec = spec
        self.ready.clear()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            await self.ready.wait()
