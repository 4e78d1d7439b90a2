"""The memory of answers: whose they are, what makes a repetition, and how many there are."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from services.kvstore.answers import Answers
from services.kvstore.state import AckLevel

LOG = b"l" * 16


def request(**fields: Any) -> kvstore_pb2.TruncateRequest:
    """A request to cut the log."""
    values: dict[str, Any] = {"log_id": LOG, "generation": 1, "position": 5, "request_id": "r"}
    return kvstore_pb2.TruncateRequest(**{**values, **fields})


def kept(answers: Answers, tenant: str = "acme", **fields: Any) -> Any:
    """What is known of a call."""
    message = request(**fields)
    return answers.call(kvstore_pb2.TruncateResponse, tenant, LOG, message).known()


def keep(answers: Answers, generation: int = 2, **fields: Any) -> None:
    """Answers a call of tenant acme."""
    call = answers.call(kvstore_pb2.TruncateResponse, "acme", LOG, request(**fields))
    call.keep(kvstore_pb2.TruncateResponse(generation=generation), AckLevel.DISK, (3,))


def test_a_repetition_gets_the_answer_and_waits_for_what_the_first_waited_for() -> None:
    """The level and the pages are kept with it: it must not be told earlier than the first."""
    answers = Answers()
    keep(answers)
    found = kept(answers, capability="a newer one")
    assert found.answer.generation == 2
    assert (found.level, found.pages) == (AckLevel.DISK, (3,))


def test_another_body_is_refused_and_another_tenant_is_not_known() -> None:
    """A tenant never gets another one's answer, not even with the very same message."""
    answers = Answers()
    keep(answers)
    with pytest.raises(ServiceError) as refused:
        kept(answers, position=4)
    assert (refused.value.reason, refused.value.field) == (Reason.ALREADY_EXISTS, "request_id")
    assert kept(answers, tenant="guest") is None


def test_without_a_request_id_nothing_is_a_repetition() -> None:
    """An empty id is no id."""
    answers = Answers()
    keep(answers, request_id="")
    assert kept(answers, request_id="") is None


def test_the_oldest_answers_make_room() -> None:
    """The memory is bounded whatever clients send."""
    answers = Answers(answers_max=3)
    for number in range(5):
        keep(answers, generation=number, request_id=f"r{number}")
    assert [kept(answers, request_id=f"r{number}") is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
