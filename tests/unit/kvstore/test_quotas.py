"""Quotas: a page is charged to who was granted it; who is over evicts its own, and nobody else's.

Random lives of several tenants in one arena, a recount after every step, and the file's checks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.log.store_records import CloseReason
from services.kvstore.pages import PagePool, PageState
from services.kvstore.quota_book import QuotaBook
from services.kvstore.quota_file import QuotaFile
from services.kvstore.quotas import OTHERS, Charges, QuotaPlan, Tier
from services.kvstore.restart import Standing, restore
from services.kvstore.state import LogState, Phase
from services.kvstore.store import ForkOrder, Now, Store
from services.kvstore.tiers.slots import Slots
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    ListSink,
    WorkerModel,
    build_store,
    fill_work,
    new_id,
    open_log,
    recovered_from,
    take,
)

PAGE = 4096
PAGES = 48
NAMED = {"red": 16, "blue": 12}
UNNAMED = ("grey", "pale")
TENANTS = (*NAMED, *UNNAMED)
REST = PAGES - sum(NAMED.values())


def plan(quotas: dict[str, int] | None = None, default: int | None = None) -> QuotaPlan:
    """A plan in pages of the host tier."""
    named = NAMED if quotas is None else quotas
    return QuotaPlan(
        tenants={name: {Tier.HOST: pages * PAGE} for name, pages in named.items()},
        default={} if default is None else {Tier.HOST: default * PAGE},
    )


def refusal(act: Callable[[], object]) -> ServiceError:
    """What a call raises."""
    with pytest.raises(ServiceError) as caught:
        act()
    return caught.value


class Shared:
    """One store, several tenants, and what each step may not touch."""

    def __init__(self, seed: int, quotas: QuotaPlan | None = None) -> None:
        self.random = random.Random(seed)
        self.sink = ListSink()
        self.store = build_store(PAGES, self.sink)
        self.book = QuotaBook(self.store.core, PAGE, quotas or plan())
        self.models: list[WorkerModel] = []
        self.seconds = NOW.monotonic_s
        self.refused: Counter[Reason] = Counter()
        self.spared = 0

    @property
    def charges(self) -> Charges:
        """The host's."""
        charges = self.store.core.pool.charges
        assert charges is not None
        return charges

    def step(self) -> None:
        """One act of one tenant, and everything that has to hold then."""
        tenant = self.random.choice(TENANTS)
        before = self.kept_kv()
        covered = {name: self.charges.is_covered(name) for name in TENANTS}
        try:
            self.act(tenant)
        except ServiceError as error:
            self.refused[error.reason] += 1
        fill_work(self.store)
        self.store.core.check_invariants()
        account = self.charges.account_of(tenant)
        for log_id, (owner, committed) in before.items():
            if covered[owner] and self.charges.account_of(owner) != account:
                assert self.store.core.logs[log_id].committed >= committed, owner
                self.spared += 1

    def kept_kv(self) -> dict[bytes, tuple[str, int]]:
        """Owner and KV of every log."""
        logs = self.store.core.logs.values()
        return {log.log_id: (log.tenant, log.committed) for log in logs}

    def act(self, tenant: str) -> None:
        """Something that a tenant does, mostly taking pages."""
        self.seconds += 1.0
        mine = [m for m in self.models if self.log(m) is not None and self.tenant(m) == tenant]
        choice = self.random.randrange(10)
        if choice < 4 or not mine:
            self.open(tenant)
            return
        model = self.random.choice(mine)
        log = self.log(model)
        assert log is not None
        if choice < 6 and log.phase is Phase.DECODE and log.writer is None:
            self.models.append(take(self.store, log.log_id, DECODE, pages=self.random.randrange(3)))
        elif choice < 8 and log.phase is Phase.DECODE and log.writer is not None:
            is_last = self.random.randrange(4) == 0
            model.generation, model.writer = log.generation, log.writer
            model.append(3, "stop" if is_last else None)
        elif choice == 8:
            self.fork(log)
        else:
            self.end(log)

    def open(self, tenant: str) -> None:
        """A log, prefilled; some are left while they are written."""
        tokens = [self.random.randrange(1, 4)] * self.random.randrange(1, 6 * BLOCK)
        model = open_log(
            self.store,
            tokens,
            PREFILL,
            tenant=tenant,
            scope=Scope(tenant=tenant),
            output_pages=self.random.randrange(1, 4),
        )
        self.models.append(model)
        if self.random.randrange(4):
            log = model.log
            model.checkpoint(log.prompt_tokens) if log.committed < log.prompt_tokens else None
            model.seal(finish=self.random.choice([None, "stop"]))

    def fork(self, log: LogState) -> None:
        """Another log from this one's beginning."""
        order = ForkOrder(log_id=new_id(), request_id="f", scope=log.scope, sampling=None)
        position = self.random.randrange(1, log.position + 1)
        parent = Parent(log_id=log.log_id, generation=log.generation, position=position)
        self.store.fork(parent, order, self.random.choice([None, DECODE]), self.now)
        self.models.append(WorkerModel(self.store, order.log_id, DECODE))

    def end(self, log: LogState) -> None:
        """Closed, cancelled, or its worker dies and is seen dead."""
        match self.random.randrange(4):
            case 0:
                self.store.keeper.cancel(log.log_id, NOW.wall_s)
            case 1:
                self.store.keeper.close(log.log_id, is_dropped=True, wall_s=NOW.wall_s)
            case 2:
                self.store.keeper.close(log.log_id, is_dropped=False, wall_s=NOW.wall_s)
            case _:
                self.store.keeper.worker_gone(PREFILL.slot, NOW.wall_s)

    @property
    def now(self) -> Now:
        """Later with every step."""
        return Now(monotonic_s=self.seconds, wall_s=NOW.wall_s)

    def log(self, model: WorkerModel) -> LogState | None:
        """The model's log, if it is there."""
        return self.store.core.logs.get(model.log_id)

    def tenant(self, model: WorkerModel) -> str:
        """Whose it is."""
        return model.log.tenant


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.more) for seed in range(4, 24))]
)
def test_no_need_takes_kv_of_a_tenant_within_its_quota(seed: int) -> None:
    """Every tenant fills all it can, with forks, takes, dead workers: charges equal a recount at
    every step, nobody is over, and KV of other accounts is never touched.
    """
    shared = Shared(seed)
    for _ in range(150):
        shared.step()
        for name, quota in NAMED.items():
            assert shared.charges.used(name) <= quota
        assert sum(shared.charges.used(name) for name in UNNAMED) <= REST
    assert shared.spared > 0
    assert shared.refused[Reason.QUOTA_EXCEEDED] > 0
    assert shared.store.core.evicted_logs > 0


