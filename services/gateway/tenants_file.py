"""The tenants file: who there is, with which keys, and what each is worth.

Owns its format and its checks; docs/tenants.md is for its writers. A fault stops the start and
names the field, its line and what to write instead, and never shows a value: a key may stand
anywhere by mistake. Nobody runs with half a tenants file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from baton.errors import StartupError
from baton.scheduling.claims import PRIORITY_MAX, WEIGHT_MAX, ServiceClass
from services.gateway.auth import KEY_CHARS_MAX, KeyRow, key_digest
from services.gateway.request import Tenant

FILE_BYTES_MAX: Final = 1 << 20
TENANTS_MAX: Final = 10_000
REQUESTS_PER_MINUTE_MAX: Final = 60_000
CLASSES: Final = {one.name.lower(): one for one in ServiceClass}
TEAM_FIELDS: Final = frozenset({"name", "keys", "class", "priority"})
TENANT_FIELDS: Final = TEAM_FIELDS | {"teams", "weight", "requests_per_minute"}

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}", re.ASCII)
_SHA256: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


class _Fault(Exception):
    """Something in the file is not as it must be: where (`tenants[0].keys`; empty: the whole file)
    and what to do.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why)
        self.where = where
        self.why = why


def load_tenants(path: Path) -> tuple[KeyRow, ...]:
    """The keys of a tenants file; StartupError naming field, line and remedy."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from error
    if len(raw) > FILE_BYTES_MAX:
        raise _bad(path, f"is larger than {FILE_BYTES_MAX} bytes")
    try:
        document = yaml.safe_load(raw)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}"
        raise _bad(path, f"is not YAML{at}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no UTF-8, or what looks like a date and is none.
        raise _bad(
            path, "is not YAML; a key that YAML takes for a date stands in quotes"
        ) from error
    try:
        _require_once(yaml.compose(raw, Loader=yaml.SafeLoader), "", set())
        return _checked(document)
    except _Fault as fault:
        raise _bad(path, _text(fault, line_of(raw, fault.where))) from fault


def tenants_from(document: Any, path: Path) -> tuple[KeyRow, ...]:
    """The keys of a parsed tenants file."""
    try:
        return _checked(document)
    except _Fault as fault:
        raise _bad(path, _text(fault, None)) from fault


def line_of(raw: bytes, where: str) -> int | None:
    """The line, from 1, of the field that is named so, or of the nearest one around it."""
    lines = dict(_lines(yaml.compose(raw, Loader=yaml.SafeLoader), ""))
    while where and where not in lines:
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    return lines.get(where)


def _lines(node: Any, where: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{where}.{key.value}" if where else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _lines(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            name = f"{where}[{index}]"
            yield name, item.start_mark.line + 1
            yield from _lines(item, name)


def _require_once(node: Any, where: str, seen: set[int]) -> None:
    """Of a field that is given twice YAML keeps the last: half a file would be lost in silence.

    `seen`: nodes by identity, since aliases make one stand in many places.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    names: set[str] = set()
    for at, inner in _fields(node, where):
        if at in names:
            raise _Fault(at, "is given twice; give each field once")
        names.add(at)
        _require_once(inner, at, seen)


def _fields(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """What a node of the file holds, and what it is called."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (f"{where}.{key.value}" if where else str(key.value)), value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{where}[{index}]", item


def _checked(document: Any) -> tuple[KeyRow, ...]:
    if not isinstance(document, dict) or set(document) != {"tenants"}:
        raise _Fault("", "must hold `tenants:` and nothing else")
    entries = document["tenants"]
    if not isinstance(entries, list) or not 0 < len(entries) <= TENANTS_MAX:
        raise _Fault("tenants", f"must be a list of 1 to {TENANTS_MAX} entries")
    rows: list[KeyRow] = []
    names: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"tenants[{index}]"
        name = _name(entry, where, TENANT_FIELDS)
        if name in names:
            raise _Fault(f"{where}.name", "is given twice; each tenant is one entry")
        names.add(name)
        rows += _tenant_rows(name, entry, where)
    _require_distinct(rows)
    return tuple(rows)


def _tenant_rows(name: str, entry: Mapping[str, Any], where: str) -> list[KeyRow]:
    """All keys of one tenant, those of its teams included."""
    weight = _whole(entry, "weight", (1, WEIGHT_MAX), where) or 1
    tenant = _ranked(Tenant(name=name, weight=weight), entry, where)
    rows = _rows(entry, where, tenant)
    for index, team in enumerate(_list(entry, "teams", where)):
        at = f"{where}.teams[{index}]"
        team_name = _name(team, at, TEAM_FIELDS)
        rows += _rows(team, at, _ranked(replace(tenant, team=team_name), team, at))
    limit = _whole(entry, "requests_per_minute", (1, REQUESTS_PER_MINUTE_MAX), where)
    return [replace(row, requests_per_minute=limit) for row in rows]


def _require_distinct(rows: list[KeyRow]) -> None:
    if len({row.digest for row in rows}) != len(rows):
        raise _Fault("", "one key is given twice; each key stands for one tenant and team")
    if not rows:
        raise _Fault("", "holds no key; nobody could get in")


def _name(entry: Any, where: str, allowed: frozenset[str]) -> str:
    if not isinstance(entry, dict) or not set(entry) <= allowed:
        raise _Fault(where, f"must be an object with {', '.join(sorted(allowed))} only")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Fault(f"{where}.name", "must be 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


def _ranked(tenant: Tenant, entry: Mapping[str, Any], where: str) -> Tenant:
    """The tenant with the class and the priority that an entry gives it; else with what it has."""
    wanted = entry.get("class")
    if wanted is not None:
        if not isinstance(wanted, str) or wanted not in CLASSES:
            raise _Fault(f"{where}.class", f"must be {' or '.join(sorted(CLASSES))}")
        tenant = replace(tenant, service_class=CLASSES[wanted])
    priority = _whole(entry, "priority", (-PRIORITY_MAX, PRIORITY_MAX), where)
    return tenant if priority is None else replace(tenant, priority=priority)


def _whole(entry: Mapping[str, Any], key: str, bounds: tuple[int, int], where: str) -> int | None:
    """A whole number of an entry; None where it has none."""
    number = entry.get(key)
    if number is None:
        return None
    if type(number) is not int or not bounds[0] <= number <= bounds[1]:
        raise _Fault(f"{where}.{key}", f"must be a whole number from {bounds[0]} to {bounds[1]}")
    return number


def _list(entry: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Fault(f"{where}.{key}", "must be a list")
    return value


def _rows(entry: Mapping[str, Any], where: str, tenant: Tenant) -> list[KeyRow]:
    rows: list[KeyRow] = []
    for index, key in enumerate(_list(entry, "keys", where)):
        if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARS_MAX:
            raise _Fault(
                f"{where}.keys[{index}]", f"must be a string of 1 to {KEY_CHARS_MAX} characters"
            )
        hashed = _SHA256.fullmatch(key)
        digest = bytes.fromhex(hashed[1]) if hashed else key_digest(key)
        rows.append(KeyRow(digest=digest, tenant=tenant))
    return rows


def _text(fault: _Fault, line: int | None) -> str:
    at = fault.where if line is None else f"line {line}, {fault.where}"
    return f"{at} {fault.why}".strip()


def _bad(path: Path, why: str) -> StartupError:
    return StartupError(
        f"tenants file {path}: {why}", hint="docs/tenants.md shows one", exit_code=2
    )
