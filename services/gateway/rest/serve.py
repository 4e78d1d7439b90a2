"""Running a checked request over HTTP: whole or streamed, with every refusal before the first byte.

Owns the exchange between an answer's events and the response: nothing is sent until the first token
is there, so that a failing prefill is a proper HTTP error; later failures end the stream with an
error event. A client that leaves cancels everything.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.errors import Reason, ServiceError
from baton.tracing import current_trace, record_span, span
from services.gateway.answers import Events, Indexed, Member
from services.gateway.core import GatewayCore
from services.gateway.events import Completed, Event, FirstToken, TokenDelta
from services.gateway.measures import RequestLine
from services.gateway.rest.answer import (
    AnswerFrame,
    AnswerShape,
    Choice,
    UsageTally,
    answer_headers,
    first_token_headers,
)
from services.gateway.rest.errors import body_of, rate_headers
from services.gateway.rest.exchange import (
    ClientGone,
    Receive,
    Send,
    send_events,
    send_json,
    while_connected,
)
from services.gateway.rest.sampling_fields import StreamOptions
from services.gateway.rest.sse import DONE
from services.gateway.rest.sse import event as sse_event
from services.gateway.timing import FirstSends


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A checked request with the shape of its response."""

    members: Sequence[Member]
    frame: AnswerFrame
    shape: AnswerShape
    stream: StreamOptions
    line: RequestLine
    headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def accounted(core: GatewayCore, line: RequestLine) -> Iterator[None]:
    """The block answers one request; it leaves one log line, however it ends."""
    started_s = core.clock.monotonic_s()
    try:
        yield
        line.outcome = "failed" if line.error is not None else "ok"
    except ServiceError as error:
        line.outcome = "refused" if error.row.http_status < 500 else "failed"
        line.error = error.reason
        raise
    except ClientGone:
        line.outcome = "cancelled"
        raise
    except Exception:
        line.outcome, line.error = "failed", Reason.INTERNAL
        raise
    finally:
        line.elapsed_s = core.clock.monotonic_s() - started_s
        with span("account"):
            core.measures.count(line)


async def serve(core: GatewayCore, served: Served, receive: Receive, send: Send) -> None:
    """Answer; raises ServiceError while nothing was sent, ClientGone when nobody reads."""
    exchange = _Exchange(core, served, send)
    await while_connected(receive, exchange.run())
    exchange.ended()


class _Exchange:
    """One response being written."""

    def __init__(self, core: GatewayCore, served: Served, send: Send) -> None:
        self._core = core
        self._served = served
        self._send = send
        self._usage = UsageTally(served.frame)
        self._sends = FirstSends(core.clock)
        self._last_token_s: float | None = None

    def ended(self) -> None:
        """The client has it all and the watch over its connection is over."""
        if self._last_token_s is not None:
            # An answer's end has no call of its own: it is what follows the last token, the end of
            # the members' work and of the watch over the connection included.
            span_s = (self._last_token_s, self._core.clock.monotonic_s())
            record_span("respond", current_trace(), span_s)

    async def run(self) -> None:
        async with self._core.run(self._served.members) as events:
            early, first = await self._until_first_token(events)
            limit = rate_headers(events.rate)
            headers = {**self._served.headers, **limit, **first_token_headers(first)}
            if self._served.stream.is_stream:
                await send_events(self._send, self._stream(early, events), headers)
            else:
                await self._whole(early, events, headers)

    async def _until_first_token(self, events: Events) -> tuple[list[Indexed], FirstToken]:
        early: list[Indexed] = []
        async for item in events:
            early.append(item)
            if isinstance(item.event, FirstToken):
                return early, item.event
        raise AssertionError("an answer has a first token or raises")

    def _sent(self, index: int) -> None:
        """A token of the sequence left."""
        sent_s = self._sends.sent(index)
        line, request = self._served.line, self._served.members[index].request
        if line.first_token_after_s is None:
            line.first_token_after_s = sent_s - request.received_s

    def _noted(self, item: Indexed) -> Event:
        """The event, accounted for; an answer's end with the times that this exchange saw."""
        event = item.event
        if isinstance(event, TokenDelta):
            self._last_token_s = self._core.clock.monotonic_s()
        if isinstance(event, Completed):
            event = self._sends.corrected(item.index, event)
            self._served.line.answers.append(event)
        self._usage.note(item.index, event)
        return event

    async def _whole(self, early: list[Indexed], events: Events, headers: dict[str, str]) -> None:
        choices = [Choice() for _ in self._served.members]
        for item in early:
            choices[item.index].note(self._noted(item))
        async for item in events:
            if isinstance(item.event, TokenDelta):
                self._sent(item.index)
            choices[item.index].note(self._noted(item))
        completed = choices[0].completed
        assert completed is not None
        headers = {**headers, **answer_headers(completed)}
        body = self._served.shape.whole(choices, self._usage.body())
        await send_json(self._send, body, headers=headers)

    async def _stream(self, early: list[Indexed], events: Events) -> AsyncGenerator[bytes, None]:
        try:
            for item in early:
                for data in self._chunks(item):
                    yield data
            async for item in events:
                for data in self._chunks(item):
                    yield data
                # Asked for more: what was yielded is written.
                if isinstance(item.event, TokenDelta):
                    self._sent(item.index)
        except ServiceError as error:
            self._served.line.error = error.reason
            yield sse_event(body_of(error))
        else:
            if self._served.stream.has_usage:
                yield sse_event(self._served.shape.usage_chunk(self._usage.body()))
        yield DONE

    def _chunks(self, item: Indexed) -> list[bytes]:
        noted = self._noted(item)
        stream = self._served.stream
        made = self._served.shape.chunks(item.index, noted)
        if stream.has_usage:
            usage = self._usage.body() if stream.has_continuous_usage else None
            made = [{**chunk, "usage": usage} for chunk in made]
        return [sse_event(chunk) for chunk in made]
