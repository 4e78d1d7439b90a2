"""What a gateway gave to workers counts at once, heard or not, and until it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype
from baton.kv.numeric import TORCH_F32
from baton.testing.clock import ManualClock
from services.gateway.hub import WorkerHub
from services.gateway.planner import Planner, PlanRequest, PlanRules
from services.gateway.policy import PrefillMode
from services.gateway.registry import Registry, WorkerLoad, WorkerRecord, WorkerRole

TOKENIZER = bytes(8)
LABEL = PairLabel(
    model=bytes(16),
    rope=bytes(16),
    dtype=KvDtype.F32,
    block_tokens=16,
    tokenizer=TOKENIZER,
    numeric_class=TORCH_F32,
)
"""One label for all: whether labels match is told elsewhere."""


def record(worker_id: str, role: WorkerRole, load: WorkerLoad) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        incarnation=1,
        node_id="n",
        address=f"{worker_id}:1",
        kvstore_address="store:1",
        model="m",
        label=LABEL,
        is_ready=True,
        load=load,
    )


class Cluster:
    """A planner with two workers of each kind, which are heard when the test says so."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.hub = WorkerHub(Registry(), self.clock)
        self.planner = Planner(self.hub, PlanRules(mode=PrefillMode.AUTO, tokenizer_hash=TOKENIZER))
        self.progress = 0
        for index in range(2):
            self.hear(f"decode-{index}")
            self.hear(f"prefill-{index}")

    def hear(
        self, worker_id: str, *, active: int = 0, queued_tokens: int = 0, queued: int = 0
    ) -> None:
        """A beat with what the worker says of itself."""
        self.progress += 1
        is_decode = worker_id.startswith("decode")
        role = WorkerRole.DECODE if is_decode else WorkerRole.PREFILL
        load = WorkerLoad(
            active=active,
            active_max=16,
            queued=queued,
            queued_tokens=queued_tokens,
            token_rate=100.0,
            queue_max=20 if is_decode else None,
        )
        self.hub.observe(replace(record(worker_id, role, load), progress=self.progress))


def test_requests_between_two_beats_are_spread() -> None:
    """Four at once over two decode and two prefill workers: two each, not four and none."""
    cluster = Cluster()
    chosen = []
    for _ in range(4):
        plan = cluster.planner.plan(PlanRequest(prompt_tokens=50))
        cluster.planner.assignment().planned(plan, 50)
        assert plan.prefill is not None
        chosen.append((plan.decode.worker_id, plan.prefill.worker_id))
    assert sorted(decode for decode, _ in chosen) == ["decode-0"] * 2 + ["decode-1"] * 2
    assert sorted(prefill for _, prefill in chosen) == ["prefill-0"] * 2 + ["prefill-1"] * 2


def test_what_a_worker_told_is_not_counted_twice() -> None:
    """After a beat its word holds, and ours is in it: others' sequences weigh as much as ours."""
    cluster = Cluster()
    held = [cluster.planner.assignment() for _ in range(2)]
    for one in held:
        one.planned(cluster.planner.plan(PlanRequest(prompt_tokens=50)), 50)
    cluster.hear("decode-0", active=1)
    cluster.hear("decode-1", active=2)
    plan = cluster.planner.plan(PlanRequest(prompt_tokens=50))
    assert plan.decode.worker_id == "decode-0", "1 against 2 of which one is another gateway's"
    for one in held:
        one.end()
    cluster.planner.assignment().planned(plan, 50)
    again = cluster.planner.plan(PlanRequest(prompt_tokens=50))
    # Both ended since the beats, one came to decode-0: 1 and 1; the smaller id.
    assert again.decode.worker_id == "decode-0"


def test_a_sequence_that_goes_on_elsewhere_counts_there() -> None:
    """Resumed at another worker: the first has room again, the second has one more."""
    cluster = Cluster()
    assignment = cluster.planner.assignment()
    plan = cluster.planner.plan(PlanRequest(prompt_tokens=50))
    assignment.planned(plan, 50)
    assignment.prefilled()
    other = cluster.hub.get("decode-1")
    assert plan.decode.worker_id == "decode-0"
    assert other is not None
    assignment.goes_on_at(other)
    assert cluster.planner.plan(PlanRequest(prompt_tokens=50)).decode.worker_id == "decode-0"
    assignment.end()
    assignment.end()
    cluster.hear("decode-0", active=1)
    assert cluster.planner.plan(PlanRequest(prompt_tokens=50)).decode.worker_id == "decode-1"


