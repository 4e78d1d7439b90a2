"""Probes against a real kvstore: every byte is checked, sizes and rights are bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from baton.cli import probe
from baton.cli.console import CommandFailed
from baton.cli.main import build_app
from baton.errors import Reason, ServiceError
from services.kvstore.moving.probe_rpc import PROBE_BYTES_MAX, Allowance
from tests.integration.kvstore.harness import (
    Model,
    StoreProcess,
    capability,
    connected,
    running_store,
)


@pytest.fixture(scope="module")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """One kvstore."""
    with running_store(model, tmp_path_factory.mktemp("probed")) as running:
        yield running


def test_doctor_measures_the_way_to_a_kvstore(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line a level, and the prediction; the same as JSON."""
    monkeypatch.setattr(probe, "LEVEL_S", 0.01)
    monkeypatch.setattr(probe, "SIZE_BYTES_MAX", probe.CALIBRATION_BYTES)
    shown = CliRunner().invoke(build_app(), ["doctor", "--probe", store.address])
    assert shown.exit_code == 0, shown.output
    assert "p99 ms" in shown.output
    assert "A prompt of 1,000 tokens" in shown.output
    shown = CliRunner().invoke(build_app(), ["doctor", "--probe", store.address, "--json"])
    report = json.loads(shown.output)
    assert [level["at_once"] for level in report["levels"]] == [1, 4, 8]
    assert all(level["bytes_per_s"] > 0 for level in report["levels"])
    assert report["token_bytes"] == store.model.geometry.token_bytes
    assert "stream" in report["transports"]


def test_another_clusters_key_is_said_in_one_line(store: StoreProcess, tmp_path: Path) -> None:
    """With the remedy."""
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    argv = ["doctor", "--probe", store.address, "--cluster-key-file", str(key)]
    result = CliRunner().invoke(build_app(), argv)
    assert isinstance(result.exception, CommandFailed)
    assert "another key" in result.exception.one_line()
    assert "--cluster-key-file" in result.exception.one_line()


@pytest.mark.parametrize("size", [0, PROBE_BYTES_MAX + 1])
async def test_a_probe_has_a_bounded_size(store: StoreProcess, size: int) -> None:
    """INVALID_REQUEST naming the field."""
    operator = capability(tenant=None, rights=frozenset({Right.ADMIN}))
    request = kvstore_pb2.ProbeTransferRequest(capability=operator, size_bytes=size)
    async with connected(store) as site:
        with pytest.raises(ServiceError) as caught:
            async for _ in site.stub.ProbeTransfer(request):
                pass
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, "size_bytes")


def test_probes_get_a_burst_and_then_a_rate() -> None:
    """What is refused takes nothing, and says when it will be there."""
    allowance = Allowance(1000, 100.0)
    assert allowance.take(900, 0.0) == 0.0
    assert allowance.take(300, 0.0) == pytest.approx(2.0)
    assert allowance.take(300, 1.9) > 0.0
    assert allowance.take(300, 2.1) == 0.0
    assert allowance.take(1000, 1e6) == 0.0
