"""`baton kv verify`: the kvstore's own code does it, and its exit code comes through."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import build_app


@pytest.mark.parametrize(("name", "code"), [("", 0), ("none", 1)])
def test_exit_code_of_the_check_is_handed_on(name: str, code: int, tmp_path: Path) -> None:
    """An empty directory is fine, one that is not there is refused."""
    result = CliRunner().invoke(build_app(), ["kv", "verify", str(tmp_path / name)])
    assert result.exit_code == code
