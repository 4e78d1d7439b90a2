"""Opening one of the small native libraries, for callers that have the same in Python.

Owns the loading and the check of the interface's version. The step kernel has a loader of its own
(`baton.engine.step_kernel_abi`), which says why it cannot serve; here Python simply serves instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_library(
    file: Path, declarations: str, version_function: str, version: int
) -> tuple[Any, Any] | None:
    """(ffi, library); None where it was not built, is another version's, or cffi is missing."""
    try:
        from cffi import FFI
    except ImportError:
        return None
    ffi = FFI()
    ffi.cdef(declarations)
    try:
        opened = ffi.dlopen(str(file))
    except OSError:
        return None
    is_ours = getattr(opened, version_function)() == version
    return (ffi, opened) if is_ours else None
