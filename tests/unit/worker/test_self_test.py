"""What a worker measures of itself before it serves."""

from __future__ import annotations

import math
from pathlib import Path

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.testing.tiny_models import write_directory
from baton.worker.self_test import measured_prefill_rate


def test_the_rate_is_there_before_the_first_prompt(tmp_path: Path) -> None:
    """Also where the context is shorter than the test's prompt; the worker's pages stay as is."""
    model = write_directory(tmp_path / "tiny")
    weights = load_weights(model, ComputeDtype.FLOAT32, max_context=32)
    pages = KvPages.allocate(read_config(model).kv_geometry(8, weights.dtype.kv_dtype), 1)
    before = pages.layer(0).clone()
    rate = measured_prefill_rate(Transformer(weights, pages))
    assert math.isfinite(rate)
    assert rate > 0.0
    assert bool((pages.layer(0) == before).all())