def test_a_worker_in_doubt_gets_nothing_and_all_in_doubt_are_nobody() -> None:
    """Its connection broke: the other one serves; with none left the refusal says so."""
    cluster = Cluster()
    for worker_id in ("decode-0", "decode-1"):
        worker = cluster.hub.get(worker_id)
        assert worker is not None
        assert cluster.planner.plan(PlanRequest(prompt_tokens=5)).decode.worker_id == worker_id
        cluster.planner.doubt(worker)
    with pytest.raises(ServiceError) as refused:
        cluster.planner.plan(PlanRequest(prompt_tokens=5))
    assert refused.value.reason is Reason.NO_WORKER
    assert cluster.planner.is_doubting()


def two_nodes() -> Cluster:
    """decode-0 and prefill-0 on one node, decode-1 and prefill-1 on another."""
    cluster = Cluster()
    for index in range(2):
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL):
            worker = record(f"{role.value}-{index}", role, WorkerLoad(active_max=1))
            cluster.hub.observe(
                replace(worker, kvstore_address=f"store-{index}:1", progress=10 + index)
            )
    return cluster


def test_a_log_stays_on_its_node_while_there_is_room() -> None:
    """Locality first: a move costs bytes, a hand-off on one node does not."""
    cluster = two_nodes()
    for _ in range(4):
        plan = cluster.planner.plan(PlanRequest(prompt_tokens=50))
        cluster.planner.assignment().planned(plan, 50)
        assert not plan.crosses_nodes


def test_another_nodes_decode_worker_takes_what_this_one_has_no_room_for() -> None:
    """Then the log moves, instead of the request being refused."""
    cluster = two_nodes()
    full = record("decode-0", WorkerRole.DECODE, WorkerLoad(active=4, active_max=1))
    cluster.hub.observe(replace(full, kvstore_address="store-0:1", progress=20))
    busy = record("prefill-1", WorkerRole.PREFILL, WorkerLoad(queued_tokens=10_000))
    cluster.hub.observe(replace(busy, kvstore_address="store-1:1", progress=20))
    plan = cluster.planner.plan(PlanRequest(prompt_tokens=50))
    assert plan.prefill is not None
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("prefill-0", "decode-1")
    assert plan.crosses_nodes


def test_who_goes_on_with_a_log_is_looked_for_at_its_store_or_anywhere() -> None:
    """A store's name narrows the search; without one any node will do, after a move."""
    cluster = two_nodes()
    lost = cluster.hub.get("decode-0")
    assert lost is not None
    assert cluster.planner.decode_for("store-0:1", lost, {"decode-0"}) is None
    other = cluster.planner.decode_for(None, lost, {"decode-0"})
    assert other is not None
    assert other.worker_id == "decode-1"


def test_full_workers_still_get_what_is_of_a_tenant_below_its_share() -> None:
    """Their queues are as full as they say they may be: others are refused, or go elsewhere. What
    is below its share is sent on, until the workers have as many more as they queue.
    """
    cluster = Cluster()
    cluster.planner.is_below_share = lambda tenant: tenant == "few"
    few, many = PlanRequest(prompt_tokens=50, tenant="few"), PlanRequest(prompt_tokens=50)
    for index in range(2):
        cluster.hear(f"decode-{index}", active=16, queued=20)
        cluster.hear(f"prefill-{index}", queued=64)
    with pytest.raises(ServiceError) as refused:
        cluster.planner.plan(many)
    assert refused.value.reason is Reason.QUEUE_FULL
    assert cluster.planner.plan(few).prefill is not None
    for index in range(2):
        cluster.hear(f"decode-{index}", active=16, queued=19)
    assert cluster.planner.plan(many).prefill is None, "prefill's queues are full to it"
    for index in range(2):
        cluster.hear(f"decode-{index}", active=16, queued=40)
    with pytest.raises(ServiceError):
        cluster.planner.plan(few)
