"""`baton tune chunk`: what a curve speaks for, what is refused before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli import tune_cluster
from baton.cli.chunk_setup import with_chunk_profile
from baton.cli.tune import curve_table, keep, label_fields, parse_sizes, profile_of
from baton.cli.tune_choice import Choice, Rounds, choose, point_of
from baton.cli.tune_cluster import (
    STARTS_MAX,
    PortTaken,
    Texts,
    Wanted,
    Worker,
    cluster_options,
    make_texts,
    measured_in_folder,
    with_chunk,
)
from baton.cli.tune_load import SETTLED_TOKENS, sorted_out
from baton.kv.layout import KvDtype
from baton.launcher.plan import ChildSpec, ClusterOptions
from baton.testing.tiny_models import write_directory
from baton.text.bundle import TextBundle
from baton.worker.chunk_profile import CurvePoint, read_profile, write_profile
from baton.worker.chunker import Chunking
from tests.unit.cli.conftest import Run

WANTED = Wanted(
    role=Worker.PREFILL,
    sizes=(16, 64),
    prompt_tokens=200,
    rounds=3,
    streams=2,
    quiet_s=0.1,
    chunking=Chunking.FIXED,
)


def point(size: int, first: float, added: float, gap: float = 10.0) -> CurvePoint:
    """A point of a curve, in milliseconds."""
    return CurvePoint(
        chunk_tokens=size,
        first_token_ms=first,
        jitter_ms=1.0,
        gap_ms=gap,
        added_gap_ms=added,
        gap_p99_ms=gap + added,
    )


# --- the choice ----------------------------------------------------------------------------------


def test_the_fastest_first_token_wins() -> None:
    """Where the others are slower by more than measurements repeat."""
    curve = [point(64, 500, 1), point(256, 400, 3), point(1024, 480, 4)]
    assert choose(curve).chunk_tokens == 256


def test_of_equally_fast_sizes_the_one_that_disturbs_least_wins() -> None:
    """Within five percent of the fastest."""
    curve = [point(128, 402, 6), point(256, 400, 9), point(512, 415, 2), point(1024, 430, 0)]
    assert choose(curve).chunk_tokens == 512


def test_of_equal_ones_the_smallest_wins() -> None:
    """Others get their turn sooner; differences below the noise of a gap do not count."""
    curve = [point(128, 402, 1.2), point(256, 400, 1.0), point(512, 401, 0.9)]
    assert choose(curve).chunk_tokens == 128


def test_a_bound_on_the_gap_is_kept() -> None:
    """Also where that costs time to the first token."""
    curve = [point(64, 900, 1), point(128, 600, 4), point(256, 400, 12)]
    assert choose(curve, 5.0).chunk_tokens == 128
    assert choose(curve, 12.0).chunk_tokens == 256


def test_a_bound_that_nothing_keeps_is_said() -> None:
    """The size that adds least, and why it was taken."""
    curve = [point(64, 900, 3), point(128, 600, 4)]
    choice = choose(curve, 1.0)
    assert choice.chunk_tokens == 64
    assert choice.reason == "no size adds at most 1 ms to a gap; this one adds least, 3.0 ms"


def test_a_point_says_what_was_seen() -> None:
    """Median and spread of first tokens; means and the tail of gaps."""
    rounds = Rounds(
        quiet_s=[0.010] * 50,
        beside_s=[0.010] * 90 + [0.050] * 10,
        first_token_s=[0.1 + 0.01 * index for index in range(11)],
    )
    assert point_of(128, rounds) == CurvePoint(
        chunk_tokens=128,
        first_token_ms=150.0,
        jitter_ms=80.0,
        gap_ms=10.0,
        added_gap_ms=4.0,
        gap_p99_ms=50.0,
    )


def test_gaps_are_sorted_by_what_was_under_way() -> None:
    """A gap that a prompt touches counts as beside it; a stream's beginning counts as nothing."""
    times = [0.1 * index for index in range(SETTLED_TOKENS + 6)]
    began_s = times[SETTLED_TOKENS + 2] + 0.05
    rounds = sorted_out([times, times[:SETTLED_TOKENS]], [(began_s, began_s + 0.1)])
    assert rounds.first_token_s == pytest.approx([0.1])
    assert rounds.beside_s == pytest.approx([0.1, 0.1])
    assert rounds.quiet_s == pytest.approx([0.1] * 3)


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--sizes", "64,big"), "baton: --sizes '64,big' is no list of whole numbers. write "),
        (("--sizes", "0,64"), "baton: --sizes has 0. a size is 1 to 65536 tokens\n"),
        (("--sizes", "70000"), "baton: --sizes has 70000. a size is 1 to 65536 tokens\n"),
        (
            ("--sizes", ",".join(map(str, range(1, 18)))),
            "baton: --sizes names 17 sizes. give at most 16\n",
        ),
        (
            ("--role", "decode", "--chunking", "semantic"),
            "baton: --role decode cuts at fixed sizes only. leave --chunking out\n",
        ),
        (("--role", "merger"), "Invalid value for '--role'"),
        (("--rounds", "1"), "Invalid value for '--rounds'"),
        (("--streams", "0"), "Invalid value for '--streams'"),
        (("--dtype", "float8"), "Invalid value for '--dtype'"),
    ],
)
def test_a_wrong_flag_is_named(run: Run, flags: tuple[str, ...], told: str) -> None:
    """Before a model is looked for, let alone a cluster started."""
    ran = run("tune", "chunk", "--model", "no-such-model", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err


def test_a_prompt_beyond_the_context_is_refused(run: Run, tmp_path: Path) -> None:
    """It names the most that fits."""
    model = write_directory(tmp_path / "tiny")
    ran = run("tune", "chunk", "--model", str(model), "--prompt-tokens", "512")
    assert ran.code == 2
    assert ran.err == (
        "baton: --prompt-tokens 512 does not fit the model's context of 512. give at most 511\n"
    )


def test_a_place_that_cannot_be_written_is_refused_first(run: Run, tmp_path: Path) -> None:
    """Minutes of measuring come after it."""
    model = write_directory(tmp_path / "tiny")
    too_long = tmp_path / ("x" * 300) / "profile.json"
    for out in (tmp_path, tmp_path / "tiny" / "config.json" / "profile.json", too_long):
        ran = run("tune", "chunk", "--model", str(model), "--out", str(out))
        assert ran.code == 2
        assert "cannot be written. name a file in a folder of yours" in ran.err


def test_an_unknown_model_is_refused(run: Run) -> None:
    """As every command does."""
    ran = run("tune", "chunk", "--model", "no-such-model")
    assert ran.code == 1
    assert "no-such-model" in ran.err


def test_sizes_ascend_and_come_once() -> None:
    """However they were written."""
    assert parse_sizes("256, 64,64") == (64, 256)


@pytest.mark.parametrize("taken", [0, 1, STARTS_MAX - 1, STARTS_MAX])
def test_a_port_that_somebody_took_is_chosen_anew(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """A few times; each start has a folder of its own, which is gone afterwards."""
    folders: list[Path] = []

    def start(options: ClusterOptions, *_: object) -> tuple[CurvePoint, ...]:
        folders.append(options.run_dir)
        assert options.run_dir.is_dir()
        if len(folders) <= taken:
            raise PortTaken("gateway-0: Address already in use")
        return (point(16, 5, 1),)

    monkeypatch.setattr(tune_cluster, "measured_curve", start)
    flags = {"model": "tiny", "dtype": "float32", "kernel": "auto"}
    nothing = Texts(prompts=(), streams=())
    if taken == STARTS_MAX:
        with pytest.raises(PortTaken):
            measured_in_folder(WANTED, nothing, lambda _: None, flags=flags)
    else:
        options, curve = measured_in_folder(WANTED, nothing, lambda _: None, flags=flags)
        assert options.run_dir == folders[-1]
        assert curve == (point(16, 5, 1),)
    assert len(set(folders)) == min(taken + 1, STARTS_MAX)
    assert not any(folder.exists() for folder in folders)


# --- what is made of it --------------------------------------------------------------------------


def test_prompts_have_their_length_and_share_no_beginning(tmp_path: Path) -> None:
    """A prompt whose KV were found would measure nothing."""
    bundle = TextBundle.load(write_directory(tmp_path / "tiny"))
    texts = make_texts(bundle.tokenizer, WANTED)
    prompts = [prompt for prompts in texts.prompts for prompt in prompts]
    assert {len(prompt) for prompt in prompts} == {200}
    assert len(prompts) == 8
    assert len({prompt[:4] for prompt in (*prompts, *texts.streams)}) == 10


def test_only_the_chunk_size_of_a_worker_changes() -> None:
    """The rest of its command line stays."""
    spec = ChildSpec(
        name="prefill-0",
        module="services.prefill",
        arguments=("--a", "1", "--chunk-tokens", "64", "--b"),
        grpc_address="127.0.0.1:1",
    )
    assert with_chunk(spec, 128).arguments == ("--a", "1", "--chunk-tokens", "128", "--b")


def test_a_profile_is_made_kept_and_used_by_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a curve to the flag that workers get; a second role is added, another model says no."""
    model = write_directory(tmp_path / "tiny")
    flags = {"model": str(model), "dtype": "float32", "kernel": "auto"}
    options = replace(cluster_options(tmp_path, WANTED, **flags), chunk_tokens=None)
    curve = (point(16, 5, 1), point(64, 4, 1))
    path = tmp_path / "chunk-profile.json"
    choice = Choice(chunk_tokens=64, reason="it is the fastest")
    keep(path, profile_of(options, WANTED, curve, choice))
    keep(path, profile_of(options, replace(WANTED, role=Worker.DECODE), curve, choice))
    profile = read_profile(path)
    assert set(profile.roles) == {"prefill", "decode"}
    assert profile.label == label_fields(options)
    assert with_chunk_profile(options, KvDtype.F32).chunk_profile == path
    assert "prefill 64 tokens" in capsys.readouterr().out
    given = replace(options, chunk_tokens=32)
    assert with_chunk_profile(given, KvDtype.F32) == given
    assert with_chunk_profile(options, KvDtype.BF16).chunk_profile is None
    assert capsys.readouterr().out == (
        f"{path} is ignored: kv_dtype: ours bf16, the profile's f32\n"
    )
    write_profile(path, replace(profile, model="another"))
    assert with_chunk_profile(options, KvDtype.F32).chunk_profile is None
    assert "model: ours tiny, the profile's another" in capsys.readouterr().out
    path.write_text("{}", encoding="utf-8")
    assert with_chunk_profile(options, KvDtype.F32).chunk_profile is None
    assert "is ignored: format is not a text" in capsys.readouterr().out


def test_the_table_marks_what_was_chosen() -> None:
    """One row a size."""
    table = curve_table((point(16, 5, 1), point(64, 4, -0.5)), 64)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["16", "64"]
    assert cells[4] == ["+1.00", "-0.50"]
    assert cells[-1] == ["", "<- chosen"]
