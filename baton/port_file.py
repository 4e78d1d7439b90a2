"""The port file: how a starter learns where a process listens when it asked for any port.

Owns its one line, `host:port`, and that it appears whole or not at all. Never reads it.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_port_file(path: Path, address: str) -> None:
    """Write `address` and a newline to `path`, atomically; call it when ready to serve."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{address}\n", encoding="ascii")
    temporary.replace(path)
