"""`baton tune`: measures a setting on this model and machine; workers load the profile it writes.

Owns the command line, the table and the profile's content. The cluster stands in `tune_cluster`,
the load in `tune_load`, the choice in `tune_choice`, the file in `baton.worker.chunk_profile`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from baton import models
from baton.cli.console import CommandFailed, ExitCode, errors, output
from baton.cli.tune_choice import Choice, choose
from baton.cli.tune_cluster import Wanted, Worker, make_texts, measured_in_folder
from baton.cli.up import KV_DTYPES, MODEL_DEFAULT, Dtype, Kernel, ensure_model
from baton.engine.config import ModelConfig, read_config
from baton.engine.label import build_label, torch_numeric_class
from baton.errors import ServiceError, StartupError
from baton.launcher.cluster import this_machine
from baton.launcher.plan import ClusterOptions, divide_cores
from baton.launcher.rundir import default_run_dir
from baton.text.bundle import TextBundle
from baton.worker import chunk_profile
from baton.worker.chunk_profile import CHUNK_TOKENS_MAX, ChunkProfile, CurvePoint, Measured
from baton.worker.chunker import Chunking

SIZES: Final = "64,128,256,512,1024"
SIZES_MAX: Final = 16
PROMPT_TOKENS: Final = 1024
COLUMNS: Final = ("chunk", "first token ms", "jitter", "gap ms", "added", "p99", "")

app = typer.Typer(
    no_args_is_help=True,
    help="Measure settings on this model and machine; write a profile that workers load.",
)

RoleOption = Annotated[
    Worker, typer.Option(help="prefill: a worker of its own; decode: one that prefills itself.")
]
PromptTokensOption = Annotated[
    int | None,
    typer.Option(
        min=16, show_default="1024, or most of a short context", help="Tokens of a prompt."
    ),
]
AddedGapOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        show_default="no bound",
        help="Milliseconds that a prompt may add to the others' gap between tokens.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        show_default=f"{chunk_profile.FILE_NAME} in the run directory of `baton up`",
        help="Where the profile goes.",
    ),
]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Chunk sizes, ascending, each once; a wrong command line raises CommandFailed."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise _usage(f"--sizes {text!r} is no list of whole numbers", f"write {SIZES}") from None
    if len(sizes) > SIZES_MAX:
        raise _usage(f"--sizes names {len(sizes)} sizes", f"give at most {SIZES_MAX}")
    for size in sizes:
        if not 1 <= size <= CHUNK_TOKENS_MAX:
            raise _usage(f"--sizes has {size}", f"a size is 1 to {CHUNK_TOKENS_MAX} tokens")
    return tuple(sizes)


def prompt_length(asked: int | None, config: ModelConfig) -> int:
    """Tokens of a prompt: as asked, else 1,024 or three quarters of a short context."""
    if asked is None:
        return min(PROMPT_TOKENS, config.max_context * 3 // 4)
    most = config.max_context - 1
    if asked > most:
        raise _usage(
            f"--prompt-tokens {asked} does not fit the model's context of {config.max_context}",
            f"give at most {most}",
        )
    return asked


def check_target(path: Path) -> None:
    """Refuse a place that cannot be written, before minutes are spent on what goes there."""
    try:
        there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
        is_kind = there.is_file() if there == path.absolute() else there.is_dir()
        is_place = is_kind and os.access(there, os.W_OK)
    except OSError:
        # A name that is too long, a folder that may not be looked into.
        is_place = False
    if not is_place:
        raise _usage(f"--out {path} cannot be written", "name a file in a folder of yours")


def label_fields(options: ClusterOptions) -> dict[str, str]:
    """The pair label that the workers of such a cluster have."""
    path = models.resolve(options.model).path
    config, dtype = read_config(path), KV_DTYPES[options.stored_dtype]
    return build_label(
        path,
        config,
        TextBundle.load(path).tokenizer_hash,
        config.kv_geometry(options.block_tokens, dtype),
        torch_numeric_class(config, dtype),
    ).as_metadata()


def profile_of(
    options: ClusterOptions, wanted: Wanted, curve: Sequence[CurvePoint], choice: Choice
) -> ChunkProfile:
    """The profile of what was measured, as of now; `load` is left to the caller."""
    threads = divide_cores(this_machine().cores, options.prefill_workers, options.decode_workers)
    own = threads[0] if wanted.role is Worker.PREFILL else threads[1]
    machine = chunk_profile.this_machine(own)
    measured = Measured(
        chunk_tokens=choice.chunk_tokens,
        reason=choice.reason,
        chunking=wanted.chunking.value,
        threads=own,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        load=0.0,
        prompt_tokens=wanted.prompt_tokens,
        streams=wanted.streams,
        rounds=wanted.rounds,
        curve=tuple(curve),
    )
    return ChunkProfile(
        model=models.resolve(options.model).name,
        label=label_fields(options),
        cpu=machine.cpu,
        cores=machine.cores,
        roles={wanted.role.value: measured},
    )


def keep(path: Path, profile: ChunkProfile) -> None:
    """Write it, with what an older one has for the other role of this model here."""
    if path.exists():
        try:
            profile = profile.measured_beside(chunk_profile.read_profile(path))
        except ServiceError as problem:
            errors().print(f"{path} is replaced: {problem.message}", markup=False)
    try:
        chunk_profile.write_profile(path, profile)
    except StartupError as problem:
        raise CommandFailed(problem.message, remedy=problem.hint) from problem


def curve_table(curve: Sequence[CurvePoint], chosen: int) -> Table:
    """The curve, the chosen size marked."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for point in curve:
        table.add_row(
            str(point.chunk_tokens),
            f"{point.first_token_ms:.1f}",
            f"{point.jitter_ms:.1f}",
            f"{point.gap_ms:.2f}",
            f"{point.added_gap_ms:+.2f}",
            f"{point.gap_p99_ms:.1f}",
            "<- chosen" if point.chunk_tokens == chosen else "",
        )
    return table


