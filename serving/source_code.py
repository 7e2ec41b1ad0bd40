"""Real code to talk about: functions and excerpts of this Python's own standard library."""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHARS_PER_TOKEN = 3.5
MODULES = 24
MODULE_BYTES = range(10_000, 90_000)
FUNCTION_CHARS = range(160, 1000)
EXCERPT_TOKENS = range(350, 601)
MIN_FUNCTIONS = 8


class SourceError(RuntimeError):
    """The standard library's source is not there."""


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    """As one would call it: `name`, or `Class.name`."""
    code: str
    arguments: tuple[str, ...]
    """Names of its arguments without self and cls."""


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    excerpt: str
    """Whole functions and classes, `EXCERPT_TOKENS` long by estimate."""
    shown: tuple[Function, ...]
    """Functions within the excerpt."""
    others: tuple[Function, ...]
    """Functions of the rest of the file."""


def estimate_tokens(text: str) -> int:
    """Tokens of English and code in a byte-pair vocabulary of about 50,000."""
    return round(len(text) / CHARS_PER_TOKEN)


@cache
def modules() -> tuple[Module, ...]:
    """`MODULES` modules spread over the sizes of the standard library, the same on every call.

    Raises SourceError if this Python came without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.name[0] != "_")
    found = [module for path in files if (module := _read(path))]
    if len(found) < MODULES:
        raise SourceError(
            f"{folder} holds only {len(found)} modules of {MODULES} that the code-assistant workload needs. "
            "Use a Python whose standard library comes as source, or replay a JSONL file of your own."
        )
    return tuple(found[len(found) * k // MODULES] for k in range(MODULES))


def _read(path: Path) -> Module | None:
    if path.stat().st_size not in MODULE_BYTES:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return None
    lines = source.split("\n")
    functions = list(_functions(tree, lines))
    excerpt_nodes = _excerpt(tree, lines)
    within = {line for node in excerpt_nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    shown = tuple(function for line, function in functions if line in within)
    others = tuple(function for line, function in functions if line not in within)
    if not excerpt_nodes or not shown or len(others) < MIN_FUNCTIONS:
        return None
    excerpt = "\n\n\n".join(_segment(node, lines) for node in excerpt_nodes)
    return Module(path.stem, excerpt, shown, others)


def _functions(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, Function]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _from_nodes(node.body, f"{node.name}.", lines)
    yield from _from_nodes(tree.body, "", lines)


def _from_nodes(nodes: list[ast.stmt], prefix: str, lines: list[str]) -> Iterator[tuple[int, Function]]:
    for node in nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        code = _segment(node, lines)
        if len(code) in FUNCTION_CHARS:
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            arguments = tuple(name for name in names if name not in ("self", "cls"))
            yield node.lineno, Function(prefix + node.name, code, arguments)


def _excerpt(tree: ast.Module, lines: list[str]) -> list[ast.stmt]:
    """The first whole functions and classes that together reach the wanted length."""
    chosen: list[ast.stmt] = []
    tokens = 0
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        size = estimate_tokens(_segment(node, lines))
        if size >= 30 and tokens + size < EXCERPT_TOKENS.stop:
            chosen.append(node)
            tokens += size
        if tokens in EXCERPT_TOKENS:
            return chosen
    return []


def _segment(node: ast.stmt, lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip()


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
