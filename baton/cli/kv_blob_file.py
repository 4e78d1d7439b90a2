"""A log in a file: blobs of consecutive ranges, one right behind the other (docs/formats.md, 3).

Owns reading and writing of such files, and their checks. Never talks to a kvstore; never holds more
than one blob's bytes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from baton.cli.console import CommandFailed
from baton.errors import ServiceError
from baton.kv.blob import (
    HEADER_BYTES,
    PAYLOAD_OFFSET_FILE,
    BlobHeader,
    checksum_mismatch,
    decode_header,
    encode_header,
    invalid,
)
from baton.kv.crc import crc32c

PORTABLE_GENERATION: Final = 1
"""In files: a generation fences writers of one home, and the log made of a file begins at this."""

FILE_MODE: Final = 0o600


def portable(header: BlobHeader) -> BlobHeader:
    """The header as it stands in a file: the same for the same content, wherever the log was."""
    return replace(header, generation=PORTABLE_GENERATION, payload_offset=PAYLOAD_OFFSET_FILE)


@contextmanager
def written_whole(path: Path, *, may_replace: bool) -> Iterator[BinaryIO]:
    """A file that is there when the block ends well, and otherwise not; mode 0600."""
    if path.exists() and not may_replace:
        raise CommandFailed(f"{path} is there already", remedy="name another file, or give --force")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except OSError as problem:
        raise CommandFailed(f"cannot write {path}: {problem.strerror}") from problem
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(temporary, path, may_replace=may_replace)
    except OSError as problem:
        raise CommandFailed(f"cannot write {path}: {problem.strerror}") from problem
    finally:
        temporary.unlink(missing_ok=True)


def _put_in_place(temporary: Path, path: Path, *, may_replace: bool) -> None:
    if may_replace:
        temporary.replace(path)
        return
    try:
        # Unlike a rename it does not replace what came meanwhile.
        path.hardlink_to(temporary)
    except FileExistsError:
        raise CommandFailed(
            f"{path} is there already", remedy="name another file, or give --force"
        ) from None


def write_header(file: BinaryIO, header: BlobHeader) -> None:
    """A blob's header and the gap before its payload."""
    file.write(encode_header(header))
    file.write(bytes(header.payload_offset - HEADER_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One blob of a file: its header, and where it begins."""

    header: BlobHeader
    offset: int


class LogFile:
    """A file of blobs, opened for reading. Refusals name the file, the byte and what is wrong."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.size_bytes = os.fstat(file.fileno()).st_size
        self.parts = tuple(self._headers())

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[LogFile]:
        """The file, its headers checked: magic, CRC, fields, order, sizes against the file's."""
        try:
            with path.open("rb") as file:
                yield cls(path, file)
        except OSError as problem:
            raise CommandFailed(f"cannot read {path}: {problem.strerror}") from problem

    @property
    def total_tokens(self) -> int:
        """Tokens of all blobs."""
        return self.parts[-1].header.end_position

    def _headers(self) -> Iterator[Part]:
        offset, position = 0, 0
        first: BlobHeader | None = None
        while offset < self.size_bytes or first is None:
            with self._named(offset):
                self._file.seek(offset)
                header = decode_header(self._file.read(HEADER_BYTES))
                if header.first_position != position:
                    raise invalid(
                        "first_position", f"is {header.first_position}; {position} comes next"
                    )
                if offset + header.blob_bytes > self.size_bytes:
                    left = self.size_bytes - offset
                    raise invalid(
                        "payload", f"ends early: {left} of {header.blob_bytes} bytes", offset=left
                    )
                if first is not None and not _is_same_log(first, header):
                    raise invalid("log_id", "is another log's than that of the first blob")
            yield Part(header=header, offset=offset)
            first = first or header
            offset, position = offset + header.blob_bytes, header.end_position

    def payload(self, part: Part) -> bytes:
        """The payload of a blob, compared with its CRC."""
        with self._named(part.offset):
            self._file.seek(part.offset + HEADER_BYTES)
            gap = self._file.read(part.header.payload_offset - HEADER_BYTES)
            if any(gap):
                raise invalid(
                    "padding", "bytes before the payload are not zero", offset=HEADER_BYTES
                )
            payload = self._file.read(part.header.payload_bytes)
            if len(payload) < part.header.payload_bytes:
                raise invalid("payload", "the file became shorter while it was read")
            if crc32c(payload) != part.header.payload_crc:
                raise checksum_mismatch("payload_crc")
        return payload

    @contextmanager
    def _named(self, offset: int) -> Iterator[None]:
        try:
            yield
        except ServiceError as problem:
            at = f", in the blob from byte {offset}" if offset else ""
            raise CommandFailed(f"{self._path}{at}: {problem.message}") from problem


def _is_same_log(first: BlobHeader, other: BlobHeader) -> bool:
    same = {
        name: getattr(first, name)
        for name in ("total_tokens", "first_position", "payload_bytes", "payload_crc")
    }
    return replace(other, **same) == first


def page_crcs(header: BlobHeader, payload: bytes) -> list[int]:
    """The CRC of each packed page of a checked payload."""
    content = np.frombuffer(payload, dtype=np.uint8)
    crcs, offset = [], 0
    for span in header.spans():
        end = offset + span.tokens * header.geometry.token_bytes
        crcs.append(crc32c(content[offset:end]))
        offset = end
    return crcs
