"""The curl lines of docs/sessions.md, run as they stand, with ids and address of a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.testing.cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PAGE = Path(__file__).parents[2] / "docs" / "sessions.md"
HOST = "localhost:8080"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESPONSE = re.compile(r"chatcmpl-[0-9a-f]{32}")
_SESSION = re.compile(r"sess-(?:[0-9a-f]{24}|\.\.\.)")


def commands() -> list[str]:
    """Each command of the page, a line continued by a backslash or an open quote with its rest."""
    found: list[str] = []
    for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        for line in block.splitlines():
            if line.startswith("curl "):
                found.append(line)
            else:
                found[-1] += f"\n{line}"
    return found


def run(command: str) -> dict[str, Any]:
    """A shell's answer, as JSON."""
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True
    )
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_every_command_of_the_page_does_what_it_says(
    cluster_f32: RunningCluster, client_f32: httpx.Client
) -> None:
    """In the page's order: each session that is named is the first that was made."""
    ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = client_f32.post("/v1/chat/completions", json={**ask, "max_tokens": 12}).json()
    session_id, told = "", dict[str, dict[str, Any]]()
    for command in commands():
        filled = command.replace(HOST, cluster_f32.url.removeprefix("http://"))
        filled = _SESSION.sub(session_id, _RESPONSE.sub(answer["id"], filled))
        body = run(filled)
        assert "error" not in body, (command, body)
        session_id = session_id or body["id"]
        told[command.split(HOST)[1].split()[0]] = body
    paths = set(told)
    assert {"/v1/sessions", "/v1/chat/completions"} <= paths
    assert {path.rpartition("/")[2] for path in paths} >= {"edit", "truncate", "fork", "sess-..."}
    assert told["/v1/chat/completions"]["baton"]["session"]["generation"] == 2
    edited = told["/v1/sessions/sess-.../edit"]
    assert edited["dropped_tokens"] > 0
    assert edited["generation"] == 3
    assert told["/v1/sessions/sess-.../truncate"]["tokens"] == 20
    assert told["/v1/sessions/sess-..."] == {
        "id": session_id, "object": "session", "deleted": True,
    }  # fmt: skip
