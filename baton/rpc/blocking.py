"""A channel for code without an event loop: scripts, notebooks, tools.

Owns its options, the same bounds as every channel of ours, and the translation of what calls raise.
Services use `baton.rpc.channel`, never this: a blocking call on an event loop stops everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import grpc

from baton.rpc.channel import ChannelOptions, channel_arguments
from baton.rpc.status import from_rpc_error
from baton.tracing import outgoing_metadata


def open_blocking_channel(target: str, options: ChannelOptions | None = None) -> grpc.Channel:
    """A channel to "host:port" or "unix:/path"; connects on first use. Close it in the end."""
    return grpc.insecure_channel(target, options=channel_arguments(options or ChannelOptions()))


def metadata() -> tuple[tuple[str, str], ...]:
    """The running request's id and trace, for a call."""
    return tuple(outgoing_metadata())


@contextmanager
def translated() -> Iterator[None]:
    """A failed call comes out as the `ServiceError` that the server raised."""
    try:
        yield
    except grpc.RpcError as error:
        # Blocking calls raise another class than asynchronous ones, with the same answers.
        # The stubs do not say that what a call raises is the call.
        call = cast("grpc.Call", error)
        trailing = grpc.aio.Metadata(
            *((str(key), value) for key, value in call.trailing_metadata() or ())
        )
        status = grpc.aio.AioRpcError(
            call.code(), grpc.aio.Metadata(), trailing, details=call.details()
        )
        raise from_rpc_error(status) from error
