"""`baton health`: whether one service answers, for people, scripts and probes.

Owns the command's form. Never does: ask (that is `baton.cli.health_probe`, which containers run by
itself because it starts faster).
"""

from __future__ import annotations

import urllib.parse
from typing import Annotated

import typer

from baton.cli import health_probe
from baton.cli.console import CommandFailed, ExitCode, output


def health(
    http: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A health page; /readyz where only a server is named."),
    ] = None,
    grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A service's gRPC server.")
    ] = None,
    service: Annotated[
        str, typer.Option(help="With --grpc: a full service name, liveness or readiness.")
    ] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=60.0, help="Seconds to wait.")
    ] = health_probe.TIMEOUT_S,
) -> None:
    """Ask one service whether it is up; leaves with 1 when it is not.

    Example: baton health --http http://127.0.0.1:8080
    """
    if http is not None and grpc is None:
        found = health_probe.ask_http(_page(http), timeout_s=timeout_s)
    elif grpc is not None and http is None:
        found = health_probe.ask_grpc(grpc, service=service, timeout_s=timeout_s)
    else:
        raise CommandFailed(
            "name one service: --http http://127.0.0.1:8080 or --grpc 127.0.0.1:8081",
            exit_code=ExitCode.USAGE,
        )
    output().print(f"{'up' if found.is_up else 'down'}: {found.detail}", markup=False)
    if not found.is_up:
        raise typer.Exit(ExitCode.FAILED)


def _page(url: str) -> str:
    """The page to ask: the one named, else the one that says whether requests are served."""
    return url if urllib.parse.urlsplit(url).path.strip("/") else url.rstrip("/") + "/readyz"
