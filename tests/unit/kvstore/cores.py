"""A store's pure cores without arena and log: builders and a journal that only counts.

Owns test doubles; asserts nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

from blake3 import blake3

from baton.kv.blocks import Scope, scope_secret
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.numeric import TORCH_F32, NumericClass
from baton.sampling_parameters import SamplingParameters
from services.kvstore.core import Core, Limits
from services.kvstore.lease import LeaseTable
from services.kvstore.log.format import (
    RecordAddress,
    RecordType,
    first_chain,
    frame_payload,
    read_record,
)
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.recovery import Recovered, recover_records
from services.kvstore.pages import PagePool
from services.kvstore.state import AckLevel, FillPage, GrantedPage, LogState, PageRow, Writer
from services.kvstore.store import Now, OpenOrder, Store
from services.kvstore.writes import AppendItem, SealEnd

BLOCK = 8
KV = bytes(range(16))
TOKENIZER = bytes(8)
NOW = Now(monotonic_s=100.0, wall_s=1_000_000.0)
SCOPE = Scope(tenant="acme")
PREFILL = Writer(worker_id="prefill-0", slot=0, incarnation=1)
DECODE = Writer(worker_id="decode-0", slot=1, incarnation=1)

EncodedBody = tuple[RecordType, bytes, RecordAddress]

_ids = itertools.count(1)


class ListJournal:
    """Remembers which records were made, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def record(*_args: object, **_kwargs: object) -> None:
            self.calls.append(name)

        return record


def new_id() -> bytes:
    """A fresh log id, the same in every run."""
    return blake3(str(next(_ids)).encode()).digest(16)


class ListSink:
    """Takes the records of a `LogJournal`."""

    def __init__(self) -> None:
        self.records: list[EncodedBody] = []

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Keeps one record."""
        self.records.append((kind, payload, address))


def build_store(pages: int = 64, sink: ListSink | None = None, **limits: Any) -> Store:
    """A store over `pages` pages of 8 slots; with a sink its records are made in full."""
    bounds = Limits(block_tokens=BLOCK, kv_digest=KV, tokenizer_hash=TOKENIZER, **limits)
    core = Core(
        limits=bounds,
        pool=PagePool(pages),
        leases=LeaseTable(10.0),
        journal=ListJournal() if sink is None else LogJournal(sink, bounds, bytes(16), 10.0),
    )
    return Store(core, lambda scope: scope_secret(bytes(32), 1, scope))


def order(tokens: list[int], **changes: Any) -> OpenOrder:
    """An order to open a log for these tokens."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "body_hash": bytes(32),
        "log_id": new_id(),
        "tenant": "acme",
        "scope": SCOPE,
        "tokens": tokens,
        "sampling": SamplingParameters(),
        "numeric_class": TORCH_F32,
        "label_digest": bytes(16),
        "base": None,
        "is_cacheable": True,
        "output_pages": 1,
        "ttl_s": None,
        "drop_at_end": False,
        "ack_level": AckLevel.OS,
    }
    return OpenOrder(**{**values, **changes})


def fill_work(store: Store) -> None:
    """Does the page work as if every copy verified: the CRCs are those of `crc_of`."""
    for work in store.core.take_work():
        if isinstance(work, FillPage):
            row = work.target
            row.crc = 7 if row.tokens == BLOCK else None
            row.slot_crcs = [] if row.tokens == BLOCK else [7] * row.tokens
            store.home.filled(work)


