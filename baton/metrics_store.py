"""The metric families of the kvstore.

Owns that part of the table in `metrics_table`, through which it is read.
"""

from __future__ import annotations

from typing import Final

from baton.metrics import (
    STAGE_SECONDS_BUCKETS,
    Label,
)
from baton.metrics_families import (
    DEVICE_SLOT_STATES,
    FLUSH_BUCKETS,
    KVSTORE,
    PAGE_STATES,
    QUOTA_LABELS,
    REASON,
    SCRUB_LABEL,
    TIER_WAY_LABEL,
    a_counter,
    a_gauge,
    a_histogram,
)

STORE_FAMILIES: Final = (
    a_gauge(
        "baton_kvstore_pages", "Arena pages by state; their sum is baton_kvstore_arena_pages.",
        KVSTORE, Label("state", PAGE_STATES),
    ),
    a_gauge("baton_kvstore_arena_pages", "All pages of the arena.", KVSTORE),
    a_gauge("baton_kvstore_logs", "Logs, open and kept.", KVSTORE),
    a_gauge("baton_kvstore_leases", "Logs with a writer.", KVSTORE),
    a_gauge("baton_kvstore_pins", "Holds of pages by transfers under way.", KVSTORE),
    a_gauge("baton_kvstore_transfers_open", "Blob transfers under way.", KVSTORE),
    a_gauge("baton_kvstore_prefixes", "Published prefixes.", KVSTORE),
    a_gauge("baton_kvstore_index_blocks", "Full blocks that lookups find.", KVSTORE),
    a_gauge("baton_kvstore_index_tails", "Partial last blocks that lookups find.", KVSTORE),
    a_counter(
        "baton_kvstore_key_collisions", "Block keys met under other token ids: never once.",
        KVSTORE,
    ),
    a_gauge("baton_kvstore_workers", "Attached workers.", KVSTORE),
    a_gauge("baton_kvstore_log_segments", "Segments on disk.", KVSTORE),
    a_counter("baton_kvstore_log_records", "Log records.", KVSTORE),
    a_counter("baton_kvstore_log_groups", "Group commits.", KVSTORE),
    a_counter("baton_kvstore_log_bytes", "Bytes written to the log, FLUSH records too.", KVSTORE),
    a_counter(
        "baton_kvstore_log_poisoned_segments", "Segments given up after a failed write or flush.",
        KVSTORE,
    ),
    a_counter("baton_kvstore_log_refused", "Calls refused while the log took no more.", KVSTORE),
    a_counter("baton_kvstore_log_compacted", "Logs and prefixes written again.", KVSTORE),
    a_gauge("baton_kvstore_log_writable", "1; 0 while the log cannot be written.", KVSTORE),
    a_gauge("baton_kvstore_log_queue_bytes", "Record bytes that wait to be written.", KVSTORE),
    a_gauge("baton_kvstore_log_unflushed_bytes", "Written, and not on disk yet.", KVSTORE),
    a_counter("baton_kvstore_stale_writes_refused", "Stale writes refused.", KVSTORE),
    a_counter("baton_kvstore_kv_evicted_logs", "Kept logs whose KV was evicted.", KVSTORE),
    a_counter("baton_kvstore_kv_damaged", "Blocks found damaged: checksum failures.", KVSTORE),
    a_counter("baton_kvstore_lookup_tokens", "Prompt tokens looked for in the cache.", KVSTORE),
    a_counter("baton_kvstore_hit_tokens", "Prompt tokens found in the cache.", KVSTORE),
    a_counter(
        "baton_kvstore_tier_hit_tokens",
        "Prompt tokens found in the cache, by the tier that had them when they were asked for.",
        KVSTORE, Label("tier", ("host", "nvme")),
    ),
    a_gauge(
        "baton_kvstore_nvme_slots", "Slots of the NVMe tier by state; retired ones are live.",
        KVSTORE, Label("state", PAGE_STATES),
    ),
    a_gauge(
        "baton_kvstore_nvme_slots_retired",
        "Slots that failed, and are not used again before a restart.", KVSTORE,
    ),
    a_gauge(
        "baton_kvstore_nvme_read_bytes_per_second", "Read rate of the NVMe tier, as measured.",
        KVSTORE,
    ),
    a_gauge(
        "baton_kvstore_nvme_writes_off", "1 where a write failed so, and nothing is demoted more.",
        KVSTORE, Label("reason", ("io", "full")),
    ),
    a_counter(
        "baton_kvstore_nvme_damaged_slots", "Slots whose bytes could not be read or believed.",
        KVSTORE,
    ),
    a_counter(
        "baton_kvstore_nvme_dropped_slots", "Slots whose copies made room for others.", KVSTORE,
    ),
    a_counter(
        "baton_kvstore_tier_moved_bytes", "Bytes read from (promoted) and written to NVMe.",
        KVSTORE, TIER_WAY_LABEL,
    ),
    a_counter(
        "baton_kvstore_tier_shared_pages",
        "Blocks that came to a tier without a copy: their content stood there already.",
        KVSTORE, TIER_WAY_LABEL,
    ),
    a_counter(
        "baton_kvstore_promotions_abandoned",
        "Requests that did without KV on NVMe: computing was faster, or it did not come.",
        KVSTORE, Label("reason", ("slower", "late", "pages", "failed", "busy")),
    ),
    a_histogram(
        "baton_kvstore_promotion_seconds", "How long requests waited for KV from NVMe.", KVSTORE,
        STAGE_SECONDS_BUCKETS,
    ),
    a_gauge(
        "baton_kvstore_device_slots", "Slots of the workers' device memory by state.", KVSTORE,
        Label("state", DEVICE_SLOT_STATES),
    ),
    a_counter("baton_kvstore_device_loaded_pages", "Pages copied to device memory.", KVSTORE),
    a_counter("baton_kvstore_device_cleared_pages", "Pages given up there.", KVSTORE),
    a_gauge(
        "baton_kvstore_quota_bytes",
        "Bytes of a tier that a tenant with a quota, or all others together, may have.",
        KVSTORE, *QUOTA_LABELS,
    ),
    a_gauge(
        "baton_kvstore_quota_used_bytes", "Bytes of a tier that are charged to it.", KVSTORE,
        *QUOTA_LABELS,
    ),
    a_counter(
        "baton_kvstore_quota_refused", "Grants refused because of a quota.", KVSTORE,
        *QUOTA_LABELS,
    ),
    a_counter("baton_kvstore_appends", "Append entries received.", KVSTORE),
    a_counter("baton_kvstore_append_messages", "Append messages, a group commit each.", KVSTORE),
    a_counter("baton_kvstore_appends_refused", "Append entries refused.", KVSTORE, REASON),
    a_histogram(
        "baton_kvstore_log_flush_seconds", "One fdatasync of the log.", KVSTORE, FLUSH_BUCKETS
    ),
    a_counter(
        "baton_kvstore_blob_bytes", "Blob payload bytes moved.", KVSTORE,
        Label("direction", ("in", "out")),
    ),
    a_counter(
        "baton_kvstore_scrub_checked_pages", "Stored pages that scrub compared with their CRCs.",
        KVSTORE, SCRUB_LABEL,
    ),
    a_counter(
        "baton_kvstore_scrub_damaged_pages", "Stored pages that scrub found damaged.",
        KVSTORE, SCRUB_LABEL,
    ),
    a_counter(
        "baton_kvstore_scrub_passes", "Passes of scrub over all stored pages.",
        KVSTORE, SCRUB_LABEL,
    ),
    a_gauge(
        "baton_kvstore_scrub_last_pass_timestamp_seconds",
        "When scrub's last pass ended; before that, when the kvstore started.", KVSTORE,
        SCRUB_LABEL,
    ),
    a_gauge(
        "baton_kvstore_scrub_period_seconds",
        "In which scrub checks each stored byte once; 0 when it is off.", KVSTORE,
    ),
    a_gauge(
        "baton_kvstore_scrub_quarantined_pages",
        "Arena pages that are not used again because scrub found them damaged.", KVSTORE,
    ),
)  # fmt: skip
