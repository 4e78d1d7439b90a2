"""Running `baton kv` inside the test process, and the logs it is asked about.

Owns the runner and the logs; asserts nothing but that JSON was printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.cli.main import main
from baton.ids import new_log_id, new_request_id
from tests.integration.kvstore.harness import BLOCK, StoreProcess, capability, connected

PROMPT = [3 + index % 90 for index in range(2 * BLOCK + 5)]
HOME = "kv-acme"
CHINESE = "kv-東京"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one command left behind."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """What stands in a store, as hex: a kept log of HOME, a fork of it, one of CHINESE."""

    kept: str
    fork: str
    chinese: str


Run = Callable[..., Ran]


async def make_logs(store: StoreProcess) -> Logs:
    """Makes them."""
    async with connected(store) as site:
        worker = await site.attach("w-kv")
        made = []
        for first, tenant in ((7, HOME), (8, CHINESE)):
            log_id = new_log_id()
            log = await site.open(
                worker,
                [first, *PROMPT],
                log_id=log_id,
                capability=capability(log_id, tenant=tenant),
                cache_mode=common_pb2.CACHE_MODE_OFF,
            )
            await worker.prefill(log, 5, "stop")
            await site.close(log)
            made.append(log_id)
        fork = kvstore_pb2.ForkRequest(log_id=new_log_id(), request_id=new_request_id())
        fork.parent.log_id, fork.parent.position = made[0], len(PROMPT)
        fork.capability = capability(None, tenant=HOME)
        await site.stub.Fork(fork)
        return Logs(kept=made[0].hex(), fork=fork.log_id.hex(), chinese=made[1].hex())


def runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: StoreProcess
) -> Run:
    """`baton kv ARGUMENTS` at a store, or at the one given as `at`; "" names none."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run_command(*arguments: str, at: StoreProcess | str | None = None) -> Ran:
        where = store if at is None else at
        address = where if isinstance(where, str) else where.address
        argv = ["baton", "kv", *arguments, *(["--kvstore", address] if address else [])]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        captured = capsys.readouterr()
        return Ran(code=code, out=captured.out, err=captured.err)

    return run_command


def of_json(ran: Ran) -> Any:
    """What a command printed with --json."""
    assert ran.code == 0, ran.err
    return json.loads(ran.out)
