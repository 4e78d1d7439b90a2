"""Simulated clients: conversations of several turns over two homes, with leavers, forks and edits.

Owns what a gateway would do: open, prefill, decode, close; after a failure a fork or a new log from
the tokens the client already has. The client hears only of the newest (log, generation).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.kv.digests import body_hash
from baton.sampling_parameters import SamplingParameters
from baton.wire.sampling import sampling_to_proto
from tests.cluster.homes import SimHome
from tests.cluster.memory import BLOCK, VOCABULARY, answer_to
from tests.cluster.oracle import Oracle
from tests.cluster.steps import Process, Promise, Scheduler
from tests.cluster.wires import Wires, lost
from tests.cluster.writers import SimWorker

ATTEMPTS_MAX: Final = 4
MOVE_SHARE: Final = 0.3
STEP_TIMEOUT_S: Final = 6.0
SAMPLING: Final = sampling_to_proto(SamplingParameters(temperature=0.0, seed=1))
EXCUSES: Final = frozenset(
    {
        Reason.WORKER_LOST,
        Reason.NO_WORKER,
        Reason.PAGES_EXHAUSTED,
        Reason.STALE_GENERATION,
        Reason.LOG_NOT_FOUND,
        Reason.PROMPT_TOO_LONG,
        Reason.BLOCK_NOT_FOUND,
        Reason.DEADLINE_EXCEEDED,
        # An Open that is repeated after its log was fenced.
        Reason.ALREADY_EXISTS,
    }
)
"""What may come of faults; anything else is a bug."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run did."""

    answered: int = 0
    given_up: int = 0
    left: int = 0
    retried: int = 0
    forked: int = 0
    truncated: int = 0
    published: int = 0
    moved: int = 0


@dataclass(slots=True)
class _Leg:
    log_id: bytes
    generation: int
    capability: str
    home: SimHome
    delivered: list[int] = field(default_factory=list)


