"""Differences between two structures, by path.

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
)
from graftree.core.text import descriptions


class Absent(enum.Enum):
    """Stands for a path without a value."""

    ABSENT = "nothing"


ABSENT = Absent.ABSENT


class Difference(NamedTuple):
    """A path at which two structures differ."""

    path: Path
    old: Any
    new: Any


def between(first: Mapping[Path, Any], second: Mapping[Path, Any]) -> list[Difference]:
    """Finds the differences of two structures, in the order of the paths of the first.

    Left out are all values below an object that the other one lacks, and each object
    that differs only in the values below it.
    """
    differing: dict[Path, Difference] = {}
    for path in {**first, **second}:
        old, new = first.get(path, ABSENT), second.get(path, ABSENT)
        if old is not new and _are_different(old, new):
            differing[path] = Difference(path, old, new)
    parents = {path[:-1] for path in differing if path}
    return [
        x
        for path, x in differing.items()
        # The root is below nothing, not even itself.
        if (path == () or _is_alike(differing.get(path[:-1])))
        and not (path in parents and _is_alike(x))
    ]


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
    differing: Sequence[Difference],
    in_first: str,
    in_second: str,
    name: Callable[[Path], str] = _name,
    most: int = 8,
) -> list[str]:
    """Writes a line for each difference: the first value, and the second one.

    Args:
        differing: The differences.
        in_first: Where the first structure is, as in "in true_fun".
        in_second: The same for the second one.
        name: Prints a path.
        most: How many lines there may be.
    """
    lines = []
    for path, *pair in differing:
        old, new = map(describe, pair)
        if new == old:
            new = "a different one"
        lines.append(f"{name(path)}: {old} {in_first}, {new} {in_second}")
    return bounded(lines, most)


def missing_and_unexpected(
    missing: Sequence[Path], unexpected: Sequence[Path], most: int = 10
) -> list[str]:
    """Reports the leaves that only one of two structures has.

    Args:
        missing: Those that should be there.
        unexpected: Those that should not.
        most: How many lines there may be of each.
    """
    lines = []
    for word, path_list in (("missing", missing), ("unexpected", unexpected)):
        lines += bounded([f"  {word}: {_name(path)}" for path in path_list], most)
    return lines


def bounded(lines: Sequence[str], most: int = 10) -> list[str]:
    """Cuts off lines beyond a limit, and says how many more there are."""
    more = len(lines) - most
    if more <= 0:
        return [*lines]
    indentation = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [*lines[:most], f"{indentation}... and {more} more"]


def common_causes(missing: Sequence[Path], unexpected: Sequence[Path]) -> list[str]:
    """Names probable causes if the same leaves are missing and unexpected.

    Args:
        missing: The paths that should be there.
        unexpected: Those that should not.
    """
    if not missing or not unexpected:
        return []
    # The shortest: the state of an optimizer repeats the paths of its model.
    prefixes = _prefixes(missing, unexpected)
    if prefixes and len({len(x) for x in prefixes[:2]}) == len(prefixes[:2]):
        return [f"The state has them below {_name(prefixes[0])}: pass that part of it."]
    prefixes = _prefixes(unexpected, missing)
    if len(prefixes) == 1:
        return [f"This is the state of {_name(prefixes[0])}: load it into that part."]
    lines = [
        f"Renamed? {_name(path)} is missing, {_name(other)} unexpected."
        for path, other in _look_alikes(missing, unexpected)
    ]
    return bounded(lines, most=3)


def _prefixes(short: Sequence[Path], long: Sequence[Path]) -> list[Path]:
    """Finds the prefixes that turn all paths of a list into paths of another one."""
    spelled = [*map(paths.spelled, long)]
    long_prefixes = {path[:end] for path in spelled for end in range(1, len(path) + 1)}
    first, *others = map(paths.spelled, short)
    candidates = {
        path[:start]
        for path in spelled
        for start in range(1, len(path))
        if path[start : start + len(first)] == first
    }
    fitting = [
        x for x in candidates if all((*x, *path) in long_prefixes for path in others)
    ]
    return sorted(fitting, key=len)


def _look_alikes(
    missing: Sequence[Path], unexpected: Sequence[Path]
) -> Iterator[tuple[Path, Path]]:
    """Pairs paths that are equal except for the characters that join words."""
    by_letters = {_letters_of(path): path for path in unexpected}
    for path in missing:
        if _letters_of(path) in by_letters:
            yield path, by_letters[_letters_of(path)]


def _letters_of(path: Path) -> str:
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


class SharedNode(NamedTuple):
    """An object at an earlier path as well, or (``None``) in another tree."""

    path: Path | None


class TreeForm(NamedTuple):
    """Structure of a pytree."""

    treedef: Any


class ByIdentity:
    """A leaf, or another value, that is compared by identity."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)


