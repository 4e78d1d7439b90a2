"""Reuse to the token: which KV a new prompt begins with, at every position where it can leave an
older one; with real bytes in the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.blocks import Scope
from baton.kv.numeric import NATIVE_Q4_1, TORCH_BF16, TORCH_F32, NumericClass
from services.kvstore.state import Phase
from tests.cluster.memory import BLOCK, kv_of
from tests.unit.kvstore.cores import DECODE, NOW, PREFILL, build_store, new_id, order
from tests.unit.kvstore.model_sites import BytesSite, Hand
from tests.unit.kvstore.test_store import kept_log

PROMPT = [(7 * index) % 50 + 1 for index in range(100)]
SCOPES = [Scope(tenant="acme"), Scope(tenant="acme", team="blue")]
OTHER = 60
"""A token that PROMPT does not have."""


def opened(site: BytesSite, tokens: Sequence[int], **changes: Any) -> Hand:
    """A log whose base is in its pages."""
    wanted = order(list(tokens), **changes)
    site.store.open(wanted, PREFILL, NOW)
    site.work()
    return Hand(site, wanted.log_id, PREFILL)


def ended(hand: Hand, *, is_dropped: bool = False) -> None:
    """Closes the log."""
    wall_s = NOW.wall_s
    hand.site.store.keeper.close(hand.log_id, is_dropped=is_dropped, wall_s=wall_s)
    released(hand.site)


def released(site: BytesSite) -> None:
    """Fenced writers say that they write no more."""
    for fence in site.store.core.pool.fences():
        site.store.keeper.lift(fence)
    site.store.core.drain_freed()
    site.work()


def kept(
    site: BytesSite,
    tokens: Sequence[int],
    outputs: Sequence[int] = (),
    writer_class: NumericClass = TORCH_F32,
    **changes: Any,
) -> Hand:
    """A log that was prefilled, continued by decode with `outputs`, and closed."""
    hand = opened(site, tokens, **changes)
    hand.checkpoint(len(tokens), NOW.monotonic_s)
    if not outputs:
        hand.seal(5, "stop", NOW.monotonic_s)
        ended(hand)
        return hand
    hand.seal(outputs[0], None, NOW.monotonic_s)
    site.store.home.take(
        hand.log_id, hand.generation, DECODE, writer_class, pages=1, now_s=NOW.monotonic_s
    )
    released(site)
    decode = Hand(site, hand.log_id, DECODE)
    for token in outputs[1:]:
        append(decode, token)
    ended(decode)
    return decode


def append(hand: Hand, token: int) -> None:
    """One token, with a page if its slot needs one."""
    log = hand.log
    if log.committed % BLOCK == 0 and not log.granted:
        hand.grant(1)
    hand.site.store.writes.append(hand.item(token, None), hand.writer.worker_id, NOW.monotonic_s)


def check_bytes(hand: Hand) -> None:
    """What the log begins with is the KV of its own tokens."""
    log, kv = hand.log, 0
    for position in range(log.cached_tokens):
        kv = kv_of(log.tokens[position], kv)
        found = hand.site.arena.get(log.rows[position // BLOCK].page, position % BLOCK)
        assert found == (kv, position + 1), f"foreign KV at position {position}"
    assert log.committed == log.cached_tokens


# --- positions --------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [(), tuple(range(1, 30))], ids=["prompt", "with answer"])
def test_a_prompt_that_leaves_anywhere_begins_with_exactly_what_it_shares(
    outputs: tuple[int, ...],
) -> None:
    """Inside a full block, at its end, in the partial tail, in what decode has written: k tokens
    shared are k tokens reused, with the right bytes.
    """
    site = BytesSite("a")
    first = kept(site, PROMPT, outputs)
    history, committed = list(first.log.tokens), first.log.committed
    assert committed == len(history) - 1
    for shared in range(len(history) + 1):
        hand = opened(site, [*history[:shared], OTHER, OTHER])
        assert hand.log.cached_tokens == min(shared, committed), shared
        check_bytes(hand)
        ended(hand, is_dropped=True)
    site.store.core.check_invariants()
    assert site.damaged == 0


def test_a_prompt_that_ends_anywhere_computes_its_last_token() -> None:
    """A prompt that is all there still has one token to compute."""
    site = BytesSite("a")
    kept(site, PROMPT)
    for count in range(1, len(PROMPT) + 1):
        hand = opened(site, PROMPT[:count])
        assert hand.log.cached_tokens == count - 1, count
        check_bytes(hand)
        ended(hand, is_dropped=True)
    site.store.core.check_invariants()


def test_the_longest_of_many_is_taken() -> None:
    """Among many that leave at different tokens of one block, the one that shares the most."""
    site = BytesSite("a")
    for shared in range(1, 2 * BLOCK):
        kept(site, [*PROMPT[:shared], OTHER - shared])
    hand = opened(site, [*PROMPT[: 2 * BLOCK], OTHER])
    assert hand.log.cached_tokens == 2 * BLOCK - 1
    check_bytes(hand)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(SCOPES), st.lists(st.integers(1, 2), min_size=1, max_size=30)),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_found_is_the_longest_common_beginning(
    asked: list[tuple[Scope, list[int]]],
) -> None:
    """Against a list of all that was kept: never less, never more, in the own scope only."""
    store = build_store(pages=512)
    for index, (scope, tokens) in enumerate(asked):
        log = kept_log(store, tokens, scope=scope).log
        earlier = [other for whose, other in asked[:index] if whose == scope]
        common = max((shared_by(other, tokens) for other in earlier), default=0)
        assert log.cached_tokens == min(common, len(tokens) - 1)
    store.core.check_invariants()


def shared_by(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two histories share."""
    pairs = zip(one, other, strict=False)
    return next(
        (at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other))
    )