@pytest.mark.parametrize("seed", range(4))
def test_charges_come_back_with_the_tables(seed: int) -> None:
    """A restart recounts from the recovered logs: each tenant has the pages its logs refer to or
    write; what only a dead writer of an ended log may still write is nobody's in particular.
    """
    shared = Shared(seed)
    for _ in range(100):
        shared.step()
    store = build_store(PAGES, ListSink())
    QuotaBook(store.core, PAGE, plan())
    standing = Standing(
        is_same_arena=True,
        locked_slots=frozenset({PREFILL.slot, DECODE.slot}),
        model="m",
        class_text=lambda _: TORCH_F32.text,
    )
    restore(store, recovered_from(shared.sink.records, bytes(16)), standing, NOW)
    store.core.check_invariants()
    charges = store.core.pool.charges
    assert charges is not None
    for name in NAMED:
        assert charges.used(name) <= shared.charges.used(name)
    for writer in (PREFILL, DECODE):
        store.keeper.worker_gone(writer.slot, NOW.wall_s)
    pages: dict[str, set[int]] = {}
    for log in store.core.logs.values():
        pages.setdefault(log.tenant, set()).update(log.rows.pages().tolist())
    used = {one.tenant: one.used_pages for one in charges.usage() if one.used_pages}
    assert used == {name: len(found) for name, found in pages.items() if found}
    assert sum(used.values()) > 5


def kept(store: Store, tenant: str, blocks: int, used_s: float = 100.0) -> bytes:
    """A kept log of a tenant with so many full blocks, last used then; its id."""
    tokens = [7] * (blocks * BLOCK)
    model = open_log(store, tokens, tenant=tenant, scope=Scope(tenant=tenant), is_cacheable=False)
    model.prefill(finish="stop")
    log = model.log
    log.last_used_s = used_s
    store.keeper.close(log.log_id, is_dropped=False, wall_s=NOW.wall_s)
    return log.log_id


def has_kv(store: Store, log_id: bytes) -> bool:
    """Whether the log still has KV."""
    return store.core.logs[log_id].committed > 0


def test_a_tenant_over_its_quota_evicts_its_own_oldest_only() -> None:
    """Free pages are left, and an older log of somebody else: its own oldest goes all the same."""
    store = build_store(PAGES)
    QuotaBook(store.core, PAGE, plan())
    others = kept(store, "grey", 4, used_s=1.0)
    first = kept(store, "blue", 5, used_s=2.0)
    second = kept(store, "blue", 5, used_s=3.0)
    third = kept(store, "blue", 5, used_s=4.0)
    assert store.core.pool.free_count > 5
    assert [has_kv(store, one) for one in (others, first, second, third)] == [
        True,
        False,
        True,
        True,
    ]


