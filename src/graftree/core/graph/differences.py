"""The differences between two structures, by path.

The structures are compared as mappings of paths: `facts` makes one of a GraphDef, and
callers may make others. `between` lists the differences of two mappings, `in_words`
puts them in words. `missing_and_unexpected` does that for leaves that one of two has.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graftree.core import fingerprints, paths
from graftree.core.graph import graphdefs
from graftree.core.graph.graphdefs import (
    ArrayRefDef,
    GraphDef,
    Path,
    Static,
    VariableDef,
)
from graftree.core.text import descriptions


class Absent(enum.Enum):
    """Stands for a path without a value."""

    ABSENT = "nothing"


ABSENT = Absent.ABSENT


class Difference(NamedTuple):
    """A path at which two structures differ."""

    path: Path
    before: Any
    after: Any


def between(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> list[Difference]:
    """The differences of two structures, in the order of the paths of the first.

    Left out are all values below an object that the other one lacks, and each object
    that differs only in the values below it.
    """
    found: dict[Path, Difference] = {}
    for path in {**before, **after}:
        old, new = before.get(path, ABSENT), after.get(path, ABSENT)
        if old is not new and _are_different(old, new):
            found[path] = Difference(path, old, new)
    parents = {path[:-1] for path in found if path}
    return [
        x
        for path, x in found.items()
        # The root is below nothing, not even itself.
        if (path == () or _is_alike(found.get(path[:-1])))
        and not (path in parents and _is_alike(x))
    ]


def stands_for(now: GraphDef[Any], before: GraphDef[Any]) -> bool:
    """Whether a skeleton is of the objects of another one, built as they were there.

    Their numbers there are the outer ones here. Metadata of Variables may differ.
    """
    kinds = (VariableDef, ArrayRefDef)
    fields = [field for spec in before.specs for field in spec.fields]
    definitions: dict[int | None, Any] = {
        field.index: field for field in fields if isinstance(field, kinds)
    }

    def as_before(field: Any) -> Any:
        return definitions.get(field.outer_index) if isinstance(field, kinds) else field

    specs = [
        spec._replace(
            index=spec.outer_index,
            outer_index=None,
            fields=tuple(map(as_before, spec.fields)),
        )
        for spec in now.specs
    ]
    return GraphDef.of(now.root, specs, now.num_leaves) == before


def _are_different(old: Any, new: Any) -> bool:
    if type(old) is type(new) is Static:
        return not fingerprints.are_same(old, new)
    try:
        return bool(old != new)
    except Exception:  # of the comparison of data in a treedef
        return True


def _is_alike(difference: Difference | None) -> bool:
    """Whether it is only in the details."""
    if difference is None:
        return True
    _, old, new = difference
    is_kind = isinstance(old, (Node, Box)) and type(old) is type(new)
    return is_kind and old[:2] == new[:2]


def _name(path: Path) -> str:
    if _is_metadata(path):
        return f"{_name(path[:-1])}, metadata {path[-1]!r}"
    return paths.to_string(path, "<root>")


def in_words(
    found: Sequence[Difference],
    before: str,
    after: str,
    name: Callable[[Path], str] = _name,
    most: int = 8,
) -> list[str]:
    """A line for each difference: the value before, and the value after.

    Args:
        found: The differences.
        before: Where the first structure is, as in "in true_fun".
        after: The same for the second one.
        name: Prints a path.
        most: How many lines there may be.
    """
    lines = []
    for path, *pair in found:
        old, new = map(describe, pair)
        if new == old:
            new = "another one"
        lines.append(f"{name(path)}: {old} {before}, {new} {after}")
    return bounded(lines, most)


def missing_and_unexpected(
    missing: Sequence[Path], unexpected: Sequence[Path], most: int = 10
) -> list[str]:
    """Lines about leaves that only one of two structures has.

    Args:
        missing: Those that should be there.
        unexpected: Those that should not.
        most: How many lines there may be of each.
    """
    lines = []
    for word, listed in (("missing", missing), ("unexpected", unexpected)):
        lines += bounded([f"  {word}: {_name(path)}" for path in listed], most)
    return lines


def bounded(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - most
    if more <= 0:
        return [*lines]
    indentation = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [*lines[:most], f"{indentation}... and {more} more"]


def common_causes(missing: Sequence[Path], unexpected: Sequence[Path]) -> list[str]:
    """The probable causes if the same leaves are missing and unexpected.

    Args:
        missing: The paths that should be there.
        unexpected: Those that should not.
    """
    if not missing or not unexpected:
        return []
    # The shortest: the state of an optimizer repeats the paths of its model.
    found = _prefixes(missing, unexpected)
    if found and len({len(x) for x in found[:2]}) == len(found[:2]):
        return [f"The state has them below {_name(found[0])}: pass that part of it."]
    found = _prefixes(unexpected, missing)
    if len(found) == 1:
        return [f"The state is that of {_name(found[0])}: load it into that part."]
    lines = [
        f"Renamed? {_name(path)} is missing, {_name(other)} unexpected."
        for path, other in _look_alikes(missing, unexpected)
    ]
    return bounded(lines, most=3)


def _prefixes(short: Sequence[Path], long: Sequence[Path]) -> list[Path]:
    """The prefixes that turn all paths of a list into paths of another one."""
    spelled = [*map(paths.spelled, long)]
    known = {path[:end] for path in spelled for end in range(1, len(path) + 1)}
    first, *others = map(paths.spelled, short)
    found = {
        path[:start]
        for path in spelled
        for start in range(1, len(path))
        if path[start : start + len(first)] == first
    }
    fitting = [x for x in found if all((*x, *path) in known for path in others)]
    return sorted(fitting, key=len)


def _look_alikes(
    missing: Sequence[Path], unexpected: Sequence[Path]
) -> Iterator[tuple[Path, Path]]:
    """Pairs of paths that are equal except for the characters that join words."""
    known = {_squeezed(path): path for path in unexpected}
    for path in missing:
        if _squeezed(path) in known:
            yield path, known[_squeezed(path)]


def _squeezed(path: Path) -> str:
    return "".join(filter(str.isalnum, "".join(map(str, path)))).lower()


# The facts of a GraphDef.


class Node(NamedTuple):
    """An object or a container."""

    type: type
    outer_index: int | None
    metadata: Any


class Box(NamedTuple):
    """A Variable."""

    type: type
    outer_index: int | None
    is_ref: bool


class Met(NamedTuple):
    """An object met before: at an earlier path, or (``None``) in another tree."""

    path: Path | None


class Form(NamedTuple):
    """The structure of a pytree."""

    treedef: Any


class Exactly:
    """A leaf, or another value, that is compared by identity."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)


