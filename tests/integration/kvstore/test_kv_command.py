"""`baton kv` against a running kvstore: tables, JSON, and errors in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import operators_pb2
from baton.capability import DEV_KEY
from baton.cli.console import CommandFailed
from baton.cli.kv_store import Store, Target, resolve
from tests.integration.kvstore.harness import StoreProcess, connected
from tests.integration.kvstore.kv_runs import (
    CHINESE,
    HOME,
    PROMPT,
    Logs,
    Run,
    make_logs,
    of_json,
    runner,
)


@pytest.fixture(scope="module")
def logs(store: StoreProcess) -> Logs:
    """Made once."""
    return asyncio.run(make_logs(store))


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: StoreProcess,
    logs: Logs,
) -> Run:
    """At the store that others use as well."""
    return runner(monkeypatch, capsys, store)


# --- looking --------------------------------------------------------------------------------


def test_list_is_aligned_in_cells_and_its_ids_can_be_copied(run: Run, logs: Logs) -> None:
    """A Chinese tenant takes two cells a character; nothing is coloured where no terminal is."""
    ran = run("ls", "--limit", "500")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    head, *lines = ran.out.splitlines()
    at = cell_len(head[: head.index("PHASE")])
    phases = {line_part(line, at) for line in lines}
    assert phases <= {"kept", "decode", "prefill"}
    row = next(line for line in lines if CHINESE in line)
    shown = row.split()[0]
    assert logs.chinese.startswith(shown)
    assert logs.chinese in run("show", shown).out


def line_part(line: str, cells: int) -> str:
    """The word that begins so many cells from the left."""
    seen = 0
    for index, character in enumerate(line):
        if seen == cells:
            return line[index:].split()[0]
        seen += cell_len(character)
    raise AssertionError(line)


def test_list_filters_and_says_what_it_left_out(run: Run, logs: Logs) -> None:
    """By tenant and phase; `total` counts what matches."""
    found = of_json(run("ls", "--tenant", CHINESE, "--json"))
    assert [log["log_id"] for log in found["logs"]] == [logs.chinese]
    assert found["total"] == 1
    ran = run("ls", "--limit", "1", "--tenant", HOME)
    assert ran.out.splitlines()[-1] == "1 of 2 logs; --limit shows more"
    assert run("ls", "--phase", "moved").out == "no log matches\n"
    found = of_json(run("ls", "--tenant", HOME, "--phase", "kept", "--json"))
    assert [log["log_id"] for log in found["logs"]] == [logs.kept]


def test_json_of_a_log_has_the_same_keys_for_every_log(run: Run, logs: Logs) -> None:
    """Programs rely on them; absent is null."""
    keys = {
        tuple(of_json(run("show", log, "--json"))) for log in (logs.kept, logs.fork, logs.chinese)
    }
    assert len(keys) == 1
    shown = of_json(run("show", logs.fork, "--json"))
    assert shown["parent_log_id"] == logs.kept
    assert shown["expires"].endswith("Z")
    assert "token_ids" not in shown
    (host,) = (tier for tier in shown["tiers"] if tier["tier"] == "host")
    assert host["shared_pages"] + host["own_pages"] == 3


def test_lineage_draws_the_tree(run: Run, logs: Logs) -> None:
    """From any of its logs, and all trees without one."""
    drawn = run("lineage", logs.fork[:8]).out.splitlines()
    assert drawn[1].startswith(logs.kept[:12])
    assert drawn[2].startswith(f"└─ {logs.fork[:12]}")
    assert run("lineage", "--tenant", HOME).out.splitlines() == drawn
    found = of_json(run("lineage", "--tenant", HOME, "--json"))
    assert [(entry["log_id"], entry["depth"]) for entry in found["logs"]] == [
        (logs.kept, 0),
        (logs.fork, 1),
    ]


def test_usage_names_tiers_and_tenants(run: Run) -> None:
    """Pages of all tenants are no more than what is used."""
    (node,) = of_json(run("du", "--json"))["nodes"]
    (host,) = (tier for tier in node["tiers"] if tier["tier"] == "host")
    assert {one["tenant"] for one in host["tenants"]} >= {HOME, CHINESE}
    assert sum(one["pages"] for one in host["tenants"]) <= host["pages_used"]
    assert node["scrub"]["period_s"] == 3600.0
    shown = run("du").out
    assert CHINESE in shown
    scrub = shown.splitlines()[-len(node["scrub"]["tiers"])]
    assert scrub.startswith("host   1 h    "), shown


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "at", "code", "words"),
    [
        (("ls",), "127.0.0.1:1", 3, "no kvstore answers at 127.0.0.1:1"),
        (("ls",), "nonsense", 2, "is no address"),
        (("show", "abcdef012345"), None, 1, "no log abcdef012345 here"),
        (("show", "xyz"), None, 2, "is no log id"),
        (("show", "abc"), None, 2, "is no log id"),
        (("ls", "--cluster-key-file", "KEY"), None, 1, "has another key"),
        (("ls", "--cluster-key-file", "MISSING"), None, 2, "cannot be read"),
        (("ls", "--run-dir", "NOWHERE"), "", 3, "no cluster runs in"),
        (("export", "KEPT", "FILE", "--tenant", "rival"), None, 1, "no log"),
        (("import", "MISSING", "--tenant", HOME), None, 1, "cannot read"),
    ],
)
def test_what_is_refused_says_why_in_one_line(
    run: Run,
    logs: Logs,
    tmp_path: Path,
    arguments: tuple[str, ...],
    at: str | None,
    code: int,
    words: str,
) -> None:
    """On stderr, with an exit code; and no file is left behind."""
    (tmp_path / "key").write_text("ab" * 32)
    names = {
        "KEY": tmp_path / "key",
        "MISSING": tmp_path / "missing",
        "NOWHERE": tmp_path / "run",
        "FILE": tmp_path / "file",
        "KEPT": logs.kept,
    }
    ran = run(*(str(names.get(word, word)) for word in arguments), at=at)
    assert ran.code == code, ran
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1, ran.err
    assert words in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


async def test_a_log_that_is_written_is_not_evicted(run: Run, store: StoreProcess) -> None:
    """The line says by whom; once it has ended it is, and says what stays."""
    async with connected(store) as site:
        worker = await site.attach("w-busy")
        log = await site.open(worker, [9, *PROMPT], cache_mode=common_pb2.CACHE_MODE_OFF)
        await worker.prefill(log, 5)
        ran = await asyncio.to_thread(run, "evict", log.log_id.hex())
        assert (ran.code, "worker w-busy writes it" in ran.err) == (1, True), ran
        await site.close(log)
        ran = await asyncio.to_thread(run, "evict", log.log_id.hex())
        assert f"evicted {log.log_id.hex()}" in ran.out
        assert f"{len(PROMPT) + 2} tokens stay" in ran.out
        await site.close(log, drop=True)


async def test_first_digits_that_two_logs_have_are_refused() -> None:
    """Rather than taking one of them; the digits of exactly one are enough."""
    ids = [bytes.fromhex("abcd" + digits * 14) for digits in ("01", "23")]

    class Stub:
        async def ListLogs(self, request: operators_pb2.ListLogsRequest) -> Any:
            found = [one for one in ids if one.hex().startswith(request.log_id_prefix.lower())]
            lines = [operators_pb2.LogSummary(log_id=one) for one in found[: request.page_size]]
            return operators_pb2.ListLogsResponse(logs=lines, total=len(found))

    class Fake(Store):
        @property
        def operators(self) -> Any:
            return Stub()

    stores = [Fake(Target(name="n", address="127.0.0.1:1"), DEV_KEY)]
    with pytest.raises(CommandFailed, match="2 logs begin with ABCD"):
        await resolve(stores, "ABCD")
    assert (await resolve(stores, "abcd2"))[1] == ids[1]
