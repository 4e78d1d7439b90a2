"""`baton kv export` and `import` between two kvstores: what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from baton.api.kvstore.v1 import kvstore_pb2
from baton.cli.kv_blob_file import LogFile, portable, write_header
from baton.kv.blob import HEADER_BYTES, encode_header
from baton.wire.blob import header_from_descriptor
from tests.integration.kvstore.harness import (
    BLOCK,
    Model,
    StoreProcess,
    capability,
    connected,
    running_store,
)
from tests.integration.kvstore.kv_runs import HOME, PROMPT, Logs, Run, make_logs, of_json, runner

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def stores(
    store: StoreProcess, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Two kvstores; what is exported from one is imported into the other."""
    directory = tmp_path_factory.mktemp("kv-two")
    with running_store(model, directory, "--lease-s", "60", node_id="n1") as second:
        yield store, second


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
    """At the first store, unless another is named."""
    return runner(monkeypatch, capsys, store)


def test_an_exported_log_comes_back_byte_for_byte(
    run: Run, stores: tuple[StoreProcess, StoreProcess], logs: Logs, tmp_path: Path
) -> None:
    """Export, import at another kvstore, export there: the same file, readable by its owner only.
    Importing it again is refused; under another id it is the same but for that.
    """
    first, second, third = (tmp_path / name for name in ("one.bkv", "two.bkv", "three.bkv"))
    ran = run("export", logs.kept, str(first), "--tenant", HOME)
    assert ran.code == 0, ran.err
    assert f"{len(PROMPT) + 1} tokens in 1 blob" in ran.out
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert run("import", str(first), "--tenant", HOME, at=stores[1]).code == 0
    assert run("export", logs.kept, str(second), "--tenant", HOME, at=stores[1]).code == 0
    assert second.read_bytes() == first.read_bytes()
    ran = run("import", str(first), "--tenant", HOME, at=stores[1])
    assert (ran.code, "--new-id" in ran.err) == (1, True)
    copy = of_json(run("import", str(first), "--tenant", HOME, "--new-id", "--json"))
    assert copy["log_id"] != logs.kept
    assert run("export", copy["log_id"], str(third), "--tenant", HOME).code == 0
    old, new = first.read_bytes(), third.read_bytes()
    assert old[HEADER_BYTES:] == new[HEADER_BYTES:]
    different = {at for at in range(HEADER_BYTES) if old[at] != new[at]}
    assert different <= {*range(88, 104), *range(124, 128)}, "log_id and the header's CRC only"


def test_a_log_goes_to_another_tenant_only_when_that_is_said(
    run: Run, stores: tuple[StoreProcess, StoreProcess], logs: Logs, tmp_path: Path
) -> None:
    """The tenant is named by who imports; the file's is not taken over, and both are apart."""
    file = tmp_path / "log.bkv"
    run("export", logs.kept, str(file), "--tenant", HOME)
    ran = run("import", str(file), at=stores[1])
    assert ran.code == 2
    moved = of_json(
        run("import", str(file), "--tenant", "rival", "--new-id", "--json", at=stores[1])
    )
    assert of_json(run("show", moved["log_id"], "--json", at=stores[1]))["tenant"] == "rival"
    refused = run("export", moved["log_id"], str(tmp_path / "x"), "--tenant", HOME, at=stores[1])
    assert refused.code == 1
    assert "no log" in refused.err


def test_an_export_replaces_nothing_unasked(run: Run, logs: Logs, tmp_path: Path) -> None:
    """And what was there stays as it was; --force replaces it."""
    file = tmp_path / "log.bkv"
    file.write_text("mine")
    ran = run("export", logs.kept, str(file), "--tenant", HOME)
    assert (ran.code, "is there already" in ran.err) == (1, True)
    assert file.read_text() == "mine"
    assert run("export", logs.kept, str(file), "--tenant", HOME, "--force").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["log.bkv"]
    ran = run("export", logs.kept, str(tmp_path / "no" / "log.bkv"), "--tenant", HOME)
    assert (ran.code, "cannot write" in ran.err) == (1, True)


