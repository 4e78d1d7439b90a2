"""The golden check while a worker serves: in slices, repeated, and what follows from a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.engine.golden_check import GoldenCheck, own_reference, sketch
from baton.errors import Reason, ServiceError, StartupError
from baton.kv.numeric import NATIVE_Q4_1, TORCH_Q4_1, NumericClass
from baton.metrics import Metrics
from baton.testing.clock import ManualClock
from baton.worker import golden_watch
from baton.worker.golden_watch import GoldenMeasures, GoldenWatch, WatchTools
from baton.worker.threads import Progress, WorkThread
from baton.worker.unvouched import LOGS_MAX, Unvouched

VOCABULARY = 300
REFERENCE = own_reference((), VOCABULARY)
SLICES = len(REFERENCE.prompt_ids) + len(REFERENCE.forced_ids)
A, B = b"a" * 16, b"b" * 16


class FakePath:
    """Logits that are what `scale` says."""

    bound, drift_bound = 1e-3, 1e-6

    def __init__(self, name: str) -> None:
        self.name, self.scale = name, 1.0

    def numeric_class(self) -> str:
        return self.name

    def weights_view(self) -> memoryview:
        return memoryview(bytearray(4))

    def slices(self, reference: Any) -> Iterator[Any]:
        logits = np.arange(1.0, VOCABULARY + 1.0, dtype=np.float32)
        for position in range(SLICES):
            is_wanted = position >= len(reference.prompt_ids) - 1
            yield sketch(logits * np.float32(self.scale)) if is_wanted else None


def checked(path: FakePath) -> GoldenCheck:
    check = GoldenCheck(path, REFERENCE)
    assert check.run().is_passed
    return check


def test_a_check_comes_slice_by_slice() -> None:
    """Between two of them a worker steps; the result comes after the last."""
    check = GoldenCheck(FakePath("native"), REFERENCE)
    for _ in range(SLICES):
        assert check.advance() is None
    result = check.advance()
    assert result is not None
    assert result.is_passed
    assert result.drift is None


@pytest.mark.parametrize("scale", [1.00001, 2.0, float("nan"), float("inf")])
def test_another_result_than_at_the_start_fails(scale: float) -> None:
    """Far below the bound of a class: the same weights give the same numbers."""
    path = FakePath("native")
    check = checked(path)
    assert check.run().is_passed
    path.scale = scale
    assert not check.run().is_passed
    path.scale = 1.0
    assert check.run().is_passed


def test_a_pass_vouches_for_what_was_written_before_it_began() -> None:
    """What is written while a check runs waits for the next one."""
    unvouched = Unvouched()
    unvouched.note(A, 30)
    unvouched.note(A, 20)
    unvouched.note(A, 40)
    unvouched.begin()
    unvouched.note(A, 50)
    unvouched.note(B, 7)
    unvouched.passed()
    assert unvouched.all() == {A: 50, B: 7}
    unvouched.note(A, 60)
    assert unvouched.all() == {A: 50, B: 7}
    unvouched.forget()
    assert unvouched.all() == {}


def test_what_is_doubtful_can_be_told_without_a_check_beginning() -> None:
    """By whoever cannot ask the compute thread."""
    unvouched = Unvouched()
    unvouched.note(A, 30)
    unvouched.begin()
    unvouched.note(A, 40)
    unvouched.note(B, 7)
    assert unvouched.told() == {A: 30, B: 7}
    unvouched.passed()
    assert unvouched.told() == {A: 40, B: 7}


def test_a_long_list_makes_a_check_due() -> None:
    """It is bounded by checking, not by forgetting."""
    unvouched = Unvouched()
    for index in range(LOGS_MAX):
        assert not unvouched.is_full
        unvouched.note(index.to_bytes(16, "little"), 0)
    assert unvouched.is_full


class Engine:
    def __init__(self) -> None:
        self.native, self.torch = FakePath("native"), FakePath("torch")
        self._all = (checked(self.native), checked(self.torch))
        self.steps_by = "native"

    @property
    def checks(self) -> tuple[GoldenCheck, ...]:
        return self._all if self.steps_by == "native" else self._all[1:]

    def fall_back(self) -> Any:
        self.steps_by = "torch"
        return TORCH_Q4_1


class Store:
    """Answers Distrust with what it is told to raise, then with a number of pages."""

    def __init__(self, *refusals: ServiceError) -> None:
        self.refusals = list(refusals)
        self.distrusted: list[dict[bytes, int]] = []

    async def distrust(self, incarnation: int, positions: dict[bytes, int]) -> int:
        if self.refusals:
            raise self.refusals.pop(0)
        self.distrusted.append(positions)
        return len(positions)


class Attachment:
    """Attaches again once the change is made."""

    def __init__(self) -> None:
        self.attached = 0

    async def renew(self, _stopping: asyncio.Event, change: Any) -> None:
        await change()
        self.attached += 1


@dataclass(frozen=True)
class Label:
    numeric_class: NumericClass


@dataclass(frozen=True)
class Identity:
    incarnation: int
    label: Label


class Site:
    """A watch with everything around it played."""

    def __init__(self, *refusals: ServiceError) -> None:
        self.engine, self.store, self.attachment = Engine(), Store(*refusals), Attachment()
        self.clock, self.stopping = ManualClock(), asyncio.Event()
        self.metrics = Metrics("decode")
        self.error: Exception | None = None
        self.parts: Any = SimpleNamespace(
            engine=self.engine,
            store=self.store,
            compute=WorkThread("compute"),
            progress=Progress(),
            unvouched=Unvouched(),
            held=[],
            is_degraded=False,
            identity=Identity(5, Label(NATIVE_Q4_1)),
        )
        attachment: Any = self.attachment
        self.watch = GoldenWatch(
            WatchTools(
                parts=self.parts,
                attachment=attachment,
                kvstore="here:1",
                clock=self.clock,
                measures=GoldenMeasures(self.metrics, self.parts),
                interval_s=300.0,
            )
        )

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Let the watch run, and its time pass, until something is so or the watch has ended."""
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            running = group.create_task(self._run())
            while not is_met() and not running.done():
                waiting = group.create_task(self.clock.until_waiting())
                await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                self.clock.advance(5.0)
            self.stopping.set()
        self.parts.compute.close()

    async def _run(self) -> None:
        try:
            await self.watch.run(self.stopping)
        except (StartupError, ServiceError) as error:
            self.error = error

    def checks(self, path: str, outcome: str) -> float:
        """How many checks ended so."""
        labels = {"path": path, "outcome": outcome}
        return (
            self.metrics.registry.get_sample_value("baton_worker_golden_checks_total", labels) or 0
        )


