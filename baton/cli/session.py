"""`baton session`: conversations under names, their trees and edits.

Owns: the command line's view of `/v1/sessions`. Never does: tokenise.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.cli.console import CommandFailed, checked_text, output
from baton.cli.gateway_http import (
    DEFAULT_URL,
    GatewayAddress,
    KeyOption,
    UrlOption,
    call,
    path_part,
)
from baton.cli.prefix import listed

PATH = "/v1/sessions"
COLUMNS = ("id", "generation", "tokens", "parent", "created", "expires")
TIMES = ("created", "expires")

app = typer.Typer(no_args_is_help=True, help="List, show, edit, fork and delete sessions.")

IdArgument = Annotated[str, typer.Argument(help="Id of the session.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]


def _print_json(value: Any) -> None:
    output().print(json.dumps(value, ensure_ascii=False, indent=2), markup=False, highlight=False)


def _path(session_id: str, action: str = "") -> str:
    return f"{PATH}/{path_part(session_id)}{action}"


@app.command("ls")
def list_sessions(
    as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None
) -> None:
    """List your sessions.

    Example: baton session ls
    """
    entries = listed(call(GatewayAddress(url=url, api_key=api_key), "GET", PATH, None))
    if as_json:
        _print_json(entries)
        return
    if not entries:
        output().print("there is no session; POST /v1/sessions makes one")
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for entry in entries:
        table.add_row(*(_cell(name, entry.get(name)) for name in COLUMNS))
    output().print(table)


def _cell(name: str, value: Any) -> str:
    if name in TIMES and isinstance(value, int):
        return datetime.fromtimestamp(value, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "" if value is None else str(value)


@app.command()
def show(
    session_id: IdArgument,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Show a session's messages, and the tree of logs that it grew in.

    Example: baton session show sess-75667a89790c4a28d48517a3
    """
    told = call(GatewayAddress(url=url, api_key=api_key), "GET", _path(session_id), None)
    if as_json:
        _print_json(told)
        return
    if not isinstance(told, dict):
        raise CommandFailed("the answer is no session", remedy="is it a Baton gateway?")
    out = output()
    out.print(
        f"{told['id']}  generation {told['generation']}, {told['tokens']} tokens",
        markup=False,
        highlight=False,
    )
    for message in told["messages"]:
        out.print(f"{message['role']}: {message['content']}", markup=False, highlight=False)
    out.print()
    for line in _tree(told["lineage"]):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _tree(lineage: list[dict[str, Any]]) -> list[str]:
    """The logs of a tree, parents before children: siblings branch off, an only child stands below
    its parent, so that a long conversation stays as narrow as it is.
    """
    parents = _parents(lineage)
    left = Counter(parents)
    is_branching = {parent: count > 1 for parent, count in left.items()}
    trunks: dict[int, str] = {}
    lines: list[str] = []
    for index, (log, parent) in enumerate(zip(lineage, parents, strict=True)):
        trunk = trunks.get(parent, "")
        left[parent] -= 1
        branch = ""
        if parent >= 0 and is_branching[parent]:
            branch = "├─ " if left[parent] else "└─ "
        trunks[index] = trunk + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        lines.append(f"{trunk}{branch}{_log_line(log)}")
    return lines


def _parents(lineage: list[dict[str, Any]]) -> list[int]:
    """The index of each log's parent, by depth; -1 for roots."""
    way: list[int] = []
    parents: list[int] = []
    for index, log in enumerate(lineage):
        del way[log["depth"] :]
        parents.append(way[-1] if way else -1)
        way.append(index)
    return parents


def _log_line(log: dict[str, Any]) -> str:
    """What a log is, where it left its parent, the id to go on from it, and who names it."""
    if log["gone"]:
        return f"{log['log_id']}  gone"
    parts = [log["log_id"], f"{log['tokens']} tokens"]
    if log["parent_log_id"]:
        parts.append(f"from {log['parent_position']}")
    if log["request_id"]:
        parts.append(f"id {log['request_id']}")
    parts += [f"<- {name}" for name in log["sessions"]]
    return "  ".join(parts)


@app.command()
def edit(
    session_id: IdArgument,
    text: Annotated[str, typer.Argument(help="A text that occurs exactly once.")],
    replacement: Annotated[str, typer.Argument(help="What comes there; empty deletes.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Replace a text; what stands behind it is kept and computed again.

    Example: baton session edit sess-75667a89790c4a28d48517a3 "of France" "of Spain"
    """
    body = {
        "start": {"text": checked_text(text, "the text")},
        "replacement": checked_text(replacement, "the replacement"),
    }
    told = call(GatewayAddress(url=url, api_key=api_key), "POST", _path(session_id, "/edit"), body)
    output().print(
        f"generation {told['generation']}: {told['reused_tokens']} tokens reused, "
        f"{told['recomputed_tokens']} recomputed, {told['dropped_tokens']} dropped",
        highlight=False,
    )


@app.command()
def fork(
    session_id: Annotated[str, typer.Argument(help="Id of a session or of a response.")],
    position: Annotated[int | None, typer.Option(min=1, help="Tokens to keep; else all.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Make a session that begins as another one, or an answer, does.

    Example: baton session fork sess-75667a89790c4a28d48517a3 --position 20
    """
    body = {} if position is None else {"position": position}
    told = call(GatewayAddress(url=url, api_key=api_key), "POST", _path(session_id, "/fork"), body)
    output().print(told["id"], markup=False, highlight=False)


@app.command()
def truncate(
    session_id: IdArgument,
    position: Annotated[int, typer.Argument(min=1, help="Tokens to keep.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Keep the first tokens of a session; nothing is computed.

    Example: baton session truncate sess-75667a89790c4a28d48517a3 20
    """
    path, body = _path(session_id, "/truncate"), {"position": position}
    told = call(GatewayAddress(url=url, api_key=api_key), "POST", path, body)
    output().print(
        f"generation {told['generation']}: {told['tokens']} tokens kept, "
        f"{told['dropped_tokens']} dropped",
        highlight=False,
    )


@app.command("rm")
def remove(session_id: IdArgument, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    """Delete a session; its logs stay for their own time.

    Example: baton session rm sess-75667a89790c4a28d48517a3
    """
    call(GatewayAddress(url=url, api_key=api_key), "DELETE", _path(session_id), None)
    output().print(f"deleted {session_id}", markup=False, highlight=False)
