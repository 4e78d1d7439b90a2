"""Waiting on conditions with a deadline, and doing things beside each other.

Owns no clock but this process's own. Never waits without a deadline.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

POLL_S: Final = 0.05
_Found = TypeVar("_Found")


def until(condition: Callable[[], _Found], seconds: float, what: str) -> _Found:
    """The first true value of `condition`; AssertionError when there is none in time."""
    end_s = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        # Polling another process: there is no event to wait on.
        pause.wait(POLL_S)


def together(*thunks: Callable[[], _Found]) -> list[_Found]:
    """Run all at once; their results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(thunks)) as pool:
        return [one.result() for one in [pool.submit(thunk) for thunk in thunks]]


@contextlib.contextmanager
def background(thunk: Callable[[], _Found]) -> Iterator[concurrent.futures.Future[_Found]]:
    """Run beside the block; its result is there when the block asks."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(thunk)
