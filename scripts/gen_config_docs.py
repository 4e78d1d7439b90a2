"""Write docs/config.md from the services' configuration dataclasses.

Owns: which services the page has, in which order. Never does: describe a setting itself.

    python scripts/gen_config_docs.py           # write
    python scripts/gen_config_docs.py --check   # compare only; exit 1 when it differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from baton.config_docs import config_markdown
from services.decode.config import DecodeConfig
from services.gateway.config import GatewayConfig
from services.kvstore.config import KVStoreConfig
from services.merger.config import MergerConfig
from services.prefill.config import PrefillConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
SERVICES = {
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "kvstore": KVStoreConfig,
    "merger": MergerConfig,
}


def main() -> int:
    """Write or compare the page; returns the exit code."""
    text = config_markdown(SERVICES)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write("docs/config.md is not what the dataclasses say; run `make gen`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
