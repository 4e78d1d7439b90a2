"""Running a few calls side by side, for code that goes on after one of them fails.

Owns the guard that keeps a failure inside: in Python 3.11 a task group whose task fails while the
group waits at its end leaves its parent with a cancel request that nobody made
(`Task.cancelling()` stays above zero). A deadline around it that passes later then comes out as
CancelledError instead of TimeoutError, and the request would end without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(
    main: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, object]
) -> Result:
    """What `main` returns, when all have ended well; the first failure ends the others."""
    return await _run(main, others, ends_with_main=False)


async def watched(
    main: Coroutine[Any, Any, Result], watcher: Coroutine[Any, Any, object]
) -> Result:
    """What `main` returns; the watcher ends with it, or ends it by failing."""
    return await _run(main, (watcher,), ends_with_main=True)


async def _run(
    main: Coroutine[Any, Any, Result],
    others: tuple[Coroutine[Any, Any, object], ...],
    *,
    ends_with_main: bool,
) -> Result:
    failures: list[Exception] = []
    results: list[Result] = []
    tasks: list[asyncio.Task[None]] = []

    def end_all() -> None:
        for task in tasks:
            task.cancel()

    async def guarded(work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # raised below, outside the group
            failures.append(error)
            end_all()

    async def guarded_main() -> None:
        results.append(await main)
        if ends_with_main:
            end_all()

    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(guarded(work)) for work in (guarded_main(), *others)]
    finally:
        # A task that was ended before its first step never began its coroutine.
        for work in (main, *others):
            work.close()
    if failures:
        raise failures[0]
    return results[0]
