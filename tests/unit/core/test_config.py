"""Configuration: one precedence, no silence about anything unknown or malformed."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import ConfigError, describe, help_text, load_config, load_config_or_exit, setting
from baton.config_docs import config_markdown
from baton.errors import Reason, ServiceError


class Ack(enum.Enum):
    """An enum whose text differs from its name."""

    OS = "os"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of the decode service."""

    queue_depth_max: int = setting("Requests waiting at most.", default=64, minimum=1, maximum=1000)
    lease_ttl_s: float = setting("Seconds a lease lasts.", default=3.0, minimum=0.1)
    heartbeat_s: float = setting("Seconds between heartbeats.", default=0.5)
    has_reflection: bool = setting("Whether gRPC reflection answers.", default=True)
    # Never opened.
    data_dir: Path = setting("Where files go.", default=Path("/tmp/baton"))  # noqa: S108
    gateways: tuple[str, ...] = setting("Gateways to tell.", default=())
    ack: Ack = setting("When a token is safe | sent.", default=Ack.OS)
    model: str | None = setting("Model to load.", default=None)
    key: bytes | None = setting("Signs capabilities.", default=None)
    password: str = setting("For the registry.", default="hunter2", is_secret=True)

    def validate(self) -> None:
        """A lease must outlive three heartbeats."""
        if self.lease_ttl_s <= 3 * self.heartbeat_s:
            raise ServiceError(
                Reason.INVALID_REQUEST, "must exceed 3 x heartbeat_s", field="lease_ttl_s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needy:
    """Has a required setting."""

    name: str = setting("Who it is.")


def _load(*argv: str, **environ: str) -> Config:
    return load_config(Config, "decode", argv, environ)


def _faults(*argv: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        _load(*argv, **environ)
    assert refused.value.exit_code == 2
    assert all(fault in str(refused.value) for fault in refused.value.faults)
    return refused.value.faults


def _file(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_defaults_stand_when_nothing_is_said() -> None:
    """A service starts on a laptop without any setting."""
    assert _load() == Config()


def test_a_flag_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    """One precedence everywhere."""
    path = _file(tmp_path, "c.toml", "queue_depth_max = 1\nlease_ttl_s = 11\nheartbeat_s = 0.25\n")
    config = _load(
        "--queue-depth-max=3",
        "--config",
        path,
        BATON_DECODE_QUEUE_DEPTH_MAX="2",
        BATON_DECODE_LEASE_TTL_S="12.5",
    )
    assert (config.queue_depth_max, config.lease_ttl_s, config.heartbeat_s) == (3, 12.5, 0.25)


def test_every_type_reads_from_flags() -> None:
    """Each kind has one spelling that the help shows."""
    config = _load(
        "--no-has-reflection",
        "--data-dir",
        "/var/lib/baton",
        "--gateways=a:1,b:2",
        "--gateways=c:3",
        "--ack",
        "disk",
        "--model=x",
        "--key",
        "00ff",
    )
    assert config.has_reflection is False
    assert config.data_dir == Path("/var/lib/baton")
    assert config.gateways == ("a:1", "b:2", "c:3")
    assert (config.ack, config.model, config.key) == (Ack.DISK, "x", b"\x00\xff")
    assert _load("--has-reflection", "--model", "none").model is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "gateways: [a, b]\nack: disk\nhas_reflection: false\nmodel: null\n"),
        ("c.yml", "gateways: [a, b]\nack: disk\nhas_reflection: false\n"),
        ("c.toml", 'gateways = ["a", "b"]\nack = "disk"\nhas_reflection = false\n'),
    ],
)
def test_yaml_and_toml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    """The file may also be named by the environment."""
    config = _load(BATON_DECODE_CONFIG=_file(tmp_path, name, text))
    assert config == Config(gateways=("a", "b"), ack=Ack.DISK, has_reflection=False)


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    """Fixing one fault a start is how an evening goes."""
    path = _file(tmp_path, "c.toml", 'queue_depth = 3\nlease_ttl_s = "soon"\ngateways = "a"\n')
    faults = _faults(
        "--config",
        path,
        "--speed=9",
        "extra",
        "--ack=tape",
        "--heartbeat-s=nan",
        "--key=xyz",
        "--queue-depth-max",
        BATON_DECODE_QUEUE_DEPTH_MAX="many",
        BATON_DECODE_COLOUR="red",
        BATON_DECODE_HAS_REFLECTION="perhaps",
        BATON_PREFILL_COLOUR="not ours",
        PATH="/bin",
    )
    text = "\n".join(faults)
    for expected in (
        "--speed: unknown flag",
        "extra: unexpected word",
        "--ack: 'tape' is none of os | disk",
        "--heartbeat-s: nan is not a finite number",
        "--key: a secret is hex digits or file:PATH",
        "--queue-depth-max: needs a value",
        "BATON_DECODE_QUEUE_DEPTH_MAX: 'many' is not a whole number",
        "BATON_DECODE_COLOUR: unknown environment variable",
        "BATON_DECODE_HAS_REFLECTION: 'perhaps' is neither true nor false",
        "queue_depth: unknown key",
        "lease_ttl_s: must be a number, not str",
        "gateways: must be a list of texts",
    ):
        assert expected in text
    assert len(faults) == 12
    assert "PREFILL" not in text


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        ("--queue-depth-max=0", "queue_depth_max: 0 is below the least allowed, 1"),
        ("--queue-depth-max=1001", "queue_depth_max: 1001 is above the most allowed, 1000"),
        ("--lease-ttl-s=0.05", "lease_ttl_s: 0.05 is below the least allowed, 0.1"),
        ("--lease-ttl-s=1.5", "lease_ttl_s: must exceed 3 x heartbeat_s"),
        ("--data-dir=", "--data-dir: is empty; leave it out to get the default"),
        ("--gateways=a,,b", "--gateways: has an empty item"),
        ("--key=", "--key: is empty; leave it out to get the default"),
    ],
)
def test_bounds_and_relations_are_checked(flag: str, fault: str) -> None:
    """At the limit is fine, one past it is a fault that names the setting."""
    assert _faults(flag) == (fault,)
    assert _load("--queue-depth-max=1").queue_depth_max == 1
    assert _load("--queue-depth-max=1000").queue_depth_max == 1000


