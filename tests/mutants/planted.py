"""The list of planted bugs: exact text, what it becomes, and the test that must fail with it.

Owns the list. Where a text is gone the plant fails loudly: adapt it to the new text or, when the
code it stood in is gone for good, plant the same mistake where it can be made now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mistake. `test` is a pytest id that fails because of it; `old` stands once in `file`."""

    name: str
    file: str
    old: str
    new: str
    test: str


LOG: Final = "services/kvstore/log"
DISK: Final = (
    "tests/durability/test_simulated_disk.py::test_log_survives_power_cuts_on_a_simulated_disk"
)
FAILING: Final = "tests/durability/test_failing_disk.py::test_failing_calls_lose_no_ack"
FLIPS: Final = "tests/durability/test_flips.py"
WRITER: Final = "tests/unit/kvlog/test_writer.py"
FORMAT: Final = "tests/unit/kvlog/test_format.py"
HOME: Final = "tests/unit/kvstore/test_home.py"
STORE: Final = "tests/unit/kvstore/test_store.py"
RULES: Final = "tests/unit/kvstore/test_sharing_rules.py"
SHARING: Final = "tests/unit/kvstore/test_token_sharing.py"
PUBLISHED: Final = "tests/unit/kvstore/test_published_scopes.py"
VERSIONS: Final = "tests/unit/kvstore/test_prefix_versions.py"
PAGES: Final = "tests/unit/kvstore/test_pages.py"
CAPABILITY: Final = (
    "tests/unit/core/test_capability.py::test_a_genuine_token_for_something_else_is_denied"
)
MOVING: Final = "tests/unit/kvmoving/test_moving_cores.py"
TIERS: Final = "services/kvstore/tiers"
PLACES: Final = "tests/unit/kvstore/test_places.py::test_cold_tables_at_every_cut_of_some_lives"

