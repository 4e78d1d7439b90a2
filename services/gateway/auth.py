"""Who asks: bearer keys to tenants.

Owns the tenants file, the hashed keys and the constant-time comparison. Never keeps a key in the
clear after loading and never puts one into a message. Only headers decide; a body cannot.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from baton.errors import Reason, ServiceError, StartupError
from services.gateway.request import Tenant

TENANTS_FILE_BYTES_MAX: Final = 1 << 20
TENANTS_MAX: Final = 10_000
KEY_CHARS_MAX: Final = 512
REQUESTS_PER_MINUTE_MAX: Final = 60_000
DEV_TENANT: Final = Tenant(name="dev")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}", re.ASCII)
_SHA256: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key's SHA-256 and whom it stands for."""

    digest: bytes
    tenant: Tenant
    requests_per_minute: int | None = None


class Authenticator:
    """Checks `Authorization` headers.

    `rows` are the keys of a tenants file. Without them, `is_open` (loopback only) makes every
    caller the tenant `dev`, and otherwise nobody is let in.
    """

    def __init__(self, rows: tuple[KeyRow, ...], *, is_open: bool) -> None:
        assert not (rows and is_open), "a tenants file and open access exclude each other"
        self._rows = rows
        self._is_open = is_open

    @property
    def is_open(self) -> bool:
        """Everybody on this host is the tenant `dev`."""
        return self._is_open

    def tenants(self) -> tuple[str, ...]:
        """Names of all tenants."""
        if self._is_open:
            return (DEV_TENANT.name,)
        return tuple(sorted({row.tenant.name for row in self._rows}))

    def requests_per_minute(self) -> dict[str, int]:
        """Limits of the tenants that have one."""
        return {
            row.tenant.name: row.requests_per_minute
            for row in self._rows
            if row.requests_per_minute is not None
        }

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header's value; UNAUTHENTICATED otherwise."""
        if self._is_open:
            return DEV_TENANT
        key = _bearer(authorization)
        if key is None:
            raise _refused("send the key as `Authorization: Bearer <key>`")
        digest = _digest(key)
        found: Tenant | None = None
        # Every row is compared, so that the time says nothing about which one matched.
        for row in self._rows:
            if hmac.compare_digest(row.digest, digest):
                found = row.tenant
        if found is None:
            raise _refused("the key is not known here")
        return found


def _bearer(authorization: str | None) -> str | None:
    if authorization is None or len(authorization) > KEY_CHARS_MAX + 16:
        return None
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" and key else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _refused(why: str) -> ServiceError:
    return ServiceError(Reason.UNAUTHENTICATED, f"no valid key: {why}")


def load_tenants(path: Path) -> tuple[KeyRow, ...]:
    """Read a tenants file; StartupError naming the entry at fault.

    YAML: `tenants:` with a list of `{name, keys, teams, requests_per_minute}`; `keys` holds keys in
    the clear or `sha256:<64 hex digits>`; `teams` holds `{name, keys}` whose keys share within the
    team only; `requests_per_minute` bounds all keys of the tenant together.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(TENANTS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from error
    if len(raw) > TENANTS_FILE_BYTES_MAX:
        raise _bad(path, f"is larger than {TENANTS_FILE_BYTES_MAX} bytes")
    try:
        document = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise _bad(path, "is not YAML") from error
    return tenants_from(document, path)


def tenants_from(document: Any, path: Path) -> tuple[KeyRow, ...]:
    """The keys of a parsed tenants file."""
    if not isinstance(document, dict) or set(document) != {"tenants"}:
        raise _bad(path, "must hold `tenants:` and nothing else")
    entries = document["tenants"]
    if not isinstance(entries, list) or not 0 < len(entries) <= TENANTS_MAX:
        raise _bad(path, f"tenants must be a list of 1 to {TENANTS_MAX} entries")
    rows: list[KeyRow] = []
    names: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"tenants[{index}]"
        name = _name(entry, where, path, allowed={"name", "keys", "teams", "requests_per_minute"})
        if name in names:
            raise _bad(path, f"{where}.name is given twice")
        names.add(name)
        first = len(rows)
        rows += _rows(entry, where, path, Tenant(name=name))
        for team_index, team in enumerate(_list(entry, "teams", where, path)):
            at = f"{where}.teams[{team_index}]"
            team_name = _name(team, at, path, allowed={"name", "keys"})
            rows += _rows(team, at, path, Tenant(name=name, team=team_name))
        limit = _limit(entry, where, path)
        rows[first:] = [replace(row, requests_per_minute=limit) for row in rows[first:]]
    if len({row.digest for row in rows}) != len(rows):
        raise _bad(path, "one key is given twice; each key stands for one tenant and team")
    if not rows:
        raise _bad(path, "holds no key; nobody could get in")
    return tuple(rows)


def _name(entry: Any, where: str, path: Path, *, allowed: set[str]) -> str:
    if not isinstance(entry, dict) or not set(entry) <= allowed:
        raise _bad(path, f"{where} must be an object with {', '.join(sorted(allowed))} only")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(path, f"{where}.name must be 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


def _limit(entry: Mapping[str, Any], where: str, path: Path) -> int | None:
    limit = entry.get("requests_per_minute")
    if limit is None:
        return None
    if type(limit) is not int or not 0 < limit <= REQUESTS_PER_MINUTE_MAX:
        raise _bad(
            path,
            f"{where}.requests_per_minute must be a whole number from 1 to "
            f"{REQUESTS_PER_MINUTE_MAX}",
        )
    return limit


def _list(entry: Mapping[str, Any], key: str, where: str, path: Path) -> list[Any]:
    value = entry.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _bad(path, f"{where}.{key} must be a list")
    return value


def _rows(entry: Mapping[str, Any], where: str, path: Path, tenant: Tenant) -> list[KeyRow]:
    rows: list[KeyRow] = []
    for index, key in enumerate(_list(entry, "keys", where, path)):
        if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARS_MAX:
            raise _bad(
                path, f"{where}.keys[{index}] must be a string of 1 to {KEY_CHARS_MAX} characters"
            )
        hashed = _SHA256.fullmatch(key)
        digest = bytes.fromhex(hashed[1]) if hashed else _digest(key)
        rows.append(KeyRow(digest=digest, tenant=tenant))
    return rows


def _bad(path: Path, why: str) -> StartupError:
    return StartupError(f"tenants file {path}: {why}", hint="docs/config.md shows one", exit_code=2)
