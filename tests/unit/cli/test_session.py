"""`baton session`: what is sent and what is shown, the tree above all."""

from __future__ import annotations

from typing import Any

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_gateway import FakeGateway

ENTRY = {
    "id": "sess-a",
    "object": "session",
    "generation": 3,
    "tokens": 46,
    "parent": None,
    "created": 1,
    "expires": 2,
}
CHANGED = {
    **ENTRY,
    "reused_tokens": 40,
    "recomputed_tokens": 6,
    "dropped_tokens": 2,
    "inserted_tokens": 1,
}


def log(name: str, depth: int, parent: str | None = None, **fields: Any) -> dict[str, Any]:
    """One log of a tree."""
    return {
        "log_id": name,
        "parent_log_id": parent,
        "parent_position": 7,
        "tokens": 46,
        "prompt_tokens": 40,
        "request_id": None,
        "opened": 1,
        "sessions": [],
        "gone": False,
        "depth": depth,
        **fields,
    }


def test_show_draws_the_tree(run: Run, gateway: FakeGateway) -> None:
    """Branches, where each left its parent, its id, which sessions name it."""
    lineage = [
        log("r", 0, gone=True),
        log("a", 1, "r", request_id="req1"),
        log("b", 2, "a"),
        log("c", 3, "b", sessions=["sess-a", "sess-b"]),
        log("d", 2, "a"),
        log("e", 1, "r"),
    ]
    messages = [{"role": "user", "content": "Wo ist 巴黎? [b]x[/b]"}]
    gateway.answer("GET /v1/sessions/sess-a", {**ENTRY, "messages": messages, "lineage": lineage})
    ran = run("session", "show", "sess-a", "--url", gateway.url)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "sess-a  generation 3, 46 tokens",
        "user: Wo ist 巴黎? [b]x[/b]",
        "",
        "r  gone",
        "├─ a  46 tokens  from 7  id req1",
        "│  ├─ b  46 tokens  from 7",
        "│  │  c  46 tokens  from 7  <- sess-a  <- sess-b",
        "│  └─ d  46 tokens  from 7",
        "└─ e  46 tokens  from 7",
    ]


def test_list_shows_a_table_or_says_how_to_make_one(run: Run, gateway: FakeGateway) -> None:
    """Never an empty screen."""
    gateway.answer("GET /v1/sessions", {"object": "list", "data": [ENTRY]})
    ran = run("session", "ls", "--url", gateway.url)
    head, row = ran.out.splitlines()
    assert head.split() == ["id", "generation", "tokens", "parent", "created", "expires"]
    assert row.split()[:3] == ["sess-a", "3", "46"]
    assert row.split()[-4].count("-") == 2
    gateway.answer("GET /v1/sessions", {"object": "list", "data": []})
    assert "POST /v1/sessions" in run("session", "ls", "--url", gateway.url).out


def test_changes_send_what_was_asked_and_say_what_they_took(run: Run, gateway: FakeGateway) -> None:
    """An edit by text, a cut, a fork of an answer, an end."""
    for action in ("edit", "truncate", "fork"):
        gateway.answer(f"POST /v1/sessions/sess-a/{action}", CHANGED)
    gateway.answer("DELETE /v1/sessions/sess-a", {"deleted": True})
    edited = run("session", "edit", "sess-a", "of 巴黎", "of 罗马", "--url", gateway.url)
    assert edited.out == "generation 3: 40 tokens reused, 6 recomputed, 2 dropped\n"
    cut = run("session", "truncate", "sess-a", "20", "--url", gateway.url)
    assert cut.out == "generation 3: 46 tokens kept, 2 dropped\n"
    forked = run("session", "fork", "sess-a", "--position", "5", "--url", gateway.url)
    assert forked.out.strip() == "sess-a"
    assert run("session", "rm", "sess-a", "--url", gateway.url).code == 0
    assert [one.body for one in gateway.seen] == [
        {"start": {"text": "of 巴黎"}, "replacement": "of 罗马"},
        {"position": 20},
        {"position": 5},
        None,
    ]


def test_a_refusal_is_shown_with_its_field(run: Run, gateway: FakeGateway) -> None:
    """The gateway's own words."""
    error = {"message": "start is a text that occurs more than once", "param": "start"}
    gateway.answer("POST /v1/sessions/sess-a/edit", {"error": error}, status=400)
    ran = run("session", "edit", "sess-a", "a", "b", "--url", gateway.url)
    assert ran.code == 1
    assert "occurs more than once" in ran.err
