"""What this kvstore's arena holds the KV of: the label everything is compared with.

Owns the comparison with workers and blobs, and the numeric class texts seen so far. The store is
bound to a model and not to a class: which classes read each other is checked per log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.kv.label import PairLabel, mismatch, require_match
from baton.kv.layout import KvGeometry
from baton.kv.numeric import NATIVE_Q4_1, TORCH_BF16, TORCH_F32

CLASSES_MAX = 1024


@dataclass(slots=True, kw_only=True)
class Identity:
    """One store's model, page shape and name."""

    label: PairLabel
    geometry: KvGeometry
    model: str
    node_id: str
    _classes: dict[int, str] = field(default_factory=dict)

    def require_suits(self, theirs: PairLabel, geometry: KvGeometry | None = None) -> None:
        """Refuses a label that differs, naming the field; remembers its numeric class."""
        require_match(replace(self.label, numeric_class=theirs.numeric_class), theirs)
        if geometry is not None and geometry != self.geometry:
            for name in ("layers", "kv_heads", "head_dim", "head_dim_v", "block_tokens", "dtype"):
                ours, other = getattr(self.geometry, name), getattr(geometry, name)
                if ours != other:
                    raise mismatch(f"geometry.{name}", str(ours), str(other))
        if len(self._classes) < CLASSES_MAX:
            self._classes[theirs.numeric_class.id] = theirs.numeric_class.text

    def class_text(self, class_id: int) -> str:
        """The text of a numeric class seen before; empty when it was not."""
        for known in (TORCH_F32, TORCH_BF16, NATIVE_Q4_1):
            if known.id == class_id:
                return known.text
        return self._classes.get(class_id, "")
