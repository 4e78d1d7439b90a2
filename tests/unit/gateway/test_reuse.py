"""Cache state in routing: what is remembered of the stores, and what the planner makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.sampling_parameters import SamplingParameters
from baton.testing.clock import ManualClock
from services.gateway.hub import WorkerHub
from services.gateway.legs import Plan
from services.gateway.planner import Planner, PlanRequest, PlanRules
from services.gateway.policy import PrefillMode
from services.gateway.registry import Registry, WorkerLoad, WorkerRole
from services.gateway.request import (
    CacheMode,
    EncodedPrompt,
    ParentLog,
    SequenceRequest,
    Tenant,
)
from services.gateway.reuse import Beginning, RequestReuse, ReuseHints, cuts
from tests.unit.gateway.test_assignments import TOKENIZER, record

IDS = tuple(range(1000, 1400))
A, B = "store-0:1", "store-1:1"


def request(ids: tuple[int, ...] = IDS, **more: object) -> SequenceRequest:
    fields = {
        "request_id": "r",
        "tenant": Tenant(name="acme"),
        "prompt": EncodedPrompt(token_ids=ids, rendered=b""),
        "sampling": SamplingParameters(seed=1),
        "cache_mode": CacheMode.READ_WRITE,
        "cache_salt": None,
        "is_dropped_at_end": False,
        "received_s": 0.0,
        "deadline_s": 60.0,
        "ready_s": 0.0,
        **more,
    }
    return SequenceRequest(**fields)


def test_a_beginning_is_found_to_a_step_at_every_length() -> None:
    """Never more than is shared, and less than a step short of it."""
    hints = ReuseHints()
    hints.noted(Beginning(b"s", IDS), A)
    for shared in range(0, len(IDS) + 1, 7):
        asked = Beginning(b"s", (*IDS[:shared], 5, 6, 7))
        found = hints.found(asked).get(A, 0)
        assert shared - 16 < found <= shared, shared


def test_a_long_prompt_has_few_cuts_and_all_prompts_the_same() -> None:
    """32,768 tokens: 144; those of a shorter prompt are the first of them."""
    long = list(cuts(32_768))
    assert (len(long), long[-1]) == (144, 32_768)
    assert list(cuts(700)) == [position for position in long if position <= 700]
    assert list(cuts(15)) == []


def test_each_store_has_what_it_was_seen_to_have() -> None:
    """The longest of each; what a store answers corrects it, and it alone."""
    hints = ReuseHints()
    hints.noted(Beginning(b"s", IDS[:320]), A)
    hints.noted(Beginning(b"s", IDS[:64]), B)
    asked = Beginning(b"s", IDS)
    assert hints.found(asked) == {A: 320, B: 64}
    hints.limited(asked, A, 100)
    assert hints.found(asked) == {A: 96, B: 64}
    hints.limited(asked, A, 0)
    hints.limited(asked, B, 0)
    assert hints.found(asked) == {}
    assert len(hints) == 0


def test_the_least_lately_used_is_forgotten() -> None:
    """Bounded whatever comes; a beginning that is asked for stays."""
    hints = ReuseHints(entries_max=40)
    hints.noted(Beginning(b"s", IDS[:320]), A)
    for other in range(50):
        assert hints.found(Beginning(b"s", IDS)) == {A: 320}
        hints.noted(Beginning(b"s", tuple(range(50_000 + other * 64, 50_064 + other * 64))), B)
        assert len(hints) <= 40


def test_nobody_outside_the_scope_finds_it() -> None:
    """Not another tenant, nor another salt; nor is a prompt looked up that must not be."""
    hints = ReuseHints()
    RequestReuse(hints, request()).sealed(A)
    assert RequestReuse(hints, request()).expected() == {A: 399}
    for more in (
        {"tenant": Tenant(name="other")},
        {"tenant": Tenant(name="acme", team="blue")},
        {"cache_salt": "x"},
        {"cache_mode": CacheMode.OFF},
    ):
        assert RequestReuse(hints, request(**more)).expected() == {}


def test_an_answer_is_the_next_turns_beginning_wherever_it_ended() -> None:
    """The log moved: the new home has prompt and answer, the old one what others share."""
    hints = ReuseHints()
    one = RequestReuse(hints, request())
    one.opened(A, 0)
    one.sealed(A)
    one.moved(A, B, 32)
    answer = list(range(2000, 2050))
    one.ended(B, answer)
    turn = (*IDS, *answer, 7, 8, 9)
    assert RequestReuse(hints, request(turn)).expected() == {B: 448, A: 32}


def test_what_is_not_kept_is_not_remembered() -> None:
    """`store: false` and a cache that is off leave nothing."""
    hints = ReuseHints()
    for more in ({"is_dropped_at_end": True}, {"cache_mode": CacheMode.OFF}):
        one = RequestReuse(hints, request(**more))
        one.sealed(A)
        one.ended(A, [1, 2, 3])
    assert len(hints) == 0


def test_a_named_parent_counts_where_it_lies_and_never_as_the_whole_prompt() -> None:
    """To the token, whatever was seen; the last token is always computed."""
    parent = ParentLog(log_id=bytes(16), position=400, address=B)
    assert RequestReuse(ReuseHints(), request(parent=parent)).expected() == {B: 399}


class Pairs:
    """A planner with a prefill and a decode worker on each of two nodes."""

    def __init__(self, mode: PrefillMode) -> None:
        self.hub = WorkerHub(Registry(), ManualClock())
        self.planner = Planner(self.hub, PlanRules(mode=mode, tokenizer_hash=TOKENIZER))
        self.progress = 0
        for index in range(2):
            self.hear(f"prefill-{index}")
            self.hear(f"decode-{index}")

    def hear(self, worker_id: str, **load: int) -> None:
        """A beat."""
        self.progress += 1
        role = WorkerRole.DECODE if worker_id.startswith("decode") else WorkerRole.PREFILL
        worker = record(worker_id, role, WorkerLoad(active_max=16, token_rate=1000.0, **load))
        at = f"store-{worker_id[-1]}:1"
        self.hub.observe(replace(worker, kvstore_address=at, progress=self.progress))

    def plan(self, cached: dict[str, int], tokens: int = 500) -> Plan:
        """Where such a prompt goes."""
        return self.planner.plan(PlanRequest(prompt_tokens=tokens, cached=cached))


def test_a_prompt_goes_to_the_node_that_has_its_beginning() -> None:
    """Without a hint to the first by name; with one to where it lies, decode included."""
    pairs = Pairs(PrefillMode.AUTO)
    assert pairs.plan({}).kvstore_address == A
    warm = pairs.plan({B: 400})
    assert (warm.kvstore_address, warm.decode.kvstore_address) == (B, B)
    assert pairs.plan({A: 400, B: 416}).kvstore_address == B


def test_a_queue_outweighs_a_cache_when_it_costs_more() -> None:
    """400 cached tokens are worth 400 queued ones and no more."""
    pairs = Pairs(PrefillMode.AUTO)
    pairs.hear("prefill-1", queued_tokens=399)
    assert pairs.plan({B: 400}).kvstore_address == B
    pairs.hear("prefill-1", queued_tokens=401)
    assert pairs.plan({B: 400}).kvstore_address == A


def test_local_prefill_prefers_the_warm_node_until_it_is_much_busier() -> None:
    """A beginning that everybody shares must not bring all of them to one node."""
    pairs = Pairs(PrefillMode.LOCAL)
    assert pairs.plan({}).decode.worker_id == "decode-0"
    assert pairs.plan({B: 400}).decode.worker_id == "decode-1"
    assert pairs.plan({B: 63}).decode.worker_id == "decode-0", "not worth it"
    pairs.hear("decode-1", active=4)
    assert pairs.plan({B: 400}).decode.worker_id == "decode-1"
    pairs.hear("decode-1", active=5)
    assert pairs.plan({B: 400}).decode.worker_id == "decode-0"


@pytest.mark.parametrize("mode", [PrefillMode.AUTO, PrefillMode.LOCAL])
def test_a_hint_of_a_store_that_is_gone_changes_nothing(mode: PrefillMode) -> None:
    """Hints are of addresses; only workers are chosen."""
    assert Pairs(mode).plan({"store-9:1": 499}).kvstore_address == A
