"""What `baton doctor` says of a running cluster's kvstores: whether they scrub, what it found.

Owns these checks. Changes nothing; without a cluster there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.api.kvstore.v1 import operators_pb2
from baton.cli.checks import Check, Status
from baton.cli.console import CommandFailed
from baton.cli.kv_store import Store, reach
from baton.cli.kv_text import moment, seconds, time_span
from baton.launcher.rundir import running_pid


def check_scrub(run_dir: Path) -> list[Check]:
    """One line a kvstore of the cluster that runs in `run_dir`."""
    if running_pid(run_dir) is None:
        return []

    async def work(stores: Sequence[Store]) -> list[Check]:
        found = []
        for store in stores:
            request = operators_pb2.ReportScrubRequest(capability=store.operator())
            with store.failures():
                report = await store.operators.ReportScrub(request)
            found.append(judge_scrub(f"scrub {store.name}", report))
        return found

    try:
        return reach(run_dir, None, None).run(work)
    except CommandFailed as problem:
        return [
            Check(
                name="scrub",
                status=Status.WARN,
                detail=problem.message,
                remedy=problem.remedy or "see the kvstore's log",
            )
        ]


def judge_scrub(name: str, report: operators_pb2.ReportScrubResponse) -> Check:
    """Damage is worth a look at the machine; scrub that is off finds none before it is used."""
    if not report.HasField("period"):
        return Check(
            name=name,
            status=Status.WARN,
            detail="off: damage is found when a page is used",
            remedy="start the kvstore with --scrub-period-s",
        )
    damaged = sum(tier.damaged_pages for tier in report.tiers)
    detail = f"every {time_span(seconds(report.period))}; " + "; ".join(
        f"{tier.tier}: {_last_pass(tier)}, {tier.checked_pages} pages checked"
        for tier in report.tiers
    )
    if damaged:
        return Check(
            name=name,
            status=Status.WARN,
            detail=f"{damaged} damaged pages; {detail}",
            remedy="look at the machine's memory and disk; `baton kv du` counts, the kvstore's log "
            "names the logs concerned",
        )
    return Check(name=name, status=Status.OK, detail=f"no damage; {detail}")


def _last_pass(tier: operators_pb2.TierScrub) -> str:
    if not tier.HasField("last_pass_time"):
        return "first pass under way"
    return f"last pass {moment(tier.last_pass_time)} over {tier.last_pass_pages} pages"
