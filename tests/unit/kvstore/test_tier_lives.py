"""Random lives over two tiers: logs are opened, written, forked, cut, published and closed while KV
is demoted, evicted, promoted, and the store restarts.

After every step pages and slots are conserved; again and again every byte of both tiers is what its
tokens make it. A test is named by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from baton.errors import Reason, ServiceError
from baton.ids import new_log_id
from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.prefixes import Prefix
from services.kvstore.state import LogState, Phase
from services.kvstore.store import ForkOrder
from services.kvstore.tiers.demotion import Watermarks
from services.kvstore.tiers.promotion import Want
from services.kvstore.tiers.wants import want_of_log
from tests.unit.kvstore.tier_world import BLOCK, EXPECTED, WRITERS, TierWorld

PAGES: Final = 40
SLOTS: Final = 72
MARKS: Final = Watermarks(low=0.5, high=0.7)
LIVES: Final = 6
"""Restarts in one run."""

TENANTS: Final = ("acme", "other")
Step = Callable[[], Coroutine[Any, Any, None]]


class Lives:
    """One run: what is done next is drawn; what must hold is asserted."""

    def __init__(self, world: TierWorld, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.prefixes = 0
        self.steps: list[tuple[int, Step]] = [
            (5, self.open),
            (2, self.open_child),
            (2, self.open_published),
            (6, self.compute),
            (8, self.append),
            (2, self.take),
            (2, self.fork),
            (1, self.truncate),
            (1, self.publish),
            (1, self.revoke),
            (2, self.close),
            (4, self.demote),
            (3, self.evict),
            (3, self.promote),
        ]

    async def step(self) -> None:
        """One of them."""
        weights = [weight for weight, _ in self.steps]
        (chosen,) = self.random.choices([step for _, step in self.steps], weights)
        name = chosen.__name__
        self.world.count(name)
        await chosen()
        self.world.order_work()
        self.world.core.check_invariants()

    # --- who --------------------------------------------------------------------------------

    def log(self, accepts: Callable[[LogState], bool] = lambda _: True) -> LogState | None:
        """Some log."""
        found = [log for log in self.world.core.logs.values() if accepts(log)]
        return self.random.choice(found) if found else None

    def written(self) -> LogState | None:
        """Some log that is written."""
        return self.log(lambda log: log.writer is not None)

    def prompt(self) -> list[int]:
        """The beginning of one of a few texts, and an end of its own."""
        text = self.random.randrange(3)
        head = [text] * self.random.randrange(0, 9 * BLOCK)
        return head + [self.random.randrange(3) for _ in range(self.random.randrange(1, 6))]

    # --- what -------------------------------------------------------------------------------

    async def open(self) -> None:
        """A log that begins with what lookups find, on either tier."""
        tenant = self.random.choice(TENANTS)
        await self._opened(
            self.prompt(),
            tenant=tenant,
            scope=Scope(tenant=tenant),
            loads=self.random.random() < 0.8,
        )

    async def open_child(self) -> None:
        """A log that begins with another's KV, which may be cold."""
        parent = self.log(lambda log: log.is_sealed)
        if parent is None:
            return
        cut = self.random.randint(1, parent.position)
        tokens = [*parent.tokens[:cut], *self.prompt()[-3:]]
        base = Parent(log_id=parent.log_id, generation=0, position=cut)
        await self._opened(tokens, tenant=parent.tenant, scope=parent.scope, base=base)

    async def open_published(self) -> None:
        """A log that begins with a published prefix."""
        prefixes = self.world.core.prefixes.all()
        if not prefixes:
            return
        prefix = self.random.choice(prefixes)
        tenant = self.random.choice(TENANTS)
        log = await self._opened(
            [*prefix.token_ids, *self.prompt()[-3:]],
            tenant=tenant,
            scope=Scope(tenant=tenant),
            base=self.world.manifest_of(prefix),
        )
        if log is not None:
            assert log.cached_tokens >= prefix.position

    async def _opened(self, tokens: list[int], **fields: Any) -> LogState | None:
        writer = self.random.choice(WRITERS)
        log = await self.world.open(tokens, writer, **fields)
        if log is None:
            return None
        assert list(log.tokens) == tokens
        assert log.cached_tokens < len(tokens)
        self.world.check_host(log)
        if log.cached_tokens:
            self.world.count("hits")
        if self.random.random() < 0.9:
            self.world.prefill(log, self.random.randrange(3))
        return log

    async def compute(self) -> None:
        """A writer commits some KV; of a prompt, or what a taken log lacks."""
        log = self.written()
        if log is None:
            return
        end = log.prompt_tokens if log.phase is Phase.PREFILL else log.position - 1
        self.world.checkpoint(log, self.random.randint(log.committed, max(end, log.committed)))
        if log.phase is Phase.PREFILL and log.committed == log.prompt_tokens:
            self.world.seal(log, self.random.randrange(3), log.chunks)

    async def append(self) -> None:
        """A few tokens; some logs end."""
        log = self.log(lambda log: log.writer is not None and log.phase is Phase.DECODE)
        if log is None:
            return
        for _ in range(self.random.randint(1, 12)):
            finish = "stop" if self.random.random() < 0.05 else None
            if not await self.world.append(log, self.random.randrange(3), finish) or finish:
                return

    async def take(self) -> None:
        """Another writer; what is cold is loaded first, or not."""
        log = self.log(lambda log: log.is_open)
        if log is None:
            return
        if self.random.random() < 0.7:
            await self.world.load(want_of_log(log, log.position - 1), log.position)
        if self.world.core.logs.get(log.log_id) is not log:
            return
        try:
            self.world.store.home.take(
                log.log_id,
                log.generation,
                self.random.choice(WRITERS),
                TORCH_F32,
                pages=self.random.randint(0, 2),
                now_s=self.world.now().monotonic_s,
            )
        except ServiceError as error:
            self._expected(error)
            return
        await self.world.settle(log)
        self._lift()

    async def fork(self) -> None:
        """A branch; of a cold parent it has the parent's copies."""
        parent = self.log(lambda log: log.is_sealed)
        if parent is None:
            return
        writer = self.random.choice([None, *WRITERS])
        position = self.random.randint(1, parent.position)
        copied = min(parent.cold.tokens, position - 1)
        fork = ForkOrder(log_id=new_log_id(), request_id="f", scope=parent.scope, sampling=None)
        base = Parent(log_id=parent.log_id, generation=0, position=position)
        try:
            log = self.world.store.fork(base, fork, writer, self.world.now())
        except ServiceError as error:
            self._expected(error)
            return
        # A copy may have made room, or been cut where KV is written again; there is no other.
        assert log.cold.tokens <= copied
        await self.world.settle(log)

    async def truncate(self) -> None:
        """A cut; copies behind it go."""
        log = self.log(lambda log: log.is_sealed and log.position > 2)
        if log is None:
            return
        position = self.random.randint(max(1, log.position - 20), log.position)
        self.world.store.truncate(log.log_id, log.generation, position, self.world.now())
        assert log.cold.tokens <= position - 1
        self._lift()

    async def publish(self) -> None:
        """A prefix of some log; a few at most."""
        log = self.log(lambda log: log.is_sealed and log.committed >= BLOCK)
        if log is None or len(self.world.core.prefixes) >= 3:
            return
        self.prefixes += 1
        self.world.publish(log, self.random.randint(1, log.committed), f"p{self.prefixes}")

    async def revoke(self) -> None:
        """One is withdrawn."""
        prefixes = self.world.core.prefixes.all()
        if len(prefixes) < 2:
            return
        prefix = self.random.choice(prefixes)
        keeper = self.world.store.prefix_keeper
        keeper.revoke(prefix.prefix_id, None, self.world.now().wall_s)

    async def close(self) -> None:
        """A log ends: kept, or dropped with its copies."""
        log = self.log()
        if log is None:
            return
        is_dropped = self.random.random() < 0.5
        keeper = self.world.store.keeper
        keeper.close(log.log_id, is_dropped=is_dropped, wall_s=self.world.now().wall_s)
        self._lift()

    def _lift(self) -> None:
        """Fenced writers let go at once."""
        for fence in self.world.core.pool.fences():
            self.world.store.keeper.lift(fence)

    # --- tiers ------------------------------------------------------------------------------

    async def demote(self) -> None:
        """One turn of the background work."""
        before = self.world.store.placement.copied_pages
        await self.world.demoter.turn()
        assert self.world.demoter.off is None
        if self.world.store.placement.copied_pages > before:
            self.world.count("copied")

    async def evict(self) -> None:
        """Somebody needs pages."""
        core = self.world.core
        held = {log.log_id: log.committed for log in core.logs.values() if log.writer is not None}
        copied = [log for log in core.logs.values() if log.is_copied and log.writer is None]
        before = {log.log_id: log.committed for log in core.logs.values()}
        self.world.store.keeper.make_room(self.random.randint(1, PAGES))
        for log_id, committed in held.items():
            assert core.logs[log_id].committed == committed, "what is written is never evicted"
        lost = [log for log in core.logs.values() if log.committed < before[log.log_id]]
        if any(not log.cold.tokens >= before[log.log_id] for log in lost):
            assert not any(log.committed and not log.is_open for log in copied), "clean ones first"

    async def flip(self) -> None:
        """The disk damages a byte of a slot that is in use."""
        slots = sorted({row.page for owner in self.world.owners() for row in owner.cold})
        if slots:
            self.world.flip(self.random.choice(slots), self.random.randrange(1 << 16))

    async def promote(self) -> None:
        """A cold owner comes back, whole."""
        owner = self._cold()
        if owner is None:
            return
        tokens = owner.cold.tokens
        loaded = await self.world.load([Want(owner=owner, tokens=tokens)], tokens)
        if loaded:
            self.world.count("loaded")
            self.world.check_host(owner)

    def _cold(self) -> LogState | Prefix | None:
        found = [owner for owner in self.world.owners() if owner.cold and not owner.rows]
        return self.random.choice(found) if found else None

    def _expected(self, error: ServiceError) -> None:
        if error.reason not in {*EXPECTED, Reason.INVALID_REQUEST}:
            raise error
        self.world.order_work()