def test_flags_given_twice_and_missing_values_are_faults() -> None:
    """A value that silently loses is a swallowed error."""
    assert _faults("--model=a", "--model=b") == ("--model: given twice",)
    (fault,) = _faults("--model", "--has-reflection")
    assert fault.startswith("--model: needs a value")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("c.toml", "a = = 1", "Invalid"),
        ("c.yaml", "a: [1", "expected"),
        ("c.yaml", "- 1\n- 2\n", "must be a mapping"),
        ("c.json", "{}", "name it .toml, .yaml or .yml"),
        ("c.yaml", "model: 5\n", "must be a text, or none, not int"),
        ("c.yaml", "queue_depth_max: true\n", "must be a whole number, not bool"),
        ("c.yaml", "queue_depth_max: null\n", "has no value"),
    ],
)
def test_a_bad_file_is_a_fault_that_names_it(
    tmp_path: Path, name: str, text: str, fault: str
) -> None:
    """A file that cannot be read as meant stops the start."""
    path = _file(tmp_path, name, text)
    (found,) = _faults("--config", path)
    assert path in found
    assert fault in found


def test_a_missing_or_huge_file_is_a_fault(tmp_path: Path) -> None:
    """Sizes are checked before the file is read."""
    assert "cannot be read" in _faults("--config", str(tmp_path / "no.toml"))[0]
    assert "larger than" in _faults("--config", _file(tmp_path, "b.toml", "#" * (1 << 20) + "#"))[0]


def test_a_required_setting_says_how_to_set_it() -> None:
    """No default means somebody has to decide."""
    with pytest.raises(ConfigError, match="name: required; set --name or BATON_KVSTORE_NAME"):
        load_config(Needy, "kvstore", (), {})
    assert load_config(Needy, "kvstore", ("--name=a",), {}).name == "a"


def test_kubernetes_service_links_are_explained() -> None:
    """A Service named baton-decode makes Kubernetes set BATON_DECODE_PORT and its like."""
    assert "enableServiceLinks" in _faults(BATON_DECODE_PORT_8080_TCP="tcp://10.0.0.1")[0]


def test_secrets_come_from_private_files_only(tmp_path: Path) -> None:
    """A key that others can read is not a key."""
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o600)
    assert _load(f"--key=file:{path}").key == b"0123456789abcdef"
    path.chmod(0o644)
    assert "chmod 600" in _faults(f"--key=file:{path}")[0]
    path.write_bytes(b"\n")
    path.chmod(0o600)
    assert "is empty" in _faults(f"--key=file:{path}")[0]
    path.write_bytes(b"x" * 5000)
    assert "larger than" in _faults(f"--key=file:{path}")[0]
    assert "cannot be read" in _faults(f"--key=file:{tmp_path}/none")[0]


def test_print_config_shows_origins_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator sees what wins and why; a screen share shows no key."""
    path = _file(tmp_path, "c.toml", "lease_ttl_s = 9.5\n")
    with pytest.raises(SystemExit) as ended:
        _load(
            "--print-config",
            "--key=abcd",
            "--gateways=x",
            f"--config={path}",
            BATON_DECODE_QUEUE_DEPTH_MAX="7",
        )
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "queue_depth_max = 7  # environment" in lines
    assert f"lease_ttl_s = 9.5  # file {path}" in lines
    assert 'gateways = ["x"]  # flag' in lines
    assert 'ack = "os"  # default' in lines
    assert 'model = "none"  # default' in lines
    assert 'key = "[secret]"  # flag' in lines
    assert 'password = "[secret]"  # default' in lines


def test_help_and_docs_name_every_setting_and_no_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are generated, so that neither can be forgotten."""
    with pytest.raises(SystemExit) as ended:
        _load("--help", "--nonsense")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    page = config_markdown({"decode": Config, "kvstore": Needy})
    for item in describe(Config, "decode"):
        for text in (shown, page):
            assert item.flag in text
            assert item.variable in text
    assert "hunter2" not in shown + page
    assert "--no-has-reflection" in shown
    assert "safe \\| sent" in page
    assert "| required |" in page
    assert help_text(Config, "decode") == shown


def test_main_functions_get_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The shell and a supervisor tell a bad setting from a crash."""
    with pytest.raises(SystemExit) as ended:
        load_config_or_exit(Config, "decode", ("--nonsense",), {})
    assert ended.value.code == 2
    assert "--nonsense: unknown flag" in capsys.readouterr().err


@given(words=st.lists(st.text(max_size=20), max_size=6))
def test_no_command_line_escapes_as_anything_but_a_listed_fault(words: list[str]) -> None:
    """Whatever is typed, the answer is a value or a list of faults, never a traceback."""
    kept = [word for word in words if not word.startswith(("--h", "--p", "--config"))]
    with contextlib.suppress(ConfigError):
        assert isinstance(_load(*kept), Config)