class WorkerModel:
    """What a worker does with a log: fills granted pages in order and reports them."""

    def __init__(self, store: Store, log_id: bytes, writer: Writer) -> None:
        self.store = store
        self.log_id = log_id
        self.writer = writer
        self.generation = self.log.generation
        self.chunks: list[list[ChunkPage]] = []

    @property
    def log(self) -> LogState:
        """The log as the store has it."""
        return self.store.core.logs[self.log_id]

    def checkpoint(self, end: int, now_s: float = NOW.monotonic_s) -> int:
        """Commits KV up to `end`."""
        log = self.log
        first = log.committed
        spare = list(log.granted.items())
        rows: list[PageRow] = []
        for block in range(first // BLOCK, -(-end // BLOCK)):
            tokens = min(BLOCK, end - block * BLOCK)
            if block < len(log.rows):
                page, page_generation = log.rows[block].page, log.rows[block].page_generation
                old = list(log.rows[block].slot_crcs)
            else:
                page, page_generation = spare.pop(0)
                old = []
            is_full = tokens == BLOCK
            rows.append(
                PageRow(
                    page=page,
                    page_generation=page_generation,
                    tokens=tokens,
                    crc=7 if is_full else None,
                    slot_crcs=[] if is_full else old + [7] * (tokens - len(old)),
                )
            )
        self.chunks.append(
            [
                ChunkPage(
                    first_position=(first // BLOCK + index) * BLOCK,
                    tokens=row.tokens,
                    crc=7 if row.crc is not None else slot_list_crc(row.slot_crcs),
                )
                for index, row in enumerate(rows)
            ]
        )
        return self.store.writes.checkpoint(self.log_id, self.generation, (first, end), rows, now_s)

    def seal(self, token: int | None = 5, finish: str | None = None) -> LogState:
        """Ends prefill."""
        digest = chunk_list_digest(KV, self.chunks)
        end = SealEnd(token_id=token, finish_reason=finish)
        return self.store.seal(self.log_id, self.generation, digest, end, NOW.monotonic_s)

    def prefill(self, token: int | None = 5, finish: str | None = None) -> LogState:
        """The whole prompt in one chunk, sealed."""
        self.checkpoint(self.log.prompt_tokens)
        return self.seal(token, finish)

    def item(self, token: int, finish: str | None = None) -> AppendItem:
        """The next append."""
        log = self.log
        slot = log.committed % BLOCK
        if slot:
            page, page_generation = log.rows[-1].page, log.rows[-1].page_generation
        else:
            page, page_generation = next(iter(log.granted.items()))
        return AppendItem(
            log_id=self.log_id,
            generation=self.generation,
            position=log.position,
            token_id=token,
            page=page,
            page_generation=page_generation,
            slot_crc=7,
            page_crc=7 if slot == BLOCK - 1 else None,
            finish_reason=finish,
        )

    def append(self, token: int, finish: str | None = None) -> LogState:
        """One token, with a page asked for where none is left."""
        log = self.log
        if log.committed % BLOCK == 0 and not log.granted:
            self.store.home.grant(self.log_id, self.generation, self.writer.worker_id, 1)
        return self.store.writes.append(
            self.item(token, finish), self.writer.worker_id, NOW.monotonic_s
        )


def open_log(
    store: Store, tokens: list[int], writer: Writer = PREFILL, **changes: Any
) -> WorkerModel:
    """An open log and its writer."""
    wanted = order(tokens, **changes)
    store.open(wanted, writer, NOW)
    fill_work(store)
    return WorkerModel(store, wanted.log_id, writer)


def take(
    store: Store,
    log_id: bytes,
    writer: Writer = DECODE,
    *,
    pages: int = 1,
    numeric_class: NumericClass = TORCH_F32,
) -> WorkerModel:
    """The log's next writer."""
    generation = store.core.logs[log_id].generation
    store.home.take(log_id, generation, writer, numeric_class, pages=pages, now_s=NOW.monotonic_s)
    fill_work(store)
    return WorkerModel(store, log_id, writer)


def pages_of(granted: tuple[GrantedPage, ...]) -> list[int]:
    """Page numbers."""
    return [page.page for page in granted]


def recovered_from(
    records: list[EncodedBody], arena_id: bytes | None = None, nvme_id: bytes | None = None
) -> Recovered:
    """What a restart makes of these records, framed and read again; KV only of that arena, copies
    only of that NVMe file.
    """
    chain = first_chain(bytes(16))
    data = bytearray()
    for lsn, (kind, payload, address) in enumerate(records, start=1):
        encoded = frame_payload(kind, payload, address, lsn=lsn, previous_chain=chain)
        chain = encoded.chain
        data += encoded.data
    chain, offset = first_chain(bytes(16)), 0
    items = []
    while offset < len(data):
        item = read_record(data, offset, previous_chain=chain)
        chain, offset = item.chain, item.end_offset
        items.append(item)
    return recover_records(items, arena_id, nvme_id)
