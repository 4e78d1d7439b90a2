"""`baton kv ls`, `show` and `lineage`: which logs stand in kvstores, and where.

Owns these commands' questions and how their answers are laid out. Changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from baton.api.kvstore.v1 import operators_pb2
from baton.cli.console import output
from baton.cli.kv_store import (
    AddressOption,
    JsonOption,
    KeyFileOption,
    RunDirOption,
    Store,
    reach,
    resolve,
)
from baton.cli.kv_text import (
    ID_DIGITS,
    PHASES,
    ends_in,
    log_object,
    moment,
    pairs,
    seconds,
    short,
    show_json,
    show_table,
    size,
    table,
    time_span,
)
from baton.wire.durations import duration_from_proto

LOGS_DEFAULT: Final = 50
LOGS_MAX: Final = 65_536
PAGE_SIZE: Final = 500


class Phase(StrEnum):
    """Where a log is in its life."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"
    KEPT = "kept"
    MOVED = "moved"


_NUMBER_OF: Final = {word: number for number, word in PHASES.items()}

TenantFilter = Annotated[str | None, typer.Option(metavar="TENANT", help="Only this tenant's.")]
LogArgument = Annotated[
    str, typer.Argument(metavar="LOG", help="The log's id, or its first digits (4 or more).")
]


# --- ls -------------------------------------------------------------------------------------


def ls(
    tenant: TenantFilter = None,
    phase: Annotated[Phase | None, typer.Option(help="Only logs in this phase.")] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Only logs of this request, by the first digits of its id."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=LOGS_MAX, help="At most so many of each kvstore.")
    ] = LOGS_DEFAULT,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """List logs, the one opened first first.

    Example: baton kv ls --tenant acme --phase kept
    """
    asked = operators_pb2.ListLogsRequest(
        tenant=tenant or "",
        phase=_NUMBER_OF[phase.value] if phase else operators_pb2.LOG_PHASE_UNSPECIFIED,
        request_id=request or "",
    )

    async def work(stores: Sequence[Store]) -> list[tuple[str, list[Any], int]]:
        return [(store.name, *await _listed(store, asked, limit)) for store in stores]

    found = reach(run_dir, kvstore, key_file).run(work)
    total = sum(count for _, _, count in found)
    if as_json:
        logs = [log_object(line, name) for name, lines, _ in found for line in lines]
        show_json({"logs": logs, "total": total})
        return
    _show_logs(found, total)


async def _listed(
    store: Store, asked: operators_pb2.ListLogsRequest, limit: int
) -> tuple[list[operators_pb2.LogSummary], int]:
    lines: list[operators_pb2.LogSummary] = []
    request = operators_pb2.ListLogsRequest()
    request.CopyFrom(asked)
    with store.failures():
        while True:
            request.capability = store.operator()
            request.page_size = min(PAGE_SIZE, limit - len(lines))
            answer = await store.operators.ListLogs(request)
            lines += answer.logs
            request.page_token = answer.next_page_token
            if not request.page_token or len(lines) >= limit:
                return lines, answer.total


def _show_logs(found: list[tuple[str, list[Any], int]], total: int) -> None:
    rows = [(name, line) for name, lines, _ in found for line in lines]
    if not total:
        output().print("no log matches")
        return
    now_s = time.time()
    # Columns that would say the same of every log are left out.
    columns: dict[str, Callable[[str, Any], str]] = {"LOG": lambda _, line: short(line.log_id)}
    if len(found) > 1:
        columns["NODE"] = lambda name, _: name
    columns |= {
        "TENANT": lambda _, line: line.tenant,
        "PHASE": lambda _, line: PHASES.get(line.phase, "?"),
        "TOKENS": lambda _, line: str(line.tokens),
        "HOST": lambda _, line: str(line.committed_tokens),
    }
    if any(line.cold_tokens for _, line in rows):
        columns["NVME"] = lambda _, line: str(line.cold_tokens)
    columns |= {
        "IDLE": lambda _, line: time_span(duration_from_proto(line.idle)),
        "ENDS IN": lambda _, line: ends_in(line, now_s),
    }
    if any(line.writer_worker_id for _, line in rows):
        columns["WRITER"] = lambda _, line: line.writer_worker_id or "-"
    columns["REQUEST"] = lambda _, line: line.request_id[:ID_DIGITS] or "-"
    made = table(*columns, right=("TOKENS", "HOST", "NVME", "IDLE", "ENDS IN"))
    for name, line in rows:
        made.add_row(*(Text(tell(name, line)) for tell in columns.values()))
    show_table(made)
    if len(rows) < total:
        output().print(f"{len(rows)} of {total} logs; --limit shows more")


