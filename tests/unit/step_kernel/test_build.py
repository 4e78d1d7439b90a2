"""The library as built: its interface is what cffi was told, its symbols are ours, and a machine
without a compiler is told once what it lost.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import google_crc32c
import pytest

from baton.engine import step_kernel_abi as abi
from baton.engine import step_kernel_build as builder
from baton.errors import ServiceError
from tests.unit.step_kernel.kernels import require_library

NATIVE = Path(__file__).parents[3] / "native"
HEADER = NATIVE / "include" / "baton_step.h"


def declarations(text: str) -> list[str]:
    """The C declarations of `text`, spaces and comments aside."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^\s*#.*$|^extern \"C\" \{$|^\}$", " ", text, flags=re.M)
    text = text.replace("BT_EXPORT", " ")
    parts = re.findall(r"[^;{}]+(?:\{[^}]*\}[^;]*)?;", text)
    return [" ".join(part.split()) for part in parts if "enum" not in part]


def enumerators(name: str) -> dict[str, int]:
    """Names and numbers of an enum of the header."""
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text("utf-8"), flags=re.S)
    found = re.search(rf"enum {name} \{{(.*?)\}}", text, flags=re.S)
    assert found is not None
    body = found[1]
    numbers, following = {}, 0
    for item in filter(None, (part.strip() for part in body.split(","))):
        key, _, value = item.partition("=")
        following = int(value) if value else following
        numbers[key.strip()] = following
        following += 1
    return numbers


def test_declarations_are_the_headers():
    """cffi believes what it is told: a difference would be a crash."""
    header = declarations(HEADER.read_text("utf-8"))
    assert sorted(declarations(abi.DECLARATIONS)) == sorted(header)


def test_numbers_are_the_headers():
    """The enums repeat the header's."""
    text = HEADER.read_text("utf-8")
    assert f"#define BT_ABI_VERSION {abi.ABI_VERSION}\n" in text
    assert f"#define BT_PHASES {len(abi.PHASES)}\n" in text
    errors = {key.removeprefix("BT_"): value for key, value in enumerators("bt_error").items()}
    assert errors == {error.name: error.value for error in abi.Error}
    roles = {key.removeprefix("BT_"): value for key, value in enumerators("bt_role").items()}
    assert roles == {role.name: role.value for role in abi.Role}
    kinds = {key.removeprefix("BT_"): value for key, value in enumerators("bt_kind").items()}
    assert kinds == {kind.name: kind.value for kind in abi.Kind}
    isas = {key.removeprefix("BT_ISA_"): value for key, value in enumerators("bt_isa").items()}
    assert isas == {isa.name: isa.code for isa in abi.Isa}
    acts = {key.removeprefix("BT_ACT_"): v for key, v in enumerators("bt_activation").items()}
    assert acts == {act.name: act.code for act in abi.Activation}


def test_only_prefixed_symbols_are_exported():
    """A symbol called `step` once met another library's; ours are hidden or prefixed."""
    require_library()
    if shutil.which("nm") is None:
        pytest.skip("binutils are not installed")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(builder.LIBRARY)],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert names
    assert [name for name in names if not name.startswith("bt_")] == []


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 128, 1000])
def test_checksum_is_crc32c(size):
    """The same CRC as the rest of the system, in one piece and continued."""
    require_library()
    ffi, library = abi.load()
    data = bytes(range(256)) * 4
    whole = library.bt_crc32c(0, ffi.from_buffer(data), size)
    assert whole == google_crc32c.value(data[:size])
    first = library.bt_crc32c(0, ffi.from_buffer(data), size // 3)
    rest = ffi.from_buffer(data[size // 3 : size])
    assert library.bt_crc32c(first, rest, size - size // 3) == whole


def test_the_portable_path_is_always_there():
    """It is the reference of the others and the last resort of every CPU."""
    require_library()
    assert abi.is_supported(abi.Isa.PORTABLE)
    assert abi.is_supported(abi.resolved_isa())


def test_missing_cmake_is_said_once(tmp_path, monkeypatch, capsys):
    """The installation goes on; the text names the loss, the cause and the remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not builder.build_or_warn(tmp_path / "lib.so", NATIVE)
    said = capsys.readouterr().err
    assert said.count("step kernel was not built") == 1
    assert "cmake was not found" in said
    assert "python -m baton.engine.step_kernel_build" in said
    assert not (tmp_path / "lib.so").exists()


def test_failing_compiler_is_said_once(tmp_path, monkeypatch, capsys):
    """So does one that exists and does not work."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    monkeypatch.setenv("CXX", "/bin/false")
    assert not builder.build_or_warn(tmp_path / "lib.so", NATIVE)
    said = capsys.readouterr().err
    assert said.count("step kernel was not built") == 1
    assert "cmake -S failed" in said


def build_something(monkeypatch):
    """Stands in for CMake: a library of one byte."""

    def run(command):
        if "-B" in command:
            (Path(command[command.index("-B") + 1]) / "libbaton_step.so").write_bytes(b"x")

    monkeypatch.setattr(builder, "_run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)


def test_two_builds_at_once_do_not_write_one_file(tmp_path, monkeypatch):
    """Or the first to end would put half of the other's in its place."""
    build_something(monkeypatch)
    copied, parts = shutil.copyfile, []

    def copy(source, target):
        parts.append(target)
        if len(parts) == 1:
            builder.build(tmp_path / "lib.so", NATIVE)
        copied(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    builder.build(tmp_path / "lib.so", NATIVE)
    assert len(set(parts)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["lib.so"]


def test_folder_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, capsys):
    """It ends no installation: torch serves."""
    build_something(monkeypatch)
    (tmp_path / "file").touch()
    assert not builder.build_or_warn(tmp_path / "file" / "lib.so", NATIVE)
    assert "cannot be written" in capsys.readouterr().err


def test_stale_means_sources_are_newer(tmp_path):
    """`make setup` is instant when nothing changed, and an installed wheel has no sources."""
    sources, library = tmp_path / "native", tmp_path / "lib.so"
    assert not builder.is_stale(library, sources)
    sources.mkdir()
    (sources / "a.cpp").write_text("")
    assert builder.is_stale(library, sources)
    library.write_text("")
    assert not builder.is_stale(library, sources)


def test_library_of_another_interface_is_refused(tmp_path, monkeypatch):
    """An old build beside new Python ends in a text, not in a crash."""
    require_library()
    copy = tmp_path / "lib.so"
    shutil.copyfile(builder.LIBRARY, copy)
    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)
    with pytest.raises(ServiceError, match="step_kernel_build"):
        abi.load(copy)
