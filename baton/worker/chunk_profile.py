"""The chunk profile: what `baton tune chunk` found out about a model on a machine.

Owns the file (JSON, versioned, written whole), what it must agree with before its sizes are used,
and which size a worker takes. Free of torch: the command line writes it, workers read it. Sizes are
a matter of speed alone: a profile that does not fit is set aside, saying so; one that is no profile
ends the start, because somebody named it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from baton.errors import Reason, ServiceError, StartupError
from baton.kv.label import PairLabel
from baton.process_files import write_private

FORMAT: Final = "baton-chunk-profile"
VERSION: Final = 1
FILE_NAME: Final = "chunk-profile.json"
"""Its name in a run directory, where `baton up` looks for it."""
FILE_BYTES_MAX: Final = 1 << 20
CHUNK_TOKENS_DEFAULT: Final = 256
CHUNK_TOKENS_MAX: Final = 65536
# A decode worker's class names its step kernel, which computes no prompts.
_UNCOMPARED: Final = "numeric_class"

_log = structlog.stdlib.get_logger("baton.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The processor's name, the cores that a process may use, and a worker's own threads."""

    cpu: str
    cores: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """What one chunk size did; milliseconds.

    `first_token_ms` is the median over the rounds, `jitter_ms` from their 10th to their 90th
    percentile. `gap_ms` is the mean gap between the tokens of the streams beside with no prompt
    under way, `added_gap_ms` what prompts added to it, `gap_p99_ms` the slowest gaps beside them.
    """

    chunk_tokens: int
    first_token_ms: float
    jitter_ms: float
    gap_ms: float
    added_gap_ms: float
    gap_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found for the workers of one role, and how.

    `measured_at`: wall time, RFC 3339. `load`: the machine's mean of runnable processes when it
    began.
    """

    chunk_tokens: int
    reason: str
    chunking: str
    threads: int
    measured_at: str
    load: float
    prompt_tokens: int
    streams: int
    rounds: int
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProfile:
    """One model on one machine. `label`: the pair label's fields as text; `roles` by name."""

    model: str
    label: Mapping[str, str]
    cpu: str
    cores: int
    roles: Mapping[str, Measured]

    def first_difference(self, **ours: str) -> str | None:
        """As `first_mismatch`, of what is known before a weight is read: the model's name, fields
        of the label, this machine.
        """
        machine = this_machine(1)
        theirs = {**self.label, "model": self.model, "cpu": self.cpu, "cores": str(self.cores)}
        return _first_difference(ours | {"cpu": machine.cpu, "cores": str(machine.cores)}, theirs)

    def first_mismatch(self, label: PairLabel, machine: MachineFacts, role: str) -> str | None:
        """What does not fit a worker, as "field: ours ..., the profile's ..."; None: all does."""
        ours = label.as_metadata() | {"cpu": machine.cpu, "cores": str(machine.cores)}
        theirs = {**self.label, "cpu": self.cpu, "cores": str(self.cores)}
        if role in self.roles:
            ours["threads"] = str(machine.threads)
            theirs["threads"] = str(self.roles[role].threads)
        return _first_difference(ours, theirs)

    def measured_beside(self, other: ChunkProfile) -> ChunkProfile:
        """With what `other`, an older one, has for further roles, if it is of this model here."""
        same = replace(other, roles=self.roles) == self
        return replace(self, roles={**other.roles, **self.roles}) if same else self


def _first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    for name, value in ours.items():
        if name != _UNCOMPARED and theirs.get(name) != value:
            return f"{name}: ours {value}, the profile's {theirs.get(name, 'missing')}"
    return None


def this_machine(threads: int) -> MachineFacts:
    """The machine as this process sees it."""
    return MachineFacts(cpu=_cpu_name(), cores=len(os.sched_getaffinity(0)), threads=threads)


def _cpu_name() -> str:
    """As the kernel tells it; the architecture where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return os.uname().machine


def write_profile(path: Path, profile: ChunkProfile) -> None:
    """Put the file in place, whole or not at all. StartupError where it cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": profile.model,
        "label": dict(profile.label),
        "machine": {"cpu": profile.cpu, "cores": profile.cores},
        "roles": {role: dataclasses.asdict(found) for role, found in profile.roles.items()},
    }
    write_private(path, (json.dumps(document, indent=2) + "\n").encode("utf-8"))


