"""Configuration: a frozen dataclass filled from flags, environment, file and defaults.

Owns the names (`--queue-depth-max`, `BATON_DECODE_QUEUE_DEPTH_MAX`, `queue_depth_max`), the
precedence (flag > environment > file > default), the parsing and the list of faults. Every fault is
found and listed before anything starts; nothing unknown is ever ignored. Keeps no global settings
object.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import yaml

from baton.config_values import (
    REDACTED,
    Kind,
    is_secret,
    kind_of,
    parse_text,
    parse_value,
    show_value,
)
from baton.errors import ServiceError, StartupError

CONFIG_FILE_BYTES_MAX: Final = 1024 * 1024

_Config = TypeVar("_Config")


def setting(
    help_text: str,
    *,
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
) -> Any:
    """A dataclass field with its help, its bounds (inclusive) and whether it is ever printed."""
    metadata = {"help": help_text, "minimum": minimum, "maximum": maximum, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata)


class ConfigError(StartupError):
    """Everything that is wrong with the configuration, one fault a line."""

    def __init__(self, service: str, faults: Sequence[str]) -> None:
        assert faults
        self.faults = tuple(faults)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = "".join(f"\n  {fault}" for fault in faults)
        super().__init__(
            f"the configuration has {count}:{lines}",
            hint=f"`baton-{service} --help` lists every setting",
            exit_code=2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as the documentation shows it."""

    name: str
    flag: str
    variable: str
    type_text: str
    default_text: str
    help_text: str
    is_secret: bool
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """One field of the dataclass, ready to be parsed."""

    field: dataclasses.Field[Any]
    kind: Kind
    variable: str

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        factory = self.field.default_factory
        return self.field.default is factory is dataclasses.MISSING

    def default(self) -> Any:
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A value somebody gave, and where."""

    value: Any
    origin: str


def load_config(
    config_type: type[_Config],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> _Config:
    """The configuration, or ConfigError with every fault.

    A dataclass may have `validate()` for relations between values: it returns faults as texts, or
    raises ServiceError or ValueError. `argv` is without the program's name. `--help` and
    `--print-config` print and raise SystemExit(0). `--config FILE` or `BATON_<SERVICE>_CONFIG`
    names a TOML or YAML file of flat keys.
    """
    specs, faults = _specs(config_type, service), _Faults()
    flags = _flags(specs, argv, faults)
    if flags.is_help:
        _print(help_text(config_type, service))
    variables = _variables(specs, service, environ, faults)
    path = flags.config_path or environ.get(_variable(service, "config"))
    from_file = _file(specs, path, faults) if path else {}
    given = {**from_file, **variables, **flags.given}
    config = _built(config_type, specs, given, faults)
    if faults.found or config is None:
        raise ConfigError(service, faults.found)
    if flags.is_print:
        _print(_shown(specs, config, given))
    return config


def load_config_or_exit(
    config_type: type[_Config], service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> _Config:
    """As `load_config`, for `main` functions: faults are printed and the process exits with 2."""
    try:
        return load_config(config_type, service, argv, environ)
    except ConfigError as error:
        sys.stderr.write(f"baton-{service}: {error.message}\n  hint: {error.hint}\n")
        raise SystemExit(error.exit_code) from None


def describe(config_type: type[Any], service: str) -> tuple[Setting, ...]:
    """Every setting of a configuration, in the order of its fields."""
    return tuple(
        Setting(
            name=spec.name,
            flag=spec.flag,
            variable=spec.variable,
            type_text=spec.kind.text,
            default_text="required" if spec.is_required else _default_text(spec),
            help_text=str(spec.field.metadata.get("help", "")),
            is_secret=is_secret(spec.field),
            is_required=spec.is_required,
        )
        for spec in _specs(config_type, service)
    )


def help_text(config_type: type[Any], service: str) -> str:
    """What `--help` prints."""
    lines = [f"usage: baton-{service} [settings]", ""]
    first = (config_type.__doc__ or "").strip().splitlines()
    lines += [first[0], ""] if first else []
    for item in describe(config_type, service):
        switch = f" | --no-{item.flag[2:]}" if item.type_text == "true or false" else ""
        lines.append(f"  {item.flag}{switch}  ({item.type_text}; {_default_note(item)})")
        lines.append(f"      {item.help_text}")
        lines.append(f"      environment: {item.variable}")
    lines += [
        "",
        "  --config FILE  TOML or YAML file with these names as keys",
        f"      environment: {_variable(service, 'config')}",
        "  --print-config  show every value and where it comes from, then exit",
        "  --help  show this, then exit",
        "",
        "Precedence: flag, environment, file, default.",
    ]
    return "\n".join(lines) + "\n"


class _Faults:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, fault: str) -> None:
        self.found.append(fault)


@dataclass(slots=True)
class _Flags:
    """What the command line says."""

    given: dict[str, _Given]
    config_path: str | None = None
    is_help: bool = False
    is_print: bool = False


def _specs(config_type: type[Any], service: str) -> tuple[_Spec, ...]:
    assert dataclasses.is_dataclass(config_type), config_type
    return tuple(
        _Spec(
            field=field,
            kind=kind_of(config_type, field.name),
            variable=_variable(service, field.name),
        )
        for field in dataclasses.fields(config_type)
    )


def _variable(service: str, name: str) -> str:
    return f"BATON_{service.upper().replace('-', '_')}_{name.upper()}"


def _flags(specs: Iterable[_Spec], argv: Sequence[str], faults: _Faults) -> _Flags:
    by_flag = {spec.flag: spec for spec in specs}
    flags, rest = _Flags(given={}), iter(argv)
    for word in rest:
        flag, equals, inline = word.partition("=")
        negated = by_flag.get(f"--{flag.removeprefix('--no-')}") if flag[:5] == "--no-" else None
        if word == "--help":
            flags.is_help = True
        elif word == "--print-config":
            flags.is_print = True
        elif flag == "--config":
            flags.config_path = _operand(flag, inline if equals else None, rest, faults)
        elif flag in by_flag:
            _take_flag(flags, by_flag[flag], inline if equals else None, rest, faults)
        elif negated is not None and negated.kind.is_switch and not equals:
            flags.given[negated.name] = _Given(value=False, origin="flag")
        else:
            faults.add(f"{flag}: {'unknown flag' if flag.startswith('-') else 'unexpected word'}")
    return flags


def _take_flag(
    flags: _Flags, spec: _Spec, inline: str | None, rest: Iterator[str], faults: _Faults
) -> None:
    """Reads one flag's value; a list flag may be repeated."""
    if spec.kind.is_switch and inline is None:
        flags.given[spec.name] = _Given(value=True, origin="flag")
        return
    text = _operand(spec.flag, inline, rest, faults)
    if text is None:
        return
    value = _parsed(spec, text, spec.flag, faults)
    if value is None:
        return
    before = flags.given.get(spec.name)
    if before is not None and not spec.kind.is_list:
        faults.add(f"{spec.flag}: given twice")
    joined = (*before.value, *value.value) if before and spec.kind.is_list else value.value
    flags.given[spec.name] = _Given(value=joined, origin="flag")


