"""The error table is complete and speaks every wire's language."""

from __future__ import annotations

import grpc
import pytest

from baton.errors import REASONS, Reason, ServiceError, StartupError


def test_every_reason_has_exactly_one_row() -> None:
    """A reason without a row would crash the interceptor instead of answering."""
    assert set(REASONS) == set(Reason)
    assert all(reason.value == reason.name for reason in Reason)


@pytest.mark.parametrize("reason", Reason)
def test_grpc_code_and_http_status_tell_the_same_story(reason: Reason) -> None:
    """A client must not see a server fault on one wire and its own fault on the other."""
    row = REASONS[reason]
    expected = {
        grpc.StatusCode.INVALID_ARGUMENT: {400},
        grpc.StatusCode.UNIMPLEMENTED: {400},
        grpc.StatusCode.UNAUTHENTICATED: {401},
        grpc.StatusCode.PERMISSION_DENIED: {403},
        grpc.StatusCode.NOT_FOUND: {404},
        grpc.StatusCode.ALREADY_EXISTS: {409},
        grpc.StatusCode.FAILED_PRECONDITION: {409},
        grpc.StatusCode.ABORTED: {409, 499},
        grpc.StatusCode.RESOURCE_EXHAUSTED: {429, 503},
        grpc.StatusCode.UNAVAILABLE: {503},
        grpc.StatusCode.DEADLINE_EXCEEDED: {504},
        grpc.StatusCode.DATA_LOSS: {500},
        grpc.StatusCode.INTERNAL: {500},
    }
    assert row.http_status in expected[row.grpc_code]
    assert (row.openai_type == "server_error") == (row.http_status >= 500)


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    """Retrying a stale writer or a mismatch would loop; retrying a full queue helps."""
    never = {Reason.STALE_GENERATION, Reason.COMPAT_MISMATCH, Reason.INVALID_REQUEST}
    helps = {Reason.QUEUE_FULL, Reason.DRAINING, Reason.WORKER_LOST, Reason.TRANSFER_TIMEOUT}
    assert not any(REASONS[reason].retryable for reason in never)
    assert all(REASONS[reason].retryable for reason in helps)


def test_openai_codes_that_clients_match_on_are_spelt_as_they_expect() -> None:
    """Agents branch on these two strings."""
    assert REASONS[Reason.PROMPT_TOO_LONG].openai_code == "context_length_exceeded"
    assert REASONS[Reason.MODEL_NOT_FOUND].openai_code == "model_not_found"


def test_errors_print_reason_message_and_field() -> None:
    """What an operator reads in a log says all three."""
    error = ServiceError(Reason.INVALID_REQUEST, "must be positive", field="max_tokens")
    assert str(error) == "INVALID_REQUEST: must be positive (field max_tokens)"
    assert "max_tokens" in repr(error)
    assert error.row.http_status == 400
    assert str(StartupError("no", hint="try")) == "no (try)"


def test_internal_is_opaque_but_findable() -> None:
    """The client gets an id to quote and nothing else."""
    error = ServiceError.internal("abc123")
    assert error.reason is Reason.INTERNAL
    assert "abc123" in error.message
    assert error.metadata["error_id"] == "abc123"
