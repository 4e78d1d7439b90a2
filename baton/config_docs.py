"""Writes docs/config.md from the configuration dataclasses, so that it cannot be wrong.

Owns the page's form; a test compares the file with `config_markdown`. Never reads a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.config import describe

_HEAD = """# Configuration

Written by `make gen` from the dataclasses; do not edit.

Each setting has three names: a flag, an environment variable and a key in the file that `--config`
(or `BATON_<SERVICE>_CONFIG`) names, TOML or YAML. A flag wins over the environment, the environment
over the file, the file over the default. Anything unknown or malformed stops the start, with all
faults listed. `--print-config` shows every value and where it comes from. Lists are
comma-separated, or the flag is repeated; secrets are hex digits or `file:PATH`, a file that only
its owner can read; `none` clears an optional setting.
"""


def config_markdown(services: Mapping[str, type[Any]]) -> str:
    """The page for these services: name -> configuration dataclass, in the order given."""
    parts = [_HEAD]
    for service, config_type in services.items():
        parts.append(f"\n## baton-{service}\n")
        parts.append("\n| setting | type | default | what it does |\n| --- | --- | --- | --- |\n")
        for item in describe(config_type, service):
            names = f"`{item.flag}`<br>`{item.variable}`"
            cells = (item.type_text, _code(item.default_text), item.help_text)
            parts.append(f"| {names} | {' | '.join(_cell(cell) for cell in cells)} |\n")
    return "".join(parts)


def _code(text: str) -> str:
    return text if text == "required" else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
