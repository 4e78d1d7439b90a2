"""Sessions with the generated stubs alone: each method, and an answer given in a session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from baton.api.gateway.v1 import (
    gateway_pb2,
    gateway_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)
from baton.testing.cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TIMEOUT_S = 60.0
TOKENS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """What one Generate told."""

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completed: gateway_pb2.Completed


@dataclass(slots=True)
class Door:
    """The gateway's gRPC door."""

    answers: Any
    sessions: Any

    async def ask(self, *turns: tuple[str, str], **fields: Any) -> Answer:
        """A greedy answer; without turns as the history stands."""
        request = gateway_pb2.GenerateRequest(**fields)
        if turns:
            request.chat.CopyFrom(chat(*turns))
        request.sampling.max_tokens = TOKENS
        request.sampling.temperature = 0.0
        events = [one async for one in self.answers.Generate(request, timeout=TIMEOUT_S)]
        first, *tokens, last = events
        assert first.HasField("admitted")
        assert last.HasField("completed")
        return Answer(
            id=first.admitted.request_id,
            token_ids=tuple(one.token.token_id for one in tokens),
            prompt_tokens=first.admitted.prompt_tokens,
            completed=last.completed,
        )

    async def refusal(self, call: Any) -> grpc.aio.AioRpcError:
        """The error of a call that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value


@pytest.fixture
async def door(cluster_f32: RunningCluster) -> AsyncIterator[Door]:
    """A plain channel."""
    async with grpc.aio.insecure_channel(cluster_f32.grpc_address) as channel:
        yield Door(
            answers=gateway_pb2_grpc.GatewayServiceStub(channel),
            sessions=sessions_pb2_grpc.SessionsServiceStub(channel),
        )


@pytest.fixture
async def client(cluster_f32: RunningCluster) -> AsyncIterator[httpx.AsyncClient]:
    """The other door, to compare with."""
    async with httpx.AsyncClient(
        base_url=cluster_f32.url, timeout=TIMEOUT_S, trust_env=False
    ) as client:
        yield client


def chat(*turns: tuple[str, str]) -> gateway_pb2.ChatMessages:
    """Turns as messages."""
    messages = [gateway_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return gateway_pb2.ChatMessages(messages=messages)


async def test_a_session_lives_by_stubs_alone(door: Door, client: httpx.AsyncClient) -> None:
    """Made of an answer, read, edited, continued, cut, forked, listed, deleted."""
    asked = (("system", "You are terse."), ("user", "What is the capital of Norway?"))
    first = await door.ask(*asked)
    create = sessions_pb2.CreateSessionRequest(**{"from": first.id})
    made = await door.sessions.CreateSession(create, timeout=TIMEOUT_S)
    session_id = made.session.id
    assert made.session.generation == 1
    assert made.session.tokens == first.prompt_tokens + len(first.token_ids)

    edit = sessions_pb2.EditSessionRequest(id=session_id, generation=1, text="Peru?")
    edit.start.text = "Norway?"
    edited = await door.sessions.EditSession(edit, timeout=TIMEOUT_S)
    assert edited.session.generation == 2
    assert edited.tokens.reused + edited.tokens.recomputed == edited.session.tokens
    assert 0 < edited.tokens.dropped < 8
    stale = await door.refusal(door.sessions.EditSession(edit, timeout=TIMEOUT_S))
    assert stale.code() is grpc.StatusCode.FAILED_PRECONDITION, stale

    get = sessions_pb2.GetSessionRequest(id=session_id)
    shown = await door.sessions.GetSession(get, timeout=TIMEOUT_S)
    said = [(one.role, one.content) for one in shown.session.messages]
    assert said[:2] == [asked[0], ("user", "What is the capital of Peru?")]
    heads = [log for log in shown.lineage if session_id in log.session_ids]
    assert [log.log_id for log in heads] == [shown.session.log_id]
    assert heads[0].parent_log_id

    told = await door.ask(("user", "Sure?"), session=session_id)
    assert told.completed.session.id == session_id
    assert (told.completed.session.generation, told.completed.session.refusal) == (3, "")
    answer = await client.post(
        "/v1/chat/completions",
        json={
            "messages": [
                *({"role": role, "content": content} for role, content in said),
                {"role": "user", "content": "Sure?"},
            ],
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        },
        headers={"X-Cache": "off"},
    )
    fresh = answer.json()
    assert told.token_ids == tuple(fresh["choices"][0]["token_ids"])

    cut = sessions_pb2.TruncateSessionRequest(id=session_id, position=first.prompt_tokens)
    shorter = await door.sessions.TruncateSession(cut, timeout=TIMEOUT_S)
    assert (shorter.session.generation, shorter.session.tokens) == (4, first.prompt_tokens)
    fork = sessions_pb2.ForkSessionRequest(id=session_id, position=5)
    forked = await door.sessions.ForkSession(fork, timeout=TIMEOUT_S)
    assert (forked.session.parent_id, forked.session.parent_position) == (session_id, 5)
    assert forked.session.tokens == 5

    empty = sessions_pb2.ListSessionsRequest()
    listed = await door.sessions.ListSessions(empty, timeout=TIMEOUT_S)
    assert {session_id, forked.session.id} <= {one.id for one in listed.sessions}
    for gone in (session_id, forked.session.id):
        delete = sessions_pb2.DeleteSessionRequest(id=gone)
        await door.sessions.DeleteSession(delete, timeout=TIMEOUT_S)
        again = await door.refusal(door.sessions.DeleteSession(delete, timeout=TIMEOUT_S))
        assert again.code() is grpc.StatusCode.NOT_FOUND


async def test_an_answers_id_names_a_point_for_ever(door: Door) -> None:
    """Continued twice it gives the same, whatever grew out of it meanwhile; no session is told."""
    first = await door.ask(("user", "Name a colour."))
    once = await door.ask(("user", "And another."), previous_response_id=first.id)
    twice = await door.ask(("user", "And another."), previous_response_id=first.id)
    assert once.token_ids == twice.token_ids
    assert once.prompt_tokens == twice.prompt_tokens > first.prompt_tokens
    assert not once.completed.HasField("session")
    fork = sessions_pb2.ForkSessionRequest(id=first.id)
    made = await door.sessions.ForkSession(fork, timeout=TIMEOUT_S)
    assert made.session.tokens == first.prompt_tokens + len(first.token_ids)


async def test_a_conversation_is_named_before_it_is_answered(door: Door) -> None:
    """Made of messages; then the last turn is answered as it stands."""
    request = sessions_pb2.CreateSessionRequest(chat=chat(("user", "What do cows give?")))
    request.ttl.seconds = 60
    made = await door.sessions.CreateSession(request, timeout=TIMEOUT_S)
    alive = made.session.expire_time.seconds - made.session.create_time.seconds
    assert alive == 60
    told = await door.ask(session=made.session.id)
    plain = await door.ask(("user", "What do cows give?"))
    assert told.token_ids == plain.token_ids
    assert told.completed.session.generation == 2


async def test_what_cannot_be_is_refused_naming_the_field(door: Door) -> None:
    """Two points at once, another kind of prompt, ids of nobody, an edit that says nothing."""
    made = await door.sessions.CreateSession(
        sessions_pb2.CreateSessionRequest(chat=chat(("user", "Hi"))), timeout=TIMEOUT_S
    )
    session_id, invalid = made.session.id, grpc.StatusCode.INVALID_ARGUMENT
    both = {"session": session_id, "previous_response_id": "x"}
    cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({**both, "text": "a"}, invalid, "previous_response_id"),
        ({"session": session_id, "text": "a"}, invalid, "text"),
        ({"session": session_id, "drop_at_end": True}, invalid, "drop_at_end"),
        ({"session": "sess-0"}, grpc.StatusCode.NOT_FOUND, "session"),
        ({"previous_response_id": "0"}, grpc.StatusCode.NOT_FOUND, "previous_response_id"),
    ]
    for fields, code, named in cases:
        request = gateway_pb2.GenerateRequest(**fields)
        error = await door.refusal(door.answers.Generate(request, timeout=TIMEOUT_S).read())
        assert error.code() is code, fields
        assert named in (error.details() or ""), error.details()
    nothing = sessions_pb2.EditSessionRequest(id=session_id)
    error = await door.refusal(door.sessions.EditSession(nothing, timeout=TIMEOUT_S))
    assert error.code() is invalid
    assert "start" in (error.details() or "")
    neither = sessions_pb2.CreateSessionRequest()
    error = await door.refusal(door.sessions.CreateSession(neither, timeout=TIMEOUT_S))
    assert error.code() is invalid
    nowhere = sessions_pb2.TruncateSessionRequest(id=session_id)
    error = await door.refusal(door.sessions.TruncateSession(nowhere, timeout=TIMEOUT_S))
    assert error.code() is invalid
    assert "position" in (error.details() or "")
