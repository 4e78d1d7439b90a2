"""`baton kv evict`, `export` and `import`: what changes a kvstore, or takes KV out of it.

Owns these commands and the order of their steps. Tenants are named by who calls: nothing crosses
from one to another unasked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, operators_pb2
from baton.capability import Right
from baton.cli.console import CommandFailed, ExitCode, output
from baton.cli.kv_blob_file import (
    LogFile,
    Part,
    page_crcs,
    portable,
    write_header,
    written_whole,
)
from baton.cli.kv_store import (
    AddressOption,
    JsonOption,
    KeyFileOption,
    RunDirOption,
    Store,
    failed,
    reach,
    resolve,
)
from baton.cli.kv_text import show_json, size
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id, new_request_id
from baton.kv.blob import BlobHeader, checksum_mismatch
from baton.kv.crc import extend_crc32c
from baton.wire.blob import descriptor_from_header, header_from_descriptor
from baton.wire.durations import duration_to_proto

CHUNK_BYTES: Final = (1 << 20) - 4096
TRANSFER_TIMEOUT_S: Final = 600.0

LogArgument = Annotated[
    str, typer.Argument(metavar="LOG", help="The log's id, or its first digits (4 or more).")
]
TenantOption = Annotated[str, typer.Option(metavar="TENANT", help="The tenant, by name.")]
NodeOption = Annotated[
    str | None,
    typer.Option(metavar="NODE", help="Which kvstore of the cluster, such as node-0."),
]


# --- evict ----------------------------------------------------------------------------------


def evict(
    log: LogArgument,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Drop a log's KV from memory; its tokens stay, and the next use computes or loads it again.

    Refused while a worker writes the log. Example: baton kv evict 5f0c9a31
    """

    async def work(stores: Sequence[Store]) -> tuple[bytes, operators_pb2.EvictLogResponse]:
        store, log_id = await resolve(stores, log)
        request = operators_pb2.EvictLogRequest(capability=store.operator(), log_id=log_id)
        with store.failures():
            return log_id, await store.operators.EvictLog(request)

    log_id, found = reach(run_dir, kvstore, key_file).run(work)
    if as_json:
        show_json(
            {
                "log_id": log_id.hex(),
                "pages": found.pages,
                "freed_pages": found.freed_pages,
                "tokens": found.tokens,
                "nvme_tokens": found.cold_tokens,
            }
        )
        return
    shared = found.pages - found.freed_pages
    output().print(
        f"evicted {log_id.hex()}: {found.freed_pages} pages are free"
        + (f", {shared} stay with others" if shared else "")
        + f"; {found.tokens} tokens stay"
        + (f", KV of {found.cold_tokens} on NVMe" if found.cold_tokens else ""),
        markup=False,
    )


# --- export ---------------------------------------------------------------------------------


