"""Every edit of a context, planned as the gateway plans it, answers as a fresh computation does.

A real kvstore, prefill and decode worker on a tiny model in float32; the edit planner is the real
one. What is the same in front of the change is taken over, the rest is computed, in a log of its
own; the next answer begins with that log's KV, down to its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.ids import new_log_id, new_request_id
from baton.kv.digests import body_hash
from baton.sampling_parameters import SamplingParameters
from baton.wire.sampling import sampling_to_proto
from services.gateway.__main__ import load_model
from services.gateway.prompts import ServedModel
from services.gateway.session_edit import Anchor, EditOrder, change_of, edited
from tests.integration.workers.harness import (
    Addresses,
    DecodeStream,
    Gateway,
    OpenedLog,
    event_shape,
    shape,
)
from tests.integration.workers.test_handoff import prompt_of
from tests.integration.workers.test_reuse import CHUNK, GREEDY, closed

pytestmark = pytest.mark.cluster

CONTEXT: Final = 40
KV_ONLY: Final = SamplingParameters(temperature=0.0, max_tokens=1)
WRITER: Final = f"prefill-{CHUNK}"
REPLACEMENTS: Final[tuple[tuple[int, ...], ...]] = ((), (11,), (12, 13), (14, 15, 16, 17, 18))
"""Deleted, shorter, longer; each range gets one of them, and each length gets all of them."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class History:
    """Tokens of a kept log."""

    log_id: bytes
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def model(addresses: Addresses) -> ServedModel:
    """What the gateway knows of the processes' model."""
    return load_model(str(addresses.model))


def ranges(step: int) -> list[Range]:
    """Every `step`-th of all (start, end) of the context, in order."""
    found = [(start, end) for start in range(CONTEXT + 1) for end in range(start, CONTEXT + 1)]
    return found[::step]


def replacement_of(start: int, end: int) -> tuple[int, ...]:
    """What comes to a range; what would leave nothing does not."""
    found = REPLACEMENTS[(start * 7 + end) % len(REPLACEMENTS)]
    return found if found or (start, end) != (0, CONTEXT) else REPLACEMENTS[1]


async def begun(
    gateway: Gateway,
    token_ids: Sequence[int],
    base: tuple[bytes, int],
    sampling: SamplingParameters,
) -> OpenedLog:
    """A log that goes on from (log, position); position 0: from nothing that is named."""
    log_id, request_id = new_log_id(), new_request_id()
    capability = gateway.capability(log_id)
    request = kvstore_pb2.OpenRequest(
        request_id=request_id,
        body_hash=body_hash(request_id.encode()),
        log_id=log_id,
        capability=capability,
        label=gateway.label,
        writer_worker_id=WRITER,
        sampling=sampling_to_proto(sampling),
        prompt_token_ids=token_ids,
        output_pages=1,
        cache_mode=common_pb2.CACHE_MODE_READ_WRITE,
    )
    if base[1]:
        request.parent.log_id, request.parent.position = base
    answer = await gateway.store.Open(request, timeout=10.0)
    return OpenedLog(log_id, request_id, capability, answer.generation, answer.cached_tokens)


async def computed(gateway: Gateway, old: History, new: tuple[int, ...]) -> OpenedLog:
    """The log of an edited history, as `HistoryComputer` has it made."""
    common = change_of(old.token_ids, new).common
    log = await begun(gateway, new, (old.log_id, common), KV_ONLY)
    # The tree may know no more than the parent: each edit's log is dropped before the next.
    assert log.cached_tokens == min(common, len(new) - 1), (common, len(new))
    _, sealed = await gateway.prefill(log, CHUNK, kv_only=True)
    assert not sealed.HasField("first_token")
    await closed(gateway, log, is_dropped=False)
    return log


async def cut(gateway: Gateway, old: History, position: int) -> OpenedLog:
    """A history's first tokens, in a log of their own."""
    log_id, request_id = new_log_id(), new_request_id()
    capability = gateway.capability(log_id)
    request = kvstore_pb2.ForkRequest(
        parent=common_pb2.LogPosition(log_id=old.log_id, position=position),
        log_id=log_id,
        capability=capability,
        request_id=request_id,
    )
    answer = await gateway.store.Fork(request, timeout=10.0)
    log = OpenedLog(log_id, request_id, capability, answer.generation, answer.cached_tokens)
    await closed(gateway, log, is_dropped=False)
    return log


async def answered(
    gateway: Gateway, stream: DecodeStream, log_id: bytes, token_ids: tuple[int, ...]
) -> list[tuple[int, int, str, str | None]]:
    """The next answer behind a history: all of its KV but the last token's is there."""
    log = await begun(gateway, token_ids, (log_id, len(token_ids)), GREEDY)
    assert log.cached_tokens == len(token_ids) - 1
    _, sealed = await gateway.prefill(log, CHUNK)
    await stream.start(log, next_index=1)
    rest = await stream.until(log.request_id)
    assert rest.error is None, rest.error
    await closed(gateway, log, is_dropped=True)
    return [event_shape(sealed.first_token), *rest.shapes()]


async def edits_equal_fresh_computations(
    gateway: Gateway, model: ServedModel, wanted: Sequence[Range], seed: int
) -> set[tuple[int, ...]]:
    """The answers' tokens, each of which was compared with the direct computation's."""
    answers: set[tuple[int, ...]] = set()
    ids = tuple(prompt_of(CONTEXT, seed=seed))
    first = await begun(gateway, ids, (b"", 0), KV_ONLY)
    await gateway.prefill(first, CHUNK, kv_only=True)
    await closed(gateway, first, is_dropped=False)
    old = History(first.log_id, ids)
    async with gateway.stream(timeout_s=300.0) as stream:
        for start, end in wanted:
            order = EditOrder(
                start=Anchor(token=start),
                end=Anchor(token=end),
                token_ids=replacement_of(start, end),
            )
            new = edited(model, ids, order)
            assert new == (*ids[:start], *replacement_of(start, end), *ids[end:])
            own: OpenedLog | None = None
            if new != ids and change_of(ids, new).common == len(new):
                own = await cut(gateway, old, len(new))
            elif new != ids:
                own = await computed(gateway, old, new)
            got = await answered(gateway, stream, old.log_id if own is None else own.log_id, new)
            assert got == shape(gateway.direct.tokens(new, GREEDY)), (start, end)
            answers.add(tuple(token for _, token, _, _ in got))
            if own is not None:
                await closed(gateway, own, is_dropped=True)
    await closed(gateway, first, is_dropped=True)
    return answers


async def test_a_sample_of_edits_equals_fresh_computations(
    gateway: Gateway, model: ServedModel
) -> None:
    """A part of all ranges, among them insertions and deletions at both ends."""
    wanted = [*ranges(step=29), (0, 0), (0, CONTEXT), (CONTEXT, CONTEXT), (CONTEXT - 1, CONTEXT)]
    answers = await edits_equal_fresh_computations(gateway, model, wanted, seed=8100)
    # Answers that do not depend on what was edited would prove nothing.
    assert len(answers) > len(wanted) // 4


@pytest.mark.more
@pytest.mark.timeout(600)
async def test_every_edit_of_a_context_equals_a_fresh_computation(
    gateway: Gateway, model: ServedModel
) -> None:
    """All 861 ranges of 40 tokens."""
    wanted = ranges(step=1)
    assert len(wanted) == (CONTEXT + 1) * (CONTEXT + 2) // 2
    answers = await edits_equal_fresh_computations(gateway, model, wanted, seed=8200)
    assert len(answers) > len(wanted) // 4