def test_tenants_without_a_quota_share_one_order_of_eviction() -> None:
    """The one used longest ago goes, whose ever it is; named tenants keep theirs."""
    store = build_store(PAGES)
    QuotaBook(store.core, PAGE, plan())
    named = kept(store, "red", 8, used_s=0.0)
    old = kept(store, "pale", 8, used_s=1.0)
    young = kept(store, "grey", 8, used_s=2.0)
    newest = kept(store, "grey", 8, used_s=3.0)
    assert [has_kv(store, one) for one in (named, old, young, newest)] == [True, False, True, True]


def test_a_default_bounds_each_other_tenant_by_itself() -> None:
    """At its default a tenant gives up its own, though the shared rest has room."""
    store = build_store(PAGES)
    QuotaBook(store.core, PAGE, plan(default=10))
    others = kept(store, "pale", 8, used_s=1.0)
    own = kept(store, "grey", 6, used_s=2.0)
    more = kept(store, "grey", 6, used_s=3.0)
    assert [has_kv(store, one) for one in (others, own, more)] == [True, False, True]


def test_what_is_being_written_counts_and_is_not_evicted() -> None:
    """QUOTA_EXCEEDED names the field, the numbers and the remedy; the writer keeps its pages."""
    store = build_store(PAGES)
    QuotaBook(store.core, PAGE, plan())
    writing = open_log(
        store, [7] * (9 * BLOCK), tenant="blue", scope=Scope(tenant="blue"), output_pages=1
    )
    error = refusal(lambda: kept(store, "blue", 4))
    assert error.reason is Reason.QUOTA_EXCEEDED
    assert error.field == "tenant"
    assert error.metadata == {
        "tier": "host",
        "wanted_bytes": str(5 * PAGE),
        "used_bytes": str(10 * PAGE),
        "quota_bytes": str(12 * PAGE),
    }
    assert "raise tenants.<name>.host in the quota file" in error.message
    assert len(writing.log.granted) == 10
    charges = store.core.pool.charges
    assert charges is not None
    assert charges.refused == {"blue": 1}
    assert len(store.home.grant_up_to(writing.log, 9)) == 2


def test_a_named_tenant_gets_its_quota_back_from_whoever_is_over() -> None:
    """A quota that is given while others fill the arena: they are over, and give up what it needs;
    one that is within its own keeps everything.
    """
    store = build_store(PAGES)
    book = QuotaBook(store.core, PAGE, plan({}))
    grey = [kept(store, "grey", 7, used_s=float(index)) for index in range(5)]
    blue = kept(store, "blue", 7, used_s=0.0)
    book.change(plan())
    store.core.check_invariants()
    red = kept(store, "red", 15, used_s=9.0)
    assert has_kv(store, blue)
    assert has_kv(store, red)
    assert [has_kv(store, one) for one in grey] == [False, False, True, True, True]
    store.core.check_invariants()


def test_quotas_over_the_tier_are_refused_with_both_numbers() -> None:
    """At the start and when they change; the plan before stays."""
    store = build_store(PAGES)
    too_much = plan({"red": 40, "blue": 9})
    error = refusal(lambda: QuotaBook(build_store(PAGES).core, PAGE, too_much))
    assert error.field == "tenants"
    assert f"{49 * PAGE} bytes" in error.message
    assert f"{48 * PAGE}" in error.message
    book = QuotaBook(store.core, PAGE, plan())
    refusal(lambda: book.change(too_much))
    assert book.plan == plan()
    tiny = QuotaPlan(tenants={"red": {Tier.HOST: PAGE - 1}})
    assert "tenants.red.host" in refusal(lambda: book.change(tiny)).message
    tiny = QuotaPlan(default={Tier.HOST: 1})
    assert "default.host" in refusal(lambda: book.change(tiny)).message


@pytest.mark.parametrize("seed", range(6))
def test_charges_equal_a_recount(seed: int) -> None:
    """Grants and ends of one page and of many, tenants that come and go, plans that change."""
    chance = random.Random(seed)
    pool = PagePool(300)
    pool.charges = charges = Charges(Tier.HOST, 300, PAGE, plan())
    owned: list[tuple[str, list[int]]] = []
    for step in range(200):
        if chance.randrange(5) < 3 and pool.free_count > 80:
            name = chance.choice([*TENANTS, f"guest-{step}"])
            pages = pool.grant(chance.choice([1, 3, 40]), name)
            pool.commit_many(pages)
            owned.append((name, pages))
        elif owned:
            _, pages = owned.pop(chance.randrange(len(owned)))
            if len(pages) == 1:
                pool.drop(pages[0])
            else:
                pool.drop_many(np.array(pages))
        if step % 40 == 0:
            charges.apply(plan({"red": chance.randrange(200), f"guest-{step}": 9}))
        pool.check_invariants()
        sums: Counter[str] = Counter()
        for name, pages in owned:
            sums[name] += len(pages)
        assert {one.tenant: one.used_pages for one in charges.usage() if one.used_pages} == sums
        labels = [*charges.named(), OTHERS]
        assert sum(charges.used_by(label) for label in labels) == sum(sums.values())
        assert sum(charges.reserved_for(label) for label in labels) == 300


