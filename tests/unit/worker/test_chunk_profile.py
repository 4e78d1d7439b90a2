"""A chunk profile is used where it was measured, and says why where it is not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.errors import Reason, ServiceError, StartupError
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype
from baton.kv.numeric import NumericClass
from baton.worker.chunk_profile import (
    CHUNK_TOKENS_DEFAULT,
    ChunkProfile,
    CurvePoint,
    MachineFacts,
    Measured,
    chunk_tokens_for,
    load_profile,
    most_chunk_tokens,
    read_profile,
    this_machine,
    write_profile,
)

TORCH = "weights=q4_1 act=bf16 acc=f32 kv=bf16 invariant=no"
NATIVE = "weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=no"
LABEL = PairLabel(
    model=bytes(range(16)),
    rope=bytes(16),
    dtype=KvDtype.BF16,
    block_tokens=16,
    tokenizer=bytes(8),
    numeric_class=NumericClass.parse(TORCH),
)
HERE = MachineFacts(cpu="a processor", cores=2, threads=1)
POINT = CurvePoint(
    chunk_tokens=128,
    first_token_ms=100.5,
    jitter_ms=3.0,
    gap_ms=10.0,
    added_gap_ms=1.25,
    gap_p99_ms=30.0,
)
FOUND = Measured(
    chunk_tokens=128,
    reason="it is the fastest",
    chunking="fixed",
    threads=1,
    measured_at="2026-11-30T08:00:00+00:00",
    load=0.25,
    prompt_tokens=1024,
    streams=1,
    rounds=5,
    curve=(POINT,),
)
PROFILE = ChunkProfile(
    model="tiny", label=LABEL.as_metadata(), cpu=HERE.cpu, cores=2, roles={"prefill": FOUND}
)


def written(path: Path, **changes: Any) -> Path:
    """A profile's file with fields of its root replaced."""
    write_profile(path, PROFILE)
    document = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps(document), "utf-8")
    return path


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Every number and text; the file is its owner's alone, and nothing is left beside it."""
    path = tmp_path / "made" / "profile.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_fitting_profile_gives_its_size() -> None:
    """The step kernel of a decode worker has no say: it computes no prompts."""
    other = replace(LABEL, numeric_class=NumericClass.parse(NATIVE))
    for label in (LABEL, other):
        assert chunk_tokens_for("prefill", PROFILE, None, (label, HERE)) == 128


def test_a_size_that_was_given_counts_more_than_a_profile() -> None:
    """The user said so."""
    assert chunk_tokens_for("prefill", PROFILE, 64, (LABEL, HERE)) == 64
    assert chunk_tokens_for("prefill", None, None, (LABEL, HERE)) == CHUNK_TOKENS_DEFAULT


@pytest.mark.parametrize(
    ("label", "machine", "field"),
    [
        (replace(LABEL, model=b"x" * 16), HERE, "model"),
        (replace(LABEL, rope=b"x" * 16), HERE, "rope"),
        (replace(LABEL, dtype=KvDtype.F32), HERE, "kv_dtype"),
        (replace(LABEL, block_tokens=32), HERE, "block_tokens"),
        (replace(LABEL, tokenizer=b"x" * 8), HERE, "tokenizer"),
        (LABEL, replace(HERE, cpu="another"), "cpu"),
        (LABEL, replace(HERE, cores=4), "cores"),
        (LABEL, replace(HERE, threads=2), "threads"),
    ],
)
def test_another_model_or_machine_is_ignored_in_one_line(
    label: PairLabel, machine: MachineFacts, field: str
) -> None:
    """The line names the field and both values; the default size is used."""
    with capture_logs() as lines:
        size = chunk_tokens_for("prefill", PROFILE, None, (label, machine))
    assert size == CHUNK_TOKENS_DEFAULT
    (line,) = lines
    assert line["event"] == "chunk_profile_ignored"
    assert line["difference"].startswith(f"{field}: ours ")


def test_a_role_that_was_not_measured_has_the_default() -> None:
    """A prefill worker's size says nothing of a decode worker's."""
    assert chunk_tokens_for("decode", PROFILE, None, (LABEL, HERE)) == CHUNK_TOKENS_DEFAULT


@pytest.mark.parametrize(("role", "given", "most"), [("prefill", 64, 64), ("decode", None, 256)])
def test_the_most_is_known_before_the_label(role: str, given: int | None, most: int) -> None:
    """Memory is planned with it, whether or not the profile turns out to fit."""
    assert most_chunk_tokens(role, PROFILE, given) == most
    large = replace(PROFILE, roles={"prefill": replace(FOUND, chunk_tokens=1024)})
    assert most_chunk_tokens("prefill", large, None) == 1024


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "another"}, "format"),
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"model": 3}, "model"),
        ({"label": []}, "label"),
        ({"machine": {"cpu": "x", "cores": 0}}, "machine.cores"),
        ({"roles": {"prefill": {}}}, "roles.prefill.chunk_tokens"),
        ({"roles": {"prefill": {"chunk_tokens": 1 << 20}}}, "roles.prefill.chunk_tokens"),
        ({"roles": {"prefill": asdict(FOUND) | {"load": 10**400}}}, "roles.prefill.load"),
    ],
)
def test_a_damaged_profile_is_refused_naming_the_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    """Also a newer version: its sizes may mean something else."""
    with pytest.raises(ServiceError) as refused:
        read_profile(written(tmp_path / "profile.json", **changes))
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert refused.value.field == field


@pytest.mark.parametrize(
    "data", [b"", b"not json", b"[" * 100_000, b"[]", b"\xff", b" " * 2_000_000]
)
def test_a_file_that_is_no_profile_ends_a_worker_s_start(tmp_path: Path, data: bytes) -> None:
    """Somebody named it: a silent default would hide the mistake."""
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    with pytest.raises(StartupError, match=r"profile\.json cannot be used"):
        load_profile(path)
    assert load_profile(None) is None
    with pytest.raises(StartupError, match="No such file"):
        load_profile(tmp_path / "absent.json")


def test_the_other_role_is_kept_where_all_else_is_the_same() -> None:
    """Two runs of `baton tune chunk` make one profile; of another model nothing is kept."""
    decode = replace(PROFILE, roles={"decode": replace(FOUND, chunk_tokens=64)})
    assert decode.measured_beside(PROFILE).roles == {**PROFILE.roles, **decode.roles}
    again = replace(PROFILE, roles={"prefill": replace(FOUND, chunk_tokens=512)})
    assert again.measured_beside(PROFILE) == again
    assert decode.measured_beside(replace(PROFILE, cores=8)) == decode


def test_what_up_knows_of_itself_is_compared() -> None:
    """The model's name, fields of the label, this machine."""
    machine = this_machine(1)
    here = replace(PROFILE, cpu=machine.cpu, cores=machine.cores)
    assert here.first_difference(model="tiny", kv_dtype="bf16", block_tokens="16") is None
    told = here.first_difference(model="other", kv_dtype="bf16")
    assert told == "model: ours other, the profile's tiny"
    told = replace(here, cores=999).first_difference(model="tiny")
    assert told == f"cores: ours {machine.cores}, the profile's 999"