async def live(
    directory: Path, seed: int, steps: int, *, is_disk_bad: bool = False
) -> dict[str, int]:
    """A whole run."""
    world = TierWorld(directory, pages=PAGES, slots=SLOTS)
    lives = Lives(world, seed)
    if is_disk_bad:
        lives.steps.append((3, lives.flip))
    for life in range(LIVES):
        tokens: dict[bytes, list[int]] = {}
        cold: dict[bytes, int] = {}
        async with world.running(MARKS):
            world.check_all(is_disk_bad=is_disk_bad)
            for done in range(steps // LIVES):
                await lives.step()
                if done % 25 == 0:
                    world.check_all(is_disk_bad=is_disk_bad)
            world.check_all(is_disk_bad=is_disk_bad)
            if world.store.placement.damaged_slots:
                world.count("damaged")
            assert is_disk_bad or world.store.placement.damaged_slots == 0
            assert world.store.placement.damaged_pages == 0
            assert world.page_worker.damaged_pages == 0
            tokens = {log.log_id: list(log.tokens) for log in world.core.logs.values()}
            cold = {log.log_id: log.cold.tokens for log in world.core.logs.values()}
        if life % 2:
            world.lose_arena()
        async with world.running(MARKS):
            logs = world.core.logs
            assert {log_id: list(log.tokens) for log_id, log in logs.items()} == tokens
            assert {log_id: log.cold.tokens for log_id, log in logs.items()} == cold
            world.check_all(is_disk_bad=is_disk_bad)
    return world.counts


@pytest.mark.parametrize("seed", [1])
async def test_every_byte_of_both_tiers_is_what_was_written(tmp_path: Path, seed: int) -> None:
    """See the module."""
    counts = await live(tmp_path, seed, 480)
    assert min(counts.get(name, 0) for name in ("copied", "loaded", "hits")) > 5, counts


@pytest.mark.more
@pytest.mark.parametrize("seed", range(10, 12))
async def test_every_byte_of_both_tiers_over_many_lives(tmp_path: Path, seed: int) -> None:
    """The same, longer."""
    await live(tmp_path, seed, 1800)


@pytest.mark.more
@pytest.mark.parametrize("seed", [20])
async def test_what_a_bad_disk_changed_is_never_in_the_host(tmp_path: Path, seed: int) -> None:
    """Flipped bytes cost KV, never a wrong one: what is loaded is what was written."""
    counts = await live(tmp_path, seed, 1200, is_disk_bad=True)
    assert counts["damaged"], counts
