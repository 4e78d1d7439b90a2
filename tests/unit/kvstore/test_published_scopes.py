"""Published prefixes in lookups: granted scopes first, then the tenant's own, across once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.blocks import PublishedScope, Scope
from baton.kv.numeric import TORCH_F32
from baton.kv.splice import splice
from services.kvstore.log.state import Parent
from services.kvstore.publishing import PublishOrder
from tests.cluster.memory import BLOCK
from tests.unit.kvstore.cores import NOW, PREFILL
from tests.unit.kvstore.model_sites import BytesSite, Hand
from tests.unit.kvstore.test_store import segment
from tests.unit.kvstore.test_token_sharing import check_bytes, ended, kept, opened

SYSTEM = [(5 * index) % 40 + 1 for index in range(4 * BLOCK + 3)]
GUEST: dict[str, Any] = {"tenant": "guest", "scope": Scope(tenant="guest")}
STRANGER: dict[str, Any] = {"tenant": "stranger", "scope": Scope(tenant="stranger")}


def publish(
    site: BytesSite,
    hand: Hand,
    position: int,
    name: str = "system",
    to: tuple[str, ...] = ("guest",),
    **changes: Any,
) -> str:
    """Publishes the beginning of a log of tenant acme; its id."""
    wanted = PublishOrder(
        prefix_id=f"pfx-{name}",
        name=name,
        tenant="acme",
        tenants=to,
        log_id=hand.log_id,
        position=position,
        text_hash=b"",
        ids_hash=b"",
        history_end=b"",
        text_bytes=10,
        template_digest=b"",
        model="m",
        expire_wall_s=None,
    )
    return site.store.prefix_keeper.publish(replace(wanted, **changes), NOW.wall_s).prefix_id


def published(to: tuple[str, ...] = ("guest",)) -> tuple[BytesSite, str]:
    """A store whose tenant acme has published SYSTEM and dropped the log it came from."""
    site = BytesSite("a")
    hand = kept(site, [*SYSTEM, 50])
    prefix_id = publish(site, hand, len(SYSTEM), to=to)
    ended(hand, is_dropped=True)
    return site, prefix_id


@pytest.mark.parametrize(
    ("field", "value"),
    [("expire_wall_s", 1e17), ("expire_wall_s", NOW.wall_s - 1.0), ("model", "m" * 257)],
)
def test_what_no_record_holds_is_refused_before_pages_are_held(field: str, value: Any) -> None:
    """A prefix without a record would hold its pages and its name until the next start."""
    site = BytesSite("a")
    hand = kept(site, [*SYSTEM, 50])
    with pytest.raises(ServiceError) as refused:
        publish(site, hand, len(SYSTEM), **{field: value})
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert refused.value.field == f"prefix.{field.replace('_wall_s', '_time')}"
    assert not site.store.core.prefixes.all()
    site.store.core.check_invariants()


def test_a_granted_prefix_is_found_to_the_token() -> None:
    """By who is granted it, in every block and in its partial end; by nobody else."""
    site, prefix_id = published()
    for shared in range(1, len(SYSTEM) + 1):
        hand = opened(site, [*SYSTEM[:shared], 60, 61], **GUEST)
        assert hand.log.cached_tokens == shared
        check_bytes(hand)
        ended(hand, is_dropped=True)
        stranger = opened(site, [*SYSTEM[:shared], 60], **STRANGER)
        assert stranger.log.cached_tokens == 0
        ended(stranger, is_dropped=True)
    assert site.store.core.prefixes.find(prefix_id).hits == len(SYSTEM)
    site.store.core.check_invariants()


def test_everybody_is_everybody() -> None:
    """A prefix for `*` is found by any tenant, whatever its team and salt."""
    site, _ = published(("*",))
    narrow = Scope(tenant="stranger", team="red", cache_salt="pepper")
    for scope in (Scope(tenant="stranger"), narrow, Scope(tenant="acme")):
        hand = opened(site, [*SYSTEM, 60], tenant=scope.tenant, scope=scope)
        assert hand.log.cached_tokens == len(SYSTEM)
        check_bytes(hand)
    site.store.core.check_invariants()


def test_a_chain_goes_on_in_the_tenants_own_scope_and_only_there() -> None:
    """Behind the prefix: the guest's own turns are found by the guest alone."""
    site, _ = published(("guest", "stranger"))
    first = kept(site, [*SYSTEM, *range(41, 60)], (7, 8, 9), **GUEST)
    assert first.log.cached_tokens == len(SYSTEM)
    history = list(first.log.tokens)
    second = opened(site, [*history, 60], **GUEST)
    assert second.log.cached_tokens == len(history) - 1
    check_bytes(second)
    assert [row.page for row in second.log.rows[:4]] == [row.page for row in first.log.rows[:4]]
    other = opened(site, [*history, 60], **STRANGER)
    assert other.log.cached_tokens == len(SYSTEM), "another's own blocks hang on the same node"
    salted = Scope(tenant="guest", cache_salt="pepper")
    narrow = opened(site, [*history, 60], tenant="guest", scope=salted)
    assert narrow.log.cached_tokens == len(SYSTEM)
    site.store.core.check_invariants()


