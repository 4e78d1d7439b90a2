"""What a page costs in the store's cores with 10 to 10,000 logs: found, offered, closed, missed.

Each log has a system prompt that all share and blocks of its own behind it, so that the shared node
has as many children as there are logs, and a partial tail. Records are encoded and handed to a sink
that keeps none; no arena, no socket. The figures are first quartiles of this thread's CPU time, of
the same number of operations in a store that already has so many logs.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from baton.kv.blocks import Scope, scope_secret
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.numeric import TORCH_F32
from baton.sampling_parameters import SamplingParameters
from services.kvstore.core import Core, Limits
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.lease import LeaseTable
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.journal import LogJournal
from services.kvstore.lookup import Asker
from services.kvstore.pages import PagePool
from services.kvstore.state import AckLevel, FillPage, PageRow, Writer
from services.kvstore.store import Now, OpenOrder, Store
from services.kvstore.writes import SealEnd

LOG_COUNTS: Final = (10, 100, 1_000, 10_000)
QUICK_COUNTS: Final = (10, 1_000)
BLOCK: Final = 16
SHARED_BLOCKS: Final = 4
OWN_BLOCKS: Final = 8
TAIL: Final = 5
ROUNDS: Final = 200
NOW: Final = Now(monotonic_s=100.0, wall_s=1e6)
SCOPE: Final = Scope(tenant="acme")
WRITER: Final = Writer(worker_id="prefill-0", slot=0, incarnation=1)
KV: Final = bytes(16)
TOKENS: Final = (SHARED_BLOCKS + OWN_BLOCKS) * BLOCK + TAIL
STEPS: Final = ("open", "seal", "close", "lookup", "miss")


class _Sink:
    """Takes encoded records and keeps none."""

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """One record."""


def prompt(number: int, blocks: int = OWN_BLOCKS) -> list[int]:
    """The shared system prompt, then tokens that only this log has."""
    own = [(number * 7919 + index * 31) % 49_000 for index in range(blocks * BLOCK + TAIL)]
    own[0], own[1] = number % 49_000, number // 49_000
    return [*range(SHARED_BLOCKS * BLOCK), *own]


def build(logs: int) -> Store:
    """A store with that many kept logs, all findable."""
    limits = Limits(block_tokens=BLOCK, kv_digest=KV, tokenizer_hash=bytes(8), logs_max=1 << 20)
    pages = (logs + ROUNDS) * (SHARED_BLOCKS + OWN_BLOCKS + 2) + 64
    core = Core(
        limits=limits,
        pool=PagePool(pages),
        leases=LeaseTable(10.0),
        journal=LogJournal(_Sink(), limits, bytes(16), 10.0),
    )
    store = Store(core, lambda scope: scope_secret(bytes(32), 1, scope))
    importer = Importer(store)
    for number in range(logs):
        tokens = prompt(number)
        log_id = number.to_bytes(16, "big")
        rows = importer.reserve(log_id, len(tokens), SCOPE.tenant)
        for row in rows:
            row.crc = 1 if row.tokens == BLOCK else None
            row.slot_crcs = [] if row.tokens == BLOCK else [1] * row.tokens
        importer.adopt(_import_order(log_id), rows, tokens, NOW)
        core.take_work()
    return store


def _import_order(log_id: bytes) -> ImportOrder:
    return ImportOrder(
        log_id=log_id,
        request_id="r",
        body_hash=bytes(32),
        tenant=SCOPE.tenant,
        scope=SCOPE,
        label_digest=bytes(16),
        numeric_class=TORCH_F32.text,
        numeric_class_id=TORCH_F32.id,
        ttl_s=None,
    )


def _open_order(log_id: bytes, tokens: list[int]) -> OpenOrder:
    return OpenOrder(
        request_id="r",
        body_hash=bytes(32),
        log_id=log_id,
        tenant=SCOPE.tenant,
        scope=SCOPE,
        tokens=tokens,
        sampling=SamplingParameters(),
        numeric_class=TORCH_F32,
        label_digest=bytes(16),
        base=None,
        is_cacheable=True,
        output_pages=1,
        ttl_s=None,
        drop_at_end=False,
        ack_level=AckLevel.OS,
    )


def _fill(store: Store) -> None:
    for work in store.core.take_work():
        if isinstance(work, FillPage):
            is_full = work.target.tokens == BLOCK
            work.target.crc = 1 if is_full else None
            work.target.slot_crcs = [] if is_full else [1] * work.target.tokens


def _computed(store: Store, log_id: bytes) -> tuple[list[PageRow], int, int]:
    """Rows of the prompt's uncached rest, as its writer would report them."""
    log = store.core.logs[log_id]
    first, end = log.committed, log.prompt_tokens
    spare = iter(log.granted.items())
    rows: list[PageRow] = []
    for block in range(first // BLOCK, -(-end // BLOCK)):
        count = min(BLOCK, end - block * BLOCK)
        known = log.rows[block] if block < len(log.rows) else None
        page, use = (known.page, known.page_generation) if known is not None else next(spare)
        old = [] if known is None else list(known.slot_crcs)
        crcs = [] if count == BLOCK else [*old, *[1] * (count - len(old))]
        crc = 1 if count == BLOCK else None
        rows.append(PageRow(page=page, page_generation=use, tokens=count, crc=crc, slot_crcs=crcs))
    return rows, first, end


def _timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return (time.thread_time() - started) * 1e6


def costs(logs: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of each step for one log in a store of `logs` logs, and bytes per node."""
    store = build(logs)
    spent: dict[str, list[float]] = {step: [] for step in STEPS}
    asker = Asker(tenant=SCOPE.tenant, scope=SCOPE, numeric_class=TORCH_F32)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            _one_log(store, logs, turn, spent)
            known = prompt(turn * 7 % logs)
            spent["lookup"].append(_timed(partial(store.history.cached, asker, known)))
            spent["miss"].append(_timed(partial(store.history.cached, asker, [turn, *known])))
    finally:
        gc.enable()
    # The first quartile: others on the machine only ever add to it.
    found = {step: statistics.quantiles(values, n=4)[0] for step, values in spent.items()}
    found["node_bytes"] = node_bytes(store)
    return found


def _one_log(store: Store, logs: int, turn: int, spent: dict[str, list[float]]) -> None:
    log_id = (1 << 64 | turn).to_bytes(16, "big")
    order = _open_order(log_id, prompt(logs + turn))
    spent["open"].append(_timed(lambda: store.open(order, WRITER, NOW)))
    _fill(store)
    rows, first, end = _computed(store, log_id)
    store.writes.checkpoint(log_id, 1, (first, end), rows, NOW.monotonic_s)
    pages = [
        ChunkPage(
            first_position=(first // BLOCK + index) * BLOCK,
            tokens=row.tokens,
            crc=slot_list_crc(row.slot_crcs) if row.crc is None else row.crc,
        )
        for index, row in enumerate(rows)
    ]
    digest = chunk_list_digest(KV, [pages])
    end_of = SealEnd(token_id=5, finish_reason="stop")
    spent["seal"].append(_timed(lambda: store.seal(log_id, 1, digest, end_of, NOW.monotonic_s)))
    spent["close"].append(
        _timed(lambda: store.keeper.close(log_id, is_dropped=True, wall_s=NOW.wall_s))
    )
    store.core.take_work()


def node_bytes(store: Store) -> float:
    """Bytes of the tree per node: nodes, keys, ids, places, page rows, tables and lists."""
    tree = store.core.tree
    seen: set[int] = set()
    total = 0
    for linked in tree._by_page.values():
        for node in linked if isinstance(linked, list) else (linked,):
            if id(node) in seen:
                continue
            seen.add(id(node))
            parts: list[object] = [node, node.key, node.ids, node.places]
            if node.children is not None:
                parts.append(node.children)
            for place in node.places:
                parts += [place, place.row]
                if place.row is not None:
                    parts += [place.row.slot_crcs, place.row.page, place.row.page_generation]
                    parts += [place.row.crc]
            total += sum(sys.getsizeof(part) for part in parts if part is not None)
    total += sys.getsizeof(tree._by_page)
    total += sum(sys.getsizeof(trunk.nodes) for trunk in tree._trunks.values())
    return total / max(len(seen), 1)


def measure(quick: bool) -> dict[str, float | None]:
    """`flat_<step>_us_<logs>` for each step, `flat_node_bytes_<logs>`, and the one ratio
    `flat_page_cost_most_vs_fewest`: all steps of a log, with the most logs against the fewest.
    """
    counts = QUICK_COUNTS if quick else LOG_COUNTS
    values: dict[str, float | None] = {}
    totals: dict[int, float] = {}
    for count in counts:
        found = costs(count, ROUNDS // 4 if quick else ROUNDS)
        totals[count] = sum(found[step] for step in STEPS)
        for name, value in found.items():
            unit = name if name == "node_bytes" else f"{name}_us"
            values[f"flat_{unit}_{count}"] = value
    values["flat_page_cost_most_vs_fewest"] = totals[counts[-1]] / totals[counts[0]]
    return values


def table(values: dict[str, float | None]) -> str:
    """A line for each number of logs."""
    counts = [count for count in LOG_COUNTS if f"flat_open_us_{count}" in values]
    pages = SHARED_BLOCKS + OWN_BLOCKS + 1
    lines = [
        f"cores, a log of {pages} pages ({TOKENS} tokens), us a log and us a page",
        f"{'logs':>7}" + "".join(f"{step:>9}" for step in STEPS) + f"{'a page':>9}{'B/node':>9}",
    ]
    for count in counts:
        spent = [values[f"flat_{step}_us_{count}"] or 0.0 for step in STEPS]
        node = values[f"flat_node_bytes_{count}"] or 0.0
        cells = "".join(f"{value:>9.1f}" for value in spent)
        lines.append(f"{count:>7}{cells}{sum(spent) / pages:>9.2f}{node:>9.0f}")
    ratio = values.get("flat_page_cost_most_vs_fewest")
    if ratio is not None:
        lines.append(f"a page with the most logs against the fewest: {ratio:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(measure(quick=False)) + "\n")
