"""One trace from every process that had a part in it.

Owns the gathering: this gateway's own spans, then those of each known worker, asked over its
metrics address. A worker that does not answer in time is named as missing. Never shows a trace to
a tenant whose request it was not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import httpx
import structlog

from baton.tracing import process_tracing
from baton.tracing_tree import process_spans
from services.gateway.registry import WorkerStatus

ASK_TIMEOUT_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 8 << 20
WORKERS_MAX: Final = 256
ANSWER_ID_PREFIXES: Final = ("chatcmpl-", "cmpl-")

_log = structlog.stdlib.get_logger("baton.gateway.traces")

Workers = Callable[[], Iterable[WorkerStatus]]


class TraceGatherer:
    """Answers `/debug/traces/{id}` for the whole cluster."""

    def __init__(self, gateway_id: str, workers: Workers) -> None:
        self._gateway_id = gateway_id
        self._workers = workers

    async def find(self, wanted: str) -> dict[str, Any] | None:
        """A trace by its own id, a request's id or an answer's; None when it is not kept here."""
        return await self._gathered(wanted, tenant=None)

    async def find_for(self, tenant: str, wanted: str) -> dict[str, Any] | None:
        """The same, for a tenant: only traces whose every request was the tenant's."""
        return await self._gathered(wanted, tenant=tenant)

    async def _gathered(self, wanted: str, *, tenant: str | None) -> dict[str, Any] | None:
        tracing = process_tracing()
        for prefix in ANSWER_ID_PREFIXES:
            wanted = wanted.removeprefix(prefix)
        trace_id = wanted if tracing.records(wanted) else tracing.trace_of(wanted)
        if trace_id is None or not _may_see(tenant, trace_id):
            return None
        gathered = process_spans(tracing, trace_id)
        gathered["processes"][0]["name"] = self._gateway_id
        missing: list[str] = []
        # Several workers may share one process's metrics address in tests; asked once each.
        addresses = {
            status.record.metrics_address: status.record.worker_id
            for status in list(self._workers())[:WORKERS_MAX]
            if status.record.metrics_address
        }
        async with (
            httpx.AsyncClient(timeout=ASK_TIMEOUT_S, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            asked = {
                worker_id: group.create_task(_asked(client, address, trace_id))
                for address, worker_id in addresses.items()
            }
        for worker_id, task in asked.items():
            answer = task.result()
            if answer is None:
                missing.append(worker_id)
            for process in answer or []:
                gathered["processes"].append({**process, "name": worker_id})
        gathered["missing"] = missing
        return gathered


def _may_see(tenant: str | None, trace_id: str) -> bool:
    if tenant is None:
        return True
    records = process_tracing().records(trace_id)
    owners = {record.attributes["tenant"] for record in records if "tenant" in record.attributes}
    return owners == {tenant}


async def _asked(
    client: httpx.AsyncClient, address: str, trace_id: str
) -> list[dict[str, Any]] | None:
    """A worker's part; empty when it has none, None when it did not answer properly."""
    try:
        async with client.stream("GET", f"http://{address}/debug/traces/{trace_id}") as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                return []
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > ANSWER_BYTES_MAX:
                    return None
        if response.status_code != httpx.codes.OK:
            return None
        answer = httpx.Response(200, content=body).json()
        processes = answer["processes"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        _log.warning("trace_not_gathered", cause=type(error).__name__)
        return None
    return [one for one in processes if isinstance(one, dict)]
