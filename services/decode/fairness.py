"""How much each tenant was served of late. Pure; time is passed in.

Owns the sums: tokens, of which half count no more after `HALF_LIFE_S`. So nobody saves up for
later, and nobody pays for long ago. Who goes next is the scheduler's.
"""

from __future__ import annotations

import math
from typing import Final

HALF_LIFE_S: Final = 30.0
TENANTS_MAX: Final = 4096
NOTHING: Final = 1e-3
"""So few tokens are as good as none."""


class ServiceLedger:
    """Tokens of late, by tenant. Bounded: who was served least is forgotten first."""

    def __init__(self, half_life_s: float = HALF_LIFE_S, tenants_max: int = TENANTS_MAX) -> None:
        assert half_life_s > 0.0
        assert tenants_max >= 1
        self._half_life_s = half_life_s
        self._tenants_max = tenants_max
        self._served: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str, now_s: float) -> float:
        """Tokens of late."""
        tokens, at_s = self._served.get(tenant, (0.0, now_s))
        return tokens * math.exp2(-max(0.0, now_s - at_s) / self._half_life_s)

    def charge(self, tenant: str, tokens: float, now_s: float) -> None:
        """The tenant was served so many more."""
        self._served[tenant] = (self.served(tenant, now_s) + tokens, now_s)
        if len(self._served) > self._tenants_max:
            self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        left = {name: self.served(name, now_s) for name in self._served}
        for name, tokens in left.items():
            if tokens < NOTHING:
                del self._served[name]
        while len(self._served) > self._tenants_max:
            del self._served[min(self._served, key=lambda name: left[name])]
