"""Who asks for a place, and what that is worth: tenant, class, priority, weight. Pure.

Owns the words and their bounds. All of them are the operator's, from the gateway's tenants file; a
request's body changes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final, TypeAlias

PRIORITY_MAX: Final = 100
"""Priorities lie between -PRIORITY_MAX and PRIORITY_MAX."""

WEIGHT_MAX: Final = 1000
"""Weights lie between 1 and WEIGHT_MAX."""

Level: TypeAlias = tuple[int, int]
"""(class, priority): a higher one goes before a lower one, always."""


@unique
class ServiceClass(IntEnum):
    """A higher one goes first."""

    BATCH = 0
    INTERACTIVE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who asks for a place. Of one level, tenants are served in proportion to their weights."""

    request_id: str
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0
    weight: int = 1

    def __post_init__(self) -> None:
        """Whoever makes a claim has checked what it is made of."""
        assert self.weight >= 1, self.weight

    @property
    def level(self) -> Level:
        """What goes before what."""
        return (int(self.service_class), self.priority)