async def test_every_path_is_checked_again_and_again() -> None:
    """Kernel and torch: prompts run on the one, steps on the other."""
    site = Site()
    site.parts.unvouched.note(A, 3)
    await site.until(lambda: site.checks("torch", "passed") >= 2)
    assert site.checks("native", "passed") >= 2
    assert site.clock.monotonic_s() >= 1_000.0 + 2 * 300.0
    assert site.parts.unvouched.all() == {}
    assert not site.store.distrusted
    assert not site.parts.is_degraded


async def test_torch_waits_for_a_moment_without_streams() -> None:
    """At most for an interval: then it is checked beside them."""
    site = Site()
    site.parts.held.append("a log")
    await site.until(lambda: site.checks("torch", "passed") >= 1)
    assert site.clock.monotonic_s() >= 1_000.0 + 2 * 300.0


async def test_a_failed_kernel_leaves_to_torch_after_its_kv_was_given_up() -> None:
    """In that order; the worker attaches again as what it is from then on."""
    site = Site()
    site.parts.unvouched.note(A, 33)
    site.engine.native.scale = 1.5
    await site.until(lambda: site.attachment.attached == 1)
    assert site.store.distrusted == [{A: 33}]
    assert site.engine.steps_by == "torch"
    assert site.parts.is_degraded
    assert site.parts.identity.label.numeric_class == TORCH_Q4_1
    assert site.checks("native", "failed") == 1
    assert site.checks("torch", "passed") == 1
    assert site.parts.unvouched.all() == {}


async def test_a_long_list_is_given_up_in_calls_that_a_store_takes() -> None:
    """A check that waits for a moment without streams is waited for by logs without number."""
    site = Site()
    noted = {index.to_bytes(16, "little"): index for index in range(2 * LOGS_MAX + 5)}
    for log_id, position in noted.items():
        site.parts.unvouched.note(log_id, position)
    site.engine.native.scale = 1.5
    await site.until(lambda: site.attachment.attached == 1)
    assert max(len(call) for call in site.store.distrusted) <= golden_watch.DISTRUSTED_MAX
    told: dict[bytes, int] = {}
    for call in site.store.distrusted:
        told |= call
    assert told == noted


async def test_a_failed_torch_path_ends_the_worker_after_its_kv_was_given_up() -> None:
    """It is not attached again: a new start checks before it serves."""
    site = Site()
    site.parts.unvouched.note(B, 1)
    site.engine.torch.scale = float("nan")
    await site.until(lambda: False)
    assert site.error is not None
    assert site.store.distrusted == [{B: 1}]
    assert site.attachment.attached == 0


async def test_a_worker_that_cannot_stop_ends_after_its_kv_was_given_up() -> None:
    """A sequence hangs: nothing is changed under it, but what it wrote is not believed."""
    site = Site()

    async def renew(_stopping: asyncio.Event, _change: Any) -> None:
        raise ServiceError(Reason.WORKER_LOST, "sequences did not stop")

    attachment: Any = site.attachment
    attachment.renew = renew
    site.parts.unvouched.note(A, 4)
    site.engine.native.scale = 1.5
    await site.until(lambda: False)
    assert isinstance(site.error, ServiceError)
    assert site.store.distrusted == [{A: 4}]
    assert site.engine.steps_by == "native"


async def test_both_failing_end_the_worker() -> None:
    """Torch serves only if it passes itself."""
    site = Site()
    site.engine.native.scale = site.engine.torch.scale = 3.0
    await site.until(lambda: False)
    assert site.error is not None
    assert site.engine.steps_by == "native"
    assert site.attachment.attached == 0


async def test_a_store_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that came back without knowing this worker is told who it is, and that it holds
    nothing, before it is told what not to believe.
    """
    site = Site(
        ServiceError(Reason.WORKER_LOST, "away"),
        ServiceError(Reason.NO_WORKER, "who?"),
    )
    introduced: list[Any] = []

    async def attach(_store: Any, identity: Any, _waiting: Any) -> None:
        introduced.append(identity)

    monkeypatch.setattr(golden_watch, "attach_when_there", attach)
    site.parts.unvouched.note(A, 2)
    site.engine.native.scale = 1.5
    await site.until(lambda: site.attachment.attached == 1)
    assert introduced == [Identity(5, Label(NATIVE_Q4_1))]
    assert site.store.distrusted == [{A: 2}]
