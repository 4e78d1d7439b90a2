"""A client channel with Baton's habits: a deadline on every call, errors as `ServiceError`.

`open_channel` gives a `grpc.aio.Channel`, so that generated stubs take it as it is. Every call it
makes - has a deadline: the one given, else the default cut to what the running request has left;
- carries the running request's id and trace;
- raises `ServiceError` where gRPC would raise AioRpcError. A cancel by the caller stays a
CancelledError. It never retries: who knows what was sent decides that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self

import grpc

from baton.errors import Reason, ServiceError
from baton.rpc import keepalive
from baton.rpc.deadline import timeout_within
from baton.rpc.server import MESSAGE_BYTES_MAX
from baton.rpc.status import from_rpc_error
from baton.tracing import outgoing_metadata

CONNECT_TIMEOUT_MS: Final = 1_000
NAME_TIMEOUT_MS: Final = 3_000
NAME_AGE_MS: Final = 1_000
NO_DEADLINE: Final = math.inf
"""As `timeout`: for a stream that lives as long as its peer and is watched by other means."""


class ClientMeasures(Protocol):
    """Where calls are counted; `baton.rpc.measures` has the Prometheus one."""

    def call_started(self, method: str) -> None:
        """A call of the full method name began."""
        ...

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """It ended with this code after so long."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Bounds on what a channel carries. The timeouts apply where a call names none."""

    call_timeout_s: float = 10.0
    stream_timeout_s: float = 600.0
    message_bytes_max: int = MESSAGE_BYTES_MAX
    keepalive_s: float = keepalive.PING_INTERVAL_S
    measures: ClientMeasures | None = None


def open_channel(target: str, options: ChannelOptions | None = None) -> Channel:
    """A channel to "host:port" or "unix:/path"; connects on first use. Close it in the end."""
    options = options or ChannelOptions()
    return Channel(grpc.aio.insecure_channel(target, options=channel_arguments(options)), options)


def channel_arguments(options: ChannelOptions) -> list[tuple[str, int]]:
    """gRPC's options of a channel of ours."""
    return [
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", options.message_bytes_max),
        *keepalive.client_arguments(options.keepalive_s),
        # A restarted worker is found again within moments, not after gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Despite its name the time that one try to connect gets. A busy peer needs a while to shake
        # hands; calls wait for the try to end before they fail.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        # A name server that does not answer: calls without a deadline would wait two minutes for
        # it. A restarted container has another address, and is looked up again at once.
        ("grpc.dns_ares_query_timeout", NAME_TIMEOUT_MS),
        ("grpc.dns_min_time_between_resolutions_ms", NAME_AGE_MS),
        # Connections are a channel's own: a new channel does not inherit another's wait to connect.
        ("grpc.use_local_subchannel_pool", 1),
        # Services are neighbours: a proxy meant for the web must not see their traffic.
        ("grpc.enable_http_proxy", 0),
    ]


class Channel(grpc.aio.Channel):
    """See the module. Wraps gRPC's own channel; the four call kinds behave as documented by
    gRPC.
    """

    def __init__(self, inner: grpc.aio.Channel, options: ChannelOptions) -> None:
        self._inner = inner
        self._options = options

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One request, one response."""
        return self._callable(self._inner.unary_unary, method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One request, many responses."""
        return self._callable(self._inner.unary_stream, method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Many requests, one response."""
        return self._callable(self._inner.stream_unary, method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Many requests, many responses."""
        return self._callable(self._inner.stream_stream, method, args, kwargs)

    def _callable(
        self, make: Callable[..., Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Call]:
        inner, options = make(method, *args, **kwargs), self._options
        is_unary = make.__name__ == "unary_unary"
        timeout_s = options.call_timeout_s if is_unary else options.stream_timeout_s

        def start(
            *requests: Any, timeout: float | None = None, metadata: Any = None, **more: Any
        ) -> Call:
            call = inner(
                *requests,
                timeout=_timeout(timeout, timeout_s),
                metadata=_metadata(metadata),
                **more,
            )
            return Call(call, method, options.measures)

        return start

    async def close(self, grace: float | None = None) -> None:
        """Ends the connection; running calls get `grace` seconds."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The connection's state now."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the state differs from the one given."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when connected; bound it with `asyncio.timeout`."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


def _timeout(given_s: float | None, default_s: float) -> float | None:
    """What gRPC gets: the caller's own choice as it is, else the default within what is left."""
    if given_s is None:
        return timeout_within(default_s)
    return None if math.isinf(given_s) else given_s


def _metadata(given: Any) -> grpc.aio.Metadata:
    """The caller's metadata, and ours where the caller did not set the same key."""
    metadata = grpc.aio.Metadata(*(tuple(pair) for pair in given or ()))
    chosen = {key for key, _value in metadata}
    for key, value in outgoing_metadata():
        if key not in chosen:
            metadata.add(key, value)
    return metadata


class Call:
    """A call under way, of any kind: awaitable, readable, writable as gRPC's own."""

    def __init__(self, call: Any, method: str, measures: ClientMeasures | None) -> None:
        self._call = call
        self._method = method
        self._measures = measures
        self._started_s = time.monotonic()
        if measures is not None:
            measures.call_started(method)

    def __getattr__(self, name: str) -> Any:
        """Everything that cannot fail with a status is gRPC's: cancel, code, details,
        metadata...
        """
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Responses(self, self._call.__aiter__())

    async def read(self) -> Any:
        """The next response, or `grpc.aio.EOF`."""
        response = await self._translated(self._call.read())
        if response is grpc.aio.EOF:
            self._handled(grpc.StatusCode.OK)
        return response

    async def write(self, request: Any) -> None:
        """Sends one request of a client stream; raises the call's status if it has ended."""
        await self._translated(self._call.write(request))

    async def done_writing(self) -> None:
        """Half-closes: no more requests follow."""
        await self._translated(self._call.done_writing())

    async def _response(self) -> Any:
        response = await self._translated(self._call)
        self._handled(grpc.StatusCode.OK)
        return response

    async def _next(self, responses: AsyncIterator[Any]) -> Any:
        try:
            return await self._translated(responses.__anext__())
        except StopAsyncIteration:
            self._handled(grpc.StatusCode.OK)
            raise

    async def _translated(self, work: Any) -> Any:
        """Awaits one step of the call; a failed status comes out as `ServiceError`."""
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            self._handled(error.code())
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError:
            # grpc.aio says only "already finished" to a write; the status tells why.
            await self._raise_status()
        except asyncio.CancelledError:
            self._handled(grpc.StatusCode.CANCELLED)
            raise

    async def _raise_status(self) -> NoReturn:
        code = await self._call.code()
        self._handled(code)
        if code is grpc.StatusCode.OK:
            raise ServiceError(
                Reason.CANCELLED, "the server ended the call before it took all requests"
            )
        trailing, details = await self._call.trailing_metadata(), await self._call.details()
        error = grpc.aio.AioRpcError(code, None, trailing, details)
        raise from_rpc_error(error) from error

    def _handled(self, code: grpc.StatusCode) -> None:
        """Records the end of the call, once."""
        measures, self._measures = self._measures, None
        if measures is not None:
            measures.call_handled(self._method, code, time.monotonic() - self._started_s)


class _Responses:
    """Iterates over responses, translating errors."""

    def __init__(self, call: Call, responses: AsyncIterator[Any]) -> None:
        self._call, self._responses = call, responses

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._call._next(self._responses)
