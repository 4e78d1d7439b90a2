"""What `baton up` makes of a chunk profile in its run directory.

Owns the one line that it says about it. Workers check again, with the digests.
"""

from __future__ import annotations

from dataclasses import replace

from baton import models
from baton.cli.console import output
from baton.errors import ServiceError
from baton.kv.layout import KvDtype
from baton.launcher.plan import ClusterOptions
from baton.worker.chunk_profile import FILE_NAME, read_profile


def with_chunk_profile(options: ClusterOptions, kv: KvDtype) -> ClusterOptions:
    """With the run directory's chunk profile, where `baton tune chunk` wrote one that fits and no
    size was given; says what becomes of it.
    """
    path = options.run_dir / FILE_NAME
    if options.chunk_tokens is not None or not path.exists():
        return options
    try:
        profile = read_profile(path)
        difference = profile.first_difference(
            model=models.resolve(options.model).name,
            kv_dtype=kv.text,
            block_tokens=str(options.block_tokens),
        )
    except ServiceError as problem:
        return _ignored(options, problem.message)
    if difference is not None:
        return _ignored(options, difference)
    sizes = ", ".join(
        f"{role} {found.chunk_tokens} tokens" for role, found in sorted(profile.roles.items())
    )
    output().print(f"chunks as {path} says: {sizes}", markup=False)
    return replace(options, chunk_profile=path)


def _ignored(options: ClusterOptions, why: str) -> ClusterOptions:
    output().print(f"{options.run_dir / FILE_NAME} is ignored: {why}", markup=False)
    return options
