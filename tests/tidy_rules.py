"""What `test_tidy.py` measures: pure functions from source text to facts and faults.

Owns: how a rule reads a text. Never does: walk the tree, decide what is allowed where.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

# Spelt in halves, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(?:FIX" r"ME|TO" r"DO|XX" r"X)\b")
MARKDOWN_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BACKTICKED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
PATH_LIKE = re.compile(r"\.?[\w.-]+(?:/[\w.-]+)+/?|[\w-]+/")
GENERATION_OF_TEXT = re.compile(
    r"text[ _-]generation|tokens?[ _-]generation"
    r"|generation[ _-](?:tokens?|throughput|speed|rate|length|config|loop)|generationconfig",
    re.IGNORECASE,
)
PROTO_ELEMENT = re.compile(
    r"^\s*(?:(?P<kind>service|rpc|message|enum|oneof)\s+(?P<name>\w+)"
    r"|(?!option\b|reserved\b)(?:(?:repeated|optional)\s+)?"
    r"(?:map<[^>]+>|[\w.]+)\s+(?P<field>\w+)\s*=\s*\d+"
    r"|(?P<value>[A-Z][A-Z0-9_]*)\s*=\s*\d+)"
)
IGNORE = re.compile(
    r"#\s*(?:noqa(?::\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*)?"
    r"|type:\s*ignore(?:\[[\w\-, ]*\])?)(?P<rest>.*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLength:
    """One function or method: its dotted name in the module and its lines, decorators excluded."""

    name: str
    lines: int


def function_lengths(tree: ast.AST, prefix: str = "") -> Iterator[FunctionLength]:
    """Every function of a module, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield FunctionLength(name=prefix + node.name, lines=end - node.lineno + 1)
        name = getattr(node, "name", None)
        inner = f"{prefix}{name}." if isinstance(name, str) else prefix
        yield from function_lengths(node, inner)


def positional_counts(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """(line, name, positional parameters without self and cls) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            yield node.lineno, node.name, count


def imported_modules(tree: ast.AST) -> set[str]:
    """Dotted names a module imports: for `from a.b import c` both a.b and a.b.c."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def named_modules(tree: ast.AST) -> set[str]:
    """Strings that read like a dotted module name: how lazy registries name what they load."""
    return {
        node.value.partition(":")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(?:baton|services)(?:\.\w+)+(?::\w+)?", node.value)
    }


def banned_code(tree: ast.AST, is_test: bool) -> Iterator[tuple[int, str]]:
    """(line, why) for code that no linter rule of ours can see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_base_exception(node.type):
            yield node.lineno, "except BaseException swallows cancellation: name what you handle"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, why) for why in _banned_call(node, is_test))


def _is_base_exception(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(name, ast.Name) and name.id == "BaseException" for name in names)


def _banned_call(call: ast.Call, is_test: bool) -> Iterator[str]:
    text = ast.unparse(call.func)
    if re.search(r"loop(?:\(\))?\.(?:create_task|run_until_complete)$", text):
        yield f"{text}: nobody awaits it; use asyncio.TaskGroup or baton.lifecycle"
    if text in {"eval", "exec", "builtins.eval", "builtins.exec"}:
        yield f"{text} runs text as code"
    if is_test and text in {"asyncio.sleep", "time.sleep", "sleep"} and not _is_zero(call):
        yield "a test never sleeps: wait for the event, or move a ManualClock"
    for keyword in call.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in {"allow_pickle", "trust_remote_code", "shell"} and is_true:
            yield f"{keyword.arg}=True runs foreign code"


def _is_zero(call: ast.Call) -> bool:
    return (
        len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    )


def long_lines(text: str, columns_max: int) -> list[int]:
    """Numbers of the lines that are wider than `columns_max`."""
    return [n for n, line in enumerate(text.splitlines(), 1) if len(line) > columns_max]


def leftovers(text: str) -> list[int]:
    """Numbers of the lines that still carry a note to ourselves."""
    return [n for n, line in enumerate(text.splitlines(), 1) if LEFTOVERS.search(line)]


def unreasoned_ignores(text: str) -> list[int]:
    """Lines with a noqa or type: ignore that gives no reason, there or in the line above."""
    lines = text.splitlines()
    faults = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        match = IGNORE.search(token.string)
        number = token.start[0]
        above = lines[number - 2].strip() if number > 1 else ""
        if match and not re.search(r"\w", match["rest"]) and not above.startswith("#"):
            faults.append(number)
    return faults


def generation_of_text(text: str, allowed: frozenset[str]) -> list[int]:
    """Lines that use the fencing word for producing text.

    `allowed` are names that others gave, in lower case.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        rest = line.lower()
        for name in allowed:
            rest = rest.replace(name, "")
        if GENERATION_OF_TEXT.search(rest):
            faults.append(number)
    return faults


def link_targets(text: str) -> list[str]:
    """Relative targets of a Markdown text's links, without anchors."""
    targets = [match.partition("#")[0] for match in MARKDOWN_LINK.findall(FENCED.sub("", text))]
    return [target for target in targets if target and not re.match(r"[a-z]+:|/", target)]


def named_paths(text: str, top_level: frozenset[str]) -> list[str]:
    """Backticked paths of a Markdown text that begin in one of the tree's own folders."""
    spans = BACKTICKED.findall(FENCED.sub("", text))
    return [
        span.rstrip("/")
        for span in spans
        if PATH_LIKE.fullmatch(span) and span.split("/")[0] in top_level
    ]


def config_fields(tree: ast.AST) -> dict[str, list[str]]:
    """Fields of every dataclass whose name ends in Config, by class."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found[node.name] = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            ]
    return found


def uncommented_proto_elements(text: str) -> list[str]:
    """`line: name` of each service, rpc, message, enum, oneof, field or value without a comment."""
    faults = []
    above = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = PROTO_ELEMENT.match(line)
        if match and not (above.startswith("//") or above.endswith("*/")):
            faults.append(f"{number}: {match['name'] or match['field'] or match['value']}")
        above = line.strip()
    return faults
