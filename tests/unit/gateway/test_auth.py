"""Keys to tenants, and tenants files with faults."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Reason, ServiceError, StartupError
from services.gateway.auth import Authenticator, load_tenants, tenants_from

HASHED = "sha256:" + hashlib.sha256(b"secret").hexdigest()
DOCUMENT: dict[str, Any] = {
    "tenants": [
        {"name": "acme", "keys": ["key-a", HASHED]},
        {"name": "globex", "teams": [{"name": "blue", "keys": ["key-blue"]}]},
    ]
}


def test_plain_and_hashed_keys_name_tenant_and_team() -> None:
    """The scheme's case does not matter, the key's does."""
    guard = Authenticator(tenants_from(DOCUMENT, Path("t")), is_open=False)
    assert guard.tenant_of("Bearer key-a").name == "acme"
    assert guard.tenant_of("bearer secret").name == "acme"
    blue = guard.tenant_of("Bearer key-blue")
    assert (blue.name, blue.team) == ("globex", "blue")
    assert guard.tenants() == ("acme", "globex")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic key-a", "key-a", "Bearer key-a ",
     "Bearer KEY-A", "Bearer " + "x" * 5000, f"Bearer {HASHED}", "Bearer key-a\x00"],
)  # fmt: skip
def test_anything_else_is_unauthenticated(header: str | None) -> None:
    """A hash from the file is no key either."""
    guard = Authenticator(tenants_from(DOCUMENT, Path("t")), is_open=False)
    with pytest.raises(ServiceError) as refused:
        guard.tenant_of(header)
    assert refused.value.reason is Reason.UNAUTHENTICATED


def test_without_a_file_loopback_is_dev_and_anything_else_is_closed() -> None:
    """Open access is for this host only; a key is welcome and not needed."""
    assert Authenticator((), is_open=True).tenant_of(None).name == "dev"
    assert Authenticator((), is_open=True).tenant_of("Bearer any").name == "dev"
    with pytest.raises(ServiceError):
        Authenticator((), is_open=False).tenant_of("Bearer any")


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ([], "tenants"),
        ({"tenants": []}, "tenants"),
        ({"tenants": [{"name": "../x", "keys": ["k"]}]}, "tenants[0].name"),
        ({"tenants": [{"name": "a", "keyz": ["k"]}]}, "tenants[0]"),
        ({"tenants": [{"name": "a", "keys": "k"}]}, "tenants[0].keys"),
        ({"tenants": [{"name": "a", "keys": [5]}]}, "tenants[0].keys[0]"),
        ({"tenants": [{"name": "a", "keys": [""]}]}, "tenants[0].keys[0]"),
        ({"tenants": [{"name": "a", "keys": []}]}, "no key"),
        ({"tenants": [{"name": "a", "keys": ["k", "k"]}]}, "twice"),
        ({"tenants": [{"name": "a", "keys": ["k"]}, {"name": "a", "keys": ["l"]}]}, "twice"),
        ({"tenants": [{"name": "a", "teams": [{"name": "b", "teams": []}]}]}, "teams[0]"),
    ],
)
def test_faulty_tenants_file_stops_the_start_naming_the_entry(document: Any, where: str) -> None:
    """Nobody runs with half a tenants file."""
    with pytest.raises(StartupError) as refused:
        tenants_from(document, Path("t"))
    assert where in refused.value.message
    assert refused.value.exit_code == 2


def test_unreadable_files_are_start_errors(tmp_path: Path) -> None:
    """Missing, and no YAML."""
    with pytest.raises(StartupError):
        load_tenants(tmp_path / "none")
    (tmp_path / "bad").write_text("tenants: [")
    with pytest.raises(StartupError):
        load_tenants(tmp_path / "bad")
