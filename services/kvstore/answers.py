"""Answers by request id, so that a repeated call is harmless.

Owns the bounded memory of them. The same call (kind, log, request id) with the same body gets the
same answer; with another body it is refused. Not kept over a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from google.protobuf.message import Message

from baton.errors import Reason, ServiceError

ANSWERS_MAX: Final = 16_384

_Answer = TypeVar("_Answer", bound=Message)


class Answers:
    """Remembers the latest answers."""

    def __init__(self, answers_max: int = ANSWERS_MAX) -> None:
        self._answers_max = answers_max
        self._known: OrderedDict[tuple[str, bytes, str], tuple[bytes, Message]] = OrderedDict()

    def recall(
        self, kind: type[_Answer], log_id: bytes, request_id: str, body: bytes
    ) -> _Answer | None:
        """The answer already given; ALREADY_EXISTS if the request id came with another body."""
        known = self._known.get((kind.__name__, log_id, request_id)) if request_id else None
        if known is None:
            return None
        fingerprint, answer = known
        if fingerprint != body:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                "request_id was used with another body; draw a new one",
                field="request_id",
            )
        assert isinstance(answer, kind)
        return answer

    def remember(self, log_id: bytes, request_id: str, body: bytes, answer: _Answer) -> _Answer:
        """Keeps and returns the answer; without a request id nothing is kept."""
        if request_id:
            self._known[type(answer).__name__, log_id, request_id] = (body, answer)
            if len(self._known) > self._answers_max:
                self._known.popitem(last=False)
        return answer


def body_of(request: Message) -> bytes:
    """What makes two calls the same: everything but the capability, whose expiry differs."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.ClearField("capability")
    return copy.SerializeToString(deterministic=True)
