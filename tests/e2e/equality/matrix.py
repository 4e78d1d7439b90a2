"""The cells of the equality matrix: how a prompt's beginning came to be there, and where it runs.

Owns what a cell does and checks. Every cell answers the same prompt, and only the way differs in
which KV for its first `fork` tokens was had; so every cell must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any, Final

import pytest

from baton.api.common.v1 import common_pb2
from baton.sampling_parameters import SamplingParameters
from baton.worker.output import OutputToken
from tests.e2e.equality.nodes import LOCAL, SIZES, Held, Node, Nodes
from tests.integration.workers.harness import event_shape, shape
from tests.integration.workers.test_handoff import prompt_of

PROMPT: Final = prompt_of(100, seed=8100)
GREEDY: Final = SamplingParameters(
    temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=2
)
GAP_MIN: Final = 1e-3
"""Tokens are compared where the two likeliest are further apart than this; here all must be."""

LOGPROB_TOLERANCE: Final = 1e-4


@unique
class Way(StrEnum):
    """Where KV of the first `fork` tokens comes from."""

    FRESH = "fresh"
    """From nowhere: all of it is computed."""
    FOUND = "found"
    """A lookup finds a kept log that has these tokens and goes on otherwise."""
    PARENT = "parent"
    """That log is named, and forked at the exact token."""
    SPLICED = "spliced"
    """The merger joins the beginning of one log and the middle of another; pages by pointer."""
    MATERIALISED = "materialised"
    """The same, but fetched as blobs and stored as a log of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell. `is_far`: the answer's second half runs on the other node; a materialised beginning
    lies there from the start.
    """

    way: Way
    fork: int
    size: int
    is_far: bool


def cells_at(fork: int) -> list[Cell]:
    """Every way on one node and on two; chunk sizes take turns, so that each meets every way."""
    ways = [Way.FRESH, Way.FOUND] if fork == 0 else list(Way)
    cells: list[Cell] = []
    for number, way in enumerate(ways):
        for is_far in (False, True):
            sizes = SIZES["b" if is_far and way is Way.MATERIALISED else "a"]
            # A log that its decode worker prefills itself has nothing to be moved for.
            may_be_local = not is_far or way is Way.MATERIALISED
            choices = (*sizes, LOCAL) if may_be_local else sizes
            size = choices[(fork + number) % len(choices)]
            cells.append(Cell(way=way, fork=fork, size=size, is_far=is_far))
    return cells


class Matrix:
    """Answers cells and compares them with the direct computation."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.expected: list[OutputToken] = nodes.direct.tokens(PROMPT, GREEDY)
        for token in self.expected:
            best, second = (one.logprob for one in token.sampled.top_logprobs)
            assert best - second > GAP_MIN, "a near tie: draw another prompt"

    async def check_fork(self, fork: int, cells: Sequence[Cell]) -> None:
        """All cells of one fork position, in a tenant of their own."""
        sources = await self._sources(fork, f"equality-{fork}")
        for cell in cells:
            await self._check(cell, sources)
        for source in sources:
            await self.nodes.close(source, drop=True)

    async def _sources(self, fork: int, tenant: str) -> list[Held]:
        """Two kept logs: one has the first half of the beginning, the other all of it; both go on
        otherwise. The second one begins with the first one's KV.
        """
        sources: list[Held] = []
        for end in (fork // 2, fork):
            other = next(token for token in range(3, 250) if token != [*PROMPT, 0][end])
            size = SIZES["a"][(fork + end) % len(SIZES["a"])]
            prompt = [*PROMPT[:end], other, 7]
            log = await self.nodes.open(self.nodes.a, prompt, GREEDY, size, tenant=tenant)
            await self.nodes.prefill(log, size, kv_only=True)
            await self.nodes.close(log, drop=False)
            sources.append(log)
        return sources

    async def _check(self, cell: Cell, sources: list[Held]) -> None:
        """The cell's answer is the direct one, and it says truly what it reused."""
        nodes, made = self.nodes, list[Held]()
        tenant, node, base = sources[1].tenant, nodes.a, dict[str, Any]()
        match cell.way:
            case Way.FRESH:
                base = {"cache_mode": common_pb2.CACHE_MODE_OFF}
            case Way.FOUND:
                pass
            case Way.PARENT:
                parent = common_pb2.LogPosition(log_id=sources[1].log_id, position=cell.fork)
                base = {"parent": parent, "cache_mode": common_pb2.CACHE_MODE_OFF}
            case Way.SPLICED:
                manifest = await self._spliced(cell.fork, sources)
                base = {"manifest": manifest, "cache_mode": common_pb2.CACHE_MODE_OFF}
            case Way.MATERIALISED:
                manifest = await self._spliced(cell.fork, sources)
                node, tenant = (nodes.b if cell.is_far else nodes.a), f"{tenant}-copy"
                used = sources[-len(manifest.parts) :]
                made.append(await nodes.materialise(manifest, used, node, tenant))
        log = await nodes.open(node, PROMPT, GREEDY, cell.size, tenant=tenant, **base)
        # Of a prompt that is known whole, the last token is computed: it gives the first logits.
        known = 0 if cell.way is Way.FRESH else min(cell.fork, len(PROMPT) - 1)
        assert log.cached_tokens == known, cell
        self._compare(await self._answer(cell, log, node), cell)
        for one in (log, *made):
            await nodes.close(one, drop=True)

    async def _spliced(self, fork: int, sources: Sequence[Held]) -> common_pb2.Manifest:
        """[0, half) of the first log, [half, fork) of the second; one token is all the second's."""
        half = fork // 2
        bounds = [(0, half), (half, fork)] if half else [(0, fork)]
        segments = [
            self.nodes.segment(source, PROMPT, first, end)
            for source, (first, end) in zip(sources[-len(bounds) :], bounds, strict=True)
        ]
        return await self.nodes.splice(segments)

    async def _answer(self, cell: Cell, log: Held, node: Node) -> list[common_pb2.TokenEvent]:
        """All tokens of the answer."""
        if cell.size == LOCAL:
            return await self.nodes.decode(log, 0)
        is_moved = cell.is_far and node is self.nodes.a
        if is_moved and cell.fork % 2:
            await self.nodes.expect(log, self.nodes.b)
        sealed = await self.nodes.prefill(log, cell.size)
        assert sealed.usage.cached_tokens == log.cached_tokens, cell
        assert sealed.exactness == common_pb2.EXACTNESS_CLASS_EXACT
        if is_moved:
            moved = await self.nodes.move(log, self.nodes.b)
            assert moved.committed_position == len(PROMPT), cell
            assert moved.transfer_bytes > 0
        return [sealed.first_token, *await self.nodes.decode(log, 1)]

    def _compare(self, events: Sequence[common_pb2.TokenEvent], cell: Cell) -> None:
        assert [event_shape(event) for event in events] == shape(self.expected), cell
        for event, token in zip(events, self.expected, strict=True):
            wanted = pytest.approx(token.sampled.logprob, abs=LOGPROB_TOLERANCE)
            assert event.logprob.logprob == wanted, cell
