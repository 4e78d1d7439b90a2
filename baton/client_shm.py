"""KV in and out of a kvstore on the same host, in place: for programs without an event loop.

Owns the attachment of one process to one arena. What is put is copied once, into the log's pages,
its CRCs taken on the way; what is got is not copied at all: the pages are pinned and mapped. A
process that is attached could read and write every page of the arena, so attaching takes a worker's
capability, which only holders of the cluster key can mint. Never forks: a child would keep the
arena's lock.

    with ShmClient.attach("127.0.0.1:7101", identity) as store:
        store.put_blob(log_id, payload, token_ids, capability=capability)
        with store.get_blob(log_id, capability=capability) as kv:
            kv.verify()
            use(kv.page(0), kv.token_ids)
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.arena.client import WorkerIdentity
from baton.arena.client_wire import arena_from_proto
from baton.arena.copying import checksums_at, slot_checksums
from baton.arena.mapping import MappedArena
from baton.arena.ticket_socket import fetch_descriptor
from baton.client_blobs import StoredBlob
from baton.client_shm_put import CALL_TIMEOUT_S, PutOrder, ShmPut
from baton.errors import Reason, ServiceError
from baton.ids import new_request_id
from baton.kv.crc import Buffer, ByteArray, as_bytes
from baton.kv.digests import TokenIds, body_hash, ids_bytes
from baton.kv.layout import KvGeometry
from baton.kv.sizing import pages_for
from baton.rpc.blocking import metadata, open_blocking_channel, translated
from baton.sampling_parameters import SamplingParameters
from baton.wire.durations import duration_to_proto
from baton.wire.label import label_to_proto
from baton.wire.sampling import sampling_to_proto

SOCKET_TIMEOUT_S: Final = 5.0


class ShmClient:
    """One attached process. Not for several threads at once."""

    def __init__(self, channel: Any, identity: WorkerIdentity, arena: MappedArena) -> None:
        self._channel = channel
        self._stub: Any = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        self._identity = identity
        self._label = label_to_proto(identity.label, identity.geometry, identity.software_version)
        self._arena = arena
        self._bytes: ByteArray = np.frombuffer(arena.slots, dtype=np.uint8)

    @classmethod
    def attach(cls, target: str, identity: WorkerIdentity) -> Self:
        """Maps the arena of the kvstore at `target` ("host:port" or "unix:/path") on this host.

        `identity` says who attaches (`worker_id` must be no other process's), what its KV is, and
        shows a worker's capability. Raises the store's refusal: COMPAT_MISMATCH names the field.
        """
        channel = open_blocking_channel(target)
        try:
            stub: Any = kvstore_pb2_grpc.KVStoreServiceStub(channel)
            label = label_to_proto(identity.label, identity.geometry, identity.software_version)
            request = kvstore_pb2.AttachRequest(
                worker_id=identity.worker_id,
                incarnation=identity.incarnation,
                capability=identity.capability,
                label=label,
            )
            with translated():
                answer = stub.Attach(request, timeout=CALL_TIMEOUT_S, metadata=metadata())
            descriptor = fetch_descriptor(
                answer.socket_path, answer.ticket, timeout_s=SOCKET_TIMEOUT_S
            )
            return cls(channel, identity, MappedArena(descriptor, arena_from_proto(answer.arena)))
        except ServiceError:
            channel.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the mapping: views of pages must be gone. What was not ended
        properly is, once the process is.
        """
        self._channel.close()
        self._bytes = np.empty(0, dtype=np.uint8)
        self._arena.unmap()

    @property
    def geometry(self) -> KvGeometry:
        """The shape of the arena's pages."""
        return self._arena.geometry

    def call(self, name: str, request: Any) -> Any:
        """A unary call of the store by its name, with a deadline; for what has no method here."""
        with translated():
            return getattr(self._stub, name)(request, timeout=CALL_TIMEOUT_S, metadata=metadata())

    # --- put --------------------------------------------------------------------------------

    def put_blob(
        self,
        log_id: bytes,
        payload: Buffer,
        token_ids: TokenIds,
        *,
        capability: str,
        is_shared: bool = True,
        ttl_s: float | None = None,
    ) -> StoredBlob:
        """Stores KV as the new log `log_id`, sealed and closed, of any length the store takes.

        `payload` holds the packed pages of positions 0 on, one after the other (a blob's payload
        without its token ids); full pages are copied as they are. `is_shared`: later prompts of the
        tenant find it by its tokens, and what is here already under the same tokens is not written
        again. `ttl_s`: how long it is kept (the store's default). PAGES_EXHAUSTED when there is no
        room.
        """
        content = as_bytes(payload)
        count = len(token_ids)
        if content.size != count * self.geometry.token_bytes or not count:
            raise ServiceError(
                Reason.INVALID_REQUEST,
                f"payload has {content.size} bytes, {count} tokens have "
                f"{count * self.geometry.token_bytes}",
                field="payload",
            )
        opened = self._open(log_id, token_ids, capability, is_shared=is_shared, ttl_s=ttl_s)
        order = PutOrder(
            log_id=log_id,
            generation=opened.generation,
            cached_tokens=opened.cached_tokens,
            content=content,
            tokens=count,
            capability=capability,
            kv_digest=self._identity.label.kv_digest(),
        )
        try:
            position = ShmPut(self._stub, self._arena, order, opened.granted).run()
            return StoredBlob(log_id=log_id, generation=opened.generation, tokens=position)
        except ServiceError:
            self.call("Cancel", kvstore_pb2.CancelRequest(log_id=log_id, capability=capability))
            raise

    def _open(
        self,
        log_id: bytes,
        token_ids: TokenIds,
        capability: str,
        *,
        is_shared: bool,
        ttl_s: float | None,
    ) -> kvstore_pb2.OpenResponse:
        request = kvstore_pb2.OpenRequest(
            request_id=new_request_id(),
            body_hash=body_hash(log_id),
            log_id=log_id,
            capability=capability,
            label=self._label,
            writer_worker_id=self._identity.worker_id,
            sampling=sampling_to_proto(SamplingParameters()),
            prompt_token_ids=np.frombuffer(ids_bytes(token_ids), dtype="<u4").tolist(),
            cache_mode=common_pb2.CACHE_MODE_READ_WRITE if is_shared else common_pb2.CACHE_MODE_OFF,
            output_pages=1,
        )
        if ttl_s is not None:
            request.ttl.CopyFrom(duration_to_proto(ttl_s))
        opened: kvstore_pb2.OpenResponse = self.call("Open", request)
        return opened

    # --- get --------------------------------------------------------------------------------

    def get_blob(self, log_id: bytes, *, capability: str, lease_s: float | None = None) -> MappedKv:
        """The committed KV of a log, pinned where it stands. Use it in a `with` block.

        `lease_s`: how long it stays pinned at most (the store's default is a minute); whoever needs
        it longer maps it again. Takes the same time whatever the length.
        """
        request = kvstore_pb2.MapLogRequest(
            log_id=log_id,
            capability=capability,
            worker_id=self._identity.worker_id,
            worker_capability=self._identity.capability,
        )
        if lease_s is not None:
            request.lease.CopyFrom(duration_to_proto(lease_s))
        return MappedKv(self, self.call("MapLog", request))

    def unmap(self, map_id: int) -> bool:
        """Lets a mapped log's pages go; whether they were pinned until now."""
        request = kvstore_pb2.UnmapLogRequest(
            map_id=map_id,
            worker_id=self._identity.worker_id,
            capability=self._identity.capability,
        )
        return bool(self.call("UnmapLog", request).held)


class MappedKv:
    """KV of `tokens` positions from 0 on, in the arena. `pages`: page slots in position order.

    Leaving its `with` block lets the pages go; LEASE_EXPIRED says that they were let go before, and
    that what was read since is worth nothing.
    """

    def __init__(self, client: ShmClient, answer: kvstore_pb2.MapLogResponse) -> None:
        self._client = client
        self._answer = answer
        self.map_id = int(answer.map_id)
        self.tokens = answer.committed_position
        self.generation = answer.generation
        self.pages: npt.NDArray[np.uint32] = np.array(answer.pages, dtype=np.uint32)
        assert len(self.pages) == pages_for(self.tokens, client.geometry.block_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        is_held = self.close()
        if not is_held and exc_type is None:
            raise ServiceError(
                Reason.LEASE_EXPIRED,
                "the pages were let go while they were read; map the log again",
            )

    def close(self) -> bool:
        """Lets the pages go; whether they were pinned until now."""
        return self._client.unmap(self.map_id)

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The token ids of the positions."""
        return np.frombuffer(self._answer.token_ids, dtype="<u4")

    def page(self, index: int) -> memoryview:
        """The content of block `index`, in place: do not write, do not keep beyond the block."""
        return self._client._arena.page(int(self.pages[index]))

    def verify(self) -> None:
        """Compares every page with the CRC it was stored with; CHECKSUM_MISMATCH."""
        client, answer = self._client, self._answer
        crcs = np.array(answer.page_crc32c, dtype=np.uint32)
        offsets = self.pages[: len(crcs)].astype(np.uint64) * client._arena.shape.slot_bytes
        found = checksums_at(client._bytes, offsets, client.geometry.page_bytes)
        wrong = np.flatnonzero(np.array(found, dtype=np.uint32) != crcs)
        if len(wrong):
            raise _damaged(int(wrong[0]))
        slots = tuple(answer.slot_crc32c)
        last = len(self.pages) - 1
        if slots and slot_checksums(client.geometry, self.page(last), 0, len(slots)) != slots:
            raise _damaged(last)


def _damaged(index: int) -> ServiceError:
    return ServiceError(
        Reason.CHECKSUM_MISMATCH,
        f"KV block {index} is damaged; compute it again",
        metadata={"block_index": str(index)},
    )
