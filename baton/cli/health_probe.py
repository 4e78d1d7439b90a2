"""Asking one service whether it is up: the probe of containers and of `baton health`.

Owns both questions (HTTP health page, gRPC health service) and their answers as one line. Light on
purpose: it runs every few seconds beside every service, so the HTTP side needs the standard library
only and gRPC is imported when asked for. Never retries: whoever runs it does.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 3.0
ANSWER_BYTES_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer: up or not, and why in a few words."""

    is_up: bool
    detail: str


def ask_http(url: str, *, timeout_s: float = TIMEOUT_S) -> Health:
    """Up if `url` (such as http://127.0.0.1:8080/readyz) answers 200 within `timeout_s`."""
    if not url.startswith(("http://", "https://")):
        return Health(is_up=False, detail=f"{url} is no http:// address")
    # A proxy of the environment has no business between a service and its own probe.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return Health(is_up=answer.status == 200, detail=f"{url}: HTTP {answer.status}")
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
        return Health(is_up=False, detail=f"{url}: HTTP {error.code}: {' '.join(text.split())}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Health(is_up=False, detail=f"{url}: {error}")


def ask_grpc(address: str, *, service: str = "", timeout_s: float = TIMEOUT_S) -> Health:
    """Up if the gRPC health service at `address` (host:port) says SERVING within `timeout_s`.

    `service` is a full service name, `liveness` or `readiness`; empty asks for the whole server.
    """
    import grpc  # deferred: the HTTP probe must not pay for it
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return Health(is_up=False, detail=f"{address}: {error.code().name}: {error.details()}")
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    is_up = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Health(is_up=is_up, detail=f"{address}: {state}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m baton.cli.health_probe`; exit status 0 up, 1 not, 2 wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m baton.cli.health_probe", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--http", metavar="URL")
    which.add_argument("--grpc", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S")
    given = parser.parse_args(argv)
    if given.http is not None:
        found = ask_http(given.http, timeout_s=given.timeout_s)
    else:
        found = ask_grpc(given.grpc, service=given.service, timeout_s=given.timeout_s)
    sys.stdout.write(f"{'up' if found.is_up else 'down'}: {found.detail}\n")
    return 0 if found.is_up else 1


if __name__ == "__main__":
    sys.exit(main())