LOG_MUTANTS: Final = (
    Mutant(
        name="ack before write",
        file=f"{LOG}/writer.py",
        old="        if progress.done >= progress.ordered:\n            return\n",
        new="        if progress.done >= progress.ordered or not is_disk:\n            return\n",
        test=DISK,
    ),
    Mutant(
        name="ack before fsync",
        file=f"{LOG}/writer.py",
        old="progress = self._durable if is_disk else self._written",
        new="progress = self._written",
        test=f"{WRITER}::test_disk_ack_is_not_given_before_its_own_flush",
    ),
    Mutant(
        name="ack of what was written during the fsync",
        file=f"{LOG}/writer.py",
        old="        self._durable.advance(target)\n",
        new="        self._durable.advance(self._written.done)\n",
        test=f"{WRITER}::test_disk_ack_is_not_given_before_its_own_flush",
    ),
    Mutant(
        name="skip fsync",
        file=f"{LOG}/files.py",
        old="        os.fdatasync(self.descriptor)\n",
        new="        return\n",
        test=DISK,
    ),
    Mutant(
        name="skip directory fsync",
        file=f"{LOG}/segments.py",
        old="if not all(segment.is_named for segment in segments):",
        new="if not segments:",
        test=DISK,
    ),
    Mutant(
        name="retry a failed fsync",
        file=f"{LOG}/files.py",
        old="        os.fdatasync(self.descriptor)\n",
        new="        try:\n            os.fdatasync(self.descriptor)\n        except OSError:\n"
        "            os.fdatasync(self.descriptor)\n",
        test=FAILING,
    ),
    Mutant(
        name="what was not flushed is not written again",
        file=f"{LOG}/segments.py",
        old="            groups = list(self._kept)\n",
        new="            groups = list(self._kept)[1:]\n",
        test=FAILING,
    ),
    Mutant(
        name="a FLUSH that states more than is on disk",
        file=f"{LOG}/writer.py",
        old="            durable_lsn=self._segments.durable_lsn,\n",
        new="            durable_lsn=self._next_lsn - 1,\n",
        test=DISK,
    ),
    Mutant(
        name="a short write taken for a whole one",
        file=f"{LOG}/files.py",
        old="            rest = rest[written:]\n",
        new="            rest = rest[len(rest) :]\n",
        test=FAILING,
    ),
    Mutant(
        name="what a restart keeps is not made durable",
        file=f"{LOG}/reader.py",
        old="            _sync(scan.segments[index].path)\n",
        new="            pass\n",
        test=DISK,
    ),
    Mutant(
        name="a torn tail is not cut",
        file=f"{LOG}/reader.py",
        old="        os.ftruncate(descriptor, size)\n",
        new="        os.fstat(descriptor)\n",
        test=f"{FLIPS}::test_log_cut_anywhere_is_the_records_before_the_cut",
    ),
    Mutant(
        name="truncate on damage in the middle",
        file=f"{LOG}/judge.py",
        old="    verdict.durable_lsn = max(",
        new="    verdict.durable_lsn = 0 * max(",
        test="tests/unit/kvstore/test_log_files.py"
        "::test_bad_record_at_or_below_the_durable_lsn_is_damage",
    ),
    Mutant(
        name="a torn group commit taken for damage",
        file=f"{LOG}/judge.py",
        old="        is_promised = expected <= self._out.durable_lsn or self._is_start_lost\n",
        new="        is_promised = True\n",
        test=DISK,
    ),
    Mutant(
        name="no header CRC",
        file=f"{LOG}/format.py",
        old="    if mask_crc(crc32c(raw[:_CRC_OFFSET])) != "
        'int.from_bytes(raw[_CRC_OFFSET:], "little"):\n'
        '        raise _corrupt_at("header_crc"',
        new='    if raw[:4] != RECORD_MAGIC:\n        raise _corrupt_at("header_crc"',
        test=f"{FORMAT}::test_every_bit_flip_of_a_record_is_refused",
    ),
    Mutant(
        name="no payload CRC",
        file=f"{LOG}/format.py",
        old="    if crc32c(payload) != header.payload_crc:\n        raise",
        new="    if header.payload_crc < 0:\n        raise",
        test=f"{FORMAT}::test_every_bit_flip_of_a_record_is_refused",
    ),
    Mutant(
        name="no chain",
        file=f"{LOG}/format.py",
        old="    if next_chain(previous_chain, raw_header) != header.chain_crc:\n",
        new="    if not raw_header:\n",
        test=f"{FORMAT}::test_record_out_of_its_place_breaks_the_chain",
    ),
    Mutant(
        name="trust length",
        file=f"{LOG}/format.py",
        old="    if payload_bytes > PAYLOAD_BYTES_MAX:\n        raise",
        new="    if payload_bytes < 0:\n        raise",
        test=f"{FORMAT}::test_lying_header_is_refused_before_allocation",
    ),
    Mutant(
        name="a log in doubt is believed",
        file=f"{LOG}/folded.py",
        old="        return self.own_doubt is None\n",
        new="        return True\n",
        test=f"{FLIPS}::test_some_larger_damages_are_found",
    ),
    Mutant(
        name="a closed log comes back",
        file=f"{LOG}/fold.py",
        old="        folded = self._logs.pop(at.log_id, None)\n        self._moved.pop",
        new="        folded = self._logs.get(at.log_id)\n        self._moved.pop",
        test=DISK,
    ),
    Mutant(
        name="segments go before what replaces them is on disk",
        file=f"{LOG}/writer.py",
        old="        await self.acked(AckLevel.DISK)\n        return await self.free_before(end)",
        new="        return await self.free_before(end)",
        test=DISK,
    ),
)

