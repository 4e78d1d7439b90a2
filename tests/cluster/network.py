"""Calls between services in one process, over a network that delays, loses and cuts by seed.

Owns nodes (their tasks, death and freezing) and channels that generated stubs take for gRPC's. The
servicers behind them are the real ones. A frozen node sends, hears and computes nothing; when it
wakes it goes on where it stood: the late writer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from baton.errors import Reason, ServiceError
from tests.cluster.loop import LoopClock

_END: Final = object()


class Node:
    """One process: its address, its servicer, its tasks."""

    def __init__(self, address: str, group: asyncio.TaskGroup) -> None:
        self.address = address
        self.servicer: Any = None
        self.is_dead = False
        self._group = group
        # In order of their start: a set would end them in order of their addresses.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def is_frozen(self) -> bool:
        """It neither sends nor hears."""
        return not self._thawed.is_set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process; it ends with it."""
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        if self.is_dead:
            task.cancel()
        return task

    def freeze(self) -> None:
        """As SIGSTOP does to its sockets."""
        self._thawed.clear()

    def thaw(self) -> None:
        """As SIGCONT."""
        self._thawed.set()

    def die(self) -> None:
        """As SIGKILL: nothing it had begun is finished, nothing more is sent."""
        self.is_dead = True
        self._thawed.set()
        for task in tuple(self._tasks):
            task.cancel()

    async def thawed(self) -> None:
        """Returns once it is not frozen."""
        await self._thawed.wait()

    async def reachable(self) -> None:
        """Returns once it is not frozen; WORKER_LOST if it is dead."""
        await self._thawed.wait()
        if self.is_dead:
            raise lost(self.address)


def lost(address: str) -> ServiceError:
    """What gRPC says when nobody answers."""
    return ServiceError(
        Reason.WORKER_LOST, f"UNAVAILABLE: {address}", metadata={"grpc_code": "UNAVAILABLE"}
    )


@dataclass(slots=True)
class Network:
    """Every node, and what happens to messages. `loss`: the share of messages that cut a call."""

    random: random.Random
    loss: float
    nodes: dict[str, Node] = field(default_factory=dict)
    clock: LoopClock = field(default_factory=LoopClock)
    messages: int = 0
    cuts: int = 0

    async def carry(self, source: Node, target: str) -> Node:
        """One message on its way; raises WORKER_LOST when it does not come through."""
        self.messages += 1
        await source.reachable()
        await self.clock.pass_(self.random.choice((0.0005, 0.001, 0.002, 0.02)))
        node = self.nodes.get(target)
        if node is None:
            raise lost(target)
        await node.reachable()
        if self.random.random() < self.loss:
            self.cuts += 1
            raise lost(target)
        return node

    def pool(self, node: Node) -> Pool:
        """The channels of one node, as a `ChannelPool`."""
        return Pool(self, node)


@dataclass(frozen=True, slots=True)
class Pool:
    """Fits where a `ChannelPool` is wanted."""

    network: Network
    node: Node

    def get(self, address: str) -> Any:
        """A channel to an address."""
        return SimulatedChannel(self.network, self.node, address)


class SimulatedChannel:
    """What generated stubs need of a channel."""

    def __init__(self, network: Network, source: Node, target: str) -> None:
        self._network, self._source, self._target = network, source, target

    def unary_unary(self, method: str, *_args: Any, **kinds: Any) -> Callable[..., Any]:
        """One request, one response."""

        def start(request: Any, *, timeout: float | None = None, **_more: Any) -> _Unary:
            return _Unary(self._call(method, kinds), request, timeout)

        return start

    def unary_stream(self, method: str, *_args: Any, **kinds: Any) -> Callable[..., Any]:
        """One request, many responses."""

        def start(request: Any, **_more: Any) -> _Streaming:
            return _Streaming(self._call(method, kinds), one=request)

        return start

    def stream_stream(self, method: str, *_args: Any, **kinds: Any) -> Callable[..., Any]:
        """Many requests, many responses."""

        def start(requests: AsyncIterator[Any] | None = None, **_more: Any) -> _Streaming:
            return _Streaming(self._call(method, kinds), many=requests)

        return start

    def stream_unary(self, method: str, *_args: Any, **_kinds: Any) -> Callable[..., Any]:
        """Nobody here puts blobs."""

        def start(*_requests: Any, **_more: Any) -> Any:
            raise AssertionError(method)

        return start

    def _call(self, method: str, kinds: dict[str, Any]) -> _Call:
        return _Call(self._network, self._source, self._target, method.rpartition("/")[2], kinds)