def _operand(flag: str, inline: str | None, rest: Iterator[str], faults: _Faults) -> str | None:
    if inline is not None:
        return inline
    text = next(rest, None)
    if text is None or text.startswith("--"):
        faults.add(f"{flag}: needs a value; one that begins with -- is written {flag}=--...")
        return None
    return text


def _parsed(spec: _Spec, text: str, where: str, faults: _Faults) -> _Given | None:
    """The value of a text, or None after its fault was noted."""
    try:
        return _Given(value=parse_text(spec.kind, text), origin=where)
    except ValueError as error:
        faults.add(f"{where}: {error}")
        return None


def _variables(
    specs: Iterable[_Spec], service: str, environ: Mapping[str, str], faults: _Faults
) -> dict[str, _Given]:
    by_variable = {spec.variable: spec for spec in specs}
    given: dict[str, _Given] = {}
    for variable in sorted(environ):
        if not variable.startswith(_variable(service, "")) or variable == _variable(
            service, "config"
        ):
            continue
        spec = by_variable.get(variable)
        if spec is None:
            kubernetes = (
                " (Kubernetes sets it for a Service of this name: enableServiceLinks: false)"
                if "_PORT" in variable or variable.endswith("_SERVICE_HOST")
                else ""
            )
            faults.add(f"{variable}: unknown environment variable{kubernetes}")
            continue
        value = _parsed(spec, environ[variable], variable, faults)
        if value is not None:
            given[spec.name] = _Given(value=value.value, origin="environment")
    return given


