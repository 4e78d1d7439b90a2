"""Reading the header of a GGUF file: metadata and where the tensors lie.

Owns the parse of the GGUF container (versions 2 and 3, little-endian) and every bound on it. It
reads no weights, imports neither torch nor numpy, and believes no length before checking it
against the bytes present. It exists because `gguf.GGUFReader` takes seconds on a vocabulary of
tens of thousands of entries, which is too slow for a gateway that only wants the tokenizer.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.errors import Reason, ServiceError

STRING_BYTES_MAX: Final = 1 << 24
ARRAY_ITEMS_MAX: Final = 1 << 24
METADATA_ENTRIES_MAX: Final = 1 << 16
TENSORS_MAX: Final = 1 << 16
DIMENSIONS_MAX: Final = 4
ALIGNMENT_MAX: Final = 1 << 20
ALIGNMENT_DEFAULT: Final = 32

_MAGIC: Final = b"GGUF"
_SCALARS: Final[Mapping[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING_TYPE: Final = 8
_ARRAY_TYPE: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """A storage type: `block_bytes` hold `block_items` numbers, along the row."""

    name: str
    block_items: int
    block_bytes: int


# The types that `baton.engine.weights` reads; others parse, but cannot be loaded.
TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType(name="F32", block_items=1, block_bytes=4),
    1: TensorType(name="F16", block_items=1, block_bytes=2),
    2: TensorType(name="Q4_0", block_items=32, block_bytes=18),
    3: TensorType(name="Q4_1", block_items=32, block_bytes=20),
    6: TensorType(name="Q5_0", block_items=32, block_bytes=22),
    7: TensorType(name="Q5_1", block_items=32, block_bytes=24),
    8: TensorType(name="Q8_0", block_items=32, block_bytes=34),
    30: TensorType(name="BF16", block_items=1, block_bytes=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies. `shape` is row-major (the file stores it reversed).

    `offset` counts from the start of the file. `type_id` is ggml's; `type` is None, and
    `stored_bytes` too, when it is one that cannot be loaded.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: TensorType | None
    offset: int
    stored_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The parsed header of one GGUF file.

    Metadata values are int, float, bool, str, or a list of one of these.
    """

    path: Path
    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    file_bytes: int


def read_metadata(path: Path) -> dict[str, object]:
    """Only the metadata of `path`. Raises as `read_header` does."""
    return dict(read_header(path).metadata)