def read_profile(path: Path) -> ChunkProfile:
    """The profile in a file. ServiceError INVALID_REQUEST naming what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _refused("chunk_profile", f"cannot be read ({error.strerror})") from error
    if len(data) > FILE_BYTES_MAX:
        raise _refused("chunk_profile", f"is over {FILE_BYTES_MAX} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused("chunk_profile", "is not JSON") from error
    root = _Fields("", document)
    if root.text("format") != FORMAT:
        raise _refused("format", f"is not {FORMAT}")
    if root.whole("version") != VERSION:
        raise _refused("version", f"is not {VERSION}, the one this version of Baton reads")
    machine = root.inner("machine")
    roles = root.inner("roles")
    return ChunkProfile(
        model=root.text("model"),
        label=root.inner("label").texts(),
        cpu=machine.text("cpu"),
        cores=machine.whole("cores"),
        roles={role: _measured(roles.inner(role)) for role in roles.names},
    )


def _measured(fields: _Fields) -> Measured:
    return Measured(
        chunk_tokens=fields.whole("chunk_tokens", CHUNK_TOKENS_MAX),
        reason=fields.text("reason"),
        chunking=fields.text("chunking"),
        threads=fields.whole("threads"),
        measured_at=fields.text("measured_at"),
        load=fields.number("load"),
        prompt_tokens=fields.whole("prompt_tokens"),
        streams=fields.whole("streams"),
        rounds=fields.whole("rounds"),
        curve=tuple(_point(point) for point in fields.rows("curve")),
    )


def _point(fields: _Fields) -> CurvePoint:
    return CurvePoint(
        chunk_tokens=fields.whole("chunk_tokens", CHUNK_TOKENS_MAX),
        first_token_ms=fields.number("first_token_ms"),
        jitter_ms=fields.number("jitter_ms"),
        gap_ms=fields.number("gap_ms"),
        added_gap_ms=fields.number("added_gap_ms"),
        gap_p99_ms=fields.number("gap_p99_ms"),
    )


def load_profile(path: Path | None) -> ChunkProfile | None:
    """A worker's profile; None: it has none. StartupError for a file that is no profile."""
    if path is None:
        return None
    try:
        return read_profile(path)
    except ServiceError as error:
        raise StartupError(
            f"the chunk profile {path} cannot be used: {error.message}",
            hint="measure again with `baton tune chunk`, or leave --chunk-profile out",
        ) from error


def most_chunk_tokens(role: str, profile: ChunkProfile | None, given: int | None) -> int:
    """What `chunk_tokens_for` may say at most, before a worker's label is known."""
    if given is not None:
        return given
    found = None if profile is None else profile.roles.get(role)
    return CHUNK_TOKENS_DEFAULT if found is None else max(found.chunk_tokens, CHUNK_TOKENS_DEFAULT)


def chunk_tokens_for(
    role: str,
    profile: ChunkProfile | None,
    given: int | None,
    ours: tuple[PairLabel, MachineFacts],
) -> int:
    """The chunk size of a worker: as `given`, else the profile's where it fits `ours`, else the
    default. Logs one line about a profile.
    """
    if profile is None or given is not None:
        return given or CHUNK_TOKENS_DEFAULT
    difference = profile.first_mismatch(*ours, role)
    if difference is not None:
        _log.warning("chunk_profile_ignored", difference=difference)
        return CHUNK_TOKENS_DEFAULT
    found = profile.roles.get(role)
    if found is None:
        _log.info("chunk_profile_without_role", role=role, roles=sorted(profile.roles))
        return CHUNK_TOKENS_DEFAULT
    _log.info("chunk_profile_loaded", chunk_tokens=found.chunk_tokens)
    return found.chunk_tokens


def _refused(field: str, what: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"{field} {what}", field=field)


class _Fields:
    """The fields of one JSON object, checked as they are taken; `name` is where it stands."""

    def __init__(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _refused(name or "chunk_profile", "is not a JSON object")
        self._name = name
        self._value: dict[str, Any] = value

    @property
    def names(self) -> list[str]:
        """All fields."""
        return list(self._value)

    def inner(self, name: str) -> _Fields:
        """An object in it."""
        return _Fields(self._path(name), self._value.get(name))

    def rows(self, name: str) -> list[_Fields]:
        """A list of objects in it."""
        rows = self._value.get(name)
        if not isinstance(rows, list):
            raise _refused(self._path(name), "is not a list")
        return [_Fields(f"{self._path(name)}[{index}]", row) for index, row in enumerate(rows)]

    def texts(self) -> dict[str, str]:
        """All of it, where every value is a text."""
        return {name: self.text(name) for name in self._value}

    def text(self, name: str) -> str:
        """A text."""
        value = self._value.get(name)
        if not isinstance(value, str):
            raise _refused(self._path(name), "is not a text")
        return value

    def whole(self, name: str, maximum: int = 1 << 31) -> int:
        """A whole number, at least 1."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise _refused(self._path(name), f"is not a whole number from 1 to {maximum}")
        return value

    def number(self, name: str) -> float:
        """Any number that a float can hold."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(self._path(name), "is not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise _refused(self._path(name), "is too large a number") from error

    def _path(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name
