"""What a disk may hold after a power cut: images of a trace.

Pure. Everything flushed is there. Of what was not, a policy drawn from the seed keeps nothing, all,
the first operations, some operations or some sectors of them; in no order among files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.durability.disk import (
    SECTOR_BYTES,
    Create,
    Operation,
    Remove,
    Rename,
    Resize,
    Sync,
    SyncDirectory,
    Write,
)

POLICIES = ("nothing", "everything", "prefix", "operations", "sectors", "sectors")


@dataclass(slots=True)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write | Resize] = field(default_factory=list)

    def flush(self) -> None:
        for operation in self.pending:
            _apply(self.durable, operation)
        self.pending.clear()

    def lose(self) -> None:
        """A failed flush: the pages are clean now, and their bytes are nowhere."""
        self.pending = [item for item in self.pending if isinstance(item, Resize)]


def _apply(content: bytearray, operation: Write | Resize) -> None:
    if isinstance(operation, Resize):
        del content[operation.size :]
        content.extend(bytes(operation.size - len(content)))
        return
    end = operation.offset + len(operation.data)
    content.extend(bytes(max(0, end - len(content))))
    content[operation.offset : end] = operation.data


@dataclass(slots=True)
class _Tree:
    """The directory and its files, as far as flushed, and what is pending."""

    files: dict[int, _File] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Create | Remove | Rename] = field(default_factory=list)

    def take(self, operation: Operation) -> None:
        match operation:
            case Create():
                self.files[operation.inode] = _File()
                self.pending.append(operation)
            case Remove() | Rename():
                self.pending.append(operation)
            case Write() | Resize():
                self.files[operation.inode].pending.append(operation)
            case Sync(inode=inode, is_lost=is_lost):
                file = self.files[inode]
                file.lose() if is_lost else file.flush()
            case SyncDirectory():
                _rename(self.names, self.pending)
                self.pending.clear()
            case _:
                pass


def _rename(names: dict[str, int], pending: Sequence[Create | Remove | Rename]) -> None:
    for operation in pending:
        match operation:
            case Create():
                names[operation.name] = operation.inode
            case Remove():
                names.pop(operation.name, None)
            case Rename():
                names[operation.target] = names.pop(operation.source)


def cut_power(trace: Sequence[Operation], rng: random.Random) -> dict[str, bytes]:
    """Files by name after a power cut at the end of the trace."""
    tree = _Tree()
    for operation in trace:
        tree.take(operation)
    policy = rng.choice(POLICIES)
    names = dict(tree.names)
    _rename(names, tree.pending[: _kept(len(tree.pending), policy, rng)])
    return {name: bytes(_content(tree.files[inode], policy, rng)) for name, inode in names.items()}


def as_seen(trace: Sequence[Operation]) -> dict[str, bytes]:
    """Files by name as a process sees them at the end of the trace."""
    tree = _Tree()
    for operation in trace:
        if not (isinstance(operation, Sync) and operation.is_lost):
            tree.take(operation)
    names = dict(tree.names)
    _rename(names, tree.pending)
    for file in tree.files.values():
        file.flush()
    return {name: bytes(tree.files[inode].durable) for name, inode in names.items()}


def _kept(count: int, policy: str, rng: random.Random) -> int:
    if policy == "nothing":
        return 0
    return count if policy == "everything" else rng.randint(0, count)


def _content(file: _File, policy: str, rng: random.Random) -> bytearray:
    content = bytearray(file.durable)
    share = rng.random()
    sizes = sum(isinstance(item, Resize) for item in file.pending)
    sizes_kept = _kept(sizes, policy, rng)
    first_kept = _kept(len(file.pending), policy, rng)
    for index, operation in enumerate(file.pending):
        if isinstance(operation, Resize):
            if sizes_kept:
                _apply(content, operation)
                sizes_kept -= 1
        elif policy in ("everything", "nothing", "prefix"):
            if index < first_kept:
                _apply(content, operation)
        elif policy == "operations":
            if rng.random() < share:
                _apply(content, operation)
        else:
            for sector in sectors(operation):
                if rng.random() < share:
                    _apply(content, sector)
    return content


def sectors(operation: Write) -> Iterator[Write]:
    """A write cut where the disk's sectors are."""
    start, end = operation.offset, operation.offset + len(operation.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        part = operation.data[start - operation.offset : stop - operation.offset]
        yield Write(operation.inode, start, part)
        start = stop
