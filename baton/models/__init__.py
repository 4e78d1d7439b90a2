"""Model files: which models are known, where they lie, how they are fetched and verified.

Never loads a model: engines and `baton.text` open the paths that this package answers.
"""

from __future__ import annotations

from baton.models.fetch import PULL_TIMEOUT_S, Progress, pull
from baton.models.files import (
    ModelFiles,
    ModelKind,
    ModelStatus,
    list_models,
    locate,
    resolve,
    verify,
)
from baton.models.registry import KNOWN_MODELS, KnownModel, cache_dir, find_known, is_known

__all__ = [
    "KNOWN_MODELS",
    "PULL_TIMEOUT_S",
    "KnownModel",
    "ModelFiles",
    "ModelKind",
    "ModelStatus",
    "Progress",
    "cache_dir",
    "find_known",
    "is_known",
    "list_models",
    "locate",
    "pull",
    "resolve",
    "verify",
]
