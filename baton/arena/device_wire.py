"""The kvstore's messages about device memory, proto <-> dataclass, and the call that carries them.

Owns the translation and the call only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Final, TypeAlias, cast

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import device_pb2, device_pb2_grpc
from baton.arena.replay import GrantedPage, HeldLog, PageRow
from baton.errors import Reason, ServiceError
from baton.rpc.channel import NO_DEADLINE, Call, Channel


@unique
class Outcome(Enum):
    """What became of an order; after all but DONE the slot is clear."""

    DONE = "done"
    DAMAGED = "damaged"
    FAILED = "failed"


_OUTCOMES: Final = {
    Outcome.DONE: device_pb2.DEVICE_OUTCOME_DONE,
    Outcome.DAMAGED: device_pb2.DEVICE_OUTCOME_DAMAGED,
    Outcome.FAILED: device_pb2.DEVICE_OUTCOME_FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Copy the page of `row` into the slot, if it hashes to what the row says."""

    order_id: int
    slot: int
    row: PageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveOrder:
    """The slot is for a page without KV, which this worker will write."""

    order_id: int
    slot: int
    page: GrantedPage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOrder:
    """Zero the slot."""

    order_id: int
    slot: int
    page: GrantedPage


Order: TypeAlias = LoadOrder | ReserveOrder | ClearOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What of a log stands in device memory; `missing` pages have no room there."""

    log: HeldLog
    pages: int
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNews:
    """One message of the kvstore."""

    orders: tuple[Order, ...]
    placed: tuple[Placement, ...]


class DeviceCall:
    """One worker's stream of orders, in the library's own words."""

    def __init__(self, channel: Channel) -> None:
        stub = device_pb2_grpc.DeviceServiceStub(channel)
        # The generated types know gRPC's own call; our channel hands out its wrapper.
        self._call = cast("Call", cast("Any", stub).FollowOrders(timeout=NO_DEADLINE))

    async def say_hello(
        self, worker_id: str, incarnation: int, capability: str, *, slots: int, slot_bytes: int
    ) -> None:
        """The first message: who this is, with all of its device memory empty."""
        hello = device_pb2.DeviceHello(
            worker_id=worker_id,
            incarnation=incarnation,
            capability=capability,
            slots=slots,
            slot_bytes=slot_bytes,
        )
        await self._call.write(device_pb2.FollowOrdersRequest(hello=hello))

    async def ask(self, log: HeldLog, *, with_written: bool) -> None:
        """The log's pages are wanted in device memory."""
        want = device_pb2.DeviceWant(
            log_id=log.log_id, generation=log.generation, written_pages=with_written
        )
        await self._call.write(device_pb2.FollowOrdersRequest(want=want))

    async def report(self, order_id: int, outcome: Outcome) -> None:
        """What became of an order."""
        done = device_pb2.DeviceDone(order_id=order_id, outcome=_OUTCOMES[outcome])
        await self._call.write(device_pb2.FollowOrdersRequest(done=done))

    async def receive(self) -> DeviceNews:
        """The next message; WORKER_LOST at the stream's end."""
        answer = await self._call.read()
        if not isinstance(answer, device_pb2.FollowOrdersResponse):
            raise ServiceError(Reason.WORKER_LOST, "the kvstore ended the stream of orders")
        return DeviceNews(
            orders=tuple(_order(message) for message in answer.orders),
            placed=tuple(
                Placement(
                    log=HeldLog(log_id=item.log_id, generation=item.generation),
                    pages=item.pages,
                    missing=item.missing,
                )
                for item in answer.placed
            ),
        )

    def cancel(self) -> None:
        """Give the stream up."""
        self._call.cancel()


def _order(message: device_pb2.DeviceOrder) -> Order:
    match message.WhichOneof("action"):
        case "load":
            return LoadOrder(order_id=message.order_id, slot=message.slot, row=_row(message.load))
        case "reserve":
            return ReserveOrder(
                order_id=message.order_id, slot=message.slot, page=_page(message.reserve)
            )
        case "clear":
            return ClearOrder(
                order_id=message.order_id, slot=message.slot, page=_page(message.clear)
            )
        case other:
            raise ServiceError(
                Reason.UNSUPPORTED,
                f"an order of a kind this worker does not know ({other}); use the same version",
                field="action",
            )


def _row(entry: common_pb2.PageEntry) -> PageRow:
    return PageRow(
        page=entry.page,
        page_generation=entry.page_generation,
        tokens=entry.tokens,
        crc32c=None if entry.slot_crc32c else entry.crc32c,
        slot_crcs=tuple(entry.slot_crc32c),
    )


def _page(message: device_pb2.DevicePage) -> GrantedPage:
    return GrantedPage(page=message.page, page_generation=message.page_generation)
