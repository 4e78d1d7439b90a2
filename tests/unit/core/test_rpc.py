"""Errors, deadlines, cancels and admission over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from baton.errors import REASONS, Reason, ServiceError
from baton.rpc.channel import NO_DEADLINE, ChannelOptions
from baton.rpc.deadline import deadline_scope, remaining_s, timeout_within
from baton.rpc.interceptor import CallLimits
from baton.tracing import current_request_id, current_trace, new_trace, request_scope
from tests.unit.core.rpc_fixtures import Recorder, method, serving, unary


@pytest.fixture(autouse=True)
def _grpc_logs_no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A refusal is an answer: gRPC must not take it for a bug of the handler and log a
    traceback.
    """
    yield
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("grpc")]
    assert [message for message in messages if message.startswith("Unexpected")] == []


def _failing(reason: Reason) -> ServiceError:
    return ServiceError(
        reason,
        f"refused because of {reason.value}; do something else",
        field="request.max_tokens",
        metadata={"ours": "a", "theirs": "b"},
        retry_after_s=1.25,
    )


async def _raise(request: bytes, context: Any) -> bytes:
    raise _failing(Reason[request.decode()])


async def _raise_midway(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    raise _failing(Reason[request.decode()])


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _collect(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([request async for request in requests])


def _assert_same(got: ServiceError, reason: Reason) -> None:
    sent = _failing(reason)
    assert got.reason is reason
    assert got.message == sent.message
    assert got.field == sent.field
    assert dict(got.metadata) == dict(sent.metadata)
    assert got.retry_after_s == sent.retry_after_s
    cause = got.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code() is REASONS[reason].grpc_code


async def test_every_reason_arrives_with_code_details_and_retry_time() -> None:
    """The table is a promise to callers: what is raised on one side is caught on the other."""
    async with serving(Fail=unary(_raise)) as (_server, channel):
        call = channel.unary_unary(method("Fail"))
        for reason in Reason:
            with pytest.raises(ServiceError) as failed:
                await call(reason.value.encode())
            _assert_same(failed.value, reason)


async def test_every_reason_arrives_in_the_middle_of_a_stream() -> None:
    """A stream that fails after its first message says why, it never just stops."""
    handler = grpc.unary_stream_rpc_method_handler(_raise_midway)
    async with serving(Fail=handler) as (_server, channel):
        for reason in Reason:
            responses = channel.unary_stream(method("Fail"))(reason.value.encode())
            assert await responses.read() == b"first"
            with pytest.raises(ServiceError) as failed:
                await responses.read()
            _assert_same(failed.value, reason)


async def test_client_streams_fail_and_succeed_with_the_same_translation() -> None:
    """All four kinds of calls pass the interceptor; two of them read from the client."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            raise _failing(Reason[request.decode()])
        return b""

    async def pairs(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request * 2
        raise _failing(Reason.DRAINING)

    async with serving(
        Collect=grpc.stream_unary_rpc_method_handler(_collect),
        Refuse=grpc.stream_unary_rpc_method_handler(refuse),
        Pairs=grpc.stream_stream_rpc_method_handler(pairs),
    ) as (_server, channel):
        collect = channel.stream_unary(method("Collect"))()
        await collect.write(b"a")
        await collect.write(b"b")
        await collect.done_writing()
        assert await collect == b"ab"

        refused = channel.stream_unary(method("Refuse"))()
        await refused.write(b"QUEUE_FULL")
        with pytest.raises(ServiceError) as failed:
            await refused
        _assert_same(failed.value, Reason.QUEUE_FULL)
        with pytest.raises(ServiceError) as failed:
            await refused.write(b"more")
        assert failed.value.reason is Reason.QUEUE_FULL

        both = channel.stream_stream(method("Pairs"))()
        await both.write(b"x")
        assert await both.read() == b"xx"
        await both.done_writing()
        with pytest.raises(ServiceError) as failed:
            await both.read()
        _assert_same(failed.value, Reason.DRAINING)


async def test_handlers_that_write_through_the_context_are_served_too() -> None:
    """gRPC allows `context.write` instead of yielding; both styles exist in generated examples."""

    async def write(request: bytes, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")

    handler = grpc.unary_stream_rpc_method_handler(write)
    async with serving(Write=handler) as (_server, channel):
        call = channel.unary_stream(method("Write"))(b"")
        assert [response async for response in call] == [b"1", b"2"]


async def test_a_bug_is_opaque_to_the_client_and_logged_once() -> None:
    """The message of an exception may quote a prompt; only the id that finds it goes out."""

    async def bug(request: bytes, context: Any) -> bytes:
        raise ValueError("the secret prompt")

    recorder = Recorder()
    async with serving(recorder, Bug=unary(bug)) as (_server, channel):
        with capture_logs() as logs, pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Bug"))(b"")
    error = failed.value
    assert error.reason is Reason.INTERNAL
    assert "secret" not in repr(error.__cause__)
    (entry,) = [entry for entry in logs if entry["event"] == "call_failed_unexpectedly"]
    assert entry["error_id"] == error.metadata["error_id"]
    assert error.metadata["error_id"] in error.message
    assert isinstance(entry["exc_info"], ValueError)
    assert recorder.handled == [(method("Bug"), grpc.StatusCode.INTERNAL)]


async def test_a_handler_cancelled_by_its_own_service_answers_at_once() -> None:
    """A drain or a fence may cancel the handler's task; its client must hear of it."""

    async def cancelled(request: bytes, context: Any) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()
        return b""

    recorder = Recorder()
    async with serving(recorder, Cancelled=unary(cancelled)) as (_server, channel):
        async with asyncio.timeout(5.0):
            with pytest.raises(ServiceError) as failed:
                await channel.unary_unary(method("Cancelled"))(b"", timeout=60.0)
            await recorder.first_handled.wait()
    assert failed.value.reason is Reason.CANCELLED
    assert recorder.handled == [(method("Cancelled"), grpc.StatusCode.ABORTED)]


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_handlers_own_cancel_answers_at_once(kind: str) -> None:
    """Let out, it would leave the client waiting for its deadline (grpc issue 29248)."""

    async def give_up(request: bytes, context: Any) -> bytes:
        raise asyncio.CancelledError

    async def give_up_midway(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise asyncio.CancelledError

    async with serving(
        Unary=unary(give_up), Stream=grpc.unary_stream_rpc_method_handler(give_up_midway)
    ) as (_server, channel):
        if kind == "unary":
            answer = channel.unary_unary(method("Unary"))(b"", timeout=60.0)
        else:
            stream = channel.unary_stream(method("Stream"))(b"", timeout=60.0)
            assert await stream.read() == b"first"
            answer = stream.read()
        async with asyncio.timeout(5.0):
            with pytest.raises(ServiceError) as failed:
                await answer
    assert failed.value.reason is Reason.CANCELLED
    cause = failed.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code() is grpc.StatusCode.ABORTED


async def test_a_client_cancel_reaches_the_handler_and_closes_its_generator() -> None:
    """What a handler holds must be free at once, not when the garbage collector comes by."""
    closed = asyncio.Event()
    kept: list[AsyncIterator[bytes]] = []

    def endless_and_kept(request: bytes, context: Any) -> AsyncIterator[bytes]:
        # Somebody else's reference must not delay the close.
        kept.append(endless(request, context))
        return kept[0]

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1000
        finally:
            closed.set()

    recorder = Recorder()
    handler = grpc.unary_stream_rpc_method_handler(endless_and_kept)
    async with serving(recorder, Endless=handler) as (server, channel):
        call = channel.unary_stream(method("Endless"))(b"")
        assert await call.read() == b"x" * 1000
        call.cancel()
        async with asyncio.timeout(5.0):
            await closed.wait()
            await recorder.first_handled.wait()
        assert server.interceptor.running == 0
        assert recorder.handled == [(method("Endless"), grpc.StatusCode.CANCELLED)]


async def test_a_client_deadline_cancels_the_handler_and_is_counted_as_one() -> None:
    """The deadline is the client's own; the handler stops with it."""
    stopped = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return b""

    recorder = Recorder()
    async with serving(recorder, Wait=unary(wait)) as (_server, channel):
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Wait"))(b"", timeout=0.2)
        assert failed.value.reason is Reason.DEADLINE_EXCEEDED
        async with asyncio.timeout(5.0):
            await stopped.wait()
            await recorder.first_handled.wait()
        assert recorder.handled == [(method("Wait"), grpc.StatusCode.DEADLINE_EXCEEDED)]


async def test_a_call_without_deadline_gets_the_servers_bound() -> None:
    """A foreign client that forgets the deadline must not hold a handler for ever."""

    async def wait(request: bytes, context: Any) -> bytes:
        assert remaining_s() is not None
        await asyncio.Event().wait()
        return b""

    async with serving(limits=CallLimits(unary_timeout_s=0.1), Wait=unary(wait)) as (
        _server,
        channel,
    ):
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Wait"))(b"", timeout=NO_DEADLINE)
    assert failed.value.reason is Reason.DEADLINE_EXCEEDED
    assert "calls without a deadline" in failed.value.message


async def test_a_handlers_own_timeout_is_a_bug_and_not_the_callers_deadline() -> None:
    """TimeoutError from inside must not pass for the bound of the call."""

    async def confused(request: bytes, context: Any) -> bytes:
        raise TimeoutError

    async with serving(Confused=unary(confused)) as (_server, channel):
        with capture_logs(), pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Confused"))(b"", timeout=NO_DEADLINE)
    assert failed.value.reason is Reason.INTERNAL


async def test_calls_over_the_limit_are_refused_with_a_time_to_come_back() -> None:
    """At the limit all run, one past it is told when to retry; a slot freed is usable again."""
    release, entered = asyncio.Event(), asyncio.Semaphore(0)

    async def hold(request: bytes, context: Any) -> bytes:
        entered.release()
        await release.wait()
        return request

    limits = CallLimits(calls_max=2, retry_after_s=0.75)
    async with serving(limits=limits, Hold=unary(hold)) as (server, channel):
        call = channel.unary_unary(method("Hold"))
        async with asyncio.TaskGroup() as held:
            for _ in range(2):
                held.create_task(_await(call(b"x")))
            await entered.acquire()
            await entered.acquire()
            assert server.interceptor.running == 2
            with pytest.raises(ServiceError) as failed:
                await call(b"one too many")
            release.set()
        assert (failed.value.reason, failed.value.retry_after_s) == (Reason.QUEUE_FULL, 0.75)
        assert await call(b"again") == b"again"


async def _await(call: Any) -> Any:
    return await call


async def test_unbounded_methods_take_no_slot() -> None:
    """The one long stream per peer must not eat the admission of requests."""

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"open"
        await asyncio.Event().wait()

    limits = CallLimits(calls_max=1, unbounded_methods=frozenset({method("Long")}))
    handler = grpc.unary_stream_rpc_method_handler(count)
    async with serving(limits=limits, Long=handler, Echo=unary(_echo)) as (server, channel):
        stream = channel.unary_stream(method("Long"))(b"", timeout=NO_DEADLINE)
        assert await stream.read() == b"open"
        assert server.interceptor.running == 0
        assert await channel.unary_unary(method("Echo"))(b"x") == b"x"
        stream.cancel()


async def test_request_id_and_trace_travel_and_malformed_ones_are_replaced() -> None:
    """One id names a request in every process's log; a forged one must not break a log line."""
    seen: list[tuple[str | None, str | None]] = []

    async def look(request: bytes, context: Any) -> bytes:
        trace = current_trace()
        seen.append((current_request_id(), trace.trace_id if trace else None))
        return b""

    trace = new_trace()
    async with serving(Look=unary(look)) as (_server, channel):
        call = channel.unary_unary(method("Look"))
        with request_scope("req-1", trace):
            await call(b"")
        await call(b"", metadata=(("baton-request-id", "x y"), ("traceparent", "nonsense")))
        await call(b"", metadata=(("baton-request-id", "given"),))
    assert seen[0] == ("req-1", trace.trace_id)
    assert seen[1][0] not in (None, "x y")
    assert seen[1][1] not in (None, trace.trace_id)
    assert seen[2][0] == "given"
    assert current_request_id() is None


async def test_downstream_calls_get_what_is_left_of_the_deadline() -> None:
    """A step downstream may not outlive the request it serves."""

    async def left(request: bytes, context: Any) -> bytes:
        return str(context.time_remaining()).encode()

    async with serving(options=ChannelOptions(call_timeout_s=50.0), Left=unary(left)) as (
        _server,
        channel,
    ):
        call = channel.unary_unary(method("Left"))
        assert 40.0 < float(await call(b"")) < 50.1
        with deadline_scope(5.0):
            assert 0.0 < float(await call(b"")) < 5.1
        with deadline_scope(0.0), pytest.raises(ServiceError) as failed:
            await call(b"")
    assert failed.value.reason is Reason.DEADLINE_EXCEEDED
    assert timeout_within(3.0) == 3.0


async def test_unknown_methods_and_oversized_messages_have_reasons() -> None:
    """What gRPC itself refuses comes without our details and still gets the right reason."""
    async with serving(Echo=unary(_echo)) as (_server, channel):
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Nothing"))(b"")
        assert failed.value.reason is Reason.UNSUPPORTED
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Echo"))(b"x" * (5 * 1024 * 1024))
        assert failed.value.reason is Reason.INVALID_REQUEST
        assert failed.value.metadata["grpc_code"] == "RESOURCE_EXHAUSTED"


async def test_a_dead_server_is_a_lost_worker() -> None:
    """Nothing listens: the caller may try elsewhere."""
    async with serving(Echo=unary(_echo)) as (server, channel):
        await server.stop()
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Echo"))(b"", timeout=2.0)
    assert failed.value.reason is Reason.WORKER_LOST


async def test_a_callers_own_cancel_stays_a_cancelled_error() -> None:
    """Turning it into an error would break structured concurrency in the caller."""
    entered = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    measures = Recorder()
    options = ChannelOptions(measures=measures)
    async with serving(options=options, Wait=unary(wait)) as (_server, channel):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_await(channel.unary_unary(method("Wait"))(b"")))
            await entered.wait()
            task.cancel()
        assert task.cancelled()
    assert measures.handled == [(method("Wait"), grpc.StatusCode.CANCELLED)]


async def test_oversized_errors_are_cut_and_still_arrive() -> None:
    """HTTP/2 headers are bounded: an error must not be lost because it says too much."""

    async def verbose(request: bytes, context: Any) -> bytes:
        raise ServiceError(
            Reason.BLOB_INVALID,
            "x" * 100_000,
            field="f" * 10_000,
            metadata={f"key{i}": "v" * 10_000 for i in range(100)},
        )

    async with serving(Verbose=unary(verbose)) as (_server, channel):
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Verbose"))(b"")
    assert failed.value.reason is Reason.BLOB_INVALID
    assert failed.value.message.startswith("xxx")


async def test_a_burst_of_calls_is_answered_each_one() -> None:
    """Over about 1,000 pending calls grpc.aio drops calls with a bare CANCELLED unless told not
    to.
    """
    async with serving(Echo=unary(_echo)) as (_server, channel):
        call = channel.unary_unary(method("Echo"))
        outcomes: list[str] = []

        async def one(number: int) -> None:
            try:
                assert await call(str(number).encode(), timeout=60.0) == str(number).encode()
                outcomes.append("answered")
            except ServiceError as error:
                outcomes.append(error.reason.value)

        async with asyncio.TaskGroup() as burst:
            for number in range(4000):
                burst.create_task(one(number))
    assert len(outcomes) == 4000
    assert set(outcomes) <= {"answered", "QUEUE_FULL"}
    assert "answered" in outcomes