def tune(
    wanted: Wanted, added_gap_max_ms: float | None, target: Path, *, flags: dict[str, str]
) -> None:
    """Measure, print the curve, write the profile. `flags`: of the cluster."""
    load = os.getloadavg()[0]
    say, progress = output(), errors()
    say.print(
        f"{len(wanted.sizes)} sizes, {wanted.rounds} prompts of {wanted.prompt_tokens} tokens "
        f"each, {wanted.streams} streaming beside; load {load:.1f} when it began"
    )

    def told(point: CurvePoint) -> None:
        progress.print(f"  {point.chunk_tokens} tokens: {point.first_token_ms:.0f} ms")

    texts = make_texts(TextBundle.load(models.resolve(flags["model"]).path).tokenizer, wanted)
    options, curve = measured_in_folder(wanted, texts, told, flags=flags)
    choice = choose(curve, added_gap_max_ms)
    profile = profile_of(options, wanted, curve, choice)
    role = wanted.role.value
    keep(target, replace(profile, roles={role: replace(profile.roles[role], load=load)}))
    say.print(curve_table(curve, choice.chunk_tokens))
    say.print(f"{choice.chunk_tokens} tokens: {choice.reason}", markup=False)
    say.print(f"written to {target}", markup=False)


def _usage(message: str, remedy: str) -> CommandFailed:
    return CommandFailed(message, remedy=remedy, exit_code=ExitCode.USAGE)


@app.command()
def chunk(
    model: Annotated[str, typer.Option(envvar="BATON_UP_MODEL", help="Name or path.")] = (
        MODEL_DEFAULT
    ),
    role: RoleOption = Worker.PREFILL,
    sizes: Annotated[str, typer.Option(help="Chunk sizes to try, with commas.")] = SIZES,
    prompt_tokens: PromptTokensOption = None,
    rounds: Annotated[int, typer.Option(min=2, max=1000, help="Prompts for each size.")] = 7,
    streams: Annotated[
        int, typer.Option(min=1, max=16, help="Answers that stream beside the prompts.")
    ] = 1,
    quiet_s: Annotated[
        float, typer.Option(min=0.01, max=60.0, help="Seconds without a prompt before each one.")
    ] = 0.5,
    added_gap_ms: AddedGapOption = None,
    chunking: Annotated[Chunking, typer.Option(help="Where chunks end.")] = Chunking.FIXED,
    dtype: Annotated[Dtype, typer.Option(envvar="BATON_UP_DTYPE")] = Dtype.BFLOAT16,
    kernel: Annotated[Kernel, typer.Option(envvar="BATON_UP_KERNEL")] = Kernel.AUTO,
    out: OutOption = None,
) -> None:
    """Find the chunk size of prompts: time to the first token against the gap of streams beside it.

    Example: baton tune chunk --sizes 128,256,512 --rounds 5
    """
    found_sizes = parse_sizes(sizes)
    if role is Worker.DECODE and chunking is Chunking.SEMANTIC:
        raise _usage("--role decode cuts at fixed sizes only", "leave --chunking out")
    ensure_model(model)
    wanted = Wanted(
        role=role,
        sizes=found_sizes,
        prompt_tokens=prompt_length(prompt_tokens, read_config(models.resolve(model).path)),
        rounds=rounds,
        streams=streams,
        quiet_s=quiet_s,
        chunking=chunking,
    )
    target = out or default_run_dir() / chunk_profile.FILE_NAME
    check_target(target)
    flags = {"model": model, "dtype": dtype.value, "kernel": kernel.value}
    tune(wanted, added_gap_ms, target, flags=flags)