def test_a_chain_that_leaves_the_prefix_early_is_found_again() -> None:
    """The guest shares two blocks of it, then goes another way; its next turn finds all."""
    site, _ = published()
    for shared in (2 * BLOCK, 2 * BLOCK + 3, 4 * BLOCK):
        first = kept(site, [*SYSTEM[:shared], *range(41, 56)], (1, 2), **GUEST)
        assert first.log.cached_tokens == shared
        history = list(first.log.tokens)
        second = opened(site, [*history, 60], **GUEST)
        assert second.log.cached_tokens == len(history) - 1
        check_bytes(second)
    site.store.core.check_invariants()


def test_the_owners_own_log_and_the_prefix_are_one_answer() -> None:
    """Who published finds its own chat, the longer one of both."""
    site = BytesSite("a")
    hand = kept(site, [*SYSTEM, 50], (1, 2, 3))
    publish(site, hand, len(SYSTEM))
    longer = opened(site, [*hand.log.tokens, 60])
    assert longer.log.cached_tokens == len(hand.log.tokens) - 1
    check_bytes(longer)


def test_revoking_ends_lookups_and_forks_at_once_and_takes_nothing_away() -> None:
    """Who had it keeps its pages until it closes; nobody finds it, nor what hangs behind it."""
    site, prefix_id = published()
    first = kept(site, [*SYSTEM, *range(41, 60)], (7, 8, 9), **GUEST)
    living = opened(site, [*SYSTEM, 44, 45], **GUEST)
    history = list(first.log.tokens)
    base = splice([segment(site.store, first.log_id, 0, 2 * BLOCK, history)])
    site.store.prefix_keeper.revoke(prefix_id, "acme", NOW.wall_s)
    site.work()
    for tokens in (history, [*SYSTEM, 44, 45, 46]):
        assert opened(site, [*tokens, 60], **GUEST).log.cached_tokens == 0
    # What was opened before goes on, and is sealed after: still nobody finds the prefix in it.
    living.checkpoint(len(living.log.tokens), NOW.monotonic_s)
    living.seal(1, "stop", NOW.monotonic_s)
    ended(living)
    assert opened(site, [*SYSTEM, 44, 45, 46], **GUEST).log.cached_tokens == 0
    # By name it is the guest's own log.
    parent = Parent(log_id=first.log_id, generation=0, position=len(history))
    child = opened(site, [*history, 60], base=parent, **GUEST)
    assert child.log.cached_tokens == len(history) - 1
    check_bytes(child)
    assert opened(site, [*history, 60], base=base, **GUEST).log.cached_tokens == 2 * BLOCK
    site.store.core.check_invariants()


def test_a_manifest_of_another_tenants_prefix_is_not_offered_as_ones_own() -> None:
    """The way of the gateway: a spliced base. Its chain hangs behind the published one too."""
    site, prefix_id = published()
    prefix = site.store.core.prefixes.find(prefix_id)
    base = splice([segment(site.store, prefix.log_id, 0, len(SYSTEM), SYSTEM)])
    first = kept(site, [*SYSTEM, *range(41, 60)], (7, 8), base=base, **GUEST)
    history = list(first.log.tokens)
    again = opened(site, [*history, 60], base=base, **GUEST)
    assert again.log.cached_tokens == len(history) - 1, "more is known than the manifest names"
    check_bytes(again)
    site.store.prefix_keeper.revoke(prefix_id, "acme", NOW.wall_s)
    site.work()
    with pytest.raises(ServiceError) as refused:
        opened(site, [*history, 60], base=base, **GUEST)
    assert refused.value.reason is Reason.BLOCK_NOT_FOUND
    assert opened(site, [*history, 60], **GUEST).log.cached_tokens == 0
    site.store.core.check_invariants()