class Conversation:
    """One client with its gateway. `is_leaver`: it goes away in the middle of an answer."""

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        wires: Wires,
        oracle: Oracle,
        workers: list[SimWorker],
        tally: Tally,
    ) -> None:
        self.scheduler, self.wires, self.oracle = scheduler, wires, oracle
        self.workers, self.tally = workers, tally
        self.random = scheduler.random
        self.process = Process(f"client-{number}")
        self._number = number
        self.is_over = False
        self.done: Promise[Any] = Promise()

    def start(self) -> None:
        """Begins."""
        self.scheduler.spawn(self.process, self._talk(), self.done)

    async def _talk(self) -> None:
        await self.scheduler.pause(self.random.uniform(0.0, 2.0))
        draw = self.random
        history = [7] * BLOCK * draw.randint(0, 2) if draw.random() < 0.6 else []
        history += [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))]
        leg: _Leg | None = None
        for _ in range(draw.randint(1, 3)):
            is_leaving = draw.random() < 0.2
            leg, history = await self._answer(leg, history, is_leaving)
            if leg is None or is_leaving:
                break
            history = await self._between(leg, history)
            await self.scheduler.pause(draw.uniform(0.0, 1.0))
        self.is_over = True

    # --- one answer -------------------------------------------------------------------------

    async def _answer(
        self, base: _Leg | None, history: list[int], is_leaving: bool
    ) -> tuple[_Leg | None, list[int]]:
        wanted = self.random.randint(1, 14)
        expected = answer_to(history, wanted)
        delivered: list[int] = []
        for attempt in range(ATTEMPTS_MAX):
            self.tally.retried += attempt > 0
            prompt = history + delivered
            leg = self._leg(base)
            leaving: Promise[None] | None = None
            if is_leaving:
                leaving = self.scheduler.pause(self.random.uniform(0.0, 1.0))
            try:
                await self._run(leg, base, prompt, wanted - len(delivered), leaving)
            except ServiceError as error:
                if error.reason not in EXCUSES:
                    raise AssertionError(f"a client was told {error}") from error
            delivered += leg.delivered
            assert delivered == expected[: len(delivered)], "W5: a wrong token was delivered"
            if len(delivered) == wanted:
                await self._end(leg)
                self.tally.answered += 1
                return leg, history + delivered
            await self._abandon(leg)
            if leaving is not None and leaving.is_kept:
                self.tally.left += 1
                return None, history
            base = None
            await self.scheduler.pause(self.random.uniform(0.0, 1.0))
        self.tally.given_up += 1
        return None, history

    def _leg(self, base: _Leg | None) -> _Leg:
        """O6: where the base is is a hint, and may be wrong."""
        home = self.random.choice(sorted(self.oracle.homes.values(), key=lambda one: one.name))
        if base is not None and self.random.random() < 0.8:
            home = base.home
        log_id = self.random.randbytes(16)
        return _Leg(log_id, 0, self.oracle.capability(log_id), home)

    def _worker(self, home: SimHome) -> SimWorker:
        names = [one for one in self.workers if one.home is home]
        return self.random.choice(names)

    async def _run(
        self,
        leg: _Leg,
        base: _Leg | None,
        prompt: list[int],
        wanted: int,
        leaving: Promise[None] | None,
    ) -> None:
        writer = self._worker(leg.home)
        answer = await self._retried(leg.home, "Open", self._open(leg, base, prompt, writer))
        leg.generation = answer.generation
        self.oracle.tell(leg.log_id, leg.generation)
        token = await self._within(
            writer.run_prefill(leg.log_id, leg.generation, leg.capability), leaving
        )
        leg.delivered.append(token)
        self.oracle.acked[leg.log_id] = [*prompt, token]
        if wanted == 1:
            return
        if self.random.random() < MOVE_SHARE:
            await self._move(leg)
        decode = self._worker(leg.home)

        def emit(position: int, got: int) -> None:
            assert position == len(prompt) + len(leg.delivered), "W5: out of order"
            leg.delivered.append(got)
            self.oracle.acked[leg.log_id].append(got)

        generation = await self._within(
            decode.run_decode(
                leg.log_id, leg.generation, leg.capability, len(prompt) + wanted, emit
            ),
            leaving,
        )
        leg.generation = generation

    async def _move(self, leg: _Leg) -> None:
        """Decode is to be at the other node: the log's home becomes its kvstore."""
        other = next(home for home in self.oracle.homes.values() if home is not leg.home)
        request = kvstore_pb2.AdoptLogRequest(
            log_id=leg.log_id,
            generation=leg.generation,
            from_kvstore_address=leg.home.name,
            capability=leg.capability,
            request_id=f"move-{leg.log_id.hex()}",
        )
        answer = await self._retried(other, "AdoptLog", request)
        leg.home, leg.generation = other, answer.generation
        self.oracle.tell(leg.log_id, leg.generation)
        self.tally.moved += 1

    def _open(
        self, leg: _Leg, base: _Leg | None, prompt: list[int], writer: SimWorker
    ) -> kvstore_pb2.OpenRequest:
        request = kvstore_pb2.OpenRequest(
            request_id=f"open-{leg.log_id.hex()}",
            body_hash=body_hash(leg.log_id),
            log_id=leg.log_id,
            capability=leg.capability,
            label=self.oracle.label,
            writer_worker_id=writer.name,
            sampling=SAMPLING,
            prompt_token_ids=prompt,
            output_pages=1,
            drop_at_end=self.random.random() < 0.2,
        )
        if base is not None and base.home is leg.home and self.random.random() < 0.5:
            position = len(self.oracle.acked[base.log_id])
            request.parent.CopyFrom(
                common_pb2.LogPosition(log_id=base.log_id, position=min(position, len(prompt)))
            )
        return request

    async def _within(self, work: Promise[Any], leaving: Promise[None] | None) -> Any:
        """The work's value; WORKER_LOST when it takes too long or the client has left."""
        first: Promise[Any] = Promise()
        work.then(lambda: first.keep(*work.outcome()))
        self.scheduler.later(STEP_TIMEOUT_S, lambda: first.keep(error=lost("a worker")))
        if leaving is not None:
            leaving.then(lambda: first.keep(error=lost("the client")))
        return await first

    async def _retried(self, home: SimHome, method: str, request: Any) -> Any:
        """The same call again after a silence: it must be harmless."""
        for _ in range(2):
            try:
                return await self.wires.call(self.process, home, method, request)
            except ServiceError as error:
                if error.reason is not Reason.WORKER_LOST:
                    raise
        return await self.wires.call(self.process, home, method, request)

    async def _end(self, leg: _Leg) -> None:
        request = kvstore_pb2.CloseRequest(
            log_id=leg.log_id, capability=leg.capability, drop=self.random.random() < 0.2
        )
        await self._quietly(leg.home, "Close", request)

    async def _abandon(self, leg: _Leg) -> None:
        """A cancel is a fence, then a stop; a gateway that dies says nothing."""
        if self.random.random() < 0.3:
            return
        request = kvstore_pb2.CancelRequest(log_id=leg.log_id, capability=leg.capability)
        await self._quietly(leg.home, "Cancel", request)
        for worker in self.workers:
            worker.stop(leg.log_id)

    async def _quietly(self, home: SimHome, method: str, request: Any) -> Any:
        try:
            return await self._retried(home, method, request)
        except ServiceError as error:
            if error.reason not in EXCUSES:
                raise AssertionError(f"{method}: {error}") from error
            return None

    # --- between answers --------------------------------------------------------------------

    async def _between(self, leg: _Leg, history: list[int]) -> list[int]:
        """The next question, an edit, a fork or a publication."""
        draw = self.random
        match draw.choice(("ask", "ask", "edit", "fork", "publish")):
            case "edit":
                await self._edit(leg, len(history))
            case "fork":
                await self._fork(leg, draw.randint(1, len(history)))
            case "publish":
                await self._publish(leg)
        return history + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6))]

    async def _edit(self, leg: _Leg, tokens: int) -> None:
        position = self.random.randint(1, tokens)
        request = kvstore_pb2.TruncateRequest(
            log_id=leg.log_id,
            generation=leg.generation,
            position=position,
            capability=leg.capability,
            request_id=f"edit-{leg.log_id.hex()}",
        )
        # W4: whether it was done or not, what is there is one of the two.
        acked = self.oracle.acked[leg.log_id]
        self.oracle.acked[leg.log_id] = acked[:position]
        answer = await self._quietly(leg.home, "Truncate", request)
        if answer is not None:
            leg.generation = answer.generation
            self.oracle.tell(leg.log_id, leg.generation)
            self.tally.truncated += 1

    async def _fork(self, leg: _Leg, position: int) -> None:
        child = self.random.randbytes(16)
        request = kvstore_pb2.ForkRequest(
            parent=common_pb2.LogPosition(log_id=leg.log_id, position=position),
            log_id=child,
            capability=self.oracle.capability(None),
            request_id=f"fork-{child.hex()}",
        )
        try:
            answer = await self._retried(leg.home, "Fork", request)
        except ServiceError as error:
            # The log may have been edited below that position.
            if error.reason not in EXCUSES | {Reason.INVALID_REQUEST}:
                raise AssertionError(f"fork: {error}") from error
            return
        self.tally.forked += 1
        self.oracle.tell(child, answer.generation)
        branch = _Leg(child, answer.generation, self.oracle.capability(child), leg.home)
        tokens = self.oracle.acked[leg.log_id][:position]
        if len(tokens) == position:
            self.oracle.acked[child] = list(tokens)
            await self._continue(branch, tokens)

    async def _continue(self, branch: _Leg, tokens: list[int]) -> None:
        """A decode from the fork's own position."""
        wanted = self.random.randint(1, 6)
        got: list[int] = []

        def emit(_position: int, token: int) -> None:
            got.append(token)
            self.oracle.acked[branch.log_id].append(token)

        work = self._worker(branch.home).run_decode(
            branch.log_id, branch.generation, branch.capability, len(tokens) + wanted, emit
        )
        try:
            await self._within(work, None)
        except ServiceError as error:
            if error.reason not in EXCUSES:
                raise AssertionError(f"a branch was told {error}") from error
            await self._abandon(branch)
        else:
            await self._end(branch)
        assert got == answer_to(tokens, wanted)[: len(got)], "W5: a branch went wrong"

    async def _publish(self, leg: _Leg) -> None:
        request = kvstore_pb2.PublishRequest(
            capability=leg.capability, request_id=f"publish-{leg.log_id.hex()}"
        )
        request.prefix.name = leg.log_id.hex()
        request.prefix.log.log_id = leg.log_id
        request.prefix.log.position = 1
        try:
            answer = await self._retried(leg.home, "Publish", request)
        except ServiceError as error:
            if error.reason not in EXCUSES | {Reason.INVALID_REQUEST, Reason.ALREADY_EXISTS}:
                raise AssertionError(f"publish: {error}") from error
            return
        self.tally.published += 1
        if self.random.random() < 0.7:
            revoke = kvstore_pb2.RevokeRequest(
                prefix_id=answer.prefix.prefix_id, capability=self.oracle.capability(None)
            )
            try:
                await self._retried(leg.home, "Revoke", revoke)
            except ServiceError as error:
                if error.reason not in EXCUSES | {Reason.PREFIX_NOT_FOUND}:
                    raise AssertionError(f"revoke: {error}") from error
