"""The tree checks itself: what reviews would otherwise have to repeat.

Each test names one habit of CONTRIBUTING.md and lists every place that breaks it. The rules read
text in `tests/tidy_rules.py`; this file says where they hold and what is excepted, with a reason.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import tomllib
from pathlib import Path

import pytest

from tests import tidy_rules as rules

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("baton", "services", "tests", "bench", "examples", "scripts")
PRODUCT_FOLDERS = ("baton", "services")
GENERATED = "baton/api"
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500
COLUMNS_MAX = 100
POSITIONAL_MAX = 5

# Older, longer functions and modules: `path::name` to lines. They may shrink and must then be
# lowered here; nothing new is added.
FUNCTION_RATCHET: dict[str, int] = {}
MODULE_RATCHET: dict[str, int] = {}

# Names that others gave: they are spelt as their owners spell them.
FOREIGN_GENERATION_NAMES = frozenset(
    {
        "vllm:generation_tokens",
        "vllm:request_generation_tokens",
        "vllm_generation_tokens",
        "generation_config",
    }
)

# Where protobuf messages may be seen; everything behind gets frozen dataclasses.
EDGE_FILES = (
    "baton/rpc.py", "baton/rpc/*", "baton/cli/*", "tests/*", "examples/*", "bench/*", "scripts/*",
    "*/servicer*.py", "*/servicer*/*.py", "*/client*.py", "*_rpc.py", "*wire*.py", "*/__main__.py",
)  # fmt: skip

# package -> where it may be imported.
RESTRICTED_IMPORTS = {
    "torch": ("baton/engine/*", "baton/testing/*", "services/prefill/*", "services/decode/*"),
    "cffi": ("baton/engine/*",),
    "redis": ("services/gateway/registry*",),
    "ucxx": ("services/kvstore/moving/ucx.py",),
    "transformers": (),
    "accelerate": (),
    "requests": (),
}


def name_of(path: Path) -> str:
    """The path as written in messages and patterns: relative, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Hand-written Python files below the folders, in a stable order."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(path for path in found if not name_of(path).startswith(GENERATED + "/")))


@functools.cache
def text_of(path: Path) -> str:
    """The file's text."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(text_of(path), filename=str(path))


@functools.cache
def documents() -> tuple[Path, ...]:
    """Markdown files of the project."""
    nested = (path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md"))
    return tuple(sorted([*ROOT.glob("*.md"), *nested]))


@functools.cache
def other_sources() -> tuple[Path, ...]:
    """Protos, C++ and shell, for the rules that hold in every language."""
    patterns = ("protos/**/*.proto", "native/**/*.[ch]pp", "native/**/*.h", "scripts/*.sh")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return tuple(sorted([*found, *(p for p in (ROOT / ".ci/run",) if p.exists())]))


def report(faults: list[str], remedy: str) -> None:
    """Fail with every fault and what to do about it."""
    if faults:
        pytest.fail(f"{remedy}:\n  " + "\n  ".join(faults), pytrace=False)


def is_at(path: Path, patterns: tuple[str, ...]) -> bool:
    """Whether the path matches one of the glob patterns."""
    return any(fnmatch.fnmatch(name_of(path), pattern) for pattern in patterns)


def dotted(path: Path) -> str:
    """The module name of a Python file."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ratchet_faults(measured: dict[str, int], ratchet: dict[str, int], lines_max: int) -> list[str]:
    """Whatever is over its limit, and ratchet entries that no longer say the truth."""
    over = [
        f"{name}: {lines} lines, at most {ratchet.get(name, lines_max)}"
        for name, lines in measured.items()
        if lines > ratchet.get(name, lines_max)
    ]
    stale = [
        f"{name}: now {measured.get(name, 0)} lines; lower or remove its ratchet entry of {lines}"
        for name, lines in ratchet.items()
        if measured.get(name, 0) < lines
    ]
    return over + stale


def test_functions_stay_short() -> None:
    """A function over 70 lines does several things; give the second one its name."""
    measured = {
        f"{name_of(path)}::{function.name}": function.lines
        for path in python_files(*CODE_FOLDERS)
        for function in rules.function_lengths(tree_of(path))
    }
    report(ratchet_faults(measured, FUNCTION_RATCHET, FUNCTION_LINES_MAX), "split these functions")


def test_modules_stay_short() -> None:
    """A module over 500 lines has a second room in it."""
    measured = {
        name_of(path): len(text_of(path).splitlines()) for path in python_files(*CODE_FOLDERS)
    }
    report(ratchet_faults(measured, MODULE_RATCHET, MODULE_LINES_MAX), "split these modules")


def test_calls_stay_readable() -> None:
    """Beyond five positional parameters a call no longer says what is what."""
    faults = [
        f"{name_of(path)}:{line}: {name} has {count}"
        for path in python_files(*PRODUCT_FOLDERS, "scripts", "examples", "bench")
        # typer reads a command's options from its parameters.
        if not is_at(path, ("baton/cli/*",))
        for line, name, count in rules.positional_counts(tree_of(path))
        if count > POSITIONAL_MAX
    ]
    report(faults, "make the others keyword-only, or group them in a dataclass")


def test_lines_fit_in_100_columns() -> None:
    """Two files side by side stay readable."""
    faults = [
        f"{name_of(path)}:{line}"
        for path in [*python_files(*CODE_FOLDERS), *other_sources()]
        for line in rules.long_lines(text_of(path), COLUMNS_MAX)
    ]
    report(faults, "wrap these lines at 100 columns")


