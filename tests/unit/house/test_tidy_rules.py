"""The tidy rules find what they are for: each sees a text that breaks it and one that does not."""

from __future__ import annotations

import ast

import pytest

from tests import tidy_rules as rules


def test_a_method_is_measured_without_its_decorators() -> None:
    """The limit is on what is read as one thing."""
    tree = ast.parse("class A:\n    @property\n    def b(self):\n        x = 1\n        return x\n")
    found = [(function.name, function.lines) for function in rules.function_lengths(tree)]
    assert found == [("A.b", 3)]


def test_positional_parameters_are_counted_without_self() -> None:
    """Keyword-only ones name themselves at the call."""
    tree = ast.parse("class A:\n    def f(self, a, /, b, *, c): ...\n")
    assert list(rules.positional_counts(tree)) == [(2, "f", 2)]


def test_from_imports_count_as_module_and_member() -> None:
    """`from baton import kv` keeps baton.kv alive."""
    assert rules.imported_modules(ast.parse("from baton import kv")) == {"baton", "baton.kv"}


def test_a_module_named_in_a_string_counts_as_used() -> None:
    """Registries import lazily by name."""
    assert rules.named_modules(ast.parse("X = 'baton.cli.up:command'")) == {"baton.cli.up"}


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    f()\nexcept BaseException:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException):\n    pass",
        "asyncio.get_running_loop().create_task(f())",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "asyncio.sleep(0.1)",
    ],
)
def test_banned_code_is_found(code: str) -> None:
    """Each of these has cost somebody a night."""
    assert len(list(rules.banned_code(ast.parse(code), is_test=True))) == 1


@pytest.mark.parametrize(
    "code",
    ["try:\n    f()\nexcept Exception:\n    raise", "group.create_task(f())", "asyncio.sleep(0)"],
)
def test_code_that_only_looks_banned_is_left_alone(code: str) -> None:
    """A TaskGroup owns its tasks; sleep(0) only yields."""
    assert list(rules.banned_code(ast.parse(code), is_test=True)) == []


def test_a_leftover_note_is_found_as_a_word_only() -> None:
    """`todos` is a noun, the marker is not."""
    marker = "TO" + "DO"
    assert rules.leftovers(f"a\n# {marker}: later\ntodos = []") == [2]


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("x = f()  # noqa: S101", [1]),
        ("x = f()  # noqa", [1]),
        ("x = f()  # type: ignore[arg-type]", [1]),
        ("x = f()  # noqa: S101 - the value is ours", []),
        ("x = f()  # type: ignore[arg-type]  # stubs are too narrow", []),
        ("# the value is ours\nx = f()  # noqa: S101", []),
        ("x = '# noqa'", []),
    ],
)
def test_an_ignore_needs_a_reason(line: str, faults: list[int]) -> None:
    """Beside it or above it."""
    assert rules.unreasoned_ignores(line + "\n") == faults


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("text_generation", True),
        ("generation_tokens_total", True),
        ("class GenerationConfig:", True),
        ("vllm:generation_tokens_total", False),
        ("generation: int", False),
        ("the next generation of the log", False),
        ("STALE_GENERATION", False),
    ],
)
def test_generation_of_text_is_told_from_the_fencing_number(line: str, is_fault: bool) -> None:
    """The word is reserved; names that others gave are not ours to change."""
    found = rules.generation_of_text(line, frozenset({"vllm:generation_tokens"}))
    assert bool(found) is is_fault


def test_links_are_read_without_anchors_and_without_the_web() -> None:
    """Only what lies in the tree can be checked offline."""
    text = "[a](b.md#c) [d](https://example.org) [e](#here)\n```\n[f](g.md)\n```\n"
    assert rules.link_targets(text) == ["b.md"]


def test_backticked_paths_are_told_from_other_code() -> None:
    """A path begins in one of our folders and has no pattern in it."""
    text = "`docs/a.md` `docs/` `docs/adr/NNNN-*.md` `a/b` `docs`"
    assert rules.named_paths(text, frozenset({"docs"})) == ["docs/a.md", "docs"]


def test_config_fields_are_collected_by_class() -> None:
    """Class variables are not configuration."""
    text = "class AConfig:\n    x: int = 1\n    y: ClassVar[int] = 2\nclass B:\n    z: int\n"
    assert rules.config_fields(ast.parse(text)) == {"AConfig": ["x"]}


def test_proto_elements_without_comment_are_named() -> None:
    """Fields, map fields and enum values count like messages; options do not."""
    text = (
        "option java_multiple_files = true;\n// Doc.\nmessage A {\n  string b = 1;\n"
        "  // Doc.\n  map<string, int32> c = 2;\n}\n// Doc.\nenum E {\n  E_UNSPECIFIED = 0;\n}\n"
    )
    assert rules.uncommented_proto_elements(text) == ["4: b", "10: E_UNSPECIFIED"]
