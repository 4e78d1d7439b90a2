"""What a worker's chunks are, by its flags and its profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.config import load_config
from baton.worker.chunk_profile import this_machine, write_profile
from services.prefill.config import PrefillConfig
from services.prefill.planning import ChunkPlanning
from tests.unit.worker.test_chunk_profile import LABEL, PROFILE

FLAGS = ("--worker-id", "one", "--model", "tiny", "--kvstore", "127.0.0.1:1", "--threads", "1")


def planning(*flags: str) -> ChunkPlanning:
    """A worker's plan by its flags."""
    return ChunkPlanning(load_config(PrefillConfig, "prefill", [*FLAGS, *flags], {}))


def test_without_flags_it_is_the_default() -> None:
    """Fixed chunks of 256 tokens."""
    assert planning().chunk_tokens(LABEL) == planning().chunk_tokens_most == 256


def test_a_profile_of_this_machine_is_loaded(tmp_path: Path) -> None:
    """By `--chunk-profile`; a size on the command line counts more."""
    path, machine = tmp_path / "profile.json", this_machine(1)
    write_profile(path, replace(PROFILE, cpu=machine.cpu, cores=machine.cores))
    named = ("--chunk-profile", str(path))
    assert planning(*named).chunk_tokens(LABEL) == 128
    assert planning(*named, "--chunk-tokens", "32").chunk_tokens(LABEL) == 32


def test_a_semantic_chunk_may_be_half_as_long_again() -> None:
    """Memory is planned for the longest, rounded to the largest page."""
    assert planning("--chunking", "semantic").chunk_tokens_most == 384
    assert planning("--chunking", "semantic", "--chunk-tokens", "1").chunk_tokens_most == 96