def test_banned_code_is_absent() -> None:
    """Code that loses tasks, runs foreign code, eats cancellation or sleeps in a test."""
    faults = [
        f"{name_of(path)}:{line}: {why}"
        for path in python_files(*CODE_FOLDERS)
        for line, why in rules.banned_code(tree_of(path), name_of(path).startswith("tests/"))
    ]
    report(faults, "replace these")


def test_no_note_to_ourselves_is_left_behind() -> None:
    """What is not done is an issue, not a comment."""
    files = [*python_files(*CODE_FOLDERS), *other_sources(), *documents()]
    faults = [
        f"{name_of(path)}:{line}" for path in files for line in rules.leftovers(text_of(path))
    ]
    report(faults, "finish these or file an issue")


def test_every_ignore_gives_its_reason() -> None:
    """A silenced check without a reason cannot be reviewed, or ever removed."""
    faults = [
        f"{name_of(path)}:{line}"
        for path in python_files(*CODE_FOLDERS)
        for line in rules.unreasoned_ignores(text_of(path))
    ]
    report(faults, "say why, after the code (`# noqa: X - why`) or in a comment line above")


def test_modules_say_what_they_own() -> None:
    """The docstring at the top is where a reader learns what belongs here."""
    faults = [name_of(p) for p in python_files(*CODE_FOLDERS) if not ast.get_docstring(tree_of(p))]
    report(faults, "give these modules a docstring: what they own, what they never do")


def entry_points() -> set[str]:
    """Modules that pyproject.toml starts by name."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return {target.partition(":")[0] for group in groups for target in group.values()}


def test_no_module_is_dead() -> None:
    """A module nobody imports, names or starts is not part of the product."""
    alive = entry_points()
    for path in python_files(*CODE_FOLDERS):
        tree = tree_of(path)
        alive |= (rules.imported_modules(tree) | rules.named_modules(tree)) - {dotted(path)}
    faults = [
        name_of(path)
        for path in python_files(*PRODUCT_FOLDERS)
        if path.name not in {"__init__.py", "__main__.py"} and dotted(path) not in alive
    ]
    report(faults, "use these modules or delete them")


def test_protobuf_messages_stay_at_the_edges() -> None:
    """Cores get frozen dataclasses, so that the wire can change without them."""
    faults = [
        f"{name_of(path)}: {module}"
        for path in python_files(*CODE_FOLDERS)
        if not is_at(path, EDGE_FILES)
        for module in sorted(rules.imported_modules(tree_of(path)))
        if module.endswith(("_pb2", "_pb2_grpc"))
    ]
    report(faults, "convert messages in a servicer, client, *_rpc or *wire* file")


def test_heavy_packages_are_imported_where_they_belong() -> None:
    """Extras stay extras: a service without torch, redis or ucxx must start."""
    faults = [
        f"{name_of(path)}: {package}"
        for path in python_files(*PRODUCT_FOLDERS)
        for package in sorted({m.split(".")[0] for m in rules.imported_modules(tree_of(path))})
        if package in RESTRICTED_IMPORTS and not is_at(path, RESTRICTED_IMPORTS[package])
    ]
    report(faults, "move these imports to the package that owns the dependency")


def test_document_links_resolve() -> None:
    """A link or a path in a document leads somewhere."""
    top_level = frozenset(
        {*CODE_FOLDERS, "docs", "protos", "native", "deploy", ".ci"}
        & {path.name for path in ROOT.iterdir()}
    )
    faults = []
    for path in documents():
        text = text_of(path)
        broken = [t for t in rules.link_targets(text) if not (path.parent / t).exists()]
        broken += [t for t in rules.named_paths(text, top_level) if not (ROOT / t).exists()]
        faults += [f"{name_of(path)}: {target}" for target in sorted(set(broken))]
    report(faults, "correct these links and paths")


def test_configuration_is_documented() -> None:
    """docs/config.md names every field of every service's configuration."""
    document = ROOT / "docs/config.md"
    if not document.exists():
        pytest.skip("docs/config.md does not exist yet")
    text = text_of(document)
    sources = [*ROOT.glob("services/*/config.py"), *ROOT.glob("baton/config.py")]
    faults = [
        f"{name_of(path)}: {owner}.{field}"
        for path in sources
        for owner, fields in rules.config_fields(tree_of(path)).items()
        for field in fields
        if f"`{field}`" not in text and field.upper() not in text
    ]
    report(faults, "document these fields in docs/config.md")


def test_generation_is_only_the_fencing_number() -> None:
    """One word, one meaning: tokens are decoded, streamed or produced; a generation fences."""
    files = [*python_files(*PRODUCT_FOLDERS), *other_sources(), *documents()]
    faults = [
        f"{name_of(path)}:{line}"
        for path in files
        for line in rules.generation_of_text(text_of(path), FOREIGN_GENERATION_NAMES)
    ]
    report(faults, "use another word for producing text")


def test_every_proto_element_has_a_comment() -> None:
    """The contract is read by people who have nothing else."""
    faults = [
        f"{name_of(path)}:{fault}"
        for path in sorted(ROOT.glob("protos/**/*.proto"))
        for fault in rules.uncommented_proto_elements(text_of(path))
    ]
    report(faults, "give each of these a sentence, in the line above")
