"""`baton doctor`: each check on machines that have and have not what it looks for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.cli import checks
from baton.cli.checks import MIB, Status

REQUIREMENTS = [
    "grpcio==1.82.3",
    "numpy<2.5,>=2.2",
    'torch==2.13.0; extra == "engine"',
    'ruff==0.17.5; extra == "dev"',
]
GOOD = {"grpcio": "1.82.3", "numpy": "2.4.6", "torch": "2.13.0+cpu"}


def statuses(installed: dict[str, str]) -> dict[str, Status]:
    """Status by package."""
    found = checks.check_packages(REQUIREMENTS, installed.get)
    return {check.name: check.status for check in found}


def test_python_before_3_11_fails() -> None:
    """The remedy names the variable of `make setup`."""
    assert checks.check_python((3, 11, 7)).status is Status.OK
    old = checks.check_python((3, 10, 12))
    assert old.status is Status.FAIL
    assert "PYTHON=" in old.remedy


def test_pins_of_the_product_are_compared_and_those_of_tools_are_not() -> None:
    """ruff is nobody's business at run time."""
    assert statuses(GOOD) == {"grpcio": Status.OK, "torch": Status.OK, "numpy": Status.OK}


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"grpcio": "1.83.0"}, "grpcio", Status.FAIL),
        ({"numpy": "2.5.0"}, "numpy", Status.FAIL),
        ({"torch": "2.12.0"}, "torch", Status.WARN),
    ],
)
def test_a_wrong_version_is_told(change: dict[str, str], name: str, status: Status) -> None:
    """A wrong torch still serves; a wrong gRPC may lose calls."""
    assert statuses(GOOD | change)[name] is status


def test_without_torch_the_other_services_still_run() -> None:
    """A gateway's machine has no torch, and that is right."""
    without = {name: version for name, version in GOOD.items() if name != "torch"}
    assert statuses(without)["torch"] is Status.WARN


def test_a_free_port_a_taken_one_and_our_own() -> None:
    """A running gateway is not in its own way."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert checks.check_port("127.0.0.1", port, lambda *_: False).status is Status.FAIL
        assert checks.check_port("127.0.0.1", port, lambda *_: True).status is Status.OK
    assert checks.check_port("127.0.0.1", port, lambda *_: False).status is Status.OK


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    """192.0.2.1 is set aside for documents."""
    found = checks.check_port("192.0.2.1", 8080, lambda *_: False)
    assert found.status is Status.FAIL
    assert "192.0.2.1" in found.detail


@pytest.mark.parametrize(
    ("free", "available", "status"),
    [
        (256 * MIB, 256 * MIB, Status.OK),
        (256 * MIB, None, Status.OK),
        (256 * MIB - 1, 900 * MIB, Status.FAIL),
        (900 * MIB, 256 * MIB - 1, Status.FAIL),
        (None, None, Status.FAIL),
    ],
)
def test_the_arena_must_fit_into_shared_memory_and_memory(
    free: int | None, available: int | None, status: Status
) -> None:
    """It is touched whole at start: too small a tmpfs would be a SIGBUS later."""
    assert checks.check_shared_memory(free, available, 256 * MIB).status is status


@pytest.mark.parametrize(
    ("soft", "status"), [(4096, Status.OK), (1024, Status.WARN), (256, Status.FAIL)]
)
def test_the_open_file_limit(soft: int, status: Status) -> None:
    """Few descriptors are few streams."""
    assert checks.check_open_files(soft, 1_048_576).status is status


def test_a_compiler_is_found_by_name_or_by_cxx() -> None:
    """CXX is believed before the usual names."""
    have = {"clang++": "/usr/bin/clang++"}
    assert checks.check_compiler(have.get, {}).detail == "/usr/bin/clang++"
    assert checks.check_compiler(have.get, {"CXX": "g++-14"}).status is Status.WARN


def test_shm_is_usable_where_locks_exclude(tmp_path: Path) -> None:
    """The check takes the locks that the arena takes."""
    assert checks.check_shm_transport(tmp_path).status is Status.OK
    missing = checks.check_shm_transport(tmp_path / "missing")
    assert missing.status is Status.FAIL
    assert "missing" in missing.detail


def test_ucx_says_why_it_is_not_usable() -> None:
    """It is optional: its absence is no fault."""
    found = checks.check_ucx_transport("libucp.so.0: cannot open shared object file")
    assert found.status is Status.OK
    assert "libucp.so.0" in found.detail
    assert checks.check_ucx_transport(None).detail.startswith("usable")


def test_stream_needs_grpc() -> None:
    """Nothing else."""
    assert checks.check_stream_transport(True).status is Status.OK
    assert checks.check_stream_transport(False).status is Status.FAIL


@pytest.mark.parametrize(
    "name", ["BATON_CAPABILITY_KEY_FILE", "BATON_KVSTORE_CLUSTER_KEY", "BATON_CLUSTER_KEY_FILE"]
)
def test_the_development_key_is_told_and_the_real_one_never_shown(name: str) -> None:
    """The name of the variable is enough."""
    assert checks.check_capability_key({}).status is Status.WARN
    assert checks.check_capability_key({name: ""}).status is Status.WARN
    found = checks.check_capability_key({name: "secret"})
    assert found.status is Status.OK
    assert "secret" not in found.detail


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1:8080", True), ("localhost", True), ("[::1]:80", True), ("::1", True),
        ("unix:/run/a.sock", True), ("127.8.9.1", True), ("0.0.0.0:8080", False),
        ("[::]:80", False), ("10.0.0.3", False), ("127.0.0.1.example.org", False), ("", False),
    ],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(address: str, is_local: bool) -> None:
    """An empty host listens everywhere."""
    assert checks.is_loopback(address) is is_local


def test_an_address_beyond_loopback_is_shown() -> None:
    """With the variable that set it."""
    assert checks.check_bind_addresses({"BATON_GATEWAY_HOST": "127.0.0.1"}).status is Status.OK
    found = checks.check_bind_addresses({"BATON_GATEWAY_HOST": "0.0.0.0", "PATH": "0.0.0.0"})
    assert found.status is Status.WARN
    assert found.detail == "beyond loopback: BATON_GATEWAY_HOST=0.0.0.0"