def test_a_log_that_goes_on_from_a_copied_tail_is_found_itself() -> None:
    """Turn after turn: each begins with all of the one before."""
    site, history = BytesSite("a"), PROMPT[:11]
    for turn in range(8):
        hand = kept(site, history, (turn + 1, turn + 2, turn + 3))
        assert hand.log.cached_tokens == (len(history) - 3 if turn else 0)
        history = [*hand.log.tokens, 30 + turn, 31 + turn]
    site.store.core.check_invariants()


# --- whose and when ---------------------------------------------------------------------------


def test_a_sealed_log_that_is_being_written_serves_what_its_prompt_had() -> None:
    """Samples of one prompt at once: the tail is found before, and after decode took it over."""
    site = BytesSite("a")
    first = opened(site, PROMPT[:11])
    first.checkpoint(11, NOW.monotonic_s)
    unsealed = opened(site, [*PROMPT[:11], OTHER])
    assert unsealed.log.cached_tokens == 0, "O2: what is not sealed serves nobody"
    first.seal(1, None, NOW.monotonic_s)
    second = opened(site, [*PROMPT[:11], OTHER])
    assert second.log.cached_tokens == 11
    page = first.log.rows[-1].page
    site.store.home.take(
        first.log_id, first.generation, DECODE, TORCH_F32, pages=1, now_s=NOW.monotonic_s
    )
    site.work()
    assert first.log.rows[-1].page != page
    decode = Hand(site, first.log_id, DECODE)
    append(decode, 9)
    third = opened(site, [*PROMPT[:11], 1, 9, OTHER])
    assert third.log.cached_tokens == 11, "what decode writes is offered when it ends"
    for hand in (second, third):
        check_bytes(hand)
    ended(decode)
    assert opened(site, [*PROMPT[:11], 1, 9, OTHER]).log.cached_tokens == 12
    site.store.core.check_invariants()


def test_a_tail_ends_with_its_log() -> None:
    """Nobody finds a tail whose page is gone, and no entry is left."""
    site = BytesSite("a")
    first = kept(site, PROMPT[:11])
    ended(first, is_dropped=True)
    assert opened(site, [*PROMPT[:11], OTHER]).log.cached_tokens == 0
    assert (site.store.core.tree.blocks, site.store.core.tree.tails) == (0, 0)


def test_a_cut_log_serves_what_it_still_has() -> None:
    """What was edited away is found as long as its page is there, and no longer."""
    site = BytesSite("a")
    first = kept(site, PROMPT)
    site.store.truncate(first.log_id, first.generation, 45, NOW)
    site.work()
    hand = opened(site, PROMPT)
    assert hand.log.cached_tokens == 48, "the block of position 44 is there whole"
    check_bytes(hand)
    ended(hand, is_dropped=True)
    site.store.home.take(
        first.log_id, first.log.generation, DECODE, TORCH_F32, pages=1, now_s=NOW.monotonic_s
    )
    site.work()
    decode = Hand(site, first.log_id, DECODE)
    for token in (55, 56, 57, 58, 59):
        append(decode, token)
    ended(decode)
    for tokens, cached in ((PROMPT, 45), ([*PROMPT[:45], 55, 56, 57, 58, 59], 49)):
        hand = opened(site, tokens)
        assert hand.log.cached_tokens == cached
        check_bytes(hand)
        ended(hand, is_dropped=True)


def test_off_is_off_for_parts_of_blocks_too() -> None:
    """A request or a log that is not cacheable neither reads nor serves; not even one token."""
    site = BytesSite("a")
    kept(site, PROMPT[:11], is_cacheable=False)
    assert opened(site, [*PROMPT[:11], OTHER]).log.cached_tokens == 0
    kept(site, PROMPT[:11])
    assert opened(site, [*PROMPT[:11], OTHER], is_cacheable=False).log.cached_tokens == 0


