"""How much of a move does prefill's time hide on a slow link?

Two kvstores in two network namespaces, the link between them capped at 1 Gbit/s and at 100 Mbit/s;
a log of 1,000 tokens and 12.3 MB of KV, prefilled in chunks of 256 at about 850 tokens a second.
`followed` lets the coming home copy meanwhile, as requests do; `at once` copies after the move
began. Beside them what the link alone needs for the bytes. Needs root, `ip` and `tc`;
without them nothing is measured, and that is said.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.integration.kvstore.harness import connected
from tests.netns.lab import NodeStore, kv_model, missing_tools, network, node
from tests.netns.moves import (
    FIRST_TOKEN,
    adopt_request,
    check_kv,
    expect,
    prefill,
    prompt_of,
    take,
    until_empty,
)

RATES: Final = {"1gbit": 1e9 / 8, "100mbit": 1e8 / 8}
TOKENS: Final = 1000
CHUNK_S: Final = 0.3
RUNS: Final = 3
RUNS_QUICK: Final = 1
TIMEOUT_S: Final = 60.0


def measure(quick: bool) -> dict[str, float]:
    """Medians by rate; empty where there are no namespaces."""
    if missing_tools() is not None:
        return {}
    with tempfile.TemporaryDirectory(prefix="bench-links-") as folder, ExitStack() as stack:
        root = Path(folder)
        model = kv_model(root / "model")
        net = stack.enter_context(network())
        for name in ("a", "b"):
            (root / name).mkdir()
        old, new = (stack.enter_context(node(model, root / name, net, name)) for name in "ab")
        values: dict[str, float] = {}
        for rate in RATES:
            net.cap(rate)
            runs = RUNS_QUICK if quick else RUNS
            values |= asyncio.run(_moves(old, new, rate, runs))
            net.uncap()
    return values


def table(values: dict[str, float]) -> str:
    """The figures for people."""
    title = f"Moving a log of {TOKENS} tokens over a capped link"
    if not values:
        return f"{title}: NOT RUN, {missing_tools()}"
    lines = [f"{title} ({values['link_bytes'] / 1e6:.1f} MB of KV), median"]
    lines += [
        f"  {rate:8} followed {values[f'link_{rate}_followed_ms']:7.0f} ms, "
        f"hidden_transfer_share {values[f'hidden_transfer_share_{rate}']:.3f}; "
        f"at once {values[f'link_{rate}_ms']:7.0f} ms; "
        f"the link alone {values[f'link_{rate}_alone_ms']:7.0f} ms"
        for rate in RATES
    ]
    return "\n".join(lines)


async def _moves(old: NodeStore, new: NodeStore, rate: str, runs: int) -> dict[str, float]:
    taken_ms: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    size = 0
    for run in range(runs):
        for is_followed in (True, False):
            share, move_ms, size = await _move(old, new, prompt_of(TOKENS, run), is_followed)
            taken_ms[is_followed].append(move_ms)
            if is_followed:
                shares.append(share)
    return {
        "link_bytes": float(size),
        f"link_{rate}_ms": statistics.median(taken_ms[False]),
        f"link_{rate}_followed_ms": statistics.median(taken_ms[True]),
        f"link_{rate}_alone_ms": size / RATES[rate] * 1e3,
        f"hidden_transfer_share_{rate}": statistics.median(shares),
    }


async def _move(
    old: NodeStore, new: NodeStore, prompt: list[int], is_followed: bool
) -> tuple[float, float, int]:
    """Hidden share, milliseconds of the move and bytes of one log; every position is read back."""
    async with connected(old) as a, connected(new) as b:
        writer, reader = await a.attach("w-old"), await b.attach("w-new")
        log = await a.open(writer, prompt, cache_mode=2)
        if is_followed:
            await expect(old, b, log)
        await prefill(writer, log, CHUNK_S)
        answer = await b.stub.AdoptLog(adopt_request(old, log, TIMEOUT_S), timeout=TIMEOUT_S)
        here = await take(reader, log, answer.generation)
        assert await check_kv(reader, here, [*prompt, FIRST_TOKEN]) == TOKENS
        writer.leave()
        a.workers.clear()
        await until_empty(a, "the old home")
        reader.leave()
        b.workers.clear()
        await b.close(here, drop=True)
        await until_empty(b, "the new home")
    move_ms = answer.total.ToMicroseconds() / 1e3
    return answer.hidden_transfer_share, move_ms, answer.transfer_bytes
