"""Logs made of tokens that a client has already: an answer that goes on at another kvstore.

Owns the core's half of an Open with forced output tokens. Pure. What KV the log's prefix has here
is reused; who takes the log computes the rest again from the tokens, which never change (W5).
"""

from __future__ import annotations

from services.kvstore.core import invalid
from services.kvstore.state import LogState, Phase, Writer
from services.kvstore.store import Now, OpenOrder, Store

NO_CHUNKS = bytes(32)


def reopen(
    store: Store, order: OpenOrder, writer: Writer, forced_tokens: int, now: Now
) -> LogState:
    """A sealed log nobody writes; its last `forced_tokens` tokens are output.

    The same request again gets the same log; another one under its id is ALREADY_EXISTS.
    """
    core = store.core
    known = core.logs.get(order.log_id)
    if known is not None and known.is_sealed and _is_same(known, order):
        return known
    if not 1 <= forced_tokens < len(order.tokens):
        raise invalid("forced_output_tokens", f"must be 1 to {len(order.tokens) - 1}")
    store.open(order, writer, now)
    log = core.logs[order.log_id]
    _release_granted(store, log)
    store.keeper.raise_generation(log)
    log.prompt_tokens = len(order.tokens) - forced_tokens
    log.cached_tokens = min(log.cached_tokens, log.prompt_tokens)
    log.phase = Phase.DECODE
    log.chunk_list_digest = NO_CHUNKS
    log.expires_wall_s = now.wall_s + log.ttl_s
    core.idle(log)
    core.journal.snapshot(log)
    return log


def _is_same(log: LogState, order: OpenOrder) -> bool:
    return (log.request_id, log.body_hash, log.tenant) == (
        order.request_id,
        order.body_hash,
        order.tenant,
    )


def _release_granted(store: Store, log: LogState) -> None:
    """The worker has not heard of these pages: nobody writes them."""
    core = store.core
    core.journal.released(log, list(log.granted))
    for page in log.granted:
        core.pool.give_back(page)
    log.granted = {}
    core.drain_freed()