@pytest.mark.parametrize(
    "scope",
    [
        Scope(tenant="acme", team="blue"),
        Scope(tenant="acme", role="admin"),
        Scope(tenant="acme", cache_salt="pepper"),
        Scope(tenant="other"),
    ],
)
def test_not_one_token_is_shared_across_scopes(scope: Scope) -> None:
    """A first token that is known would tell what others have asked."""
    site = BytesSite("a")
    kept(site, PROMPT)
    hand = opened(site, PROMPT, scope=scope, tenant=scope.tenant)
    assert hand.log.cached_tokens == 0
    assert opened(site, PROMPT).log.cached_tokens == len(PROMPT) - 1


def test_classes_that_read_each_other_share_one_history() -> None:
    """The prompt is prefill's KV, the answer decode's: the next prefill begins with both."""
    site = BytesSite("a")
    first = kept(site, PROMPT[:40], tuple(range(1, 20)), NATIVE_Q4_1, numeric_class=TORCH_BF16)
    history = list(first.log.tokens)
    following = opened(site, [*history, OTHER], numeric_class=TORCH_BF16)
    assert following.log.cached_tokens == len(history) - 1
    assert following.log.base_class_id == NATIVE_Q4_1.id, "what is read names the other class"
    assert opened(site, [*history, OTHER], numeric_class=TORCH_F32).log.cached_tokens == 0
    site.store.core.check_invariants()


# --- damage and recycling ---------------------------------------------------------------------


@pytest.mark.parametrize("shared", [20, 99], ids=["inside a full block", "in a tail"])
def test_a_damaged_source_is_not_copied(shared: int) -> None:
    """The copy is checked against its record: the log begins with the blocks before, and nobody
    is led to the damaged page again.
    """
    site = BytesSite("a")
    first = kept(site, PROMPT)
    block = (shared - 1) // BLOCK
    site.arena.page(first.log.rows[block].page)[3] ^= 1
    for _ in range(2):
        hand = opened(site, [*PROMPT[:shared], OTHER])
        assert hand.log.cached_tokens == block * BLOCK
        check_bytes(hand)
    assert site.damaged == 1
    site.store.core.check_invariants()


def test_recycled_pages_hold_no_foreign_byte() -> None:
    """Filled, freed, granted to another tenant: every page it gets is blank, and each copied tail
    is blank behind what was copied (`Hand` looks at every slot).
    """
    site = BytesSite("a")
    pages = site.arena.page_count
    for turn in range(4 * pages):
        tenant = f"tenant-{turn % 3}"
        changes = {"tenant": tenant, "scope": Scope(tenant=tenant)}
        tokens = [*PROMPT[: 20 + turn % 60], OTHER - turn % 3]
        hand = kept(site, tokens, (1, 2), **changes)
        assert hand.log.phase is Phase.KEPT
        if turn % 2:
            ended(hand, is_dropped=True)
    assert site.damaged == 0
    site.store.core.check_invariants()


def test_a_restart_finds_tails_and_copied_ends_again() -> None:
    """What was kept is found after a restart to the token, also what began with a copy."""
    site = BytesSite("a")
    kept(site, PROMPT[:45])
    second = kept(site, [*PROMPT[:20], OTHER, OTHER])
    assert second.log.cached_tokens == 20
    waiting = opened(site, [*PROMPT[:30], 3, 4])
    assert waiting.log.cached_tokens == 30
    site.restart(NOW, is_same_arena=True, locked=frozenset({PREFILL.slot}))
    log = site.store.core.logs[waiting.log_id]
    assert (log.committed, log.cached_tokens) == (30, 30)
    for tokens, cached in (
        ([*PROMPT[:45], OTHER], 45),
        ([*PROMPT[:20], OTHER, OTHER, 1], 22),
        ([*PROMPT[:33], OTHER], 33),
    ):
        hand = opened(site, tokens)
        assert hand.log.cached_tokens == cached
        check_bytes(hand)


def test_a_fork_and_its_parent_are_found_each_by_its_own_tokens() -> None:
    """A fork that went another way serves its own continuation, and the parent its."""
    site = BytesSite("a")
    first = kept(site, PROMPT[:30], (1, 2, 3, 4))
    child = kept(site, [*PROMPT[:27], 50, 51], (6, 7, 8))
    assert child.log.cached_tokens == 27
    for history in (list(first.log.tokens), list(child.log.tokens)):
        hand = opened(site, [*history, OTHER], log_id=new_id())
        assert hand.log.cached_tokens == len(history) - 1
        check_bytes(hand)