def test_what_two_prefixes_share_stays_with_the_other_one() -> None:
    """Two of one grant, one longer: revoking either leaves the other as it was."""
    for gone, left in (("short", 4 * BLOCK), ("long", 2 * BLOCK)):
        site = BytesSite("a")
        hand = kept(site, [*SYSTEM, 50])
        publish(site, hand, 2 * BLOCK, "short")
        publish(site, hand, 4 * BLOCK, "long")
        ended(hand, is_dropped=True)
        chat = kept(site, [*SYSTEM[: 2 * BLOCK], *range(41, 60)], (7, 8), **GUEST)
        # It goes on holding the pages of the longer one.
        kept(site, [*SYSTEM[: 4 * BLOCK], *range(51, 60)], (7, 8), **GUEST)
        site.store.prefix_keeper.revoke(f"pfx-{gone}", "acme", NOW.wall_s)
        site.work()
        assert opened(site, [*SYSTEM, 60], **GUEST).log.cached_tokens == left
        again = opened(site, [*chat.log.tokens, 60], **GUEST)
        assert again.log.cached_tokens == len(chat.log.tokens) - 1
        check_bytes(again)
        site.store.core.check_invariants()


def test_a_restart_finds_prefixes_and_what_hangs_behind_them() -> None:
    """And a prefix that is revoked after it takes the guest's lookups with it, as before."""
    site, prefix_id = published()
    first = kept(site, [*SYSTEM, *range(41, 60)], (7, 8), **GUEST)
    history = list(first.log.tokens)
    site.restart(NOW, is_same_arena=True, locked=frozenset())
    assert opened(site, [*SYSTEM, 60], **STRANGER).log.cached_tokens == 0
    again = opened(site, [*history, 60], **GUEST)
    assert again.log.cached_tokens == len(history) - 1
    check_bytes(again)
    site.store.prefix_keeper.revoke(prefix_id, "acme", NOW.wall_s)
    site.work()
    assert opened(site, [*history, 60], **GUEST).log.cached_tokens == 0
    site.store.core.check_invariants()


def test_a_cut_log_is_not_led_along_its_old_way() -> None:
    """An edit inside the prefix, then other tokens: the log's own new blocks are found, the old
    ones by nobody as its.
    """
    site, _ = published()
    first = kept(site, [*SYSTEM, *range(41, 60)], (7, 8), **GUEST)
    old = list(first.log.tokens)
    site.store.truncate(first.log_id, first.log.generation, BLOCK + 4, NOW)
    site.work()
    site.store.home.take(
        first.log_id,
        first.log.generation,
        PREFILL,
        TORCH_F32,
        pages=1,
        now_s=NOW.monotonic_s,
    )
    site.work()
    hand = Hand(site, first.log_id, PREFILL)
    for token in range(1, 2 * BLOCK):
        if hand.log.committed % BLOCK == 0 and not hand.log.granted:
            hand.grant(1)
        site.store.writes.append(hand.item(token, None), PREFILL.worker_id, NOW.monotonic_s)
    ended(hand)
    new = list(first.log.tokens)
    again = opened(site, [*new, 60], **GUEST)
    assert again.log.cached_tokens == len(new) - 1
    check_bytes(again)
    assert opened(site, [*old, 60], **GUEST).log.cached_tokens == len(SYSTEM)
    site.store.core.check_invariants()


def test_a_published_scope_is_nobodys_own() -> None:
    """No tenant, team or salt spells the scope of a grant."""
    grant = PublishedScope(owner="acme", tenants=("guest",))
    spelt = Scope(tenant="baton.published.v1", team="acme", role="guest", cache_salt=None)
    assert grant.canonical_bytes() != spelt.canonical_bytes()
    assert grant.canonical_bytes() != PublishedScope(owner="acme", tenants=()).canonical_bytes()
    assert grant.canonical_bytes().hex() == (
        "120000006261746f6e2e7075626c69736865642e76310400000061636d6509000000050000006775657374"
    ), "docs/formats.md section 5 states it"
