"""docs/observability.md says what the code shows: metrics, stages, fields of the log line."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from baton.log import CanonicalLine
from baton.metrics_table import FAMILIES
from baton.metrics_vllm import ALIASES, Alias
from baton.stages import STAGES

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "observability.md"
BEGIN = (
    "<!-- families: written by REWRITE=1 pytest tests/unit/observability/test_documents.py -->\n"
)
END = "<!-- end of families -->\n"


def families_text() -> str:
    """The table of families, and the one of aliases."""
    lines = [
        "",
        "| metric | kind | labels | services | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES.values():
        labels = ", ".join(f"`{label.name}`" for label in family.labels)
        services = ", ".join(family.services)
        name = f"`{family.shown_name}`"
        lines.append(f"| {name} | {family.kind} | {labels} | {services} | {family.help_text} |")
    lines += ["", "| vLLM's name | read from |", "| --- | --- |"]
    lines += [f"| `{alias.shown_name}` | {_sources(alias)} |" for alias in ALIASES]
    return "\n".join([*lines, "", ""])


def _sources(alias: Alias) -> str:
    return "; ".join(
        f"{service}: " + " + ".join(f"`{name}`" for name in names)
        for service, names in alias.sources.items()
    )


def test_the_families_are_those_of_the_table() -> None:
    """Whoever builds a board reads this page, not the code."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    current, _, after = rest.partition(END)
    wanted = families_text()
    if os.environ.get("REWRITE") == "1":
        DOCUMENT.write_text(before + BEGIN + wanted + END + after, encoding="utf-8")
        current = wanted
    assert current == wanted, "run this test with REWRITE=1 and look at the difference"


def test_every_stage_and_every_field_of_the_log_line_is_explained() -> None:
    """A name that nobody explains is a name that nobody uses."""
    text = DOCUMENT.read_text(encoding="utf-8")
    missing = [name for name in STAGES if f"`{name}`" not in text]
    missing += [
        field.name for field in dataclasses.fields(CanonicalLine) if f"`{field.name}`" not in text
    ]
    assert missing == []
