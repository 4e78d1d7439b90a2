"""`baton session`: conversations under names, their trees and edits.

Owns: the command line's view of `/v1/sessions`. Never does: tokenise.
"""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from baton.cli.console import CommandFailed, checked_text, output
from baton.cli.gateway_http import DEFAULT_URL, GatewayAddress, KeyOption, UrlOption, call
from baton.cli.prefix import listed

PATH = "/v1/sessions"
COLUMNS = ("id", "generation", "tokens", "parent", "created", "expires")

app = typer.Typer(no_args_is_help=True, help="List, show, edit, fork and delete sessions.")

IdArgument = Annotated[str, typer.Argument(help="Id of the session.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]


def _print_json(value: Any) -> None:
    output().print(json.dumps(value, ensure_ascii=False, indent=2), markup=False, highlight=False)


def _path(session_id: str, action: str = "") -> str:
    return f"{PATH}/{quote(session_id, safe='')}{action}"


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
        table.add_row(*(str(entry.get(name) or "") for name in COLUMNS))
    output().print(table)


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
    for log in told["lineage"]:
        out.print(_branch(log), markup=False, highlight=False)


def _branch(log: dict[str, Any]) -> str:
    """One log of the tree, as deep as it stands."""
    indent = "  " * log["depth"]
    if log["gone"]:
        return f"{indent}{log['log_id']}  gone"
    names = "".join(f"  <- {name}" for name in log["sessions"])
    at = f" from {log['parent_position']}" if log["parent_log_id"] else ""
    return f"{indent}{log['log_id']}  {log['tokens']} tokens{at}{names}"


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


@app.command("rm")
def remove(session_id: IdArgument, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None) -> None:
    """Delete a session; its logs stay for their own time.

    Example: baton session rm sess-75667a89790c4a28d48517a3
    """
    call(GatewayAddress(url=url, api_key=api_key), "DELETE", _path(session_id), None)
    output().print(f"deleted {session_id}", markup=False, highlight=False)
