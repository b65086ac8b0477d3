"""The package as text: its files parsed, for the rules that a machine can hold."""

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "graftree"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file of this repository.

    Attributes:
        path: Where it is, from the root of the repository.
        text: What it holds.
    """

    path: pathlib.Path
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The dotted name under which it is imported."""
        parts = self.path.relative_to("src").with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST, text: str) -> str:
        """A violation, in the form that editors turn into a link."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    def walk(self, *kinds: type) -> Iterator:
        return (node for node in self.nodes if isinstance(node, kinds))

    @functools.cached_property
    def code_lines(self) -> frozenset[int]:
        """The lines that hold code: no comments, blank lines or docstrings."""
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.walk(ast.Module, ast.ClassDef, *Function.__args__):
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
        return frozenset(lines)


_NO_CODE = {tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER}
_NO_CODE |= {tokenize.INDENT, tokenize.NEWLINE, tokenize.NL}


def read(folder: pathlib.Path) -> list[Source]:
    return [
        Source(path.relative_to(ROOT), path.read_text())
        for path in sorted(folder.rglob("*.py"))
    ]


@functools.cache
def package() -> list[Source]:
    return read(PACKAGE)


@functools.cache
def repository() -> list[Source]:
    folders = ["src", "tests", "benchmarks", "examples", "website"]
    return [source for folder in folders for source in read(ROOT / folder)]


@functools.cache
def module_names() -> frozenset[str]:
    return frozenset(source.module for source in package())


def imports(source: Source) -> Iterator[tuple[ast.stmt, str, str | None]]:
    """What a file imports, as (statement, module, name or None).

    ``from a import b`` gives ``("a.b", None)`` if that is a module of the package.
    Imports for the type checker only are left out.
    """
    unseen = set()
    for branch in source.walk(ast.If):
        if ast.unparse(branch.test).endswith("TYPE_CHECKING"):
            unseen.update(id(node) for node in ast.walk(branch))
    for node in source.walk(ast.Import, ast.ImportFrom):
        if id(node) not in unseen:
            for alias in node.names:
                yield node, *_target(node, alias.name)


def _target(node: ast.Import | ast.ImportFrom, name: str) -> tuple[str, str | None]:
    if isinstance(node, ast.Import):
        return name, None
    module = node.module or ""
    if f"{module}.{name}" in module_names():
        return f"{module}.{name}", None
    return module, name


def public_definitions(tree: ast.Module) -> Iterator[ast.ClassDef | Function]:
    """Classes, functions and methods whose names have no underscore in front."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in waiting.pop().body:
            if isinstance(node, (ast.ClassDef, *Function.__args__)):
                if not node.name.startswith("_"):
                    yield node
                    if isinstance(node, ast.ClassDef):
                        waiting.append(node)


def private_names(source: Source) -> frozenset[str]:
    """The names with an underscore that a file defines, at any level."""
    names = {node.name for node in source.walk(ast.ClassDef, *Function.__args__)}
    for node in source.walk(ast.Name, ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    for node in source.walk(ast.Constant):  # slots, and object.__setattr__
        if isinstance(node.value, str):
            names.add(node.value)
    return frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))
