"""How much freed memory a process keeps for its next buffers.

Owns one setting of glibc's allocator. Chunks of a transfer are buffers of a megabyte that come and
go; left to itself the allocator gives each back to the kernel, and its next one is mapped and
zeroed page by page again: a third of what receiving costs. Elsewhere than on glibc this does
nothing.
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT_BYTES: Final = 64 << 20

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_MAX: Final = 32 << 20
"""glibc takes no more."""


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> bool:
    """Lets the allocator keep up to `kept_bytes` of freed memory at the heap's end, and serve
    buffers of up to 32 MiB from it. For the whole process; returns whether it was taken.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    settings = ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX), (_M_TRIM_THRESHOLD, kept_bytes))
    return all(mallopt(name, value) for name, value in settings)
