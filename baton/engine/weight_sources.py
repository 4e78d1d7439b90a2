"""Where raw tensors come from: a GGUF file or a directory of safetensors.

Owns reading and dequantising single tensors by the file's own names. It never knows what a tensor
is for (that is `baton.engine.weights`) and never loads anything that could run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import gguf
import numpy as np
import torch
from gguf import quants
from safetensors import SafetensorError, safe_open

from baton.engine.gguf_meta import GgufHeader, TensorInfo
from baton.engine.model_fields import bad_model, read_json_object

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_SAFETENSORS_DTYPES: Final = ("F32", "F16", "BF16")


class TensorSource(Protocol):
    """Named tensors of one model on disk."""

    @property
    def path(self) -> Path:
        """The file or directory, for errors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and row-major shape."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, dequantised: float32, float16 or bfloat16, in its row-major shape."""


class GgufSource:
    """Tensors of one GGUF file; quantised ones come out as float32."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._tensors = header.tensors
        try:
            self._bytes = np.memmap(header.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise bad_model(header.path, "file", f"cannot be mapped ({error})") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and row-major shape."""
        return {name: info.shape for name, info in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` as float32. INVALID_REQUEST when its type cannot be read."""
        info = self._tensors[name]
        stored = self._stored(info)
        kind = gguf.GGMLQuantizationType(info.type_id)
        numbers = quants.dequantize(stored, kind).astype(np.float32, copy=True)
        return torch.from_numpy(numbers).reshape(info.shape)

    def stored_rows(self, name: str) -> tuple[str, np.ndarray[Any, Any]]:
        """The ggml type of `name` and its rows as stored: uint8 [rows, bytes] for block types."""
        info = self._tensors[name]
        rows = self._stored(info)
        assert info.type is not None
        return info.type.name, rows

    def _stored(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        if info.type is None or info.stored_bytes is None:
            raise bad_model(
                self.path,
                info.name,
                f"has ggml type {_type_name(info.type_id)}, which cannot be read; "
                "use a model in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, BF16 or F32",
            )
        end = info.offset + info.stored_bytes
        if end > self._bytes.size:
            raise bad_model(self.path, info.name, "is cut off; the file changed: fetch it again")
        row_bytes = info.shape[-1] // info.type.block_items * info.type.block_bytes
        rows = np.asarray(self._bytes[info.offset : end]).reshape(-1, row_bytes)
        # Plain types are viewed as numbers; blocks stay bytes for the dequantiser.
        views = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
        return rows.view(views[info.type.name]) if info.type.name in views else rows


class SafetensorsSource:
    """Tensors of a Hugging Face directory: model.safetensors, or shards with their index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[Path, Any] = {}
        for file in _shard_files(path):
            self._open(file)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and row-major shape."""
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` in its stored type."""
        tensor: torch.Tensor = self._handles[self._file_of[name]].get_tensor(name)
        return tensor

    def _open(self, file: Path) -> None:
        try:
            handle: Any = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                view = handle.get_slice(name)
                if view.get_dtype() not in _SAFETENSORS_DTYPES:
                    raise bad_model(
                        file,
                        name,
                        f"has type {view.get_dtype()}; use one of {', '.join(_SAFETENSORS_DTYPES)}",
                    )
                if name in self._file_of:
                    raise bad_model(file, name, f"also stands in {self._file_of[name].name}")
                self._file_of[name] = file
                self._shapes[name] = tuple(view.get_shape())
        except (OSError, SafetensorError) as error:
            raise bad_model(
                file, "file", f"is no readable safetensors file ({error}); fetch it again"
            ) from error
        self._handles[file] = handle


def _shard_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    if not index.is_file():
        single = path / SINGLE_FILE
        if not single.is_file():
            raise bad_model(path, SINGLE_FILE, f"is missing, and so is {INDEX_FILE}")
        return [single]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_model(index, "weight_map", "must be an object that names a file for each tensor")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # A shard beside its index has a plain name; anything else would read elsewhere.
        if Path(name).name != name or not (path / name).is_file():
            raise bad_model(index, "weight_map", f"names {name!r}, which is not a file beside it")
    return [path / name for name in names]


def _type_name(type_id: int) -> str:
    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return str(type_id)
