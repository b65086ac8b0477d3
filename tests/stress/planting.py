"""Where small faults can be planted in the package, and what each of them is.

A fault is one edit of the text of one file: a comparison, condition or operator turned,
a statement dropped, two arguments swapped, a number off by one. Line numbers stay.

Left out is what no test should see: imports, annotations, docstrings, decorators, texts
of errors and warnings (all that is in a `raise`), what only our own bug can break
(`assert`, ``strict=`` of `zip`), sizes of caches and ``stacklevel=``, overloads, lists
of names. Nor are arguments swapped where the order means nothing (`SYMMETRIC`), or
where whoever runs the line sees it (`RAISING`).
"""

import ast
import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator

from tests import sources

FOLDERS = ("core", "transforms", "nn", "training", "checkpoints")

TURNED = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.In: ("in", "not in")},
    **{ast.NotIn: ("not in", "in"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<")},
    **{ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-")},
    **{ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
}
SYMMETRIC = {
    *("max", "min", "maximum", "minimum", "add", "multiply", "gcd", "allclose"),
    *("promote_types", "result_type"),
}
RAISING = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "map", "filter"}
UNSEEN_CALLS = {"warn", "cast", "TypeVar", "ParamSpec", "NewType"}
UNSEEN_OPTIONS = {"stacklevel", "maxsize", "strict"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One edit.

    Attributes:
        path: The file, from the root of the repository.
        line: Where the edit begins.
        kind: What sort of fault it is.
        scope: The definition that it is in.
        start: Where the edit begins, in bytes.
        end: Where it ends.
        text: What is written there instead.
        old: The lines as they are, stripped.
        new: The lines as they become.
        covered: The first and the last line of those that a test must run to see it.
        key: What identifies it after edits elsewhere, in its file or in others.
    """

    path: str
    line: int
    kind: str
    scope: str
    start: int
    end: int
    text: str
    old: str
    new: str
    covered: tuple[int, int]
    key: str = ""

    def planted(self) -> str:
        """The text of the file with the fault."""
        data = (sources.ROOT / self.path).read_bytes()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def chosen(seed: int, count: int, file: str | None = None) -> list[Fault]:
    """Faults, as many in each folder, and of each kind as far as there are.

    A fault is chosen by its own text, so that an edit elsewhere chooses the same ones.
    """
    folders = collections.defaultdict(list)
    for source in sources.package():
        folder = source.path.parts[2]
        if file == str(source.path) or (file is None and folder in FOLDERS):
            folders[folder].extend(_Planter(source).faults())
    found = []
    for number, folder in enumerate(sorted(folders)):
        share = (count + number) // len(folders)
        found.extend(itertools.islice(_of_each_kind(folders[folder], seed), share))
    return found


def _of_each_kind(faults: list[Fault], seed: int) -> Iterator[Fault]:
    """Valid faults of each kind in turn, by chance, and at most one in a line."""

    def chance(fault):
        return hashlib.sha256(f"{seed} {fault.key}".encode()).digest()

    kinds = collections.defaultdict(list)
    for fault in sorted(faults, key=chance):
        kinds[fault.kind].append(fault)
    lines = set()
    for turn in itertools.zip_longest(*[kinds[kind] for kind in sorted(kinds)]):
        for fault in filter(None, turn):
            if (fault.path, fault.line) not in lines and _is_valid(fault):
                lines.add((fault.path, fault.line))
                yield fault


def _is_valid(fault: Fault) -> bool:
    """Whether Python reads it, as another program."""
    try:
        tree = ast.parse(fault.planted())
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(_tree(fault.path))


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((sources.ROOT / path).read_text())


class _Planter(ast.NodeVisitor):
    """Goes through one file; a `visit_...` that ends there leaves out what is below."""

    def __init__(self, source: sources.Source):
        self.path = str(source.path)
        self.data = source.text.encode()
        lines = [len(line) for line in self.data.splitlines(keepends=True)]
        self.starts = [0, *itertools.accumulate(lines)]
        self.covered = (1, len(lines))
        self.scope: list[str] = []
        self.is_called = False  # in a function
        self.found: list[Fault] = []
        self.visit(source.tree)

    def faults(self) -> list[Fault]:
        """All of them, each with its key."""
        counts = collections.Counter()
        keyed = []
        for fault in self.found:
            key = f"{fault.scope}: {fault.old} -> {fault.new}"
            counts[key] += 1
            key += f" #{counts[key]}" if counts[key] > 1 else ""
            keyed.append(dataclasses.replace(fault, key=key))
        return keyed

    # ------------------------------------------------------------------ the edits

    def begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def add(self, kind: str, start: int, end: int, text: str) -> None:
        first = self.data.rfind(b"\n", 0, start) + 1
        last = self.data.find(b"\n", end)
        old = self.text(first, last)
        new = self.text(first, start) + text + self.text(end, last)
        line = self.data.count(b"\n", 0, start) + 1
        lines = [" ".join(x.split()) for x in (old, new)]
        place = self.path, line, kind, ".".join(self.scope), start, end
        self.found.append(Fault(*place, text, *lines, self.covered))

    def turn(self, kind: str, operator: ast.AST, left: ast.AST, right: ast.AST) -> None:
        """Another operator between two expressions."""
        if type(operator) in TURNED:
            start, end = self.end(left), self.begin(right)
            between = self.text(start, end)
            text = between.replace(*TURNED[type(operator)], 1)
            if text != between:
                self.add(kind, start, end, text)

    def drop(self, node: ast.stmt) -> None:
        start, end = self.begin(node), self.end(node)
        lines = self.text(start, end).count("\n")
        self.add("statement dropped", start, end, "pass" + "\n" * lines)

    # ------------------------------------------------------------------ statements

    def visit(self, node: ast.AST) -> None:
        outer = self.covered
        if isinstance(node, ast.stmt) and self.is_called:
            first = [x for x in getattr(node, "body", []) if isinstance(x, ast.stmt)]
            last = max(node.lineno, first[0].lineno - 1) if first else node.end_lineno
            self.covered = (node.lineno, last)
        super().visit(node)
        self.covered = outer

    def inside(self, node: ast.AST, body: list[ast.stmt], is_called: bool) -> None:
        """Goes through the body of a definition."""
        outer = self.covered, self.is_called
        self.scope.append(node.name)
        self.covered, self.is_called = (node.lineno, node.end_lineno), is_called
        for statement in body[1:] if ast.get_docstring(node) is not None else body:
            self.visit(statement)
        self.scope.pop()
        self.covered, self.is_called = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside(node, node.body, False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any(ast.unparse(x).endswith("overload") for x in node.decorator_list):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            outer, self.covered = self.covered, (node.lineno, node.end_lineno)
            for default in defaults:
                self.visit(default)
            self.covered = outer
            self.inside(node, node.body, True)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.AST) -> None:
        """Leaves out what is below, as all that stands here."""

    visit_ImportFrom = visit_Assert = visit_JoinedStr = visit_arguments = visit_Import

    def visit_Raise(self, node: ast.Raise) -> None:
        self.drop(node)

    visit_Continue = visit_Break = visit_Delete = visit_Raise

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)):
            self.drop(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.drop(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [x.id for x in node.targets if isinstance(x, ast.Name)]
        if any(name.startswith("__") for name in names):
            return
        if not names and self.is_called:  # without a name, the program would stop
            self.drop(node)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self.negate(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    # ------------------------------------------------------------------ expressions

    def negate(self, test: ast.expr) -> None:
        """The other condition, where no operator can be turned."""
        if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
            start, end = self.begin(test), self.end(test)
            self.add("condition", start, end, f"(not {self.text(start, end)})")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = itertools.pairwise([node.left, *node.comparators])
        for operator, pair in zip(node.ops, operands, strict=True):
            self.turn("comparison", operator, *pair)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for pair in itertools.pairwise(node.values):
            self.turn("condition", node.op, *pair)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.turn("arithmetic", node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self.begin(node)
            self.add("condition", start, start + len("not"), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in UNSEEN_CALLS:
            return
        stars = [isinstance(x, ast.Starred) for x in node.args[:2]]
        if stars == [False, False] and name not in SYMMETRIC | RAISING:
            first, second = [(self.begin(x), self.end(x)) for x in node.args[:2]]
            between = self.text(first[1], second[0])
            text = self.text(*second) + between + self.text(*first)
            self.add("arguments swapped", first[0], second[1], text)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in UNSEEN_OPTIONS:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            text = str(not node.value)
        elif isinstance(node.value, (int, float)):
            text = repr(node.value + 1)
        else:
            return
        self.add("constant", self.begin(node), self.end(node), text)
