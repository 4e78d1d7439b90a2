"""Spreads seeds over two processes: the heavy groups here are thousands of small recoveries."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Final, TypeVar

import structlog

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

PROCESSES_MAX: Final = 2


def _quiet() -> None:
    structlog.configure(processors=[_dropped])


def _dropped(_logger: object, _name: str, _event: object) -> str:
    raise structlog.DropEvent


def spread(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`work` of each item, in order; `work` and items must be importable by name."""
    processes = min(PROCESSES_MAX, os.cpu_count() or 1)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_quiet) as pool:
        return list(pool.map(work, items))


def slices(count: int, parts: int) -> list[range]:
    """The numbers below `count` in `parts` ranges of about one size."""
    bounds = [count * index // parts for index in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]
