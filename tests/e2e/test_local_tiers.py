"""Tier honesty where the decode worker prefills: a disk that became slow costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from baton.testing.cluster import RunningCluster, running_cluster
from tests.e2e.test_observability import samples, scrape, targets
from tests.e2e.test_tiers import FIRST, all_copied, ask, cached, evict_all, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.more, pytest.mark.timeout(300)]

PAUSE_S = 3.0
"""What every read takes: thousands of times longer than it does."""
WAITED_MAX_S = PAUSE_S / 2
"""5 % of what computing this prompt takes is a few hundredths of a second; who does not know how
fast the worker computes waits for the whole read.
"""


@pytest.fixture(scope="module")
def cluster(
    bundled_model: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """Everything aggregated, on a disk that is slow from the first read on."""
    run_dir = tmp_path_factory.mktemp("cluster-local-tiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_KVSTORE_DEMOTE_BELOW", "1")
        patch.setenv("BATON_KVSTORE_DEMOTE_UNTIL", "1")
        patch.setenv("BATON_FAULTS_ENABLED", "1")
        patch.setenv("FAULT", f"nvme.read:pause:{PAUSE_S:g}")
        options = ("--dtype", "float32", "--nvme-bytes", "268435456", "--prefill-mode", "local")
        with running_cluster(run_dir, *options) as running:
            yield running


def waited(cluster: RunningCluster) -> tuple[float, float]:
    """Seconds that requests waited for the disk, and loads that were given up for being slow."""
    found = samples(scrape(targets(cluster)["kvstore-0"]))
    seconds = sum(
        value for (name, _), value in found.items() if name == "baton_kvstore_promotion_seconds_sum"
    )
    late = sum(
        value
        for (name, labels), value in found.items()
        if name == "baton_kvstore_promotions_abandoned_total"
        and dict(labels)["reason"] in ("late", "slower")
    )
    return seconds, late


def test_a_slow_disk_does_not_hold_a_local_prefill(cluster: RunningCluster) -> None:
    """The next turn of an evicted conversation computes its prompt after it has waited for less
    than 5 % of that; its tokens are those of a fresh computation.
    """
    with httpx.Client(base_url=cluster.url, timeout=120.0, trust_env=False) as client:
        one = ask(client, FIRST)
        assert one["baton"]["mode"] == "aggregated"
        second = [
            *FIRST,
            {"role": "assistant", "content": one["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And its food?"},
        ]
        fresh = ask(client, second, **{"X-Cache": "off"})
        wait_until(lambda: all_copied(cluster))
        evict_all(cluster)
        assert waited(cluster) == (0.0, 0.0)
        warm = ask(client, second)
    seconds, late = waited(cluster)
    assert late >= 1.0
    assert seconds < WAITED_MAX_S
    assert cached(warm) == 0
    assert warm["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
