"""Print a new cluster key and the worker capability it signs, as two lines for .env.

    .venv/bin/python scripts/compose_key.py >>.env

Gateway and kvstore hold the key, workers and merger only the capability, which is good for 30 days;
the same key prints a new capability:

    .venv/bin/python scripts/compose_key.py 64_HEX_DIGITS
"""

from __future__ import annotations

import secrets
import sys

from baton.launcher.cluster import worker_capability

KEY_BYTES = 32


def main() -> int:
    """Exit status 0; 2 for a key that is none."""
    text = sys.argv[1] if len(sys.argv) == 2 else secrets.token_hex(KEY_BYTES)
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(sys.argv) > 2 or len(key) < KEY_BYTES:
        print(f"give nothing, or a key of at least {2 * KEY_BYTES} hex digits", file=sys.stderr)
        return 2
    print(f"BATON_CLUSTER_KEY_HEX={key.hex()}")
    print(f"BATON_WORKER_CAPABILITY={worker_capability(key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
