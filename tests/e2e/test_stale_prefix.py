"""Published prefixes at a real cluster: who may use one, and what a changed template does to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from baton.clock import SystemClock
from baton.testing.cluster import RunningCluster, running_cluster
from baton.testing.tiny_models import CHAT_TEMPLATE, write_directory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TENANTS: Final = """
tenants:
  - {name: red, keys: [key-red]}
  - {name: blue, keys: [key-blue]}
  - {name: green, keys: [key-green]}
  - {name: yellow, keys: [key-yellow]}
"""
SYSTEM: Final = {"role": "system", "content": "You are terse, and you never guess. " * 3}
BACK_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster of a tiny model whose files may be changed."""

    cluster: RunningCluster
    model: Path

    def call(self, method: str, path: str, key: str, body: Any = None, **more: Any) -> Any:
        """One exchange."""
        headers = {"authorization": f"Bearer key-{key}", **more.pop("headers", {})}
        url = f"{self.cluster.url}{path}"
        return httpx.request(
            method, url, json=body, headers=headers, timeout=60.0, trust_env=False, **more
        )

    def publish(self, name: str, tenants: list[str], **more: Any) -> dict[str, Any]:
        """The system turn, published by red."""
        body = {"name": name, "messages": [SYSTEM], "tenants": tenants, **more}
        answer = self.call("POST", "/v1/prefixes", "red", body)
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def ask(self, key: str, text: str = "hi", headers: dict[str, str] | None = None) -> Any:
        """A greedy answer behind the system turn."""
        messages = [SYSTEM, {"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
        return self.call("POST", "/v1/chat/completions", key, body, headers=headers or {})

    def cached(self, key: str, text: str = "hi") -> int:
        """Prompt tokens of that answer that were not computed."""
        answer = self.ask(key, text)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Four tenants."""
    folder = tmp_path_factory.mktemp("stale")
    model = write_directory(folder / "model")
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    flags = ("--model", str(model), "--dtype", "float32", "--tenants-file", str(file))
    with running_cluster(folder / "run", *flags) as cluster:
        yield Site(cluster=cluster, model=model)


def test_tenants_share_nothing_unless_it_is_published_to_both(site: Site) -> None:
    """The same prompt of several tenants; then one published to some of them, and revoked."""
    for key in ("red", "blue", "green"):
        assert site.cached(key) == 0
    made = site.publish("shared", ["blue", "yellow"])
    assert site.cached("yellow", "what is new?") >= made["tokens"]
    for wanted in (made["id"], "shared"):
        assert site.ask("green", headers={"x-baton-prefix": wanted}).status_code == 404
        for key in ("green", "blue"):
            assert site.call("DELETE", f"/v1/prefixes/{wanted}", key).status_code == 404
    wider = site.publish("shared", ["blue", "yellow", "green"])
    assert wider["version"] == 2
    for key in ("blue", "yellow", "green"):
        answer = site.ask(key, "what else?", headers={"x-baton-prefix": "shared"})
        assert answer.json()["baton"]["prefix_id"] == wider["id"]
    assert site.call("DELETE", "/v1/prefixes/shared", "red").status_code == 200
    assert site.ask("green", headers={"x-baton-prefix": "shared"}).status_code == 404
    # All that yellow ever asked began with the prefix: nothing of it is its own.
    assert site.cached("yellow", "what now?") == 0


def test_a_changed_template_makes_it_stale_and_says_so(site: Site) -> None:
    """The gateway comes back with another template: the prefix is listed and not spliced."""
    made = site.publish("briefing", ["*"])
    assert made["status"] == "ready"
    assert site.cached("green", "before") >= made["tokens"]
    changed = CHAT_TEMPLATE.replace("'<|im_end|>\n'", "'<|im_end|>\n\n'")
    assert changed != CHAT_TEMPLATE
    (site.model / "chat_template.jinja").write_text(changed, encoding="utf-8")
    restart_gateway(site)
    stale = site.call("GET", "/v1/prefixes/briefing", "green").json()
    assert stale["status"] == "stale"
    assert made["template_digest"] in stale["detail"]
    refused = site.ask("green", headers={"x-baton-prefix": "briefing"})
    assert refused.status_code == 409
    assert made["template_digest"] in refused.text
    answer = site.ask("green", "after")
    assert answer.status_code == 200
    assert answer.json()["baton"].get("prefix_id") in (None, "")
    again = site.publish("briefing", ["*"])
    assert (again["status"], again["version"]) == ("ready", 2)
    assert again["template_digest"] != made["template_digest"]
    assert again["template_digest"] in stale["detail"]
    assert site.cached("green", "and again") >= again["tokens"]


def restart_gateway(site: Site) -> None:
    """Kill it; its successor serves."""
    old = site.cluster.pid("gateway-0")
    os.kill(old, signal.SIGKILL)
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + BACK_S
    while True:
        try:
            is_back = site.cluster.pid("gateway-0") != old and site.ask("red").status_code == 200
        except (httpx.HTTPError, OSError):
            is_back = False
        if is_back:
            return
        assert clock.monotonic_s() < deadline_s, "the gateway did not come back"
