"""`baton chat`: what a person or a pipe sees."""

from __future__ import annotations

import pytest

from baton.cli.chat_stream import Answer, event_data, read_answer
from baton.cli.console import CommandFailed
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import FakeGateway, piece

ROUTE = "POST /v1/chat/completions"


def test_a_piped_message_is_answered_on_stdout_alone(run: Run, gateway: FakeGateway) -> None:
    """`echo hi | baton chat > file` holds the answer and nothing else."""
    gateway.answer("GET /v1/models", {"data": [{"id": "m"}]})
    gateway.stream(ROUTE, piece("Par"), piece("is.", "stop"), "[DONE]")
    ran = run("chat", "--url", gateway.url, "--temperature", "0", stdin="Capital\nof France?\n")
    assert (ran.code, ran.out, ran.err) == (0, "Paris.\n", "")
    body = gateway.seen[-1].body
    assert body["model"] == "m"
    assert body["messages"] == [{"role": "user", "content": "Capital\nof France?"}]
    assert (body["temperature"], body["stream"]) == (0.0, True)


def test_the_key_of_the_environment_is_sent(
    run: Run, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on the command line would stand in `ps`."""
    monkeypatch.setenv("BATON_API_KEY", "k-123")
    monkeypatch.setenv("BATON_URL", gateway.url)
    gateway.stream(ROUTE, piece("x", "stop"), "[DONE]")
    assert run("chat", "--model", "m", "-m", "hi").code == 0
    assert gateway.seen[-1].authorization == "Bearer k-123"


def test_an_error_answer_is_one_line_with_a_remedy(run: Run, gateway: FakeGateway) -> None:
    """Code, status and when to retry, in one line on stderr."""
    error = {"message": "the queue is full", "code": "queue_full", "type": "server_error"}
    gateway.answer(ROUTE, {"error": error}, status=503, retry_after="2")
    ran = run("chat", "--url", gateway.url, "--model", "m", "-m", "hi")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == ("baton: the queue is full (queue_full) [HTTP 503]. try again in 2 s\n")


def test_an_error_in_the_middle_of_a_stream_is_told(run: Run, gateway: FakeGateway) -> None:
    """What came stays visible; the error does not hide behind it."""
    gateway.stream(ROUTE, piece("half"), {"error": {"message": "worker lost", "code": "w"}})
    ran = run("chat", "--url", gateway.url, "--model", "m", "-m", "hi")
    assert (ran.code, ran.out, ran.err) == (1, "half\n", "baton: worker lost (w)\n")


def test_a_stream_that_just_stops_is_an_error(run: Run, gateway: FakeGateway) -> None:
    """Without a finish_reason the answer may be cut."""
    gateway.stream(ROUTE, piece("half"))
    ran = run("chat", "--url", gateway.url, "--model", "m", "-m", "hi")
    assert ran.code == 1
    assert "broke off" in ran.err


def test_no_gateway_leaves_with_3_and_says_how_to_start_one(run: Run) -> None:
    """Port 9 of this machine has nobody behind it."""
    ran = run("chat", "--url", "http://127.0.0.1:9", "-m", "hi")
    assert ran.code == 3
    assert ran.err.startswith("baton: no gateway answers at http://127.0.0.1:9")
    assert "baton up" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://[", "ftp://localhost", "http://a:b", ""])
def test_a_bad_address_is_a_wrong_command_line(run: Run, url: str) -> None:
    """Not a traceback."""
    ran = run("chat", "--url", url, "-m", "hi")
    assert ran.code == 2
    assert ran.err.startswith("baton: --url")


def test_empty_input_is_refused(run: Run, gateway: FakeGateway) -> None:
    """Nothing is sent for nothing."""
    assert run("chat", "--url", gateway.url, stdin="  \n").code == 2
    assert gateway.seen == []


def test_bytes_that_are_no_utf8_are_refused(run: Run, gateway: FakeGateway) -> None:
    """They come in as surrogates, which no request can carry; a traceback told nobody why."""
    piped = run("chat", "--url", gateway.url, stdin="\udcff\udcfe")
    flag = run("chat", "--url", gateway.url, "--model", "m", "--message", "\udcff")
    prompt = run("prefix", "publish", "x", "--url", gateway.url, "--text", "\udcff")
    assert [ran.code for ran in (piped, flag, prompt)] == [2, 2, 2]
    assert piped.err == "baton: stdin is not UTF-8 text. convert it first\n"
    assert flag.err.startswith("baton: the message is not UTF-8")
    assert prompt.err.startswith("baton: the prompt is not UTF-8")
    assert not [seen for seen in gateway.seen if seen.method == "POST"]


def test_a_conversation_remembers_resets_and_survives_errors(
    run: Run, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error shows as a line, its turn is forgotten, and the next one works."""
    gateway.stream(ROUTE, piece("one", "stop"), "[DONE]")
    lines = iter(["first", "second", "BREAK", "/reset", "third", "/quit"])

    def typed(prompt: str) -> str:
        line = next(lines)
        broken = line == "BREAK"
        error = {"error": {"message": "no", "code": "c"}}
        gateway.stream(ROUTE, *([error] if broken else [piece("one", "stop"), "[DONE]"]))
        return line

    monkeypatch.setattr("builtins.input", typed)
    ran = run("chat", "--url", gateway.url, "--model", "m", "--system", "S", is_terminal=True)
    assert ran.code == 0
    system = {"role": "system", "content": "S"}
    turns = [[message["content"] for message in seen.body["messages"]] for seen in gateway.seen]
    assert turns == [
        ["S", "first"],
        ["S", "first", "one", "second"],
        ["S", "first", "one", "second", "one", "BREAK"],
        ["S", "third"],
    ]
    assert gateway.seen[0].body["messages"][0] == system
    assert "baton: no (c)" in ran.err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    run: Run, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation goes on with the half answer in it."""
    gateway.stream(ROUTE, piece("half "), piece("more", "stop"), "[DONE]")
    lines = iter(["first", "second"])
    interrupted: list[bool] = []

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    def interrupting(lines_: object, answer: Answer):
        for text in read_answer(lines_, answer):
            yield text
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("baton.cli.chat.read_answer", interrupting)
    ran = run("chat", "--url", gateway.url, "--model", "m", is_terminal=True)
    assert ran.code == 0
    assert "(stopped)" in ran.err
    contents = [message["content"] for message in gateway.seen[1].body["messages"]]
    assert contents == ["first", "half ", "second"]


def test_events_join_lines_and_skip_comments() -> None:
    """As the standard for server-sent events has it."""
    lines = [": ping", "", "event: x", "data: a", "data: b", "", "data:c"]
    assert list(event_data(lines)) == ["a\nb", "c"]


def test_usage_is_read_from_the_last_chunk() -> None:
    """It has no choices."""
    answer = Answer()
    usage = (
        '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
        '"prompt_tokens_details": {"cached_tokens": 4}}}'
    )
    chunk = '{"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]}'
    lines = [f"data: {chunk}", "", f"data: {usage}", "", "data: [DONE]", ""]
    assert list(read_answer(lines, answer)) == ["x"]
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 2, 4)


@pytest.mark.parametrize("data", ["not json", "[1]", '"text"'])
def test_a_chunk_that_is_no_object_is_refused(data: str) -> None:
    """Some other server answers there."""
    with pytest.raises(CommandFailed):
        list(read_answer([f"data: {data}", ""], Answer()))
