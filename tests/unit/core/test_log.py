"""Log lines: structured, with ids, and never with what tenants wrote."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from baton.log import CanonicalLine, LogFormat, configure_logging, log_canonical_line
from baton.redaction import REDACTED, redact
from baton.tracing import new_trace, request_scope


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Logging as a service has it, into a string; restored afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("decode", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json_with_level_time_service_and_ids(lines: io.StringIO) -> None:
    """A log store finds a request in every process by its id."""
    trace = new_trace()
    with request_scope("req-1", trace):
        structlog.stdlib.get_logger("baton.x").info("lease_granted", lease_s=3.0)
    (line,) = _parsed(lines)
    assert line["event"] == "lease_granted"
    assert (line["level"], line["service"], line["logger"]) == ("info", "decode", "baton.x")
    assert (line["request_id"], line["trace_id"]) == ("req-1", trace.trace_id)
    assert line["timestamp"].endswith("Z")
    assert line["lease_s"] == 3.0


def test_the_standard_librarys_loggers_end_in_the_same_lines(lines: io.StringIO) -> None:
    """uvicorn and grpc log by the standard library; chatty ones are heard from WARNING on."""
    logging.getLogger("uvicorn.error").info("Started on %s", "a port")
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("baton").debug("below the level")
    (line,) = _parsed(lines)
    assert (line["event"], line["service"]) == ("Started on a port", "decode")


def test_forbidden_fields_are_redacted_also_when_nested(lines: io.StringIO) -> None:
    """One careless line must not put a prompt on disk."""
    structlog.stdlib.get_logger().info(
        "request_parsed",
        prompt="hello",
        body={"messages": [{"content": "hi"}], "Authorization": "Bearer x", "n": 1},
        parts=[{"text": "t", "kind": "a"}],
        tokens=[1, 2],
        prompt_tokens=2,
        raw=b"abc",
    )
    logging.getLogger("other").warning("text", extra={"api_key": "k"})
    first = _parsed(lines)[0]
    assert first["prompt"] == REDACTED
    assert first["body"] == {"messages": REDACTED, "Authorization": REDACTED, "n": 1}
    assert first["parts"] == [{"text": REDACTED, "kind": "a"}]
    assert (first["tokens"], first["prompt_tokens"]) == (REDACTED, 2)
    assert first["raw"] == "[3 bytes]"
    assert "hello" not in lines.getvalue()


def test_counts_pass_where_lists_do_not() -> None:
    """`tokens` as a number is a measure, as a list it is what somebody wrote."""
    assert redact({"tokens": 5}) == {"tokens": 5}
    assert redact({"tokens": (1,)}) == {"tokens": REDACTED}
    assert redact({"API-Key": "x", "capability": "y"}) == {
        "API-Key": REDACTED,
        "capability": REDACTED,
    }
    deep: dict[str, Any] = {"a": {"a": {"a": {"a": {"a": {"prompt": "x"}}}}}}
    assert "x" not in json.dumps(redact(deep))


def test_tracebacks_carry_no_local_variables(lines: io.StringIO) -> None:
    """Locals hold prompts and keys."""

    def fail(prompt: str) -> None:
        raise ValueError(len(prompt))

    try:
        fail("the secret prompt" + "!")
    except ValueError:
        structlog.stdlib.get_logger().exception("call_failed")
    (line,) = _parsed(lines)
    assert "ValueError: 18" in line["exception"]
    assert "secret prompt!" not in lines.getvalue()


def test_the_console_form_is_for_people() -> None:
    """On a terminal lines are read, not parsed; locals stay out there too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        configure_logging("decode", log_format=LogFormat.CONSOLE, level="DEBUG", stream=stream)
        secret = "the secret " + "prompt"
        try:
            raise ValueError(len(secret))
        except ValueError:
            structlog.stdlib.get_logger().exception("call_failed", prompt=secret)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    assert "call_failed" in stream.getvalue()
    assert "Traceback" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_a_request_leaves_one_line_without_the_unknown(lines: io.StringIO) -> None:
    """One line a request answers most questions."""
    log_canonical_line(
        CanonicalLine(
            request_id="r1",
            tenant="acme",
            model="m",
            route="/v1/chat/completions",
            outcome="ok",
            prompt_tokens=10,
            output_tokens=3,
            ttft_ms=200.0,
        )
    )
    (line,) = _parsed(lines)
    assert (line["event"], line["outcome"]) == ("request_finished", "ok")
    assert (line["prompt_tokens"], line["ttft_ms"]) == (10, 200.0)
    assert "fallback" not in line
