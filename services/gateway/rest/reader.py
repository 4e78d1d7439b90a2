"""Typed access to a JSON object: every wrong type is a 400 that names the path.

Owns the coercion rules (there are none: a string is never a number) and the record of which keys
were looked at, so that the rest can be reported as ignored. `null` means absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from services.gateway.rest.json_body import invalid, is_text, joined

IGNORED_MAX: Final = 32


class ObjectReader:
    """One JSON object at `path`."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        """The path of a member, as errors spell it."""
        return joined(self._path, name)

    def take(self, name: str) -> Any:
        """The raw value, None when absent or null; the key counts as known."""
        self._known.add(name)
        return self._values.get(name)

    def note(self, *names: str) -> None:
        """These keys are understood, though nothing here depends on them."""
        self._known.update(names)

    def has(self, name: str) -> bool:
        """Whether the member is given and not null."""
        return self._values.get(name) is not None

    def text(self, name: str, *, chars_max: int) -> str | None:
        """A string of at most `chars_max` characters."""
        value = self.take(name)
        if value is None:
            return None
        return checked_text(value, self.at(name), chars_max)

    def flag(self, name: str, default: bool = False) -> bool:
        """A JSON boolean."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{self.at(name)} must be true or false", self.at(name))
        return value

    def real(self, name: str) -> float | None:
        """A JSON number."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{self.at(name)} must be a number", self.at(name))
        return value

    def whole(self, name: str, *, low: int, high: int) -> int | None:
        """A JSON integer within [low, high]."""
        value = self.take(name)
        if value is None:
            return None
        return checked_whole(value, self.at(name), low, high)

    def items(self, name: str, *, count_max: int) -> list[Any] | None:
        """A JSON array of at most `count_max` items."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise invalid(f"{self.at(name)} must be a list", self.at(name))
        if len(value) > count_max:
            raise invalid(f"{self.at(name)} may hold at most {count_max} items", self.at(name))
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A JSON object."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(f"{self.at(name)} must be an object", self.at(name))
        return value

    def ignored(self) -> tuple[str, ...]:
        """Paths of the members that nobody asked for, in the order given, at most 32."""
        unknown = [self.at(name) for name in self._values if name not in self._known]
        return tuple(unknown[:IGNORED_MAX])


def checked_text(value: Any, path: str, chars_max: int) -> str:
    """`value` as text, or a 400 naming `path`."""
    if not isinstance(value, str):
        raise invalid(f"{path} must be a string", path)
    if len(value) > chars_max:
        raise invalid(f"{path} may have at most {chars_max} characters", path)
    if not is_text(value):
        raise invalid(f"{path} holds an unpaired surrogate; send whole characters", path)
    return value


def checked_whole(value: Any, path: str, low: int, high: int) -> int:
    """`value` as an integer within bounds, or a 400 naming `path`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{path} must be a whole number", path)
    if not low <= value <= high:
        raise invalid(f"{path} must be from {low} to {high}", path)
    return value