def facts(
    graphdef: GraphDef[Any],
    located: Callable[[Path], Any] = lambda path: path,
    leaves: Sequence[Any] | None = None,
    identity: bool = True,
) -> dict[Path, Any]:
    """The facts of a GraphDef, by path: types, static attributes, metadata, sharing.

    Args:
        graphdef: Of an object.
        located: Gives the name of a path; ``None`` leaves it out.
        leaves: The leaves of the object. They are then compared by identity, instead of
            by their entries in the GraphDef.
        identity: Whether the outer object that each one stands for is a fact, too.
    """
    found: dict[Path, Any] = {}
    known: dict[int, Path] = {}
    for place, what in graphdef.located_fields():
        path = located(place)
        if path is None:
            continue
        if isinstance(what, graphdefs.NodeRef):
            found[path] = Met(known.get(what.index))
            continue
        found |= _facts_of(path, what, identity)
        if (index := getattr(what, "index", None)) is not None:
            known[index] = path
    if leaves is None:
        return found
    given = zip(graphdef.paths(), leaves, strict=True)
    exactly = {located(path): Exactly(leaf) for path, leaf in given}
    kept = {p: x for p, x in found.items() if not _is_metadata(p)}
    return kept | exactly


def below(start: Path) -> Callable[[Path], Path]:
    """Makes a function that puts a path below another one."""
    return lambda path: (*start, *path)


class MetadataKey(str):
    """The last key of a path to metadata of a Variable."""


def metadata(path: Path, entries: Mapping[str, Any]) -> dict[Path, Any]:
    """The metadata of a Variable, by path.

    Args:
        path: Of the Variable.
        entries: Its metadata.
    """
    return {(*path, MetadataKey(key)): Static(value) for key, value in entries.items()}


def _is_metadata(path: Path) -> bool:
    return bool(path) and isinstance(path[-1], MetadataKey)


def _facts_of(path: Path, what: Any, identity: bool) -> dict[Path, Any]:
    index = getattr(what, "outer_index", None) if identity else None
    if isinstance(what, graphdefs.NodeSpec):
        return {path: Node(what.type, index, what.metadata)}
    if isinstance(what, graphdefs.VariableDef):
        box = Box(what.type, index, what.array_refdef is not None)
        return {path: box, **metadata(path, what.metadata)}
    return {path: ArrayRefDef if isinstance(what, ArrayRefDef) else what}


def describe(fact: Any) -> str:
    """A fact in words: "a Linear", "an array", the value of a static attribute."""
    match fact:
        case Node() | Box():
            known = "" if fact.outer_index is None else " from outside"
            return f"a {fact.type.__name__}{known}"
        case Exactly():
            return f"one {type(fact.leaf).__name__}"
        case Met():
            where = "" if fact.path is None else f": {paths.to_string(fact.path)}"
            return f"a known object{where}"
        case Form():
            leaves = [_STAR] * fact.treedef.num_leaves
            try:
                example = fact.treedef.unflatten(leaves)
            except Exception:  # a pytree of the user's own
                example = fact.treedef
            return _shortened(descriptions.safe_repr(example), most=200)
        case Static():
            return _shortened(descriptions.safe_repr(fact.value))
        case _ if fact is graphdefs.LEAF:
            return "an array"
        case _ if fact is ArrayRefDef:
            return "a ref"
        case Absent():
            return fact.value
        case _:
            return _shortened(descriptions.safe_repr(fact, str))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def _shortened(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
