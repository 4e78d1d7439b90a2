"""`baton doctor --probe`: addresses, percentiles, and what is said of the figures."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from baton.cli import probe
from baton.cli.console import CommandFailed, ExitCode
from baton.cli.main import build_app
from baton.cli.probe import Level, Report


def level(at_once: int, rate: float) -> Level:
    """So many transfers at once, of `rate` bytes a second together."""
    return Level(
        at_once=at_once,
        transfers=8,
        size_bytes=1 << 20,
        p50_s=0.01,
        p99_s=0.02,
        worst_s=0.03,
        bytes_per_s=rate,
    )


REPORT = Report(
    address="10.0.0.2:7000",
    transports=("ucx", "stream"),
    token_bytes=23_040,
    round_trip_p50_s=0.001,
    round_trip_p99_s=0.002,
    levels=(level(1, 100e6), level(4, 110e6), level(8, 115.2e6)),
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.2", "10.0.0.2:7000"),
        ("kv-1.example:7411", "kv-1.example:7411"),
        ("[fd00::2]", "[fd00::2]:7000"),
        ("[fd00::2]:7411", "[fd00::2]:7411"),
    ],
)
def test_an_address_may_leave_its_port_out(text: str, address: str) -> None:
    """The port of docker-compose.yml."""
    assert probe.address_of(text) == address


@pytest.mark.parametrize(
    "text", ["", ":7000", "host:", "host:0", "host:65536", "host:x", "fd00::2"]
)
def test_what_is_no_address_is_refused_before_anything_is_sent(text: str) -> None:
    """Exit code 2 and how to write one."""
    with pytest.raises(CommandFailed) as caught:
        probe.address_of(text)
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.remedy is not None


def test_percentiles_are_values_that_were_measured() -> None:
    """Nearest rank: the 99th of a few is the worst of them."""
    assert probe.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert probe.percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0


def test_the_prediction_is_bytes_over_the_share_of_one_transfer() -> None:
    """23.04 MB at 100 MB/s; as one of eight at an eighth of 115.2 MB/s."""
    assert REPORT.transfer_s(REPORT.levels[0]) == pytest.approx(0.2314)
    assert REPORT.transfer_s(REPORT.levels[2]) == pytest.approx(1.601)
    said = " ".join(probe.meaning(REPORT))
    assert "0.231 s alone" in said
    assert "1.601 s as one of 8" in said


def test_the_report_for_programs_has_every_level() -> None:
    """Plain JSON."""
    parsed = json.loads(json.dumps(probe.as_object(REPORT)))
    assert [one["at_once"] for one in parsed["levels"]] == [1, 4, 8]
    assert parsed["levels"][0]["predicted_transfer_s"] == pytest.approx(0.2314)


def test_nobody_there_is_one_line() -> None:
    """Exit code 3, no traceback."""
    result = CliRunner().invoke(build_app(), ["doctor", "--probe", "127.0.0.1:9"])
    assert isinstance(result.exception, CommandFailed)
    assert result.exception.exit_code is ExitCode.UNREACHABLE
    assert "127.0.0.1:9" in result.exception.one_line()
