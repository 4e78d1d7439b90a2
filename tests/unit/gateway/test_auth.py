"""Keys to tenants, and tenants files with faults."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import Reason, ServiceError, StartupError
from baton.scheduling.claims import ServiceClass
from services.gateway.auth import Authenticator
from services.gateway.tenants_file import load_tenants, tenants_from

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


RANKED = """\
tenants:
  - name: acme
    keys: [key-a]
    priority: 5
    weight: 3
    teams:
      - name: night
        keys: [key-night]
        class: batch
        priority: -1
  - name: globex
    keys: [key-g]
    class: batch
  - {name: initech, keys: [key-i]}
"""


def test_class_priority_and_weight_are_the_tenants_and_a_team_may_have_its_own(
    tmp_path: Path,
) -> None:
    """Weight is of the whole tenant: shares are between tenants, not between teams."""
    file = tmp_path / "tenants.yaml"
    file.write_text(RANKED)
    guard = Authenticator(load_tenants(file), is_open=False)

    def ranks(key: str) -> tuple[ServiceClass, int, int]:
        one = guard.tenant_of(f"Bearer {key}")
        return (one.service_class, one.priority, one.weight)

    assert ranks("key-a") == (ServiceClass.INTERACTIVE, 5, 3)
    assert ranks("key-night") == (ServiceClass.BATCH, -1, 3)
    assert ranks("key-g") == (ServiceClass.BATCH, 0, 1)
    assert ranks("key-i") == (ServiceClass.INTERACTIVE, 0, 1)


@pytest.mark.parametrize(
    ("old", "new", "at", "remedy"),
    [
        ("weight: 3", "weight: 0", "line 5, tenants[0].weight", "a whole number from 1 to 1000"),
        ("weight: 3", "weight: 1.5", "line 5, tenants[0].weight", "a whole number"),
        ("weight: 3", "weight: true", "line 5, tenants[0].weight", "a whole number"),
        ("weight: 3", "weight: '3'", "line 5, tenants[0].weight", "a whole number"),
        ("weight: 3", "weigth: 3", "line 2, tenants[0]", "weight"),
        ("priority: 5", "priority: 101", "line 4, tenants[0].priority", "from -100 to 100"),
        ("priority: -1", "priority: -101", "line 10, tenants[0].teams[0].priority", "from -100"),
        ("    class: batch\n  -", "    class: slow\n  -", "line 13, tenants[1].class",
         "batch or interactive"),
        ("        class: batch", "        class: [batch]", "line 9, tenants[0].teams[0].class",
         "batch or interactive"),
        ("        class: batch", "        weight: 2", "line 7, tenants[0].teams[0]",
         "class, keys, name, priority"),
        ("keys: [key-i]", "keys: [5]", "line 14, tenants[2].keys[0]", "a string"),
        ("name: initech", "name: acme", "line 14, tenants[2].name", "one entry"),
        ("keys: [key-g]", "keys: [key-g", "line 13", "YAML"),
        ("keys: [key-g]", "keys: [2024-13-45]", "YAML", "in quotes"),
        ("  - {name: initech", "tenants:\n  - {name: initech", "line 14, tenants", "given twice"),
        ("    weight: 3", "    weight: 3\n    weight: 4", "line 6, tenants[0].weight",
         "given twice"),
    ],
)  # fmt: skip
def test_a_fault_names_the_field_the_line_and_what_to_write(
    tmp_path: Path, old: str, new: str, at: str, remedy: str
) -> None:
    """And shows no value: a key may stand in the wrong place."""
    file = tmp_path / "tenants.yaml"
    assert RANKED.count(old) == 1
    file.write_text(RANKED.replace(old, new))
    with pytest.raises(StartupError) as refused:
        load_tenants(file)
    message = refused.value.message
    assert at in message
    assert remedy in message
    assert "key-" not in message
    assert "docs/tenants.md" in (refused.value.hint or "")


def test_the_tenants_file_of_the_documentation_is_one() -> None:
    """What people copy works."""
    text = (Path(__file__).parents[3] / "docs" / "tenants.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n")[1].split("```")[0]
    rows = tenants_from(yaml.safe_load(example), Path("t"))
    tenants = {row.tenant for row in rows}
    assert {one.service_class for one in tenants} == set(ServiceClass)
    assert max(one.weight for one in tenants) > 1
    assert any(row.requests_per_minute for row in rows)


def test_unreadable_files_are_start_errors(tmp_path: Path) -> None:
    """Missing, and no YAML."""
    with pytest.raises(StartupError):
        load_tenants(tmp_path / "none")
    (tmp_path / "bad").write_text("tenants: [")
    with pytest.raises(StartupError):
        load_tenants(tmp_path / "bad")
