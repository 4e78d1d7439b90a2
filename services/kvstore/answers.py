"""Answers by request id, so that a repeated call is harmless.

Owns the bounded memory of them. The same call (kind, tenant, log, request id) with the same body
gets the same answer; with another body it is refused. An answer is kept in the same step in which
its operation is done, before anybody waits for the log: a repetition that overtakes the first one's
wait, or follows its cancellation, waits for the same records and answers the same. Not kept over a
restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from blake3 import blake3
from google.protobuf.message import Message

from baton.errors import Reason, ServiceError
from services.kvstore.state import AckLevel

ANSWERS_MAX: Final = 16_384
# A right's text differs from one showing to the next, a measured rate from one moment to the next:
# they are no part of what is asked.
NOT_ASKED: Final = ("capability", "base_capability", "compute_tokens_per_s")

_Answer = TypeVar("_Answer", bound=Message)
_Key = tuple[str, str, bytes, str]


@dataclass(slots=True, kw_only=True)
class Kept(Generic[_Answer]):
    """An answer, and what has to be reached before it is given: pages ready, records acked."""

    body: bytes
    answer: _Answer
    level: AckLevel = AckLevel.OS
    pages: Collection[int] = ()


class Call(Generic[_Answer]):
    """One call that may be a repetition. Without a request id it never is."""

    __slots__ = ("_answers", "_body", "_key", "_kind")

    def __init__(self, answers: Answers, kind: type[_Answer], key: _Key, body: bytes) -> None:
        self._answers = answers
        self._kind = kind
        self._key = key
        self._body = body

    def known(self) -> Kept[_Answer] | None:
        """What was answered before; ALREADY_EXISTS if the request id came with another body."""
        return self._answers.find(self._kind, self._key, self._body)

    def keep(
        self, answer: _Answer, level: AckLevel = AckLevel.OS, pages: Collection[int] = ()
    ) -> Kept[_Answer]:
        """The operation is done and will be answered so."""
        kept = Kept(body=self._body, answer=answer, level=level, pages=pages)
        if self._key[-1]:
            self._answers.put(self._key, kept)
        return kept


class Answers:
    """Remembers the latest answers."""

    def __init__(self, answers_max: int = ANSWERS_MAX) -> None:
        self._answers_max = answers_max
        self._known: OrderedDict[_Key, Kept[Message]] = OrderedDict()

    def call(
        self, kind: type[_Answer], tenant: str | None, subject: bytes, request: Message
    ) -> Call[_Answer]:
        """A call about `subject` (a log's id, or another name), answered with a `kind`."""
        request_id: str = getattr(request, "request_id")  # noqa: B009 - each such call has one
        key = (kind.__name__, tenant or "", subject, request_id)
        return Call(self, kind, key, body_of(request) if request_id else b"")

    def find(self, kind: type[_Answer], key: _Key, body: bytes) -> Kept[_Answer] | None:
        """What is kept under `key`; see `Call.known`."""
        kept = self._known.get(key) if key[-1] else None
        if kept is None:
            return None
        if kept.body != body:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                "request_id was used with another body; draw a new one",
                field="request_id",
            )
        assert isinstance(kept.answer, kind)
        # The assertion above is what the key promises; a type checker cannot see it.
        return kept  # type: ignore[return-value]

    def put(self, key: _Key, kept: Kept[_Answer]) -> None:
        """Keeps an answer; the oldest makes room."""
        # One table for all kinds of answers: the key has the kind.
        self._known[key] = kept  # type: ignore[assignment]
        if len(self._known) > self._answers_max:
            self._known.popitem(last=False)


def body_of(request: Message) -> bytes:
    """What makes two calls the same (32 bytes): all of the request but `NOT_ASKED`."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name in NOT_ASKED:
        if name in request.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return blake3(copy.SerializeToString(deterministic=True)).digest()