def read_header(path: Path) -> GgufHeader:
    """Parse the header of the GGUF file `path`.

    Raises ServiceError INVALID_REQUEST, naming the file and the field, when the file cannot be
    read, is no GGUF, is truncated, or states a length that cannot be.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Parser(path, view).header()
    except (OSError, ValueError) as error:
        raise _bad(path, "file", f"cannot be read ({error})") from error


class _Parser:
    """A cursor over the mapped file; every read is checked against the bytes that are left."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4, "magic") != _MAGIC:
            raise _bad(self._path, "magic", "is not GGUF; give a .gguf model file")
        version = self._scalar(_U32, "version")
        if version not in (2, 3):
            raise _bad(self._path, "version", f"is {version}; only little-endian 2 and 3 are read")
        tensor_count = self._count("tensor_count", TENSORS_MAX)
        entry_count = self._count("metadata_count", METADATA_ENTRIES_MAX)
        metadata: dict[str, object] = {}
        for _ in range(entry_count):
            key = self._string("metadata key")
            if key in metadata:
                raise _bad(self._path, key, "appears twice")
            metadata[key] = self._value(key)
        tensors = self._tensors(tensor_count, self._alignment(metadata))
        return GgufHeader(
            path=self._path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            file_bytes=self._size,
        )

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= ALIGNMENT_MAX
            or alignment & (alignment - 1)
        ):
            raise _bad(self._path, "general.alignment", "must be a power of two up to 1 MiB")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        heads = [self._tensor_head() for _ in range(count)]
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, relative_offset in heads:
            if name in tensors:
                raise _bad(self._path, name, "appears twice")
            tensors[name] = self._tensor(name, shape, type_id, data_start + relative_offset)
        return tensors

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("tensor name")
        dimension_count = self._scalar(_U32, name)
        if not 1 <= dimension_count <= DIMENSIONS_MAX:
            raise _bad(self._path, name, f"has {dimension_count} dimensions; at most 4 are allowed")
        sizes = [self._scalar(_U64, name) for _ in range(dimension_count)]
        type_id = self._scalar(_U32, name)
        return name, tuple(reversed(sizes)), type_id, self._scalar(_U64, name)

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        kind = TENSOR_TYPES.get(type_id)
        stored_bytes: int | None = None
        if kind is not None:
            items = 1
            for size in shape:
                items *= size
            if shape[-1] % kind.block_items or items == 0:
                raise _bad(self._path, name, f"has a shape {shape} that {kind.name} cannot hold")
            stored_bytes = items // kind.block_items * kind.block_bytes
        if offset + (stored_bytes or 0) > self._size:
            raise _bad(
                self._path,
                name,
                f"ends at byte {offset + (stored_bytes or 0)} of {self._size}; "
                "the file is truncated: fetch it again",
            )
        return TensorInfo(
            name=name,
            shape=shape,
            type_id=type_id,
            type=kind,
            offset=offset,
            stored_bytes=stored_bytes,
        )

    def _value(self, key: str) -> object:
        type_id = self._scalar(_U32, key)
        return self._list(key) if type_id == _ARRAY_TYPE else self._item(type_id, key)

    def _item(self, type_id: int, key: str) -> object:
        if type_id == _STRING_TYPE:
            return self._string(key)
        scalar = _SCALARS.get(type_id)
        if scalar is None:
            raise _bad(self._path, key, f"has the unknown value type {type_id}")
        return scalar.unpack(self._take(scalar.size, key))[0]

    def _list(self, key: str) -> list[object]:
        item_type = self._scalar(_U32, key)
        count = self._count(key, ARRAY_ITEMS_MAX)
        scalar = _SCALARS.get(item_type)
        if scalar is not None:
            body = self._take(count * scalar.size, key)
            return list(struct.unpack(f"<{count}{scalar.format[-1]}", body))
        if item_type != _STRING_TYPE:
            raise _bad(self._path, key, f"is an array of the unread value type {item_type}")
        # Every string has at least its 8-byte length: an absurd count fails before the loop.
        if count * _U64.size > self._size - self._at:
            raise self._truncated(key)
        return [self._string(key) for _ in range(count)]

    def _string(self, field: str) -> str:
        length = self._scalar(_U64, field)
        if length > STRING_BYTES_MAX:
            raise _bad(self._path, field, f"states a string of {length} bytes; the file is damaged")
        try:
            return self._take(length, field).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _bad(self._path, field, "is not UTF-8; the file is damaged") from error

    def _count(self, field: str, most: int) -> int:
        count = self._scalar(_U64, field)
        if count > most:
            raise _bad(self._path, field, f"states {count} items, more than {most}")
        return count

    def _scalar(self, scalar: struct.Struct, field: str) -> int:
        end = self._at + scalar.size
        if end > self._size:
            raise self._truncated(field)
        value: int = scalar.unpack_from(self._view, self._at)[0]
        self._at = end
        return value

    def _take(self, size: int, field: str) -> bytes:
        end = self._at + size
        if end > self._size:
            raise self._truncated(field)
        body = self._view[self._at : end]
        self._at = end
        return body

    def _truncated(self, field: str) -> ServiceError:
        return _bad(
            self._path, field, f"ends past byte {self._size}; the file is truncated: fetch it again"
        )


def _bad(path: Path, field: str, what: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"GGUF file {path}: {field} {what}", field=field)
