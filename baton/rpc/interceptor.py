"""The one server interceptor: errors, deadlines, admission, context and measures of every call.

It is the only place where a call is aborted. For all four kinds of calls it
- turns a `ServiceError` into google.rpc.Status details, and anything unexpected into an opaque
INTERNAL with
  an error id whose traceback is logged once;
- turns a CancelledError that the handler raised itself into ABORTED/CANCELLED: let out, it would
leave the
  client waiting for its deadline (grpc issue 29248); the client's own cancel and deadline pass;
- bounds a unary call that came without a deadline;
- refuses calls over the admission limit with QUEUE_FULL and a time to come back;
- binds request id and trace for logs and downstream calls, and measures the call as a span.
It never looks into a message.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, TypeAlias, cast

import grpc
import structlog

from baton.errors import REASONS, Reason, ServiceError
from baton.ids import new_error_id, new_request_id
from baton.rpc.deadline import deadline_scope
from baton.rpc.status import DETAILS_KEY, status_of
from baton.tracing import (
    REQUEST_ID_METADATA,
    TRACEPARENT_METADATA,
    TraceContext,
    current_request_id,
    is_request_id,
    new_trace,
    parse_traceparent,
    request_scope,
    span,
)

_log = structlog.stdlib.get_logger("baton.rpc")

# gRPC's classes are generic for type checkers only, hence the quotes.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behaviour: TypeAlias = "Callable[[Any, _Context], Any]"
_Work = Callable[[], Awaitable[Any]]
_ID_KEYS: Final = frozenset({REQUEST_ID_METADATA, TRACEPARENT_METADATA})

_GIVEN_UP: Final = "the server gave this call up"

INFRASTRUCTURE_PREFIX: Final = "/grpc."
"""Health and reflection answer also when the service is full."""


class ServerMeasures(Protocol):
    """Where calls are counted; `baton.rpc.measures` has the Prometheus one."""

    def call_started(self, method: str) -> None:
        """A call of the full method name began."""
        ...

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """It ended with this code after so long."""
        ...


class NoMeasures:
    """Counts nothing."""

    def call_started(self, method: str) -> None:
        """Nothing."""

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Bounds on calls. `calls_max`: running at once; `unbounded_methods` (full names) are neither
    counted nor traced, for the few streams that live as long as a peer. `is_edge`: applications
    call here, so a call without a trace begins one; elsewhere it leaves spans only if it fails.
    """

    calls_max: int = 1024
    unary_timeout_s: float = 30.0
    retry_after_s: float = 0.5
    unbounded_methods: frozenset[str] = field(default_factory=frozenset)
    is_edge: bool = False


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """See the module. One instance per server."""

    def __init__(self, limits: CallLimits, measures: ServerMeasures | None = None) -> None:
        self._limits = limits
        self._measures = measures or NoMeasures()
        self._running = 0

    @property
    def running(self) -> int:
        """Calls that hold an admission slot now."""
        return self._running

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of the call, wrapped; an unknown method stays gRPC's UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._wrapped(handler, str(handler_call_details.method))

    def _wrapped(self, handler: _Handler, method: str) -> _Handler:
        respond = self._stream_response if handler.response_streaming else self._unary_response
        behaviour, make = _parts(handler)

        async def call(request: Any, context: _Context) -> Any:
            return await self._guarded(
                method, context, lambda: respond(behaviour, request, context)
            )

        wrapped = make(
            call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return cast("_Handler", wrapped)

    async def _guarded(self, method: str, context: _Context, work: _Work) -> Any:
        """Runs `work` and answers for its failure."""
        self._measures.call_started(method)
        started_s, code = time.monotonic(), grpc.StatusCode.OK
        try:
            with self._scope(method, context):
                return await work()
        except asyncio.CancelledError:
            code = _code_of_client(context)
            # grpc.aio does not say whose cancel this is: `cancelled()` and `done()` are False in
            # either case. Only a client that still waits can be sent a status.
            ended = await _sent(context, ServiceError(Reason.CANCELLED, _GIVEN_UP))
            if ended is None:
                raise
            code = REASONS[Reason.CANCELLED].grpc_code
            raise ended from None
        except grpc.aio.AbortError:
            # Health and reflection abort on their own; nothing of ours does.
            code = context.code()
            raise
        except ServiceError as error:
            code = error.row.grpc_code
            await _abort(context, error)
        except grpc.aio.InternalError as failed:
            # What a write raises that meets the client's cancel on its way. It is a bug only while
            # the client still waits.
            internal = ServiceError.internal(new_error_id())
            ended = await _sent(context, internal)
            if ended is None:
                code = _code_of_client(context)
                raise asyncio.CancelledError("the client left during a write") from failed
            code = grpc.StatusCode.INTERNAL
            _log_bug(method, internal, failed)
            raise ended from None
        except Exception as bug:  # noqa: BLE001  # whatever it is, the client gets an answer
            code = grpc.StatusCode.INTERNAL
            internal = ServiceError.internal(new_error_id())
            _log_bug(method, internal, bug)
            await _abort(context, internal)
        finally:
            self._measures.call_handled(method, code, time.monotonic() - started_s)

    @contextmanager
    def _scope(self, method: str, context: _Context) -> Iterator[None]:
        """Ids, span, admission slot and deadline of one call; the span sees a refusal too."""
        name = method.rpartition("/")[2]
        with (
            _ids_of(context, self._new_trace(method)),
            span(name, request_id=current_request_id()),
            self._admitted(method),
            deadline_scope(context.time_remaining()),
        ):
            yield

    def _new_trace(self, method: str) -> TraceContext | None:
        """The trace of a call that brings none; None for what lives as long as a peer."""
        if method in self._limits.unbounded_methods or method.startswith(INFRASTRUCTURE_PREFIX):
            return None
        return new_trace(is_sampled=self._limits.is_edge)

    @contextmanager
    def _admitted(self, method: str) -> Iterator[None]:
        """Holds one of `calls_max` slots, or refuses."""
        limits = self._limits
        if method in limits.unbounded_methods or method.startswith(INFRASTRUCTURE_PREFIX):
            yield
            return
        if self._running >= limits.calls_max:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{limits.calls_max} calls are running, the most this service admits",
                retry_after_s=limits.retry_after_s,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _unary_response(self, behaviour: _Behaviour, request: Any, context: _Context) -> Any:
        """Runs the handler under the caller's deadline, or under the default one."""
        if context.time_remaining() is not None:
            return await _awaited(behaviour(request, context))
        timeout_s = self._limits.unary_timeout_s
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                with deadline_scope(timeout_s):
                    return await _awaited(behaviour(request, context))
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise ServiceError(
                Reason.DEADLINE_EXCEEDED,
                f"no answer within {timeout_s:g} s, the bound for calls without a deadline",
            ) from error

    async def _stream_response(
        self, behaviour: _Behaviour, request: Any, context: _Context
    ) -> None:
        """Writes what the handler yields, and closes it at once when the call ends early.

        Were this wrapper an async generator, a call cancelled between two messages would leave the
        handler's clean-up to the garbage collector.
        """
        responses = behaviour(request, context)
        if not inspect.isasyncgen(responses):
            await _awaited(responses)
            return
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _parts(handler: _Handler) -> tuple[_Behaviour, Callable[..., object]]:
    """The function inside a handler and the gRPC constructor for its kind."""
    kind = (bool(handler.request_streaming), bool(handler.response_streaming))
    behaviours: dict[tuple[bool, bool], tuple[object, Callable[..., object]]] = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = behaviours[kind]
    return cast("_Behaviour", behaviour), make


@contextmanager
def _ids_of(context: _Context, fresh: TraceContext | None) -> Iterator[None]:
    """Binds the caller's request id and trace, or a fresh id and `fresh` where they are missing or
    malformed.
    """
    sent = {key: value for key, value in context.invocation_metadata() or () if key in _ID_KEYS}
    request_id, traceparent = sent.get(REQUEST_ID_METADATA), sent.get(TRACEPARENT_METADATA)
    if not isinstance(request_id, str) or not is_request_id(request_id):
        request_id = new_request_id()
    trace = parse_traceparent(traceparent) if isinstance(traceparent, str) else None
    with request_scope(request_id, trace or fresh):
        yield


def _code_of_client(context: _Context) -> grpc.StatusCode:
    """Why the client's side ended the call."""
    left_s = context.time_remaining()
    if left_s is not None and left_s <= 0.0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _log_bug(method: str, answer: ServiceError, bug: Exception) -> None:
    """Logs the traceback under the error id that the opaque answer carries."""
    error_id = answer.metadata["error_id"]
    _log.error("call_failed_unexpectedly", method=method, error_id=error_id, exc_info=bug)


async def _abort(context: _Context, error: ServiceError) -> NoReturn:
    """Ends the call with the error; raises what tells gRPC that the handler is over."""
    ended = await _sent(context, error)
    if ended is None:
        raise asyncio.CancelledError("the client left before its error could be sent")
    raise ended


async def _sent(context: _Context, error: ServiceError) -> grpc.aio.AbortError | None:
    """Sends the error's code, message and details; None if the client is gone already.

    The AbortError must be raised as it is: gRPC takes another one for a bug of the handler.
    """
    status = status_of(error)
    try:
        await context.abort(
            error.row.grpc_code,
            status.message,
            trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
        )
    except grpc.aio.AbortError as ended:
        return ended
    except grpc.aio.InternalError:
        return None
    raise AssertionError("abort neither raised nor failed")
