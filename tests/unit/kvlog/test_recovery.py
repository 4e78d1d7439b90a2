"""What comes back from the records is what the store had: tokens, KV, grants, prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.kvstore.log import native
from services.kvstore.log.reader import read_directory, scan_directory
from services.kvstore.log.recovery import Recovered, recover, recover_records
from services.kvstore.state import LogState, Phase
from services.kvstore.store import Store
from tests.unit.kvlog.story import ARENA, Story, write_records
from tests.unit.kvstore.cores import BLOCK

SEEDS = range(24)
STEPS = 90


def facts(log: LogState) -> tuple[object, ...]:
    """What of a log must be the same after a restart, whatever becomes of its KV."""
    return (
        list(log.tokens),
        log.prompt_tokens,
        log.generation,
        log.numeric_class_id,
        log.base_class_id,
        log.is_sealed,
        log.tenant,
        log.request_id,
    )


def check(store: Store, recovered: Recovered) -> None:
    """The recovered logs are the store's, and no row names anything but the store's page."""
    assert set(recovered.logs) == set(store.core.logs)
    assert not recovered.damaged
    for log_id, log in store.core.logs.items():
        back = recovered.logs[log_id]
        assert facts(back) == facts(log), log_id.hex()
        assert list(back.rows) == list(log.rows)[: len(back.rows)]
        # Only the tail copied out of a full page is not known until its page fills.
        assert log.committed - log.committed % BLOCK <= back.committed <= log.committed
        assert back.committed == sum(row.tokens for row in back.rows)
        if log.phase is Phase.PREFILL:
            assert back.chunks == log.chunks
        writer = recovered.writers.get(log_id)
        assert writer == log.writer, log_id.hex()
    check_grants(store, recovered)
    prefixes = {prefix.prefix_id: prefix for prefix in store.core.prefixes.all()}
    assert {prefix.prefix_id for prefix in recovered.prefixes} == set(prefixes)
    for prefix in recovered.prefixes:
        original = prefixes[prefix.prefix_id]
        assert prefix.token_ids == original.token_ids
        assert list(prefix.rows) == list(original.rows)[: len(prefix.rows)]


def check_grants(store: Store, recovered: Recovered) -> None:
    """Every page that a writer may still write is known, with who it is."""
    granted = {
        (grant.log_id, grant.generation, grant.writer.slot, page, page_generation)
        for grant in recovered.grants
        for page, page_generation in grant.pages.items()
    }
    for log in store.core.logs.values():
        for page, page_generation in log.granted.items():
            assert log.writer is not None
            place = (log.log_id, log.generation, log.writer.slot, page, page_generation)
            assert place in granted
    for fence in store.core.pool.fences():
        for page, page_generation in store.core.pool.fenced_pages(fence).items():
            place = (fence.log_id, fence.generation, fence.worker_slot, page, page_generation)
            assert place in granted


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restart_gives_back_what_the_store_had(seed: int, tmp_path: Path) -> None:
    """Opens, index hits, forks, cuts, takes, evictions, publications: all of it is in records."""
    story = Story(seed)
    story.live(STEPS)
    write_records(tmp_path, story.sink.records, random.Random(seed))
    scan = scan_directory(tmp_path)
    assert not scan.holes
    check(story.store, recover(scan, ARENA))


@pytest.mark.parametrize("seed", [1, 2])
def test_kv_of_another_arena_is_a_miss_and_tokens_survive(seed: int, tmp_path: Path) -> None:
    """A store whose arena is new has every token and no KV."""
    story = Story(seed)
    story.live(STEPS)
    write_records(tmp_path, story.sink.records, random.Random(seed))
    for arena in (None, b"B" * 16):
        recovered = recover(read_directory(tmp_path), arena)
        assert {key: facts(log) for key, log in recovered.logs.items()} == {
            key: facts(log) for key, log in story.store.core.logs.items()
        }
        assert all(log.committed == 0 and not log.rows for log in recovered.logs.values())
        assert not recovered.grants


@pytest.mark.parametrize("seed", range(6))
def test_bulk_and_one_by_one_and_python_alone_agree(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast way is a way, not another meaning."""
    story = Story(100 + seed)
    story.live(STEPS)
    write_records(tmp_path, story.sink.records, random.Random(seed), segment_bytes=1 << 14)
    scan = read_directory(tmp_path)
    items = [item for segment in scan.segments for item in segment.records]
    bulk, single = recover(scan, ARENA), recover_records(items, ARENA)
    monkeypatch.setattr(native, "opened_library", lambda: None)
    slow = recover(read_directory(tmp_path), ARENA)
    for other in (single, slow):
        assert other.logs == bulk.logs
        assert other.writers == bulk.writers
        assert other.grants == bulk.grants
        assert other.prefixes == bulk.prefixes
        assert other.dropped == bulk.dropped
        assert other.page_generations == bulk.page_generations


@pytest.mark.parametrize("seed", range(4))
def test_segments_that_nobody_needs_can_go(seed: int, tmp_path: Path) -> None:
    """`living` says it: without the segments before the first needed one nothing is lost."""
    story = Story(200 + seed)
    story.live(STEPS)
    for log in list(story.store.core.logs.values()):
        if story.rng.random() < 0.8:
            story.store.core.journal.snapshot(log)
    for prefix in story.store.core.prefixes.all():
        story.store.prefix_keeper.revoke(prefix.prefix_id, None, 0.0)
    write_records(tmp_path, story.sink.records, random.Random(seed), segment_bytes=1 << 12)
    before = recover(read_directory(tmp_path), ARENA)
    needed = before.living.first_needed()
    assert needed is not None
    for segment in read_directory(tmp_path).segments:
        if segment.sequence < needed:
            segment.path.unlink()
    after = recover(read_directory(tmp_path), ARENA)
    assert after.logs == before.logs
    assert after.damaged == before.damaged == set()
