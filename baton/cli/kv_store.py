"""How `baton kv` reaches kvstores: addresses, the operator's capability, errors as one line.

Owns the options that all of its commands share. Never prints, never keeps a capability.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from baton.api.kvstore.v1 import kvstore_pb2_grpc, operators_pb2, operators_pb2_grpc
from baton.capability import DEV_KEY, CapabilitySigner, Claims, Right
from baton.cli.console import CommandFailed, ExitCode
from baton.clock import SystemClock
from baton.cluster_key import read_cluster_key
from baton.errors import Reason, ServiceError, StartupError
from baton.ids import LOG_ID_BYTES
from baton.launcher.rundir import KEY_FILE, default_run_dir, running_pid
from baton.process_files import read_port_file
from baton.rpc.channel import Channel, ChannelOptions, open_channel
from baton.rpc.server import split_bind

CALL_TIMEOUT_S: Final = 30.0
CAPABILITY_TTL_S: Final = 600.0
REQUESTER: Final = "baton-kv"
PREFIX_DIGITS_MIN: Final = 4
PORT_FILES: Final = "kvstore-*.port"

_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_UNREACHABLE: Final = frozenset({Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED})

_T = TypeVar("_T")

RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        envvar="BATON_UP_RUN_DIR",
        show_default=str(default_run_dir()),
        help="Run directory of `baton up`; its kvstores are asked, with its key.",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--kvstore",
        envvar="BATON_KV_KVSTORE",
        metavar="HOST:PORT",
        help="One kvstore's gRPC address, instead of those of a run directory.",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster-key-file",
        envvar="BATON_KV_CLUSTER_KEY_FILE",
        show_default="the run directory's, or the public development key with --kvstore",
        help="The cluster's key.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kvstore: the name it is shown by and its address."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Which kvstores are meant, and the key they check capabilities with."""

    targets: tuple[Target, ...]
    key: bytes

    def run(self, work: Callable[[Sequence[Store]], Coroutine[Any, Any, _T]]) -> _T:
        """Opens a channel to each, does the work, closes them. Errors come out as CommandFailed."""

        async def with_channels() -> _T:
            stores = [Store(target, self.key) for target in self.targets]
            try:
                return await work(stores)
            finally:
                for store in stores:
                    await store.close()

        return asyncio.run(with_channels())


def reach(run_dir: Path | None, address: str | None, key_file: Path | None) -> Reach:
    """The kvstores that the options name."""
    if address is not None:
        return Reach(targets=(Target(name=address, address=_checked(address)),), key=_key(key_file))
    where = run_dir or default_run_dir()
    if running_pid(where) is None:
        raise CommandFailed(
            f"no cluster runs in {where}",
            remedy="start one with `baton up`, or name another with --run-dir or --kvstore",
            exit_code=ExitCode.UNREACHABLE,
        )
    targets = _in_run_dir(where)
    if not targets:
        raise CommandFailed(
            f"no kvstore of {where} is ready yet",
            remedy=f"see {where}/kvstore-0.log",
            exit_code=ExitCode.UNREACHABLE,
        )
    return Reach(targets=targets, key=_key(key_file or where / KEY_FILE))


def _in_run_dir(where: Path) -> tuple[Target, ...]:
    found = []
    for path in sorted(where.glob(PORT_FILES), key=lambda path: (len(path.name), path.name)):
        address = read_port_file(path)
        if address is not None:
            found.append(Target(name=path.stem.replace("kvstore", "node"), address=address))
    return tuple(found)


def _checked(address: str) -> str:
    try:
        split_bind(address)
    except StartupError:
        raise CommandFailed(
            f"--kvstore {address!r} is no address",
            remedy="write it like 127.0.0.1:7070",
            exit_code=ExitCode.USAGE,
        ) from None
    return address


def _key(path: Path | None) -> bytes:
    if path is None:
        return DEV_KEY
    try:
        return read_cluster_key(path)
    except StartupError as problem:
        raise CommandFailed(
            problem.message, remedy=problem.hint, exit_code=ExitCode.USAGE
        ) from problem


