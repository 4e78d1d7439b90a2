"""200 sequences at once, joined, cancelled, preempted and resumed at random: none hears another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from baton.api.decode.v1 import decode_pb2
from baton.clock import SystemClock
from baton.errors import Reason
from baton.sampling_parameters import SamplingParameters
from tests.integration.workers.crowd import Crowd, Shapes, crowd_on, preempted, told
from tests.integration.workers.harness import (
    Answer,
    Direct,
    Gateway,
    OpenedLog,
    Processes,
    event_shape,
    gateway_to,
    running_workers,
    shape,
)

SETTLED_WITHIN_S = 60.0
"""Two leases and more: what was cancelled last is given back after its answer."""

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

SEQUENCES = 200
PAGE_BYTES = 16_384
PAGES = 40
SLOTS = 12
CLASSES = (decode_pb2.SERVICE_CLASS_INTERACTIVE, decode_pb2.SERVICE_CLASS_BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens to one sequence. `stops`: after so many tokens each it is stopped; it goes on
    from there unless `is_cancelled`.
    """

    prompt: list[int]
    sampling: SamplingParameters
    is_local: bool
    service_class: decode_pb2.ServiceClass.ValueType
    tenant: str
    stops: tuple[int, ...]
    is_cancelled: bool


def scripts(seed: int) -> list[Script]:
    """Drawn once, the same in every run."""
    random = np.random.default_rng(seed)
    drawn = []
    for index in range(SEQUENCES):
        most = int(random.integers(6, 40))
        is_greedy = bool(random.random() < 0.4)
        sampling = SamplingParameters(
            temperature=0.0 if is_greedy else 0.9,
            top_k=None if is_greedy else 40,
            seed=index,
            repetition_penalty=1.3 if random.random() < 0.3 else 1.0,
            max_tokens=most,
            ignore_eos=True,
        )
        stops = sorted({int(one) for one in random.integers(1, most, random.integers(0, 3))})
        drawn.append(
            Script(
                prompt=[int(one) for one in random.integers(3, 250, random.integers(3, 40))],
                sampling=sampling,
                is_local=bool(random.random() < 0.5),
                service_class=CLASSES[int(random.random() < 0.4)],
                tenant=f"tenant-{random.integers(4)}",
                stops=tuple(stops),
                is_cancelled=bool(stops) and bool(random.random() < 0.25),
            )
        )
    return drawn


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Twelve slots over pages for half of what they may need."""
    with running_workers(
        tmp_path_factory.mktemp("crosstalk"),
        (64,),
        arena_bytes=PAGES * PAGE_BYTES,
        decode_flags=("--active-sequences-max", str(SLOTS), "--queue-max", str(SEQUENCES)),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def direct(processes: Processes) -> Direct:
    """The same model in this process."""
    return Direct(processes.addresses.model)


@pytest.fixture
async def gateway(processes: Processes, direct: Direct) -> AsyncIterator[Gateway]:
    """A gateway's side."""
    async with gateway_to(processes.addresses, direct) as side:
        yield side


async def begin(crowd: Crowd, script: Script) -> tuple[OpenedLog, Shapes]:
    """An open log and what is told of it already."""
    if script.is_local:
        log = await crowd.open(script.prompt, script.sampling, "decode-0", tenant=script.tenant)
        return log, []
    log = await crowd.open(script.prompt, script.sampling, "prefill-64", tenant=script.tenant)
    _, sealed = await crowd.gateway.prefill(log, 64)
    return log, [event_shape(sealed.first_token)]


async def play(crowd: Crowd, script: Script, opening: asyncio.Semaphore) -> Shapes:
    """All that one sequence's client heard."""
    fields = {"tenant": script.tenant, "service_class": script.service_class}
    async with opening:
        log, heard = await begin(crowd, script)
    is_sealed = bool(heard)
    for stop in (*script.stops, None):
        answer = await crowd.start(
            log, next_index=len(heard), local_prefill=not is_sealed, **fields
        )
        wanted = None if stop is None else stop - len(heard)
        await crowd.until(answer, partial(has, tokens=wanted))
        if not answer.is_over:
            await crowd.stop(log)
            await crowd.until(answer, lambda _one: False)
        heard += told(answer)
        is_sealed = is_sealed or bool(answer.tokens)
        if heard and heard[-1][3] is not None:
            break
        assert answer.error is not None
        assert answer.error.reason == Reason.CANCELLED.value, answer.error
        if script.is_cancelled:
            break
        log.generation = await crowd.generation(log)
    return heard


def has(answer: Answer, tokens: int | None) -> bool:
    """Whether it was told so many tokens; None: never enough."""
    return tokens is not None and len(answer.tokens) >= tokens


async def test_two_hundred_random_sequences_each_equal_their_solo_run(
    gateway: Gateway, processes: Processes
) -> None:
    """Float32: the same tokens, to the last one, whatever happened in between."""
    drawn, opening = scripts(7), asyncio.Semaphore(6)
    async with crowd_on(gateway) as crowd, asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(play(crowd, one, opening)) for one in drawn]
    for script, task in zip(drawn, playing, strict=True):
        expected = shape(gateway.direct.tokens(script.prompt, script.sampling))
        heard = task.result()
        if script.is_cancelled:
            expected = expected[: len(heard)]
        assert heard == expected
    causes = Counter(cause for _, cause in preempted(processes.run_dir))
    assert causes["pages"] >= 1
    assert causes.total() >= 5
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + SETTLED_WITHIN_S
    while (found := await gateway.arena()).pages_granted:
        assert clock.monotonic_s() < deadline_s, found