@dataclass(frozen=True, slots=True)
class _Call:
    network: Network
    source: Node
    target: str
    name: str
    kinds: dict[str, Any]

    def copied_request(self, request: Any) -> Any:
        """Over the wire: never the same object."""
        return type(request).FromString(self.kinds["request_serializer"](request))

    def handler(self, node: Node) -> Any:
        return getattr(node.servicer, self.name)


class _Context:
    """A servicer's side of a call."""

    def __init__(self, write: Callable[[Any], None] | None = None) -> None:
        self._write = write

    async def write(self, response: Any) -> None:
        assert self._write is not None
        self._write(type(response).FromString(response.SerializeToString()))

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()


class _Unary:
    """Awaited once."""

    def __init__(self, call: _Call, request: Any, timeout_s: float | None) -> None:
        self._call, self._request = call, call.copied_request(request)
        self._timeout_s = timeout_s

    def __await__(self) -> Generator[Any, None, Any]:
        return self._run().__await__()

    async def _run(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange()
        except TimeoutError as error:
            raise ServiceError(
                Reason.DEADLINE_EXCEEDED, "too late", metadata={"grpc_code": "DEADLINE_EXCEEDED"}
            ) from error

    async def _exchange(self) -> Any:
        call = self._call
        node = await call.network.carry(call.source, call.target)
        outcome: list[Any] = []

        async def serve() -> None:
            try:
                outcome.append(await call.handler(node)(self._request, _Context()))
            except ServiceError as error:
                outcome.append(error)

        task = node.spawn(serve())
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
        await call.network.carry(node, call.source.address)
        if not outcome:
            raise lost(call.target)
        if isinstance(outcome[0], ServiceError):
            raise outcome[0]
        return type(outcome[0]).FromString(outcome[0].SerializeToString())


class _Streaming:
    """A call with a stream of responses, and perhaps of requests."""

    def __init__(
        self, call: _Call, *, one: Any = None, many: AsyncIterator[Any] | None = None
    ) -> None:
        self._call = call
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._node: Node | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._one = None if one is None else call.copied_request(one)
        self._tasks.append(call.source.spawn(self._open(many)))

    def cancel(self) -> None:
        """The client gives the call up."""
        for task in self._tasks:
            task.cancel()
        self._responses.put_nowait(lost(self._call.target))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        response = await self.read()
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    async def read(self) -> Any:
        """The next response; EOF at the end."""
        try:
            item = await self._responses.get()
            if self._node is not None and not isinstance(item, ServiceError):
                await self._call.network.carry(self._node, self._call.source.address)
        except (ServiceError, asyncio.CancelledError):
            self.cancel()
            raise
        if isinstance(item, ServiceError):
            raise item
        return grpc.aio.EOF if item is _END else item

    async def write(self, request: Any) -> None:
        """One more request."""
        copied = self._call.copied_request(request)
        try:
            await self._call.network.carry(self._call.source, self._call.target)
        except ServiceError:
            self.cancel()
            raise
        self._requests.put_nowait(copied)

    async def _open(self, many: AsyncIterator[Any] | None) -> None:
        call = self._call
        try:
            self._node = await call.network.carry(call.source, call.target)
            self._tasks.append(self._node.spawn(self._serve(self._node)))
            if many is not None:
                async for request in many:
                    await self.write(request)
        except ServiceError as error:
            self._responses.put_nowait(error)

    async def _serve(self, node: Node) -> None:
        handler = self._call.handler(node)
        context = _Context(self._responses.put_nowait)
        source = self._one if self._one is not None else self._read_requests()
        end: Any = lost(self._call.target)
        try:
            answer = handler(source, context)
            if isinstance(answer, AsyncIterator):
                async for response in answer:
                    await context.write(response)
            else:
                await answer
            end = _END
        except ServiceError as error:
            end = error
        finally:
            self._responses.put_nowait(end)

    async def _read_requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()
