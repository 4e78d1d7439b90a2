"""The bundled model's text bundle, and small tokenizers and templates made in code."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from baton import models
from baton.errors import ServiceError
from baton.text.bundle import TextBundle


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The bundled GGUF, or a skip that says how to get it."""
    try:
        return models.locate("smollm2")
    except ServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the bundled model is needed: {error.message}")


@pytest.fixture(scope="session")
def bundle(model_path: Path) -> TextBundle:
    """The bundled model's tokenizer and template."""
    return TextBundle.load(model_path)


@pytest.fixture(scope="session")
def make_golden() -> Any:
    """The script that writes the golden file: it holds the texts and the way to the oracle."""
    place = Path(__file__).parent / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.fixture
def tiny_metadata() -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer: three control tokens, every byte, two merges."""
    from baton.text.byte_level import BYTE_TO_CHAR

    alphabet = [BYTE_TO_CHAR[byte] for byte in range(256)]
    tokens = [*CONTROLS, "<think>", *alphabet, "ab", "abc"]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
