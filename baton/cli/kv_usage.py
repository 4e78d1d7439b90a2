"""`baton kv du`: how full kvstores are, who has what, and what scrub found.

Owns the question and how its answer is laid out. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from baton.api.kvstore.v1 import operators_pb2
from baton.cli.console import output
from baton.cli.kv_store import AddressOption, JsonOption, KeyFileOption, RunDirOption, Store, reach
from baton.cli.kv_text import moment, seconds, show_json, show_table, size, table, time_span


def du(
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Show how much of each tier is used, and by which tenants.

    A page that several logs share counts once, for the tenant that brought it. Example: baton kv du
    """

    async def work(stores: Sequence[Store]) -> list[tuple[str, Any, Any]]:
        return [(store.name, *await _usage(store)) for store in stores]

    found = reach(run_dir, kvstore, key_file).run(work)
    if as_json:
        show_json({"nodes": [_usage_object(*one) for one in found]})
        return
    for name, usage, scrub in found:
        if len(found) > 1:
            output().print(Text(name, style="bold"))
        _show_usage(usage)
        output().print()
        _show_scrub(scrub)


async def _usage(
    store: Store,
) -> tuple[operators_pb2.ReportUsageResponse, operators_pb2.ReportScrubResponse]:
    text = store.operator()
    with store.failures():
        return (
            await store.operators.ReportUsage(operators_pb2.ReportUsageRequest(capability=text)),
            await store.operators.ReportScrub(operators_pb2.ReportScrubRequest(capability=text)),
        )


def _show_usage(usage: operators_pb2.ReportUsageResponse) -> None:
    numbers = ("LOGS", "PAGES", "BYTES", "SHARE", "QUOTA")
    made = table("TIER", "TENANT", *numbers, right=numbers)
    for tier in usage.tiers:
        total = tier.pages_total
        made.add_row(
            Text(tier.tier, style="bold"), "", "", f"{tier.pages_used} of {total}",
            f"{size(tier.pages_used * tier.page_bytes)} of {size(total * tier.page_bytes)}",
            share(tier.pages_used, total), "",
        )  # fmt: skip
        for one in tier.tenants:
            has_quota = one.HasField("quota_pages")
            quota = size(one.quota_pages * tier.page_bytes) if has_quota else "-"
            made.add_row(
                "", Text(one.tenant), str(one.logs), str(one.pages),
                size(one.pages * tier.page_bytes), share(one.pages, total), quota,
            )  # fmt: skip
        if tier.tenant_count > len(tier.tenants):
            made.add_row("", f"and {tier.tenant_count - len(tier.tenants)} more")
    show_table(made)


def share(part: int, whole: int) -> str:
    """A part in percent."""
    return f"{part / whole:.1%}" if whole else "-"


def _show_scrub(scrub: operators_pb2.ReportScrubResponse) -> None:
    if not scrub.HasField("period"):
        output().print("scrub is off")
        return
    numbers = ("PAGES", "CHECKED", "DAMAGED")
    made = table("SCRUB", "EVERY", "LAST PASS", *numbers, right=numbers)
    for tier in scrub.tiers:
        has_ended = tier.HasField("last_pass_time")
        made.add_row(
            tier.tier,
            time_span(seconds(scrub.period)),
            moment(tier.last_pass_time) if has_ended else "under way",
            str(tier.last_pass_pages) if has_ended else "-",
            str(tier.checked_pages),
            str(tier.damaged_pages),
        )
    show_table(made)


def _usage_object(
    name: str,
    usage: operators_pb2.ReportUsageResponse,
    scrub: operators_pb2.ReportScrubResponse,
) -> dict[str, Any]:
    return {
        "node": name,
        "tiers": [
            {
                "tier": tier.tier,
                "pages_total": tier.pages_total,
                "pages_used": tier.pages_used,
                "page_bytes": tier.page_bytes,
                "tenants": [
                    {
                        "tenant": one.tenant,
                        "logs": one.logs,
                        "pages": one.pages,
                        "quota_pages": one.quota_pages if one.HasField("quota_pages") else None,
                        "is_named": one.named,
                    }
                    for one in tier.tenants
                ],
                "tenant_count": tier.tenant_count,
            }
            for tier in usage.tiers
        ],
        "scrub": scrub_object(scrub),
    }


def scrub_object(scrub: operators_pb2.ReportScrubResponse) -> dict[str, Any]:
    """What scrub did, for programs."""
    return {
        "period_s": seconds(scrub.period) if scrub.HasField("period") else None,
        "bytes_per_s": scrub.bytes_per_s,
        "tiers": [
            {
                "tier": tier.tier,
                "passes": tier.passes,
                "last_pass_pages": tier.last_pass_pages,
                "last_pass_s": seconds(tier.last_pass),
                "checked_pages": tier.checked_pages,
                "damaged_pages": tier.damaged_pages,
            }
            for tier in scrub.tiers
        ],
    }
