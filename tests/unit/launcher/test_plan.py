"""The plan of a local cluster: flags, threads, sizes and secrets, without starting anything."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baton.launcher.plan import (
    ARENA_BYTES_MAX,
    ChildSpec,
    ClusterOptions,
    Machine,
    arena_bytes,
    build_plan,
    divide_cores,
)

CAPABILITY = "bc1.secret"


def options(**changes: object) -> ClusterOptions:
    """Options of a small cluster."""
    base = {
        "model": "smollm2",
        "run_dir": Path("/run/x"),
        "arena_dir": Path("/arena"),
        "http_port": 8080,
        "grpc_port": 8081,
    }
    return ClusterOptions(**(base | changes))


def plan(**changes: object) -> dict[str, ChildSpec]:
    """The children by name."""
    ports = itertools.count(20_000)
    specs = build_plan(
        options(**changes),
        Machine(cores=2, shm_free_bytes=1 << 34),
        next_port=lambda: next(ports),
        key_file=Path("/run/x/cluster.key"),
        worker_capability=CAPABILITY,
    )
    return {spec.name: spec for spec in specs}


def flag(spec: ChildSpec, name: str) -> str:
    """The value of a flag."""
    return spec.arguments[spec.arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "expected"),
    [
        (1, 1, 1, (1, 1)),
        (2, 1, 1, (1, 1)),
        (4, 1, 1, (2, 2)),
        (16, 1, 1, (14, 2)),
        (16, 2, 2, (6, 2)),
        (2, 4, 4, (1, 1)),
    ],
)
def test_cores_are_divided(
    cores: int, prefill: int, decode: int, expected: tuple[int, int]
) -> None:
    """One thread each on two cores; decode takes two at most, prefill the rest."""
    assert divide_cores(cores, prefill, decode) == expected


def test_all_services_run_and_know_each_other() -> None:
    """Five services; the workers know their store, all but the gateway know the gateway."""
    children = plan()
    assert sorted(children) == ["decode-0", "gateway-0", "kvstore-0", "merger-0", "prefill-0"]
    kvstore = children["kvstore-0"].grpc_address
    for name in ("prefill-0", "decode-0"):
        assert flag(children[name], "--kvstore") == kvstore
    for name in ("prefill-0", "decode-0", "kvstore-0", "merger-0"):
        assert flag(children[name], "--gateways") == children["gateway-0"].grpc_address


def test_no_port_is_given_twice() -> None:
    """Ports of gRPC and of metrics are all different."""
    children = plan(prefill_workers=3, decode_workers=3)
    ports = [
        flag(spec, name) for spec in children.values() for name in ("--port", "--metrics-port")
    ]
    assert len(set(ports)) == len(ports)


def test_secrets_stay_out_of_the_process_list() -> None:
    """Arguments are world-readable; capabilities go by environment."""
    for spec in plan().values():
        assert CAPABILITY not in " ".join(spec.arguments)
    assert CAPABILITY in plan()["decode-0"].environment.values()


def test_the_arena_is_as_asked_for_or_what_fits() -> None:
    """Half of free shared memory, at most 1 GiB, unless a size is given."""
    machine = Machine(cores=2, shm_free_bytes=100 << 20)
    assert arena_bytes(options(), machine) == 50 << 20
    roomy = Machine(cores=2, shm_free_bytes=1 << 40)
    assert arena_bytes(options(), roomy) == ARENA_BYTES_MAX
    assert arena_bytes(options(arena_bytes=7 << 20), machine) == 7 << 20


def test_a_tenants_file_goes_to_the_gateway_alone() -> None:
    """Nobody else reads keys."""
    children = plan(tenants_file=Path("/etc/tenants.yaml"))
    holders = [name for name, spec in children.items() if "/etc/tenants.yaml" in spec.arguments]
    assert holders == ["gateway-0"]