class Store:
    """One kvstore while a command talks to it."""

    def __init__(self, target: Target, key: bytes) -> None:
        self.name, self.address = target.name, target.address
        self._signer = CapabilitySigner(key, SystemClock())
        self._channel: Channel | None = None

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._channel is not None:
            await self._channel.close()

    @property
    def operators(self) -> Any:
        """The stub of OperatorService."""
        return operators_pb2_grpc.OperatorServiceStub(self._open())

    @property
    def data(self) -> Any:
        """The stub of KVStoreService."""
        return kvstore_pb2_grpc.KVStoreServiceStub(self._open())

    def _open(self) -> Channel:
        if self._channel is None:
            options = ChannelOptions(call_timeout_s=CALL_TIMEOUT_S)
            self._channel = open_channel(self.address, options)
        return self._channel

    def operator(self) -> str:
        """An operator's capability, for a few minutes."""
        return self._sign(None, None, frozenset({Right.ADMIN}), None)

    def tenant(self, name: str, scope: str, right: Right, log_id: bytes) -> str:
        """A tenant's capability for one log, for a few minutes."""
        return self._sign(name, scope, frozenset({right}), log_id)

    def _sign(
        self, tenant: str | None, scope: str | None, rights: frozenset[Right], log_id: bytes | None
    ) -> str:
        return self._signer.sign(
            Claims(
                tenant=tenant,
                scope=scope,
                rights=rights,
                expiry_wall_s=self._signer.expiry_after(CAPABILITY_TTL_S),
                request_id=REQUESTER,
                log_id=log_id,
            )
        )

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns what a call raises into one line with a remedy."""
        try:
            yield
        except ServiceError as problem:
            raise failed(problem, self) from problem


def failed(problem: ServiceError, store: Store) -> CommandFailed:
    """The line for people."""
    if problem.reason in _UNREACHABLE:
        return CommandFailed(
            f"no kvstore answers at {store.address}",
            remedy="is it running? `baton up` starts one; --kvstore names another",
            exit_code=ExitCode.UNREACHABLE,
        )
    if problem.reason is Reason.UNAUTHENTICATED:
        return CommandFailed(
            f"the kvstore at {store.address} has another key",
            remedy="give its cluster's with --cluster-key-file",
        )
    if problem.reason is Reason.UNSUPPORTED and problem.field is None:
        return CommandFailed(
            f"what answers at {store.address} is no kvstore, or an older one",
            remedy="is it the kvstore's gRPC port?",
        )
    return CommandFailed(problem.message)


async def resolve(stores: Sequence[Store], text: str) -> tuple[Store, bytes]:
    """The log that an id, or the first digits of one, names, and the kvstore that has it."""
    if not _HEX.fullmatch(text) or not PREFIX_DIGITS_MIN <= len(text) <= 2 * LOG_ID_BYTES:
        raise CommandFailed(
            f"{text!r} is no log id",
            remedy=f"give {2 * LOG_ID_BYTES} hex digits, or the first {PREFIX_DIGITS_MIN} or more; "
            "`baton kv ls` lists them",
            exit_code=ExitCode.USAGE,
        )
    found: list[tuple[Store, operators_pb2.LogSummary]] = []
    total = 0
    for store in stores:
        with store.failures():
            answer = await store.operators.ListLogs(
                operators_pb2.ListLogsRequest(
                    capability=store.operator(), log_id_prefix=text, page_size=1
                )
            )
        total += answer.total
        found += [(store, line) for line in answer.logs]
    if not found:
        raise CommandFailed(
            f"no log {text} here",
            remedy="it ended, its time was over, or another kvstore has it; `baton kv ls` lists "
            "what there is",
        )
    if total > len(found) or len({line.log_id for _, line in found}) > 1:
        raise CommandFailed(f"{total} logs begin with {text}", remedy="give more digits")
    # Where it moved away from it is only read.
    found.sort(key=lambda pair: pair[1].phase == operators_pb2.LOG_PHASE_MOVED)
    return found[0][0], found[0][1].log_id