def _file(specs: Iterable[_Spec], path_text: str, faults: _Faults) -> dict[str, _Given]:
    by_name = {spec.name: spec for spec in specs}
    given: dict[str, _Given] = {}
    for key, raw in _read_file(Path(path_text).expanduser(), faults).items():
        spec = by_name.get(key)
        where = f"{path_text}: {key}"
        if spec is None:
            faults.add(f"{where}: unknown key")
            continue
        try:
            value = parse_value(spec.kind, raw)
        except ValueError as error:
            faults.add(f"{where}: {error}")
            continue
        given[key] = _Given(value=value, origin=f"file {path_text}")
    return given


def _read_file(path: Path, faults: _Faults) -> dict[str, Any]:
    """The top level of a TOML or YAML file; empty after a fault."""
    try:
        if path.stat().st_size > CONFIG_FILE_BYTES_MAX:
            raise ValueError(f"larger than {CONFIG_FILE_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError("name it .toml, .yaml or .yml")
        loaded = yaml.safe_load(text)
    except OSError as error:
        faults.add(f"{path}: cannot be read: {error.strerror}")
        return {}
    except (ValueError, yaml.YAMLError) as error:
        faults.add(f"{path}: {' '.join(str(error).split())}")
        return {}
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        faults.add(f"{path}: must be a mapping of names to values")
        return {}
    return loaded


def _built(
    config_type: type[_Config],
    specs: Iterable[_Spec],
    given: Mapping[str, _Given],
    faults: _Faults,
) -> _Config | None:
    """The dataclass, after every value stands and every relation holds; None after faults."""
    values: dict[str, Any] = {}
    for spec in specs:
        if spec.name in given:
            values[spec.name] = given[spec.name].value
            _check_bounds(spec, values[spec.name], faults)
        elif spec.is_required:
            faults.add(f"{spec.name}: required; set {spec.flag} or {spec.variable}")
    if faults.found:
        return None
    try:
        config = config_type(**values)
        for fault in getattr(config, "validate", tuple)() or ():
            faults.add(str(fault))
    except ServiceError as error:
        faults.add(f"{error.field}: {error.message}" if error.field else error.message)
    except ValueError as error:
        faults.add(str(error))
    else:
        return config
    return None


def _check_bounds(spec: _Spec, value: Any, faults: _Faults) -> None:
    minimum, maximum = (spec.field.metadata.get(bound) for bound in ("minimum", "maximum"))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if minimum is not None and value < minimum:
        faults.add(f"{spec.name}: {value} is below the least allowed, {minimum}")
    if maximum is not None and value > maximum:
        faults.add(f"{spec.name}: {value} is above the most allowed, {maximum}")


def _shown(specs: Iterable[_Spec], config: Any, given: Mapping[str, _Given]) -> str:
    """Every value as TOML would have it, with its origin."""
    lines = []
    for spec in specs:
        value = getattr(config, spec.name)
        origin = given[spec.name].origin if spec.name in given else "default"
        text = REDACTED if is_secret(spec.field) and value is not None else show_value(value)
        lines.append(f"{spec.name} = {text}  # {origin}")
    return "\n".join(lines) + "\n"


def _default_text(spec: _Spec) -> str:
    value = spec.default()
    return REDACTED if is_secret(spec.field) and value is not None else show_value(value)


def _default_note(item: Setting) -> str:
    return "required" if item.is_required else f"default {item.default_text}"


def _print(text: str) -> NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)
