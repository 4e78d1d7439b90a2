"""Slots that nobody pins, in the order in which they became idle, one order for each account.

Owns those orders. Pure; time is passed in. Adding, removing and finding the first ones costs as
much as what is added, removed or found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator


class IdleSlots:
    """Idle slots by account, the one that is idle longest first."""

    __slots__ = ("_account_of", "_orders")

    def __init__(self) -> None:
        self._orders: dict[str, OrderedDict[int, float]] = {}
        self._account_of: dict[int, str] = {}

    def __contains__(self, slot: object) -> bool:
        return slot in self._account_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._account_of)

    def __len__(self) -> int:
        return len(self._account_of)

    def add(self, slot: int, account: str, since_s: float) -> None:
        """One more, idle since now."""
        assert slot not in self._account_of, slot
        self._account_of[slot] = account
        self._orders.setdefault(account, OrderedDict())[slot] = since_s

    def discard(self, slot: int) -> None:
        """It is not idle any more, if it was."""
        account = self._account_of.pop(slot, None)
        if account is not None:
            del self._orders[account][slot]

    def first(
        self, accounts: Iterable[str], count: int, is_meant: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Up to `count` slots of these accounts, idle longest first; of them those that are meant.

        With `is_meant` all idle slots of the accounts are looked at.
        """
        if count <= 0:
            return []
        found: list[tuple[float, int]] = []
        for account in dict.fromkeys(accounts):
            order = self._orders.get(account, OrderedDict())
            meant = (slot for slot in order if is_meant is None or is_meant(slot))
            found += [(order[slot], slot) for slot, _ in zip(meant, range(count), strict=False)]
        return [slot for _, slot in sorted(found)[:count]]

    def reorder(self, account_of: Callable[[int], str]) -> None:
        """The accounts changed; how long each slot is idle did not."""
        all_slots = [(since_s, slot) for o in self._orders.values() for slot, since_s in o.items()]
        self._orders, self._account_of = {}, {}
        for since_s, slot in sorted(all_slots):
            self.add(slot, account_of(slot), since_s)
