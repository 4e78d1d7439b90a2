"""`baton prefix`: what is sent and what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import FakeGateway

ENTRY = {"id": "p1", "name": "support", "tokens": 42, "status": "ready"}


def test_publish_sends_a_system_message(run: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    """Only what was asked for is in the body."""
    file = tmp_path / "system.txt"
    file.write_text("Be kind. [b]ä[/b]", encoding="utf-8")
    gateway.answer("POST /v1/prefixes", ENTRY)
    ran = run("prefix", "publish", "support", "--file", str(file), "--url", gateway.url)
    assert ran.code == 0
    assert "support" in ran.out
    assert "42" in ran.out
    assert gateway.seen[0].body == {
        "name": "support",
        "messages": [{"role": "system", "content": "Be kind. [b]ä[/b]"}],
    }


def test_publish_passes_every_option_on(run: Run, gateway: FakeGateway) -> None:
    """Raw text from stdin, tenants, time to live, pin."""
    gateway.answer("POST /v1/prefixes", ENTRY)
    options = ["--file", "-", "--raw", "--tenant", "a", "--tenant", "b", "--ttl-s", "60", "--pin"]
    ran = run("prefix", "publish", "x", *options, "--url", gateway.url, stdin="Raw.")
    assert ran.code == 0
    assert gateway.seen[0].body == {
        "name": "x", "text": "Raw.", "tenants": ["a", "b"], "ttl_s": 60.0, "pin": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options", [[], ["--text", "a", "--file", "b"], ["--text", " "]], ids=["none", "both", "empty"]
)
def test_publish_needs_exactly_one_prompt(
    run: Run, gateway: FakeGateway, options: list[str]
) -> None:
    """Refused before anything is sent."""
    assert run("prefix", "publish", "x", *options, "--url", gateway.url).code == 2
    assert gateway.seen == []


def test_publish_names_a_file_it_cannot_read(run: Run, gateway: FakeGateway) -> None:
    """The path is in the message."""
    ran = run("prefix", "publish", "x", "--file", "/nowhere/a.txt", "--url", gateway.url)
    assert ran.code == 1
    assert "/nowhere/a.txt" in ran.err


def test_list_shows_a_table_or_json(run: Run, gateway: FakeGateway) -> None:
    """People and programs."""
    gateway.answer("GET /v1/prefixes", {"object": "list", "data": [ENTRY]})
    table = run("prefix", "list", "--url", gateway.url)
    assert "support" in table.out
    assert json.loads(run("prefix", "list", "--json", "--url", gateway.url).out) == [ENTRY]


def test_list_says_what_does_not_serve_and_why(run: Run, gateway: FakeGateway) -> None:
    """Version, pin and status of each; the reason of a stale or failed one below the table."""
    stale = {**ENTRY, "status": "stale", "version": 2, "pin": True, "detail": "hash [aa] not [bb]"}
    old = {**ENTRY, "version": 1, "pin": False, "superseded_by": 2}
    gateway.answer("GET /v1/prefixes", {"object": "list", "data": [stale, old]})
    lines = run("prefix", "list", "--url", gateway.url).out.splitlines()
    assert lines[0].split()[:4] == ["name", "version", "status", "pin"]
    assert lines[1].split()[:4] == ["support", "2", "stale", "yes"]
    assert "superseded by 2" in lines[2]
    assert lines[3] == "support stale: hash [aa] not [bb]"


def test_publish_in_the_background_and_show(run: Run, gateway: FakeGateway) -> None:
    """The id comes at once; all of it can be asked for later."""
    gateway.answer("POST /v1/prefixes", {**ENTRY, "status": "pending"}, status=202)
    ran = run("prefix", "publish", "x", "--text", "Hi.", "--no-wait", "--url", gateway.url)
    assert ran.code == 0
    assert gateway.seen[0].body["wait"] is False
    gateway.answer("GET /v1/prefixes/support", ENTRY)
    assert json.loads(run("prefix", "show", "support", "--url", gateway.url).out) == ENTRY


def test_list_says_when_there_is_none(run: Run, gateway: FakeGateway) -> None:
    """An empty table looks like a fault."""
    gateway.answer("GET /v1/prefixes", {"object": "list", "data": []})
    assert "no prefix" in run("prefix", "list", "--url", gateway.url).out


def test_delete_escapes_the_name(run: Run, gateway: FakeGateway) -> None:
    """A name may hold a slash."""
    gateway.answer("DELETE /v1/prefixes/a%2Fb", {})
    assert run("prefix", "delete", "a/b", "--url", gateway.url).code == 0


def test_a_missing_key_names_the_variable(run: Run, gateway: FakeGateway) -> None:
    """401 has one remedy."""
    gateway.answer("GET /v1/prefixes", {"error": {"message": "who are you?"}}, status=401)
    ran = run("prefix", "list", "--url", gateway.url)
    assert ran.code == 1
    assert "BATON_API_KEY" in ran.err


def test_an_answer_that_is_no_json_is_told(run: Run, gateway: FakeGateway) -> None:
    """Another program may listen on that port."""
    gateway.answer("GET /v1/prefixes", {})
    gateway.replies["GET /v1/prefixes"].body = b"<html>"
    ran = run("prefix", "list", "--url", gateway.url)
    assert ran.code == 1
    assert "is it a Baton gateway" in ran.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show", "\udcff"), "the name is not UTF-8 text"),
        (("publish", "\udcff", "--text", "Hi."), "the name is not UTF-8 text"),
        (("publish", "x", "--text", "Hi.", "--tenant", "\udcff"), "--tenant is not UTF-8 text"),
        (("publish", "x", "--text", "Hi.", "--ttl-s", "inf"), "'--ttl-s'"),
        (("list", "--api-key", "k\u00e9y"), "--api-key has characters that no header can hold"),
        (("list", "--url", "http://xn--a:1"), "is not an address"),
        (("list", "--url", "http://a\x01b:1"), "is not an address"),
    ],
)
def test_what_can_be_sent_nowhere_is_refused(
    run: Run, gateway: FakeGateway, arguments: tuple[str, ...], told: str
) -> None:
    """With a line that names it, not a traceback."""
    ran = run("prefix", arguments[0], "--url", gateway.url, *arguments[1:])
    assert ran.code == 2
    assert told in ran.err
    assert gateway.seen == []


def test_a_table_shows_brackets_as_they_are(run: Run, gateway: FakeGateway) -> None:
    """A model's folder may have any name."""
    gateway.answer("GET /v1/prefixes", {"object": "list", "data": [{**ENTRY, "model": "m[/b]"}]})
    assert "m[/b]" in run("prefix", "list", "--url", gateway.url).out
