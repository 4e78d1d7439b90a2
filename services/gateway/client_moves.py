"""Calls to kvstores about logs that change their kvstore, in the gateway's own words.

Owns the messages and every call's deadline. Never retries and never decides. `_pb2` stops here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.kv.digests import body_hash
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.sampling import sampling_to_proto
from services.gateway.clients import StoreClient
from services.gateway.legs import Leg
from services.gateway.registry import WorkerRecord
from services.gateway.wire import cache_mode_to_proto, label_message

EXPECT_TIMEOUT_S: Final = 1.0
FORK_TIMEOUT_S: Final = 2.0
REOPEN_TIMEOUT_S: Final = 4.0
ANSWER_MARGIN_S: Final = 0.5
"""How much longer the call may take than the move: the store's own words are worth waiting for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A log at its new home: its state there and what the move took."""

    generation: int
    position: int
    committed: int
    transfer_bytes: int
    hidden_share: float
    transport: str
    transfer_s: float


class MoveClient:
    """Calls about one gateway's moves."""

    def __init__(self, stores: StoreClient) -> None:
        self._stores = stores

    async def expect(self, to_address: str, leg: Leg, capability: str) -> None:
        """Let the coming home copy what prefill commits, while it does."""
        message = kvstore_pb2.ExpectLogRequest(
            log_id=leg.log_id,
            from_kvstore_address=leg.home,
            capability=capability,
            request_id=leg.request.request_id,
        )
        await self._stores.stub(to_address).ExpectLog(message, timeout=EXPECT_TIMEOUT_S)

    async def adopt(self, to_address: str, leg: Leg, capability: str, *, timeout_s: float) -> Moved:
        """Make another kvstore the log's home."""
        message = kvstore_pb2.AdoptLogRequest(
            log_id=leg.log_id,
            generation=leg.generation,
            from_kvstore_address=leg.home,
            capability=capability,
            request_id=f"{leg.request.request_id}-move-{leg.generation}",
            timeout=duration_to_proto(timeout_s),
        )
        stub = self._stores.stub(to_address)
        answer = await stub.AdoptLog(message, timeout=timeout_s + ANSWER_MARGIN_S)
        return Moved(
            generation=answer.generation,
            position=answer.position,
            committed=answer.committed_position,
            transfer_bytes=answer.transfer_bytes,
            hidden_share=answer.hidden_transfer_share,
            transport=answer.transport,
            transfer_s=duration_from_proto(answer.transfer),
        )

    async def fork(self, leg: Leg, log_id: bytes, position: int, capability: str) -> int:
        """A new log from the first `position` tokens of the leg's; its generation."""
        message = kvstore_pb2.ForkRequest(
            parent=common_pb2.LogPosition(
                log_id=leg.log_id, generation=leg.generation, position=position
            ),
            log_id=log_id,
            capability=capability,
            request_id=f"{leg.request.request_id}-fork-{leg.generation}",
        )
        answer = await self._stores.stub(leg.home).Fork(message, timeout=FORK_TIMEOUT_S)
        return answer.generation

    async def reopen(
        self,
        writer: WorkerRecord,
        leg: Leg,
        log_id: bytes,
        delivered: Sequence[int],
        capability: str,
    ) -> int:
        """A new log at the worker's kvstore, of the prompt and the tokens the client has already;
        its generation. Its KV is computed by who takes it.
        """
        request = leg.request
        message = kvstore_pb2.OpenRequest(
            request_id=f"{request.request_id}-again-{leg.generation}",
            log_id=log_id,
            capability=capability,
            label=label_message(writer),
            writer_worker_id=writer.worker_id,
            sampling=sampling_to_proto(request.sampling),
            prompt_token_ids=[*request.prompt.token_ids, *delivered],
            forced_output_tokens=len(delivered),
            cache_mode=cache_mode_to_proto(request.cache_mode),
            cache_salt=request.cache_salt or "",
            output_pages=1,
            drop_at_end=request.is_dropped_at_end,
            ttl=None if request.ttl_s is None else duration_to_proto(request.ttl_s),
        )
        message.body_hash = body_hash(message.SerializeToString(deterministic=True))
        # Measured, so no part of what a retry repeats.
        message.compute_tokens_per_s = writer.prompt_token_rate or 0.0
        stub = self._stores.stub(writer.kvstore_address)
        answer = await stub.Open(message, timeout=REOPEN_TIMEOUT_S)
        return answer.generation