def export(
    log: LogArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to.")],
    tenant: TenantOption,
    is_forced: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Write a log's token ids and KV to a file (docs/formats.md, 3), whole or not at all.

    The file holds what the tenant said and was answered: it gets mode 0600.
    Example: baton kv export 5f0c9a31 talk.bkv --tenant acme
    """

    async def work(stores: Sequence[Store]) -> dict[str, Any]:
        store, log_id = await resolve(stores, log)
        with written_whole(file, may_replace=is_forced) as out, store.failures():
            return await _export(store, log_id, tenant, out)

    done = reach(run_dir, kvstore, key_file).run(work)
    if as_json:
        show_json({**done, "file": str(file), "tenant": tenant})
        return
    output().print(
        f"exported {done['log_id']}: {done['tokens']} tokens in {done['blobs']} "
        f"{'blob' if done['blobs'] == 1 else 'blobs'}, {size(done['bytes'])}, to {file}",
        markup=False,
    )


async def _export(store: Store, log_id: bytes, tenant: str, out: BinaryIO) -> dict[str, Any]:
    operator = operators_pb2.InspectLogRequest(capability=store.operator(), log_id=log_id)
    log = (await store.operators.InspectLog(operator)).log
    if not log.committed_tokens:
        raise CommandFailed(
            f"log {log_id.hex()} has no KV in memory",
            remedy="it was evicted: continue it once, then export it",
        )
    position, blobs = 0, 0
    first: BlobHeader | None = None
    while position < log.committed_tokens:
        # One of its own for each blob: a long log takes longer than a capability lasts.
        text = store.tenant(tenant, "", Right.BLOB_GET, log_id)
        request = kvstore_pb2.GetBlobRequest(log_id=log_id, from_position=position, capability=text)
        header = await _one_blob(store, request, out)
        if first is not None and first.generation != header.generation:
            raise CommandFailed("the log changed hands meanwhile", remedy="export it again")
        first = first or header
        position, blobs = header.end_position, blobs + 1
    return {
        "log_id": log_id.hex(),
        "tokens": position,
        "blobs": blobs,
        "bytes": out.tell(),
    }


async def _one_blob(store: Store, request: kvstore_pb2.GetBlobRequest, out: BinaryIO) -> BlobHeader:
    header: BlobHeader | None = None
    crc, left = 0, 0
    async for piece in store.data.GetBlob(request, timeout=TRANSFER_TIMEOUT_S):
        if piece.WhichOneof("content") == "descriptor":
            header = header_from_descriptor(piece.descriptor)
            left = header.payload_bytes
            write_header(out, portable(header))
            continue
        crc, left = extend_crc32c(crc, piece.chunk), left - len(piece.chunk)
        out.write(piece.chunk)
    if header is None or left or crc != header.payload_crc:
        raise checksum_mismatch("payload_crc")
    return header


# --- import ---------------------------------------------------------------------------------


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    tenant: TenantOption,
    scope: Annotated[
        str, typer.Option(metavar="SCOPE", help="Its sharing scope; default: the tenant's own.")
    ] = "",
    has_new_id: Annotated[
        bool, typer.Option("--new-id", help="Under a fresh id, beside the log it was.")
    ] = False,
    may_convert: Annotated[
        bool, typer.Option("--convert", help="Take another dtype or page size, and convert.")
    ] = False,
    ttl_s: Annotated[float | None, typer.Option(min=1.0, help="Seconds it is kept.")] = None,
    node: NodeOption = None,
    as_json: JsonOption = False,
    run_dir: RunDirOption = None,
    kvstore: AddressOption = None,
    key_file: KeyFileOption = None,
) -> None:
    """Store an exported log again, for the tenant named, whoever had it before.

    Everything is checked before anything is stored: the tokenizer first, then the model, the shape
    and every checksum. Example: baton kv import talk.bkv --tenant acme
    """
    with LogFile.opened(file) as found:
        header = operators_pb2.ImportLogHeader(
            log_id=new_log_id() if has_new_id else found.parts[0].header.log_id,
            total_tokens=found.total_tokens,
            convert=may_convert,
        )
        if ttl_s is not None:
            header.ttl.CopyFrom(duration_to_proto(ttl_s))

        async def work(stores: Sequence[Store]) -> operators_pb2.ImportLogResponse:
            store = chosen(stores, node)
            with _refusals(file, store):
                header.capability = store.tenant(tenant, scope, Right.BLOB_PUT, header.log_id)
                await _offer(store, header, found)
                for part in found.parts:
                    found.payload(part)
                # Reading a long log takes longer than a capability lasts.
                header.capability = store.tenant(tenant, scope, Right.BLOB_PUT, header.log_id)
                return await _send(store, header, found)

        answer = reach(run_dir, kvstore, key_file).run(work)
    log_id = answer.log.log_id.hex()
    if as_json:
        show_json(
            {
                "log_id": log_id,
                "tenant": tenant,
                "tokens": answer.log.position,
                "pages": answer.pages,
                "history_end": answer.history_end.hex(),
            }
        )
        return
    output().print(
        f"imported {log_id} for {tenant}: {answer.log.position} tokens in {answer.pages} pages",
        markup=False,
    )


def chosen(stores: Sequence[Store], node: str | None) -> Store:
    """The kvstore of that name, or the only one there is."""
    names = ", ".join(store.name for store in stores)
    if node is None:
        if len(stores) == 1:
            return stores[0]
        raise CommandFailed(
            f"the cluster has {len(stores)} kvstores",
            remedy=f"choose one with --node: {names}",
            exit_code=ExitCode.USAGE,
        )
    for store in stores:
        if store.name == node:
            return store
    raise CommandFailed(
        f"no kvstore is called {node}", remedy=f"there are: {names}", exit_code=ExitCode.USAGE
    )


@contextmanager
def _refusals(file: Path, store: Store) -> Iterator[None]:
    try:
        yield
    except ServiceError as problem:
        if problem.reason is Reason.ALREADY_EXISTS:
            raise CommandFailed(
                f"{file} was not imported: the kvstore has, or had, a log of its id",
                remedy="import it beside that one with --new-id",
            ) from problem
        line = failed(problem, store)
        raise CommandFailed(
            f"{file} was not imported: {line.message}",
            remedy=line.remedy,
            exit_code=line.exit_code,
        ) from problem


async def _offer(store: Store, header: operators_pb2.ImportLogHeader, found: LogFile) -> None:
    """Whether the kvstore would take it, before a byte of payload is read or sent."""
    head = operators_pb2.ImportLogHeader()
    head.CopyFrom(header)
    head.only_check, head.request_id = True, new_request_id()

    async def pieces() -> AsyncIterator[operators_pb2.ImportLogRequest]:
        yield operators_pb2.ImportLogRequest(header=head)
        for part in found.parts:
            # Checksums of pages are of the payload, which is not asked about yet.
            yield _described(part, [0] * sum(1 for _ in part.header.spans()))

    await store.operators.ImportLog(pieces(), timeout=TRANSFER_TIMEOUT_S)


async def _send(
    store: Store, header: operators_pb2.ImportLogHeader, found: LogFile
) -> operators_pb2.ImportLogResponse:
    head = operators_pb2.ImportLogHeader()
    head.CopyFrom(header)
    head.request_id = new_request_id()

    async def pieces() -> AsyncIterator[operators_pb2.ImportLogRequest]:
        yield operators_pb2.ImportLogRequest(header=head)
        for part in found.parts:
            payload = found.payload(part)
            yield _described(part, page_crcs(part.header, payload))
            for start in range(0, len(payload), CHUNK_BYTES):
                chunk = payload[start : start + CHUNK_BYTES]
                yield operators_pb2.ImportLogRequest(chunk=chunk)

    answer: operators_pb2.ImportLogResponse = await store.operators.ImportLog(
        pieces(), timeout=TRANSFER_TIMEOUT_S
    )
    return answer


def _described(part: Part, crcs: Sequence[int]) -> operators_pb2.ImportLogRequest:
    descriptor: common_pb2.KvBlobDescriptor = descriptor_from_header(part.header, crcs)
    return operators_pb2.ImportLogRequest(descriptor=descriptor)
