"""The plan of a local cluster: flags, threads, sizes and secrets, without starting anything."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baton.launcher.plan import (
    ARENA_BYTES_MAX,
    NVME_BYTES_MAX,
    ChildSpec,
    ClusterOptions,
    Machine,
    arena_bytes,
    build_plan,
    divide_cores,
    nvme_bytes,
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


def test_the_nvme_tier_is_as_asked_for_or_a_modest_part_of_the_disk() -> None:
    """A tenth of what is free for all nodes together, at most 1 GiB each, none of too little."""
    machine = Machine(cores=2, shm_free_bytes=1 << 34, disk_free_bytes=1 << 30)
    assert nvme_bytes(options(), machine) == (1 << 30) // 10
    assert nvme_bytes(options(nodes=2), machine) == 0
    roomy = Machine(cores=2, shm_free_bytes=1 << 34, disk_free_bytes=1 << 40)
    assert nvme_bytes(options(), roomy) == NVME_BYTES_MAX
    assert nvme_bytes(options(nvme_bytes=7), roomy) == 7
    assert nvme_bytes(options(nvme_bytes=0), roomy) == 0


def test_the_nvme_tier_lies_in_the_run_directory_unless_the_user_says() -> None:
    """And where there is none, no flag of it is given."""
    assert "--nvme-bytes" not in plan(nvme_bytes=0)["kvstore-0"].arguments
    store = plan(nvme_bytes=1 << 20, nodes=2)["kvstore-1"]
    assert (flag(store, "--nvme-bytes"), flag(store, "--nvme-dir")) == ("1048576", "/run/x/nvme")
    chosen = plan(nvme_bytes=1 << 20, nvme_dir=Path("/disk"))["kvstore-0"]
    assert flag(chosen, "--nvme-dir") == "/disk"


def test_a_tenants_file_goes_to_the_gateway_alone() -> None:
    """Nobody else reads keys."""
    children = plan(tenants_file=Path("/etc/tenants.yaml"))
    holders = [name for name, spec in children.items() if "/etc/tenants.yaml" in spec.arguments]
    assert holders == ["gateway-0"]


def test_a_quota_file_goes_to_every_kvstore_alone() -> None:
    """Its numbers count on each node."""
    children = plan(nodes=2, quotas=Path("/etc/quotas.yaml"))
    holders = [name for name, spec in children.items() if "/etc/quotas.yaml" in spec.arguments]
    assert holders == ["kvstore-0", "kvstore-1"]


def test_two_nodes_have_stores_logs_and_workers_of_their_own() -> None:
    """With one worker of each role, prefill and decode are on different nodes."""
    children = plan(nodes=2)
    stores = [children["kvstore-0"], children["kvstore-1"]]
    assert [flag(store, "--node-id") for store in stores] == ["node-0", "node-1"]
    assert flag(stores[0], "--log-dir") != flag(stores[1], "--log-dir")
    assert flag(children["prefill-0"], "--kvstore") == stores[0].grpc_address
    assert flag(children["decode-0"], "--kvstore") == stores[1].grpc_address


def test_workers_are_dealt_so_that_each_node_has_both_roles() -> None:
    """Two of each on two nodes: a request may stay on either."""
    children = plan(nodes=2, prefill_workers=2, decode_workers=2)
    for node in (0, 1):
        address = children[f"kvstore-{node}"].grpc_address
        served = {name for name, spec in children.items() if "--kvstore" in spec.arguments}
        there = {name for name in served if flag(children[name], "--kvstore") == address}
        assert {name.partition("-")[0] for name in there} == {"prefill", "decode"}


def test_chunks_are_the_profile_s_unless_a_size_was_given(tmp_path: Path) -> None:
    """Both kinds of workers read the profile; only prefill workers cut at edges of the text."""
    plain = plan()
    assert "--chunk-tokens" not in plain["prefill-0"].arguments
    assert "--chunking" not in plain["prefill-0"].arguments
    children = plan(chunk_profile=tmp_path / "profile.json", chunking="semantic")
    for name in ("prefill-0", "decode-0"):
        arguments = children[name].arguments
        assert arguments[arguments.index("--chunk-profile") + 1] == str(tmp_path / "profile.json")
    assert "semantic" in children["prefill-0"].arguments
    assert "--chunking" not in children["decode-0"].arguments
    given = plan(chunk_tokens=64)["decode-0"].arguments
    assert given[given.index("--chunk-tokens") + 1] == "64"
