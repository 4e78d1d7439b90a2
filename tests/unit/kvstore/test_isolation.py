"""Tenants, teams, salts and hashes: whose KV a lookup can meet, under forged and colliding keys."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from baton.kv.blocks import BlockChain, Scope
from services.kvstore.store import Store
from tests.cluster.memory import BLOCK
from tests.unit.kvstore.cores import build_store, open_log
from tests.unit.kvstore.model_sites import BytesSite
from tests.unit.kvstore.test_store import kept_log
from tests.unit.kvstore.test_token_sharing import check_bytes, ended, kept, opened

LOOKUPS = 2000
TENANTS = 8
PROMPTS = 12


def keys_in_one_byte(patch: pytest.MonkeyPatch) -> None:
    """Every key is the first byte of a hash over the ids alone: no secret, no scope, no parent."""

    def keys_of(
        _self: BlockChain, blocks: Iterable[bytes], *, parent: bytes | None = None
    ) -> Iterator[bytes]:
        del parent
        return (bytes([sum(block) % 256]) + bytes(31) for block in blocks)

    patch.setattr(BlockChain, "keys_of", keys_of)


def prompt(number: int) -> list[int]:
    """One of the texts that everybody sends."""
    return [(number * 13 + index * 7) % 500 + 1 for index in range(2 * BLOCK + 3 + number)]


def scopes_of(tenant: str) -> list[Scope]:
    """Those that a tenant's credentials and salts make."""
    return [
        Scope(tenant=tenant),
        Scope(tenant=tenant, team="blue"),
        Scope(tenant=tenant, team="red"),
        Scope(tenant=tenant, team="blue", role="admin"),
        Scope(tenant=tenant, cache_salt="pepper"),
    ]


def looked_up(store: Store, tokens: list[int], scope: Scope) -> int:
    """How many tokens of a prompt are found; nothing stays of it."""
    log = open_log(store, tokens, tenant=scope.tenant, scope=scope).log
    cached = log.cached_tokens
    store.keeper.cancel(log.log_id, 0.0)
    for fence in store.core.pool.fences():
        store.keeper.lift(fence)
    store.core.take_work()
    return cached


@pytest.mark.parametrize("is_truncated", [False, True], ids=["keyed", "equal truncated hashes"])
def test_two_thousand_lookups_across_tenants_find_nothing(
    is_truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same texts under other tenants, teams, roles and salts, also where every key is equal;
    beside it the tenant's own lookups, which hit.
    """
    if is_truncated:
        keys_in_one_byte(monkeypatch)
    store = build_store(pages=2048)
    holders = [Scope(tenant="acme"), Scope(tenant="acme", team="blue")]
    for number in range(PROMPTS):
        for scope in holders:
            kept_log(store, prompt(number), tenant="acme", scope=scope)
    strangers = [
        scope
        for tenant in ("acme", *(f"tenant-{number}" for number in range(TENANTS)))
        for scope in (
            *scopes_of(tenant),
            # Salts that spell another scope, in case fields were run together.
            Scope(tenant=tenant, cache_salt="acme"),
            Scope(tenant=tenant, team="acme", cache_salt="blue"),
        )
        if scope not in holders
    ]
    draw = random.Random(7)
    foreign = [
        looked_up(store, prompt(draw.randrange(PROMPTS)), draw.choice(strangers))
        for _ in range(LOOKUPS)
    ]
    assert sum(foreign) == 0
    own = [
        looked_up(store, prompt(draw.randrange(PROMPTS)), draw.choice(holders))
        for _ in range(LOOKUPS // 10)
    ]
    # Under one byte of key, blocks of the tenant's own are in each other's way.
    assert sum(cached > 0 for cached in own) >= (0.5 if is_truncated else 0.95) * len(own)
    store.core.check_invariants()


def test_names_that_run_together_are_other_scopes() -> None:
    """A salt cannot spell a team, nor a tenant another tenant and its team."""
    spelt = [
        Scope(tenant="a", team="b"),
        Scope(tenant="a", role="b"),
        Scope(tenant="a", cache_salt="b"),
        Scope(tenant="ab"),
        Scope(tenant="a", team="b", role="c"),
        Scope(tenant="a", team="bc"),
    ]
    assert len({scope.canonical_bytes() for scope in spelt}) == len(spelt)


def test_c68_colliding_keys_never_serve_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache keys: with one byte of key collisions are certain; each prompt still begins with the
    KV of its own tokens, or with none.

    openvino.genai#3722, vllm#12621: the hash was trusted and tokens were not compared.
    """
    keys_in_one_byte(monkeypatch)
    site, draw = BytesSite("a"), random.Random(11)
    hits = 0
    for _ in range(300):
        tokens = [draw.randrange(1, 4) for _ in range(BLOCK * 3 + draw.randrange(BLOCK))]
        hand = opened(site, tokens)
        check_bytes(hand)
        hits += hand.log.cached_tokens > 0
        ended(hand, is_dropped=True)
        kept(site, tokens, (1, 2, 3))
    assert site.store.core.tree.collisions > 0
    assert hits > 100
    site.store.core.check_invariants()
    assert site.damaged == 0


def test_the_right_guess_reads_like_a_wrong_one() -> None:
    """C67: what another tenant has asked changes no count, whichever word is tried, at any token
    of the guess.
    """
    store = build_store(pages=512)
    secret = [*range(1, 30), 99, *range(30, 60)]
    kept_log(store, secret)
    other = Scope(tenant="other")
    for length in range(1, len(secret)):
        for word in (98, 99):
            guess = [*secret[:29], word, *secret[30:]][:length]
            assert looked_up(store, guess, other) == 0
