"""`baton demo`: the whole path on the real model, once, with what each stage took.

Owns the tour: start, publish a system prompt, stream answers behind it, show the stages, stop.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.table import Table

from baton.cli import gateway_http
from baton.cli.chat_stream import event_data
from baton.cli.console import CommandFailed, output
from baton.cli.up import (
    MODEL_DEFAULT,
    ClusterView,
    check_arena,
    check_ports,
    ensure_model,
    raise_cluster_failure,
)
from baton.launcher.cluster import arena_dir, prepare, remove_arena_dir, this_machine
from baton.launcher.plan import ClusterOptions
from baton.launcher.rundir import RunDir
from baton.launcher.supervisor import Supervisor

SYSTEM: Final = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer questions "
    "about science, history and everyday life for curious readers. Keep answers short and "
    "friendly: two or three sentences, plain words, no lists. If a question is unclear, explain "
    "what you assume. If you do not know the answer, say so."
)
QUESTIONS: Final = ("How do plants make food?", "What is gravity?")
MAX_TOKENS: Final = 80
STREAM_TIMEOUT_S: Final = 120.0


def ask(client: httpx.Client, question: str, max_tokens: int) -> dict[str, Any]:
    """Stream one answer to the terminal; returns what the last chunks said about it."""
    body = {
        "model": MODEL_DEFAULT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
    }
    told: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if not response.is_success:
            response.read()
            gateway_http.refuse_errors(response)
        told["mode"] = response.headers.get("x-serving-mode", "?")
        for data in event_data(response.iter_lines()):
            if data != "[DONE]":
                _show(httpx.Response(200, content=data).json(), told)
    output().print()
    return told


def _show(chunk: dict[str, Any], told: dict[str, Any]) -> None:
    if "error" in chunk:
        raise CommandFailed(gateway_http.error_text(chunk["error"]))
    for choice in chunk.get("choices", ()):
        sys.stdout.write(choice.get("delta", {}).get("content") or "")
        sys.stdout.flush()
    told.update({key: chunk[key] for key in ("usage", "baton") if chunk.get(key)})


def stage_table(answers: list[dict[str, Any]]) -> Table:
    """Stages as rows, answers as columns; seconds as milliseconds."""
    table = Table("what", *(f"answer {i}" for i in range(1, len(answers) + 1)), box=None)
    stages = list(dict.fromkeys(s for a in answers for s in a["baton"].get("stage_seconds", {})))
    for stage in stages:
        values = [a["baton"].get("stage_seconds", {}).get(stage) for a in answers]
        table.add_row(stage, *("" if v is None else f"{v * 1000:.1f} ms" for v in values))
    usage = [a["usage"] for a in answers]
    table.add_row("prompt tokens", *(str(u["prompt_tokens"]) for u in usage))
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    table.add_row("of them not computed", *(str(count) for count in cached))
    table.add_row("answer tokens", *(str(u["completion_tokens"]) for u in usage))
    for key in ("kv_source", "exactness"):
        table.add_row(key, *(str(a["baton"].get(key, "")) for a in answers))
    return table


def tour(url: str, max_tokens: int) -> None:
    """What the demo shows, against a running cluster."""
    with (
        gateway_http.translated_failures(url),
        httpx.Client(base_url=url, timeout=STREAM_TIMEOUT_S, trust_env=False) as client,
    ):
        started_s = time.monotonic()
        content = [{"role": "system", "content": SYSTEM}]
        response = client.post("/v1/prefixes", json={"name": "demo", "messages": content})
        gateway_http.refuse_errors(response)
        tokens = response.json().get("tokens")
        took_s = time.monotonic() - started_s
        output().print(
            f"\npublished a system prompt of {tokens} tokens in {took_s:.2f} s; "
            "every request below starts behind it\n"
        )
        answers = []
        for question in QUESTIONS:
            output().print(f"> {question}", style="bold", markup=False)
            answers.append(ask(client, question, max_tokens))
            output().print()
        output().print(stage_table(answers))


async def _run(cluster: Supervisor, view: ClusterView, url: str, max_tokens: int) -> None:
    started_s = time.monotonic()
    async with cluster:
        view.settle()
        output().print(f"all services ready in {time.monotonic() - started_s:.1f} s")
        await asyncio.to_thread(tour, url, max_tokens)
        output().print("\nstopping ...")
    output().print("stopped; nothing is left running")


def demo(
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="REST port.")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="gRPC port.")] = 8081,
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Per answer.")] = MAX_TOKENS,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Start everything, stream answers behind a published system prompt, show the stages, stop.

    Example: baton demo
    """
    ensure_model(MODEL_DEFAULT)
    with tempfile.TemporaryDirectory(prefix="baton-demo-") as folder:
        options = ClusterOptions(
            model=MODEL_DEFAULT,
            dtype=dtype,
            http_port=http_port,
            grpc_port=grpc_port,
            run_dir=Path(folder),
            arena_dir=arena_dir(Path(folder)),
            # The folder may be memory itself, and nothing of it is found again.
            nvme_bytes=0,
        )
        check_ports(options)
        check_arena(options, this_machine(options.arena_dir))
        try:
            with RunDir(options.run_dir) as held, ClusterView(is_live=sys.stdout.isatty()) as view:
                cluster = prepare(options, held, on_change=view.show)
                try:
                    asyncio.run(_run(cluster, view, f"http://127.0.0.1:{http_port}", max_tokens))
                finally:
                    remove_arena_dir(options.arena_dir)
        except BaseExceptionGroup as group:
            raise_cluster_failure(group)
