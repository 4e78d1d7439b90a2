"""Reading the fields of a model description with bounds and errors that name file and field.

Owns the access to untrusted metadata (GGUF key-values, config.json). Never interprets a model: that
is `baton.engine.config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from baton.errors import Reason, ServiceError

JSON_BYTES_MAX: Final = 1 << 26
TOKEN_ID_MAX: Final = (1 << 31) - 1
# Also shuts out NaN, infinities and whole numbers that no float can hold.
_REAL_ABS_MAX: Final = 1e300


def bad_model(path: Path, field: str, what: str) -> ServiceError:
    """The error for a model file that cannot be used."""
    return ServiceError(Reason.INVALID_REQUEST, f"model {path}: {field} {what}", field=field)


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises ServiceError INVALID_REQUEST naming the file."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise bad_model(path, "file", f"is larger than {JSON_BYTES_MAX} bytes")
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise bad_model(path, "file", f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise bad_model(path, "file", f"is not JSON ({error}); fetch the model again") from error
    if not isinstance(body, dict):
        raise bad_model(path, "file", "must hold a JSON object")
    return body


class ModelFields:
    """Typed, bounded access to one file's fields; null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def bad(self, field: str, what: str) -> ServiceError:
        """The error that names this file and `field`."""
        return bad_model(self.path, field, what)

    def whole(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        """The whole number `name`, from `low` to `high`; `default` None means it must be there."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, f"must be a whole number, not {type(value).__name__}")
        if not low <= value <= high:
            raise self.bad(name, f"is {value}; it must be from {low} to {high}")
        return value

    def optional_whole(self, name: str) -> int | None:
        """The token id `name`, or None when absent."""
        if self._values.get(name) is None:
            return None
        return self.whole(name, 0, TOKEN_ID_MAX)

    def whole_or_list(self, name: str) -> tuple[int, ...]:
        """Token ids written as one number, a list, or not at all."""
        value = self._values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= TOKEN_ID_MAX:
                raise self.bad(name, "must be token ids")
        return tuple(items)

    def real(self, name: str, *, default: float | None = None) -> float:
        """The finite number `name`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, f"must be a number, not {type(value).__name__}")
        if not -_REAL_ABS_MAX < value < _REAL_ABS_MAX:
            raise self.bad(name, "must be a finite number of sensible size")
        return float(value)

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        """The list `name` of exactly `count` finite numbers."""
        value = self._present(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.bad(name, f"must be a list of {count} numbers")
        return tuple(ModelFields(self.path, {name: item}).real(name) for item in value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """The string `name`."""
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.bad(name, f"must be a string, not {type(value).__name__}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """The boolean `name`."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, f"must be true or false, not {type(value).__name__}")
        return value

    def nested(self, name: str) -> ModelFields | None:
        """The object `name` as fields of its own, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(name, f"must be an object, not {type(value).__name__}")
        return ModelFields(self.path, value)

    def _present(self, name: str, default: object) -> object:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.bad(name, "is missing")
        return value
