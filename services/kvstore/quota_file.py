"""The quota file: who may have how much of each tier.

Owns its format and its checks, and noticing that it changed. A fault names the field and what to
write instead; a file that is faulty when it changes changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog
import yaml

from baton.errors import Reason, ServiceError
from baton.metrics_families import QUOTA_TENANTS_MAX
from services.kvstore.quotas import OTHERS, QuotaPlan, Tier

FILE_BYTES_MAX: Final = 1 << 20
TENANTS_MAX: Final = QUOTA_TENANTS_MAX // 2
"""So that the metrics of a life in which the names change stay within their bound."""

TENANT_CHARS_MAX: Final = 256
BYTES_MAX: Final = 1 << 50

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,16})\s*([KMGT]iB)?")
_TIERS: Final = ", ".join(Tier)

Stamp: TypeAlias = tuple[int, int, int]

_log = structlog.stdlib.get_logger("services.kvstore")


class QuotaFile:
    """One quota file. INVALID_REQUEST for what is not one, naming the field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None

    def read(self) -> QuotaPlan:
        """What it says now."""
        self._stamp = self._look()
        try:
            with self.path.open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise self._bad("", f"cannot be read ({error.strerror})") from error
        if len(raw) > FILE_BYTES_MAX:
            raise self._bad("", f"is larger than {FILE_BYTES_MAX} bytes")
        try:
            document = yaml.safe_load(raw)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise self._bad("", "is not YAML") from error
        return self._plan({} if document is None else document)

    def follow(self, change: Callable[[QuotaPlan], None]) -> None:
        """Calls `change` with what the file says, if it changed since it was read.

        A file that is gone or faulty, or a plan that `change` refuses, is reported once.
        """
        if self._look() == self._stamp:
            return
        try:
            change(self.read())
        except ServiceError as error:
            _log.error("quotas_refused", field=error.field, why=error.message)
        else:
            _log.info("quotas_changed", file=str(self.path))

    def _look(self) -> Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _plan(self, document: Any) -> QuotaPlan:
        if not isinstance(document, dict) or not set(document) <= {"tenants", "default"}:
            raise self._bad("", "must hold `tenants:` and `default:` and nothing else")
        tenants = document.get("tenants") or {}
        if not isinstance(tenants, dict) or len(tenants) > TENANTS_MAX:
            raise self._bad("tenants", f"must map at most {TENANTS_MAX} names to their quotas")
        named = {}
        for name, sizes in tenants.items():
            if not isinstance(name, str) or not 1 <= len(name) <= TENANT_CHARS_MAX:
                raise self._bad("tenants", f"a name must be text of 1 to {TENANT_CHARS_MAX}")
            if name == OTHERS or not name.isprintable():
                raise self._bad("tenants", f"{name!r} cannot be a name here; call it otherwise")
            named[name] = self._sizes(f"tenants.{name}", sizes)
        return QuotaPlan(tenants=named, default=self._sizes("default", document.get("default")))

    def _sizes(self, where: str, entry: Any) -> dict[Tier, int]:
        """Bytes by tier."""
        if entry is None:
            return {}
        if not isinstance(entry, dict) or not set(entry) <= set(Tier):
            raise self._bad(where, f"must map {_TIERS} to sizes and hold nothing else")
        return {Tier(key): self._size(f"{where}.{key}", size) for key, size in entry.items()}

    def _size(self, where: str, size: Any) -> int:
        remedy = "write a number of bytes, or one with KiB, MiB, GiB or TiB, such as 512MiB"
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is not None:
            size = int(match[1]) * _UNITS[match[2] or ""]
        if type(size) is not int or not 0 <= size <= BYTES_MAX:
            raise self._bad(where, f"is not a size up to {BYTES_MAX} bytes; {remedy}")
        return size

    def _bad(self, field: str, why: str) -> ServiceError:
        at = f"{field}: " if field else ""
        return ServiceError(
            Reason.INVALID_REQUEST, f"quota file {self.path}: {at}{why}", field=field or "quotas"
        )
