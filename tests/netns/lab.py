"""Two kvstores in two network namespaces, joined by one link that can be capped, cut and healed.

Owns the namespaces and their end. Needs root, `ip` and `tc`; `missing_tools` says what is not
there. The test itself reaches each side over a link of its own, which is never touched; so does a
gateway, also where it calls a store by the address that the other store knows.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from baton.engine.config import read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.kv.layout import KvDtype
from baton.testing.tiny_models import TinyModel, write_directory
from baton.text.bundle import TextBundle
from tests.integration.kvstore.harness import BLOCK, Model, StoreProcess, ready_at

TOOLS: Final = ("ip", "tc")
COMMAND_TIMEOUT_S: Final = 10.0
ARENA_BYTES: Final = 64 << 20
PORT: Final = 7411
SIDES: Final = ("a", "b")
NOBODY: Final = "02:00:00:00:00:fe"
"""A hardware address that no device here has."""

SHAPE: Final = TinyModel(
    layers=6, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=256, max_context=2048
)
"""12,288 bytes of float32 KV per token: 1,000 tokens are 12.3 MB."""


def missing_tools() -> str | None:
    """Why the lab cannot be built here; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2)"
    probe = subprocess.run(
        ["ip", "netns", "add", f"bt{os.getpid()}p"],
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if probe.returncode != 0:
        return f"namespaces are not allowed here: {probe.stderr.decode().strip()}"
    _command("ip", "netns", "del", f"bt{os.getpid()}p")
    return None


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)


def kv_model(directory: Path) -> Model:
    """A tiny model whose KV is big enough to be seen on a slow link."""
    path = write_directory(directory, SHAPE)
    config = read_config(path)
    geometry = config.kv_geometry(BLOCK, KvDtype.F32)
    label = build_label(
        path,
        config,
        TextBundle.load(path).tokenizer_hash,
        geometry,
        torch_numeric_class(config, KvDtype.F32),
    )
    return Model(path=path, label=label, geometry=geometry)


@dataclass(slots=True, kw_only=True)
class Network:
    """The namespaces by side, and the link between them."""

    names: dict[str, str]

    def inside(self, side: str, *words: str) -> None:
        """Runs a command in a side's namespace."""
        _command("ip", "netns", "exec", self.names[side], *words)

    def cap(self, rate: str) -> None:
        """Bounds the link in both directions, such as `100mbit`."""
        for side in SIDES:
            limits = ("rate", rate, "burst", "256kb", "latency", "100ms")
            self.inside(side, "tc", "qdisc", "replace", "dev", "peer", "root", "tbf", *limits)

    def uncap(self) -> None:
        """As fast as the machine goes."""
        for side in SIDES:
            self.inside(side, "tc", "qdisc", "del", "dev", "peer", "root")

    def cut(self) -> None:
        """Packets vanish without a word, both ways: each side sends them to nobody."""
        for side, other in zip(SIDES, (2, 1), strict=True):
            to = (f"10.77.0.{other}", "lladdr", NOBODY, "dev", "peer", "nud", "permanent")
            self.inside(side, "ip", "neigh", "replace", *to)

    def heal(self) -> None:
        """Packets pass again."""
        for side in SIDES:
            self.inside(side, "ip", "neigh", "flush", "dev", "peer", "nud", "permanent")


@contextmanager
def network() -> Iterator[Network]:
    """Both namespaces and all links until the block ends."""
    stem = f"bt{os.getpid()}"
    names = {side: f"{stem}{side}" for side in SIDES}
    net = Network(names=names)
    try:
        for name in names.values():
            _command("ip", "netns", "add", name)
        _command(
            *("ip", "link", "add", "peer", "netns", names["a"], "type", "veth"),
            *("peer", "name", "peer", "netns", names["b"]),
        )
        for number, side in enumerate(SIDES, start=1):
            host = f"{stem}h{side}"
            _command(
                *("ip", "link", "add", host, "type", "veth"),
                *("peer", "name", "host", "netns", names[side]),
            )
            _command("ip", "addr", "add", f"10.77.{number}.1/24", "dev", host)
            _command("ip", "link", "set", host, "up")
            net.inside(side, "ip", "addr", "add", f"10.77.{number}.2/24", "dev", "host")
            net.inside(side, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "peer")
            for device in ("lo", "host", "peer"):
                net.inside(side, "ip", "link", "set", device, "up")
            # Where the stores know each other: from out here over the side's own link.
            _command("ip", "route", "add", f"10.77.0.{number}/32", "via", f"10.77.{number}.2")
        yield net
    finally:
        for name in names.values():
            subprocess.run(
                ["ip", "netns", "del", name],
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )


@dataclass(slots=True, kw_only=True)
class NodeStore(StoreProcess):
    """A kvstore inside a namespace. `address` is for the test, `peer_address` for the other store.

    `faults` are armed at the next start, and only then.
    """

    namespace: str = ""
    number: int = 0
    faults: str = ""
    starts: list[str] = field(default_factory=list)

    @property
    def peer_address(self) -> str:
        """Where the other kvstore reaches it, over the link that is capped and cut."""
        return f"10.77.0.{self.number}:{PORT}"

    def start(self) -> None:
        """Starts it in its namespace and waits until it is ready."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Starts it."""
        self.address = f"10.77.{self.number}.2:{PORT}"
        argv = [
            *("ip", "netns", "exec", self.namespace),
            *(sys.executable, "-m", "services.kvstore", "--model", str(self.model.path)),
            *("--dtype", "float32", "--block-tokens", str(BLOCK), "--node-id", self.node_id),
            *("--arena-bytes", str(ARENA_BYTES), "--arena-dir", str(self.arena_dir)),
            *("--log-dir", str(self.directory / "log"), "--port", str(PORT)),
            *("--host", "0.0.0.0", "--insecure-bind"),
            *("--advertise", self.peer_address, "--log-level", "info", *self.flags),
        ]
        environment = {**os.environ, **self.environment}
        if self.faults:
            environment |= {"BATON_FAULTS_ENABLED": "1", "FAULT": self.faults}
        self.starts.append(self.faults)
        self.faults = ""
        with (self.directory / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    def await_ready(self) -> None:
        """Returns when it serves."""
        asyncio.run(ready_at(self.address))

    def wait_dead(self, timeout_s: float) -> int:
        """Its exit code, once it has crashed."""
        assert self.process is not None
        return self.process.wait(timeout_s)


@contextmanager
def node(model: Model, directory: Path, net: Network, side: str) -> Iterator[NodeStore]:
    """A ready kvstore in one namespace."""
    store = NodeStore(
        model=model,
        directory=directory,
        node_id=f"n{side}",
        namespace=net.names[side],
        number=SIDES.index(side) + 1,
    )
    try:
        store.start()
        yield store
    finally:
        if store.process is not None and store.process.poll() is None:
            store.stop()
        shutil.rmtree(store.arena_dir, ignore_errors=True)
