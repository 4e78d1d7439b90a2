"""The merger registers its calls by hand: none of the contract's may be forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc

from baton.api.merger.v1 import merger_pb2
from services.merger.servicer import SERVICE_NAME, MergerServicer, add_to_server

NAMES = ("splice", "splice_batch", "splice_stream", "materialize")


class RecordingServer:
    """Keeps what was registered."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """As a server does."""
        self.handlers += handlers


def test_every_call_of_the_contract_is_registered_as_it_streams() -> None:
    """The generated function would have refused a servicer without one of them."""
    server = RecordingServer()
    servicer = cast("MergerServicer", SimpleNamespace(**dict.fromkeys(NAMES, len)))
    add_to_server(servicer, cast("grpc.aio.Server", server))
    (handler,) = server.handlers
    service = merger_pb2.DESCRIPTOR.services_by_name["MergerService"]
    assert service.full_name == SERVICE_NAME
    for name, method in service.methods_by_name.items():
        details: Any = SimpleNamespace(method=f"/{SERVICE_NAME}/{name}", invocation_metadata=())
        found: Any = handler.service(details)
        assert found is not None, name
        assert (found.request_streaming, found.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        ), name
