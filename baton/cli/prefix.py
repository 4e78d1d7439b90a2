"""`baton prefix`: system prompts computed ahead and shared.

Owns: the command line's view of `/v1/prefixes`. Never does: tokenise or splice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from baton.cli.console import CommandFailed, ExitCode, checked_text, output, read_stdin
from baton.cli.gateway_http import (
    DEFAULT_URL,
    GatewayAddress,
    KeyOption,
    UrlOption,
    call,
    path_part,
)

PATH = "/v1/prefixes"
TEXT_BYTES_MAX = 4 * 1024 * 1024
TTL_S_MAX = 10 * 365 * 86_400.0
COLUMNS = ("name", "version", "status", "pin", "tokens", "id", "model", "expires")

app = typer.Typer(no_args_is_help=True, help="Publish system prompts ahead, list and revoke them.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]


def read_content(text: str | None, file: Path | None) -> str:
    """The prompt from --text, --file or, with `--file -`, stdin; refused when empty or huge."""
    if (text is None) == (file is None):
        raise CommandFailed("give the prompt by either --text or --file", exit_code=ExitCode.USAGE)
    if text is None:
        assert file is not None
        text = _read_file(file)
    if not text.strip():
        raise CommandFailed("the prompt is empty", exit_code=ExitCode.USAGE)
    if len(checked_text(text, "the prompt").encode()) > TEXT_BYTES_MAX:
        raise CommandFailed(f"the prompt is over {TEXT_BYTES_MAX} bytes", exit_code=ExitCode.USAGE)
    return text


def _read_file(file: Path) -> str:
    try:
        if str(file) == "-":
            return read_stdin(TEXT_BYTES_MAX + 1)
        with file.open(encoding="utf-8") as stream:
            return stream.read(TEXT_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as problem:
        raise CommandFailed(f"--file {file}: {problem}") from problem


def listed(answer: Any) -> list[dict[str, Any]]:
    """The entries of a list answer (`{"object": "list", "data": [...]}`)."""
    entries = answer.get("data") if isinstance(answer, dict) else answer
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CommandFailed(f"{PATH} did not answer with a list", remedy="is it a Baton gateway?")
    return entries


def show(entries: list[dict[str, Any]], as_json: bool) -> None:
    """Print prefixes as a table, or as one JSON array; below it why some do not serve."""
    if as_json:
        output().print(json.dumps(entries, ensure_ascii=False, indent=2), markup=False)
        return
    if not entries:
        output().print("no prefix is published; `baton prefix publish` makes one")
        return
    columns = [name for name in COLUMNS if any(entry.get(name) is not None for entry in entries)]
    table = Table(*columns, box=None, pad_edge=False)
    for entry in entries:
        table.add_row(*(Text(_cell(entry, name)) for name in columns))
    output().print(table)
    for entry in entries:
        if entry.get("detail"):
            output().print(
                f"{_cell(entry, 'name')} {_cell(entry, 'status')}: {_cell(entry, 'detail')}",
                markup=False,
            )


def _cell(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if name == "status" and entry.get("superseded_by") is not None:
        return f"{value}, superseded by {entry['superseded_by']}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


@app.command()
def publish(
    name: Annotated[str, typer.Argument(help="Name of the prefix, unique per tenant.")],
    text: Annotated[str | None, typer.Option(help="The system prompt itself.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with it; `-` is stdin.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Raw text, not a system message.")] = False,
    tenant: Annotated[
        list[str] | None, typer.Option(help="A tenant that may use it; repeatable, `*` is all.")
    ] = None,
    ttl_s: Annotated[
        float | None, typer.Option(min=1.0, max=TTL_S_MAX, help="Seconds it lives.")
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Keep it in memory until it is deleted.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Compute it in the background.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Compute a system prompt ahead and publish it.

    Again under the same name it is a new version, if anything about it is new.

    Example: baton prefix publish support --file system.txt --ttl-s 86400
    """
    content = read_content(text, file)
    body: dict[str, Any] = {"name": checked_text(name, "the name")}
    body |= {"text": content} if raw else {"messages": [{"role": "system", "content": content}]}
    body |= {"tenants": [checked_text(one, "--tenant") for one in tenant]} if tenant else {}
    body |= {"ttl_s": ttl_s} if ttl_s is not None else {}
    body |= {"pin": True} if pin else {}
    body |= {"wait": False} if no_wait else {}
    show([call(GatewayAddress(url=url, api_key=api_key), "POST", PATH, body)], as_json)


@app.command("list")
def list_prefixes(
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """List the prefixes that this key may use.

    Example: baton prefix list --json
    """
    show(listed(call(GatewayAddress(url=url, api_key=api_key), "GET", PATH, None)), as_json)


@app.command("show")
def show_prefix(
    name: Annotated[str, typer.Argument(help="Name or id of the prefix.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Print all that is known of one prefix, as JSON: status, version, both hashes, digests.

    Example: baton prefix show support
    """
    path = f"{PATH}/{path_part(name)}"
    answer = call(GatewayAddress(url=url, api_key=api_key), "GET", path, None)
    output().print(json.dumps(answer, ensure_ascii=False, indent=2), markup=False)


@app.command()
def delete(
    name: Annotated[str, typer.Argument(help="Name or id of the prefix.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Revoke a prefix, by name all its versions: new requests do not find it; running ones keep
    what they hold.

    Example: baton prefix delete support
    """
    path = f"{PATH}/{path_part(name)}"
    call(GatewayAddress(url=url, api_key=api_key), "DELETE", path, None)
    output().print(f"revoked {name}", markup=False)