OWNERSHIP_MUTANTS: Final = (
    Mutant(
        name="no generation check",
        file="services/kvstore/core.py",
        old="        if log is not None and log.generation == generation:\n",
        new="        if log is not None:\n",
        test=f"{HOME}::test_stale_generation_is_refused_before_anything_else_and_changes_nothing",
    ),
    Mutant(
        name="drop generation check on commit",
        file="services/kvstore/writes.py",
        old="        log = self._core.current(log_id, generation)\n"
        "        require_allowed(log, Event.CHECKPOINT)\n",
        new="        log = self._core.find(log_id)\n"
        "        require_allowed(log, Event.CHECKPOINT)\n",
        test=f"{HOME}::test_stale_generation_is_refused_before_anything_else_and_changes_nothing",
    ),
    Mutant(
        name="any worker appends",
        file="services/kvstore/writes.py",
        old="        elif writer.worker_id == worker_id:\n            return log\n",
        new="        else:\n            return log\n",
        test=f"{HOME}::test_append_by_another_worker_at_the_right_generation_is_stale",
    ),
    Mutant(
        name="append anywhere",
        file="services/kvstore/writes.py",
        old="        if item.position != len(tokens) or log.phase is not Phase.DECODE:\n",
        new="        if log.phase is not Phase.DECODE:\n",
        test=f"{HOME}::test_append_is_accepted_at_the_next_position_only"
        "_and_its_repetition_is_a_no_op",
    ),
    Mutant(
        name="serve uncommitted block",
        file="services/kvstore/writes.py",
        old="        if log.committed != log.prompt_tokens:\n            raise invalid(\n",
        new="        if log.committed < 0:\n            raise invalid(\n",
        test=f"{HOME}::test_seal_before_all_kv_is_committed_is_refused",
    ),
    Mutant(
        name="a seal that names other chunks",
        file="services/kvstore/writes.py",
        old="        if chunk_list_digest(self._core.limits.kv_digest, log.chunks) != digest:\n",
        new="        if not digest:\n",
        test=f"{HOME}::test_seal_with_another_chunk_list_is_refused_and_leaves_the_log_unsealed",
    ),
    Mutant(
        name="free on timeout",
        file="services/kvstore/keeper.py",
        old="            self.park(self._core.logs[log_id], wall_s)\n        return expired\n",
        new="            self.park(self._core.logs[log_id], wall_s)\n"
        "        for fence in self._core.pool.fences():\n"
        "            if fence.log_id in expired:\n                self.lift(fence)\n"
        "        return expired\n",
        test=f"{RULES}::test_time_alone_frees_no_page",
    ),
    Mutant(
        name="free on socket close",
        file="services/kvstore/runtime.py",
        old="            if self.arena.is_slot_locked(slot):\n                continue\n",
        new="",
        test="tests/integration/kvstore/test_reattach.py"
        "::test_pages_of_a_stopped_worker_stay_away_until_it_is_gone",
    ),
    Mutant(
        name="unpin before fencing",
        file="services/kvstore/home.py",
        old="        for page in log.granted:\n            core.pool.fence(page, fence)\n",
        new="        for page in log.granted:\n            core.pool.give_back(page)\n",
        test=f"{RULES}::test_time_alone_frees_no_page",
    ),
    Mutant(
        name="fence without a new generation",
        file="services/kvstore/home.py",
        old="        log.generation += 1\n        if writer is None:\n",
        new="        if writer is None:\n",
        test=f"{STORE}::test_cancel_fences_first_and_is_idempotent",
    ),
    Mutant(
        name="unpin twice",
        file="services/kvstore/pages.py",
        old="        self._holders[page] -= 1\n        left = self._holders[page]\n",
        new="        self._holders[page] -= min(2, self._holders[page])\n"
        "        left = self._holders[page]\n",
        test=f"{PAGES}::test_page_is_free_only_after_its_last_holder_drops_it",
    ),
    Mutant(
        name="a fenced page is freed with its last holder",
        file="services/kvstore/pages.py",
        old="            if page in self._fence_of:\n"
        "                self._state[page] = QUARANTINED",
        new="            if page < 0:\n                self._state[page] = QUARANTINED",
        test=f"{PAGES}::test_fenced_held_page_is_quarantined_when_dropped_and_free_when"
        "_lifted_first",
    ),
    Mutant(
        name="a page's generation repeats",
        file="services/kvstore/pages.py",
        old="            self._generation[pages[0]] += 1\n",
        new="            self._generation[pages[0]] += 0\n",
        test=f"{PAGES}::test_each_grant_of_a_page_has_another_page_generation",
    ),
    Mutant(
        name="two generations in one page",
        file="services/kvstore/home.py",
        old="        if log.committed % core.block_tokens:\n            self._copy_tail(log)\n",
        new="",
        test=f"{HOME}::test_take_copies_the_partial_tail_into_a_page_of_the_new_generation",
    ),
    Mutant(
        name="no zeroing",
        file="services/kvstore/page_worker.py",
        old="                    self._arena.zero(page)\n",
        new="                    pass\n",
        test="tests/unit/kvstore/test_dirty_pages.py"
        "::test_a_page_is_zero_when_its_writer_is_told_of_it",
    ),
    Mutant(
        name="no token compare",
        file="services/kvstore/tree.py",
        old="            if child.ids != ids or child.parent is not node:\n",
        new="            if child.parent is not node:\n",
        test=f"{RULES}::test_a_key_with_other_tokens_is_no_hit",
    ),
    Mutant(
        name="a hit in a page that was freed",
        file="services/kvstore/tree.py",
        old="            if self._is_current(row):\n                return True\n",
        new="            if row.page >= 0:\n                return True\n",
        test=f"{RULES}::test_an_entry_ends_with_the_use_of_its_page",
    ),
    Mutant(
        name="the last token of a prompt is reused",
        file="services/kvstore/lookup.py",
        old="        usable = len(tokens) - 1\n",
        new="        usable = len(tokens)\n",
        test=f"{SHARING}::test_a_prompt_that_ends_anywhere_computes_its_last_token",
    ),
    Mutant(
        name="a class that cannot be read is found",
        file="services/kvstore/tree.py",
        old="            if place.class_id in class_ids:\n"
        "                at = class_ids.index(place.class_id)\n",
        new="            if class_ids:\n                at = 0\n",
        test=f"{SHARING}::test_classes_that_read_each_other_share_one_history",
    ),
    Mutant(
        name="a revoked prefix is found",
        file="services/kvstore/chains.py",
        old="            tree.disown(node, prefix.prefix_id)\n",
        new="            tree.root(prefix.scope)\n",
        test=f"{PUBLISHED}::test_what_two_prefixes_share_stays_with_the_other_one",
    ),
    Mutant(
        name="a prefix of another tokenizer is found",
        file="services/kvstore/chains.py",
        old="        if not rows or prefix.tokenizer_hash != self._core.limits.tokenizer_hash:\n",
        new="        if not rows:\n",
        test=f"{VERSIONS}::test_a_prefix_of_another_tokenizer_is_kept_and_not_found",
    ),
    Mutant(
        name="behind a published node all tenants meet",
        file="services/kvstore/chains.py",
        old="        return self._tree.plant(scope, node)\n",
        new="        return self._tree.plant(scope, node) if node is None else node\n",
        test=f"{PUBLISHED}::test_a_chain_goes_on_in_the_tenants_own_scope_and_only_there",
    ),
    Mutant(
        name="no history digest",
        file="services/kvstore/history.py",
        old="            if history.digest() != segment.history_end:\n                raise",
        new="            if not segment.history_end:\n                raise",
        test=f"{STORE}::test_manifest_whose_history_is_not_the_prompts_is_refused",
    ),
    Mutant(
        name="an unsealed log serves a fork",
        file="services/kvstore/home.py",
        old="    Event.FORK: frozenset({Phase.DECODE,",
        new="    Event.FORK: frozenset({Phase.PREFILL, Phase.DECODE,",
        test=f"{RULES}::test_an_unsealed_log_is_no_parent",
    ),
    Mutant(
        name="renew lease in a stuck loop",
        file="services/kvstore/lease.py",
        old="        if progress <= known.progress:\n            return False\n",
        new="",
        test=f"{STORE}::test_renewal_without_progress_does_not_count",
    ),
    Mutant(
        name="another tenant's log",
        file="services/kvstore/history.py",
        old="        if log.tenant != tenant:\n            raise log_not_found(log_id)\n",
        new="",
        test=f"{STORE}::test_parent_with_other_tokens_or_of_another_tenant_is_refused",
    ),
    Mutant(
        name="tenant from body",
        file="baton/capability.py",
        old="        if tenant is not None and tenant != claims.tenant:\n",
        new='        if tenant == "":\n',
        test=CAPABILITY,
    ),
    Mutant(
        name="a capability for another log",
        file="baton/capability.py",
        old="        if log_id is not None and claims.log_id is not None"
        " and log_id != claims.log_id:\n",
        new='        if log_id == b"":\n',
        test=CAPABILITY,
    ),
    Mutant(
        name="MOVED without refusing writes",
        file="services/kvstore/moving/departure.py",
        old="log.phase, log.moved_to, log.last_used_s = Phase.MOVED, to_home, now_s",
        new="log.moved_to, log.last_used_s = to_home, now_s",
        test=f"{MOVING}::test_the_old_home_refuses_every_write_once_moved_and_still_forks",
    ),
    Mutant(
        name="MOVED without fencing the writer",
        file="services/kvstore/moving/departure.py",
        old="        self._home.fence(log)\n        log.phase,",
        new="        log.phase,",
        test=f"{MOVING}::test_the_old_home_refuses_every_write_once_moved_and_still_forks",
    ),
    Mutant(
        name="a late confirmation drops the log that came back",
        file="services/kvstore/moving/departure.py",
        old="            if generation < log.generation:\n                return False\n",
        new="",
        test=f"{MOVING}::test_a_log_may_come_back_and_a_late_confirmation_of_the_first"
        "_move_hits_nothing",
    ),
)

