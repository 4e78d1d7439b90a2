"""docker-compose.yml as a text: valid by the specification, closed to the outside, in step with
the services it configures. No engine is needed.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from baton.config import describe

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "kvstore", "prefill", "decode", "merger")
ENTRYPOINT = ROOT / "deploy/compose/entrypoint.sh"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
CONFIGS = {
    "gateway": "GatewayConfig",
    "kvstore": "KVStoreConfig",
    "prefill": "PrefillConfig",
    "decode": "DecodeConfig",
    "merger": "MergerConfig",
}


def compose_text() -> str:
    return (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def compose() -> dict[str, Any]:
    """The file with every variable at its default."""
    return yaml.safe_load(VARIABLE.sub(r"\2", compose_text()))


def known_variables(service: str) -> set[str]:
    """Every environment variable that a service reads; it refuses any other of its own prefix."""
    module = importlib.import_module(f"services.{service}.config")
    return {item.variable for item in describe(getattr(module, CONFIGS[service]), service)}


def run_entrypoint(tmp_path: Path, *words: str, **environment: str) -> dict[str, str]:
    """What a service would find in its environment: its program is replaced by `env`."""
    program = tmp_path / f"baton-{words[0]}"
    program.write_text("#!/bin/sh\nexec env\n", encoding="utf-8")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        [str(ENTRYPOINT), *words],
        env={"PATH": path, "HOSTNAME": "c0ffee", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return dict(line.split("=", 1) for line in ran.stdout.splitlines() if "=" in line)


def test_the_file_follows_the_compose_specification() -> None:
    """What `docker compose` version 2 reads; a misspelt key must not be ignored by some of them."""
    assert set(PyCompose.from_yaml(yaml.safe_dump(compose())).services) == {*SERVICES, "redis"}


def test_a_misspelt_key_is_refused() -> None:
    """The check above is one: it refuses what the specification does not have."""
    document = compose()
    document["services"]["gateway"]["stop_grace"] = "30s"
    with pytest.raises(ValueError, match="stop_grace"):
        PyCompose.from_yaml(yaml.safe_dump(document))


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    """Workers trust their network; nobody else may be on it."""
    published = {
        name: service["ports"]
        for name, service in compose()["services"].items()
        if "ports" in service
    }
    assert published == {"gateway": ["127.0.0.1:8080:8080"]}


@pytest.mark.parametrize("service", [*SERVICES, "redis"])
def test_containers_can_do_little(service: str) -> None:
    """No root, no capabilities, no writable image, no default network of the host."""
    settings = compose()["services"][service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "ipc", "pid", "devices"} & settings.keys()


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_given_to_a_service_exists(service: str) -> None:
    """A service refuses to start with a variable of its prefix that it does not know."""
    prefix = f"BATON_{service.upper()}_"
    given = {n for n in compose()["services"][service]["environment"] if n.startswith("BATON_")}
    assert all(name.startswith(prefix) for name in given)
    assert given <= known_variables(service)


@pytest.mark.parametrize("service", SERVICES)
def test_the_entrypoint_sets_only_what_exists(tmp_path: Path, service: str) -> None:
    """As above, for what the image itself adds."""
    found = run_entrypoint(tmp_path, service, CLUSTER_KEY_HEX="", CLUSTER_WORKER_CAPABILITY="cap")
    given = {name for name in found if name.startswith("BATON_")}
    assert given <= known_variables(service)
    assert found[f"BATON_{service.upper()}_INSECURE_BIND"] == "true"


def test_scaled_workers_have_names_and_addresses_of_their_own(tmp_path: Path) -> None:
    """`--scale decode=2` starts containers that differ by their host name alone."""
    found = run_entrypoint(tmp_path, "decode")
    assert found["BATON_DECODE_WORKER_ID"] == "decode-c0ffee"
    assert found["BATON_DECODE_ADVERTISE"] == "c0ffee:7000"


def test_what_compose_sets_has_the_last_word(tmp_path: Path) -> None:
    """The kvstore is reached by its service name, which outlives its container."""
    found = run_entrypoint(tmp_path, "kvstore", BATON_KVSTORE_ADVERTISE="kvstore:7000")
    assert found["BATON_KVSTORE_ADVERTISE"] == "kvstore:7000"


def test_secrets_reach_a_service_by_its_own_setting_only(tmp_path: Path) -> None:
    """Whatever is left in the environment is inherited and shown by tools."""
    found = run_entrypoint(tmp_path, "merger", CLUSTER_WORKER_CAPABILITY="cap")
    assert found["BATON_MERGER_WORKER_CAPABILITY"] == "cap"
    assert "CLUSTER_WORKER_CAPABILITY" not in found


def test_the_example_environment_says_the_defaults() -> None:
    """`cp .env.example .env` changes nothing, and names everything that can be set."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    images = {name for name, _ in VARIABLE.findall(compose_text()) if name.endswith("_IMAGE")}
    defaults = dict(VARIABLE.findall(compose_text()))
    assert {name: value for name, value in defaults.items() if name not in images} == {
        name: value for name, value in example.items() if name not in images
    }


def test_the_volume_holds_two_arenas() -> None:
    """A restarted kvstore makes a new arena while workers still map the old one."""
    document = compose()
    arena = int(document["services"]["kvstore"]["environment"]["BATON_KVSTORE_ARENA_BYTES"])
    size = re.search(r"size=(\d+)m", document["volumes"]["arena"]["driver_opts"]["o"])
    assert size is not None
    assert int(size[1]) << 20 > 2 * arena
