"""What a request would use if it were in the host: the wants of an Open, by its base.

Owns that reading of a base. Pure; it changes nothing and refuses nothing: what is wrong with a base
is said by the operation itself.
"""

from __future__ import annotations

from baton.kv.manifest import Manifest
from services.kvstore.core import Core
from services.kvstore.log.state import Parent
from services.kvstore.lookup import Asker
from services.kvstore.state import LogState, PageRow
from services.kvstore.store import OpenOrder, Store
from services.kvstore.tiers.owners import Owner
from services.kvstore.tiers.promotion import Want


def wants_of_open(store: Store, order: OpenOrder) -> list[Want]:
    """Runs of KV that the new log would begin with; each of a log of the tenant, or granted to it.

    The last token of the prompt is always computed.
    """
    core = store.core
    most = len(order.tokens) - 1
    if core.slots is None or order.log_id in core.logs:
        return []
    match order.base:
        case Parent() as parent:
            log = core.logs.get(parent.log_id)
            if log is None or log.tenant != order.tenant:
                return []
            named = [Want(owner=log, tokens=min(parent.position, most))]
            return _with_others(store, order, named) if order.is_cacheable else named
        case Manifest() as manifest:
            named = _of_manifest(store, manifest, order.tenant)
            if len(manifest.segments) > 1 or not order.is_cacheable:
                return named
            return _with_others(store, order, named)
        case None:
            return _of_lookup(store, order) if order.is_cacheable else []


def _with_others(store: Store, order: OpenOrder, named: list[Want]) -> list[Want]:
    """More may be known of the prompt than the base that it names has (`Store._longer`)."""
    more = _of_lookup(store, order)
    return [*named, *(one for one in more if all(one.owner is not want.owner for want in named))]


def _of_manifest(store: Store, manifest: Manifest, tenant: str) -> list[Want]:
    core = store.core
    wants: list[Want] = []
    for segment in manifest.segments:
        prefix = core.prefixes.granting(segment.log_id, tenant, segment.to_position)
        log = core.logs.get(segment.log_id)
        if prefix is not None:
            wants.append(Want(owner=prefix, tokens=segment.to_position))
        elif log is not None and log.tenant == tenant:
            wants.append(Want(owner=log, tokens=segment.to_position))
    return wants


def _of_lookup(store: Store, order: OpenOrder) -> list[Want]:
    asker = Asker(tenant=order.tenant, scope=order.scope, numeric_class=order.numeric_class)
    hit = store.history.anywhere(asker, order.tokens)
    if hit is None:
        return []
    wants: list[Want] = []
    block_tokens = store.core.block_tokens
    for key, tokens in hit.wants(block_tokens):
        cold = hit.blocks[(tokens - 1) // block_tokens].cold
        owner = None if cold is None else _owner(store.core, key, cold, order.tenant)
        if owner is not None:
            wants.append(Want(owner=owner, tokens=tokens))
    return wants


def _owner(core: Core, key: bytes | str, cold: PageRow, tenant: str) -> Owner | None:
    """Who had the copy when it was offered; where that has ended or given the copy up, another log
    of the tenant that shares it: a fork and its parent, say.
    """
    if isinstance(key, str):
        return core.prefixes.get(key)
    known = core.logs.get(key)
    if known is not None and _has(known, cold):
        return known
    logs = (log for log in core.logs.values() if log.cold and log.tenant == tenant)
    return next((log for log in logs if _has(log, cold)), known)


def _has(log: LogState, cold: PageRow) -> bool:
    """Whether one of the log's copies stands in the slot."""
    return bool((log.cold.pages() == cold.page).any())


def want_of_log(log: LogState, tokens: int) -> list[Want]:
    """The first `tokens` positions of one log, which is taken or forked."""
    return [Want(owner=log, tokens=tokens)]