TIER_MUTANTS: Final = (
    Mutant(
        name="a copy is told before its flush",
        file=f"{TIERS}/disk_queue.py",
        old="            self._flush(run.job)\n",
        new="            pass\n",
        test="tests/unit/kvstore/test_disk_queue.py::test_write_that_fails_is_not_believed",
    ),
    Mutant(
        name="a slot is not compared when it is read",
        file=f"{TIERS}/disk_queue.py",
        old="        return self._compared(run.copies, buffers)\n",
        new="        return [None] * len(run.copies)\n",
        test="tests/unit/kvstore/test_disk_queue.py"
        "::test_flipped_bit_on_disk_is_found_before_anybody_sees_it",
    ),
    Mutant(
        name="slot generations begin anew",
        file=f"{TIERS}/nvme_file.py",
        old="spec.header.encode(starts + 1)",
        new="spec.header.encode(starts)",
        test="tests/unit/kvstore/test_nvme_file.py"
        "::test_file_of_a_dead_store_is_found_again_with_its_slots",
    ),
    Mutant(
        name="a snapshot forgets copies",
        file=f"{LOG}/journal.py",
        old="        if log.cold:\n            self.placed(log, 0)\n",
        new="",
        test=PLACES,
    ),
    Mutant(
        name="copies outlive the truncation of their tokens",
        file=f"{LOG}/fold.py",
        old="        folded.cold.cut(min(folded.cold.committed, at.position - 1))\n",
        new="",
        test=PLACES,
    ),
)

MERGER: Final = "tests/unit/merger"
MERGER_MUTANTS: Final = (
    Mutant(
        name="histories that do not meet are joined by hand",
        file="services/merger/quick_wire.py",
        old="            or history != meets\n",
        new="",
        test=f"{MERGER}/test_quick_wire.py"
        "::test_drawn_messages_are_answered_as_by_the_generated_code",
    ),
    Mutant(
        name="a stale segment is joined",
        file="baton/kv/splice.py",
        old="    _check_generations(segments)\n    return joined",
        new="    return joined",
        test=f"{MERGER}/test_merger.py::test_segment_of_a_stale_generation_is_refused_naming_it",
    ),
    Mutant(
        name="materialised KV is whatever the log has",
        file="services/merger/materialise.py",
        old="        history.extend(ids.token_ids())\n    if",
        new="        history.extend(ids.token_ids())\n    if False and",
        test=f"{MERGER}/test_materialise.py"
        "::test_log_of_other_tokens_than_the_manifest_says_is_refused",
    ),
)

MUTANTS: Final = (*LOG_MUTANTS, *OWNERSHIP_MUTANTS, *TIER_MUTANTS, *MERGER_MUTANTS)