def damaged(data: bytes, how: str) -> bytes:
    """A file that somebody changed, and what is found to be wrong."""
    content = bytearray(data)
    match how:
        case "payload":
            content[-40] ^= 1
        case "header":
            content[30] ^= 1
        case "padding":
            content[HEADER_BYTES + 7] = 1
        case "short":
            del content[-1:]
        case "long":
            content += b"z"
        case "magic":
            content[0] = 0
        case "empty":
            content.clear()
    return bytes(content)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("payload", "payload_crc"),
        ("header", "header_crc"),
        ("padding", "padding"),
        ("short", "ends early"),
        ("long", "1 bytes present"),
        ("magic", "this is no KV blob"),
        ("empty", "0 bytes present"),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_is_stored(
    run: Run,
    stores: tuple[StoreProcess, StoreProcess],
    logs: Logs,
    tmp_path: Path,
    how: str,
    words: str,
) -> None:
    """The line names the file and what does not fit."""
    file = tmp_path / "log.bkv"
    run("export", logs.kept, str(file), "--tenant", HOME)
    file.write_bytes(damaged(file.read_bytes(), how))
    used = of_json(run("du", "--json", at=stores[1]))["nodes"][0]["tiers"][0]["pages_used"]
    ran = run("import", str(file), "--tenant", HOME, "--new-id", at=stores[1])
    assert ran.code == 1, ran
    assert len(ran.err.splitlines()) == 1
    assert str(file) in ran.err
    assert words in ran.err
    after = of_json(run("du", "--json", at=stores[1]))["nodes"][0]["tiers"][0]["pages_used"]
    assert after == used


def test_a_file_of_another_tokenizer_is_refused_before_its_checksums(
    run: Run, stores: tuple[StoreProcess, StoreProcess], logs: Logs, tmp_path: Path
) -> None:
    """Its ids mean other texts: that comes first, whatever else is wrong; then the model."""
    file = tmp_path / "log.bkv"
    run("export", logs.kept, str(file), "--tenant", HOME)
    data = file.read_bytes()
    with LogFile.opened(file) as opened:
        header = opened.parts[0].header
    for changes, words in (
        ({"tokenizer_hash": bytes(8), "model_digest": bytes(16)}, "tokenizer_hash differs"),
        ({"model_digest": bytes(16)}, "model_digest"),
        ({"kv_digest": bytes(16)}, "kv_digest"),
    ):
        foreign = encode_header(replace(header, **changes)) + data[HEADER_BYTES:-1] + b"\xff"
        file.write_bytes(foreign)
        ran = run("import", str(file), "--tenant", HOME, "--new-id", at=stores[1])
        assert ran.code == 1
        assert f"{file} was not imported: {words}" in ran.err, ran.err


def test_a_file_of_several_blobs_becomes_one_log(
    run: Run, stores: tuple[StoreProcess, StoreProcess], logs: Logs, tmp_path: Path
) -> None:
    """As a log of over 64 MiB is exported; a blob that is missing or twice is refused."""
    parts = asyncio.run(_ranges(stores[0], bytes.fromhex(logs.kept), (BLOCK, 2 * BLOCK, 0)))
    whole, again = tmp_path / "whole.bkv", tmp_path / "again.bkv"
    whole.write_bytes(b"".join(parts))
    done = of_json(run("import", str(whole), "--tenant", HOME, "--new-id", "--json", at=stores[1]))
    assert done["tokens"] == len(PROMPT) + 1
    assert run("export", done["log_id"], str(again), "--tenant", HOME, at=stores[1]).code == 0
    single = tmp_path / "single.bkv"
    run("export", logs.kept, str(single), "--tenant", HOME)
    assert again.read_bytes()[HEADER_BYTES:] == single.read_bytes()[HEADER_BYTES:]
    for wrong in (parts[1:], [parts[0], *parts], [parts[0], parts[2]]):
        whole.write_bytes(b"".join(wrong))
        ran = run("import", str(whole), "--tenant", HOME, "--new-id", at=stores[1])
        assert (ran.code, "first_position" in ran.err) == (1, True)


async def _ranges(store: StoreProcess, log_id: bytes, ends: tuple[int, ...]) -> list[bytes]:
    """Blobs of consecutive ranges, as they stand in a file."""
    found: list[bytes] = []
    text = capability(log_id, tenant=HOME)
    async with connected(store) as site:
        first = 0
        for end in ends:
            request = kvstore_pb2.GetBlobRequest(
                log_id=log_id, from_position=first, to_position=end, capability=text
            )
            pieces = [piece async for piece in site.stub.GetBlob(request)]
            header = portable(header_from_descriptor(pieces[0].descriptor))
            found.append(blob_bytes(header) + b"".join(piece.chunk for piece in pieces[1:]))
            first = end
    return found


def blob_bytes(header: Any) -> bytes:
    """A header and its gap, as they are written."""
    out = BytesIO()
    write_header(out, header)
    return out.getvalue()