def test_pages_of_a_dead_writer_stay_charged_until_they_are_free() -> None:
    """Quarantined pages are nobody else's yet: they count."""
    store = build_store(PAGES)
    QuotaBook(store.core, PAGE, plan())
    model = open_log(store, [7] * BLOCK, tenant="blue", scope=Scope(tenant="blue"))
    (page, *_) = model.log.granted
    store.keeper.raise_generation(model.log)
    store.keeper.drop(model.log, CloseReason.DELETED)
    assert store.core.pool.state(page) is PageState.QUARANTINED
    charges = store.core.pool.charges
    assert charges is not None
    assert charges.used("blue") == 2
    store.keeper.worker_gone(PREFILL.slot, NOW.wall_s)
    assert charges.used("blue") == 0
    store.core.check_invariants()


def test_a_page_that_is_lost_for_good_counts_for_no_tenant() -> None:
    """A bad slot of the NVMe tier, held for good: the tenant that had it may have another."""
    slots = Slots(4)
    slots.pool.charges = charges = Charges(Tier.NVME, 4, PAGE, QuotaPlan())
    (slot,) = slots.pool.grant(1, "red")
    slots.retire(slot)
    slots.pool.check_invariants()
    assert charges.used("red") == 0
    assert charges.used_by(OTHERS) == 1
    assert charges.owner(slot) == ""


def written(path: Path, text: str) -> QuotaFile:
    """A quota file with this text."""
    path.write_text(text)
    return QuotaFile(path)


def test_a_quota_file_says_bytes_by_tenant_and_tier(tmp_path: Path) -> None:
    """Numbers or sizes with a unit; an empty file holds nobody to anything."""
    text = "tenants:\n  red: {host: 512MiB, nvme: 2 GiB}\n  blue: {device: 4096}\n"
    text += "default: {host: 1KiB}\n"
    assert written(tmp_path / "q.yaml", text).read() == QuotaPlan(
        tenants={"red": {Tier.HOST: 512 << 20, Tier.NVME: 2 << 30}, "blue": {Tier.DEVICE: 4096}},
        default={Tier.HOST: 1024},
    )
    assert written(tmp_path / "q.yaml", "").read() == QuotaPlan()


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("tenants: [red]", "tenants", "must map"),
        ("tenants: {red: {hots: 1}}", "tenants.red", "host, nvme, device"),
        ("tenants: {red: {host: -1}}", "tenants.red.host", "such as 512MiB"),
        ("tenants: {red: {host: 12GB}}", "tenants.red.host", "such as 512MiB"),
        ("tenants: {red: {host: true}}", "tenants.red.host", "such as 512MiB"),
        ("tenants: {red: {host: 99999999999999999}}", "tenants.red.host", "such as 512MiB"),
        ("tenants: {other: {host: 1}}", "tenants", "call it otherwise"),
        ("default: 3", "default", "must map"),
        ("quotas: {}", "quotas", "nothing else"),
        ("{", "quotas", "is not YAML"),
    ],
)
def test_a_faulty_quota_file_is_refused_naming_the_field(
    tmp_path: Path, text: str, field: str, remedy: str
) -> None:
    """And what to write instead."""
    error = refusal(written(tmp_path / "q.yaml", text).read)
    assert error.reason is Reason.INVALID_REQUEST
    assert error.field == field
    assert remedy in error.message


def test_a_changed_file_changes_the_quotas_and_a_faulty_one_nothing(tmp_path: Path) -> None:
    """Without a restart; a file that went away is as a faulty one."""
    path = tmp_path / "q.yaml"
    file = written(path, "tenants: {red: {host: 1}}")
    seen: list[QuotaPlan] = []
    file.read()
    file.follow(seen.append)
    assert not seen
    path.write_text("tenants: {red: {host: 22}}")
    file.follow(seen.append)
    file.follow(seen.append)
    assert [one.tenants["red"][Tier.HOST] for one in seen] == [22]
    path.write_text("tenants: {red: {host: much}}")
    file.follow(seen.append)
    path.unlink()
    file.follow(seen.append)
    assert len(seen) == 1
