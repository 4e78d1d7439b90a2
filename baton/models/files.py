"""From a model's name or path to its files on this machine, checked as far as is cheap.

Owns `locate` and `resolve` (size only: a cut-off download never passes) and `verify` (every byte).
Never fetches anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

from baton.engine.gguf_meta import read_header
from baton.errors import Reason, ServiceError
from baton.models.registry import KNOWN_MODELS, KnownModel, cache_dir, find_known

_CHUNK_BYTES: Final = 1 << 20


@unique
class ModelKind(StrEnum):
    """How a model is stored."""

    GGUF = "gguf"
    HF_DIRECTORY = "hf_directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on disk: `path` is absolute; `known` is its row of the table, if it has one."""

    name: str
    path: Path
    kind: ModelKind
    known: KnownModel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A known model and whether its file is here.

    `present_bytes` is None when there is no file; a size other than `model.file_bytes` means that
    the file is damaged and must be pulled again.
    """

    model: KnownModel
    path: Path
    present_bytes: int | None

    @property
    def is_complete(self) -> bool:
        """Whether the file is here in full size."""
        return self.present_bytes == self.model.file_bytes


def locate(name_or_path: str | Path) -> Path:
    """The GGUF file or model directory of a known name, an alias, or a path.

    Raises ServiceError MODEL_NOT_FOUND with the command to run, CHECKSUM_MISMATCH when the cached
    file does not have the recorded size.
    """
    return resolve(name_or_path).path


def resolve(name_or_path: str | Path) -> ModelFiles:
    """As `locate`, with the kind and the canonical name."""
    known = find_known(name_or_path) if isinstance(name_or_path, str) else None
    if known is not None:
        return ModelFiles(name=known.name, path=_cached(known), kind=ModelKind.GGUF, known=known)
    try:
        path = Path(name_or_path).expanduser().absolute()
        if path.is_dir():
            return _directory(path)
        if path.is_file():
            return _file(path)
    except (OSError, ValueError, RuntimeError):
        # A name too long for a path, or with a NUL: no such model.
        pass
    raise not_found(name_or_path)


def verify(name_or_path: str | Path) -> None:
    """Read every byte of a model's file and compare it with what is recorded.

    A model without a record is checked for structure only: a GGUF whose tensors are all there, a
    directory with its files. Raises as `locate` does; CHECKSUM_MISMATCH names the remedy.
    """
    files = resolve(name_or_path)
    if files.known is not None:
        if sha256_hex(files.path) != files.known.sha256:
            raise damaged(files.known, files.path, "does not have the recorded SHA-256")
    elif files.kind is ModelKind.GGUF:
        read_header(files.path)


def list_models() -> tuple[ModelStatus, ...]:
    """Every known model with the state of its cached file."""
    return tuple(
        ModelStatus(model=model, path=cached_path(model), present_bytes=_size(cached_path(model)))
        for model in KNOWN_MODELS
    )


def cached_path(model: KnownModel) -> Path:
    """Where the model's file belongs, present or not."""
    return (cache_dir() / model.file_name).absolute()


def sha256_hex(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def not_found(name_or_path: str | Path) -> ServiceError:
    """MODEL_NOT_FOUND with what to do about it."""
    name = str(name_or_path)[:200].encode("utf-8", "replace").decode("utf-8")
    known = ", ".join(model.short_name for model in KNOWN_MODELS)
    return ServiceError(
        Reason.MODEL_NOT_FOUND,
        f"model {name} is neither a known name ({known}) nor a .gguf file or a Hugging Face "
        f"directory on this machine; to fetch the bundled model: "
        f"baton models pull {KNOWN_MODELS[0].short_name}",
        field="model",
    )


def damaged(model: KnownModel, path: Path, what: str) -> ServiceError:
    """CHECKSUM_MISMATCH with what to do about it."""
    return ServiceError(
        Reason.CHECKSUM_MISMATCH,
        f"{path} {what}; fetch it again: baton models pull {model.short_name}",
        field="model",
    )


def _cached(model: KnownModel) -> Path:
    path = cached_path(model)
    size = _size(path)
    if size is None:
        raise ServiceError(
            Reason.MODEL_NOT_FOUND,
            f"model {model.name} is not in {path.parent}; "
            f"fetch it: baton models pull {model.short_name}",
            field="model",
        )
    if size != model.file_bytes:
        raise damaged(model, path, f"has {size} bytes instead of {model.file_bytes}")
    return path


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _file(path: Path) -> ModelFiles:
    for model in KNOWN_MODELS:
        if path == cached_path(model):
            return resolve(model.name)
    if path.suffix != ".gguf":
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"{path} is no .gguf file; give one, or a Hugging Face directory",
            field="model",
        )
    by_file_name = {model.file_name: model.name for model in KNOWN_MODELS}
    name = by_file_name.get(path.name, path.stem)
    return ModelFiles(name=name, path=path, kind=ModelKind.GGUF, known=None)


def _directory(path: Path) -> ModelFiles:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ServiceError(
            Reason.MODEL_NOT_FOUND,
            f"{path} has no {' and no '.join(missing)}; give a Hugging Face model directory",
            field="model",
        )
    return ModelFiles(name=path.name, path=path, kind=ModelKind.HF_DIRECTORY, known=None)
