"""One error out of a task group: callers of a run get a ServiceError, never a group.

Owns that choice only.
"""

from __future__ import annotations

from baton.errors import ServiceError


def first_failure(group: BaseExceptionGroup[ServiceError]) -> ServiceError:
    """The first ServiceError of a group, however deep it is nested."""
    first = group.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, ServiceError)
    return first