# --- show -----------------------------------------------------------------------------------


def show(
    log: LogArgument,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Show one log: phase, writer, tokens, KV in each tier, lineage.

    Example: baton kv show 5f0c9a31
    """

    async def work(stores: Sequence[Store]) -> tuple[str, operators_pb2.InspectLogResponse]:
        store, log_id = await resolve(stores, log)
        request = operators_pb2.InspectLogRequest(capability=store.operator(), log_id=log_id)
        with store.failures():
            return store.name, await store.operators.InspectLog(request)

    node, found = reach(run_dir, kvstore, key_file).run(work)
    if as_json:
        show_json(_details_object(found, node))
        return
    show_table(pairs(_details(found, node)))
    tiers = table("TIER", "TOKENS", "OWN PAGES", "SHARED PAGES", "BYTES", right=_TIER_NUMBERS)
    for tier in found.tiers:
        tiers.add_row(
            tier.tier, str(tier.tokens), str(tier.own_pages), str(tier.shared_pages),
            size(tier.bytes),
        )  # fmt: skip
    output().print()
    show_table(tiers)


_TIER_NUMBERS: Final = ("TOKENS", "OWN PAGES", "SHARED PAGES", "BYTES")


def _details(found: operators_pb2.InspectLogResponse, node: str) -> dict[str, str]:
    line = found.log
    tokens = f"{line.tokens} ({found.prompt_tokens} of the prompt, {found.cached_tokens} found)"
    rows = {
        "log": line.log_id.hex(),
        "node": node,
        "tenant": line.tenant + (f", scope {found.scope}" if found.scope else ""),
        "phase": PHASES.get(line.phase, "?")
        + (f", ended by {found.finish_reason}" if found.finish_reason else ""),
        "generation": str(line.generation),
        "writer": line.writer_worker_id or "nobody",
        "tokens": tokens,
        "request": line.request_id or "-",
        "opened": f"{moment(line.open_time)}, idle for {time_span(seconds(line.idle))}",
        "kept for": f"{time_span(seconds(found.ttl))} after its end"
        + (", dropped when it ends" if found.drop_at_end else ""),
        "numeric class": found.numeric_class or "-",
        "history": found.history_end.hex(),
        "findable": f"{found.findable_blocks} blocks",
    }
    if line.HasField("expire_time"):
        rows["ends"] = f"{moment(line.expire_time)}, in {ends_in(line, time.time())}"
    if found.granted_pages:
        rows["granted"] = f"{found.granted_pages} pages to its writer"
    if line.parent_log_id:
        rows["forked off"] = f"{line.parent_log_id.hex()} at {line.parent_position} tokens"
    if found.child_count:
        few = ", ".join(short(child) for child in found.child_log_ids[:8])
        rows["forks"] = few + (", ..." if found.child_count > 8 else "")
    if found.prefix_ids:
        rows["published"] = ", ".join(found.prefix_ids)
    if found.moved_to:
        rows["moved to"] = found.moved_to
    return rows


def _details_object(found: operators_pb2.InspectLogResponse, node: str) -> dict[str, Any]:
    return {
        **log_object(found.log, node),
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "finish_reason": found.finish_reason or None,
        "scope": found.scope or None,
        "numeric_class": found.numeric_class or None,
        "history_end": found.history_end.hex(),
        "findable_blocks": found.findable_blocks,
        "granted_pages": found.granted_pages,
        "ttl_s": seconds(found.ttl),
        "drop_at_end": found.drop_at_end,
        "moved_to": found.moved_to or None,
        "prefix_ids": list(found.prefix_ids),
        "child_log_ids": [child.hex() for child in found.child_log_ids],
        "child_count": found.child_count,
        "tiers": [
            {
                "tier": tier.tier,
                "tokens": tier.tokens,
                "own_pages": tier.own_pages,
                "shared_pages": tier.shared_pages,
                "bytes": tier.bytes,
            }
            for tier in found.tiers
        ],
    }


# --- lineage --------------------------------------------------------------------------------


def lineage(
    log: Annotated[
        str | None,
        typer.Argument(metavar="[LOG]", help="A log of the tree; without one, every tree."),
    ] = None,
    tenant: TenantFilter = None,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Show which logs were forked off which, parents above their children.

    Example: baton kv lineage 5f0c9a31
    """

    async def work(
        stores: Sequence[Store],
    ) -> list[tuple[str, operators_pb2.ListLineageResponse]]:
        asked, log_id = stores, b""
        if log is not None:
            store, log_id = await resolve(stores, log)
            asked = [store]
        return [(store.name, await _tree(store, log_id, tenant or "")) for store in asked]

    found = reach(run_dir, kvstore, key_file).run(work)
    if as_json:
        entries = [
            {**_entry_object(entry, name), "depth": entry.depth, "gone": entry.gone}
            for name, answer in found
            for entry in answer.entries
        ]
        show_json({"logs": entries, "truncated": any(answer.truncated for _, answer in found)})
        return
    _show_trees([entry for _, answer in found for entry in answer.entries])
    if any(answer.truncated for _, answer in found):
        output().print("there are more; name a log, or a tenant with --tenant")


async def _tree(store: Store, log_id: bytes, tenant: str) -> operators_pb2.ListLineageResponse:
    request = operators_pb2.ListLineageRequest(
        capability=store.operator(), log_id=log_id, tenant=tenant
    )
    with store.failures():
        answer: operators_pb2.ListLineageResponse = await store.operators.ListLineage(request)
        return answer


def _entry_object(entry: operators_pb2.LineageEntry, node: str) -> dict[str, Any]:
    if entry.gone:
        return {"log_id": entry.log.log_id.hex(), "node": node}
    return log_object(entry.log, node)


def _show_trees(entries: Sequence[operators_pb2.LineageEntry]) -> None:
    if not entries:
        output().print("no log was forked off another")
        return
    made = table("LOG", "FORKED AT", "TOKENS", "HOST", "PHASE", "TENANT", right=_TREE_NUMBERS)
    for entry, stem in zip(entries, stems([entry.depth for entry in entries]), strict=True):
        line, name = entry.log, Text(stem + short(entry.log.log_id))
        if entry.gone:
            made.add_row(name, "-", "-", "-", "gone", "-")
            continue
        made.add_row(
            name,
            str(line.parent_position) if line.parent_log_id else "-",
            str(line.tokens),
            str(line.committed_tokens),
            PHASES.get(line.phase, "?"),
            Text(line.tenant),
        )
    show_table(made)


_TREE_NUMBERS: Final = ("FORKED AT", "TOKENS", "HOST")


def stems(depths: Sequence[int]) -> list[str]:
    """The lines that join each entry of a tree, given in order by depth, with its parent."""
    drawn: list[str] = []
    # By level, seen from behind: whether a later entry hangs there below the same parent.
    goes_on = [False] * (max(depths, default=0) + 1)
    for depth in reversed(depths):
        lines = ["│  " if goes_on[level] else "   " for level in range(1, depth)]
        own = "├─ " if goes_on[depth] else "└─ "
        drawn.append("".join(lines) + (own if depth else ""))
        goes_on[depth] = True
        goes_on[depth + 1 :] = [False] * (len(goes_on) - depth - 1)
    return drawn[::-1]