def facts(
    graphdef: GraphDef[Any],
    located: Callable[[Path], Any] = lambda path: path,
    leaves: Sequence[Any] | None = None,
    identity: bool = True,
) -> dict[Path, Any]:
    """Lists the facts of a GraphDef by path: types, statics, metadata, sharing.

    Args:
        graphdef: The GraphDef of an object.
        located: Gives the name of a path; ``None`` leaves it out.
        leaves: The leaves of the object. They are then compared by identity, instead of
            by their entries in the GraphDef.
        identity: Whether the outer object that each one stands for is a fact, too.
    """
    fact_at: dict[Path, Any] = {}
    path_of: dict[int, Path] = {}
    for field_path, field in graphdef.located_fields():
        path = located(field_path)
        if path is None:
            continue
        if isinstance(field, graphdefs.NodeRef):
            fact_at[path] = SharedNode(path_of.get(field.index))
            continue
        fact_at |= _facts_of(path, field, identity)
        if (index := getattr(field, "index", None)) is not None:
            path_of[index] = path
    if leaves is None:
        return fact_at
    paired = zip(graphdef.paths(), leaves, strict=True)
    by_identity = {located(path): ByIdentity(leaf) for path, leaf in paired}
    others = {p: x for p, x in fact_at.items() if not _is_metadata(p)}
    return others | by_identity


def below(start: Path) -> Callable[[Path], Path]:
    """Makes a function that puts a path below another one."""
    return lambda path: (*start, *path)


class MetadataKey(str):
    """Last key of a path to metadata of a Variable."""


def metadata(path: Path, entries: Mapping[str, Any]) -> dict[Path, Any]:
    """Returns the metadata of a Variable, by path.

    Args:
        path: The path of the Variable.
        entries: Its metadata.
    """
    return {(*path, MetadataKey(key)): Static(value) for key, value in entries.items()}


def _is_metadata(path: Path) -> bool:
    return bool(path) and isinstance(path[-1], MetadataKey)


def _facts_of(path: Path, field: Any, identity: bool) -> dict[Path, Any]:
    index = getattr(field, "outer_index", None) if identity else None
    if isinstance(field, graphdefs.NodeSpec):
        return {path: Node(field.type, index, field.metadata)}
    if isinstance(field, graphdefs.VariableDef):
        box = Box(field.type, index, field.array_refdef is not None)
        return {path: box, **metadata(path, field.metadata)}
    return {path: ArrayRefDef if isinstance(field, ArrayRefDef) else field}


def describe(fact: Any) -> str:
    """Puts a fact in words: "a Linear", "an array", the value of a static attribute."""
    match fact:
        case Node() | Box():
            origin = "" if fact.outer_index is None else " from outside"
            return f"a {fact.type.__name__}{origin}"
        case ByIdentity():
            return f"one {type(fact.leaf).__name__}"
        case SharedNode():
            earlier = "" if fact.path is None else f": {paths.to_string(fact.path)}"
            return f"a known object{earlier}"
        case TreeForm():
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
