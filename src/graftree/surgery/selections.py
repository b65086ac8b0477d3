"""Selects parts of a model: modules, containers and Variables, by path.

Each part is found once, with the first path that leads to it; parents come first. A
pattern selects a shared part if one of its paths matches. Classes and predicates see
only the first path.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths, patterns, walks
from graftree.core.graph import nodes
from graftree.core.variables.variables import Variable
from graftree.nn import reparametrization


def at(pattern: str) -> patterns.Pattern:
    """A filter that matches paths, for all functions that take filters.

    A string used as a filter is the tag of a Variable; this makes a filter from a
    pattern of paths. Combine it with ``nnx.All``, ``nnx.Any`` and ``nnx.Not``.

    Args:
        pattern: A path such as ``"encoder.blocks[3].mlp"``: ``*`` is any one step or a
            part of a name, ``**`` any number of steps, ``{a,b}`` either of two,
            ``[2:5]`` a range of indices. It must match the whole path.

    Returns:
        A predicate ``(path, leaf) -> bool``; equal patterns are equal.

    Raises:
        TypeError: If ``pattern`` is not a string.
        ValueError: If it is malformed.

    Example:
        >>> model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), b=nnx.Param(1.0))
        >>> nnx.to_flat_state(nnx.state(model, nnx.surgery.at("a.*"))).paths
        (('a', 'bias'), ('a', 'kernel'))
    """
    return patterns.Pattern(pattern)


class ModelPart(NamedTuple):
    """A part of a model, and the first path to it."""

    path: Path
    value: Any


def check_model(model: Any, call: str) -> None:
    """Raises a TypeError unless something can be in a model."""
    if not nodes.is_node(model):
        raise TypeError(
            f"{call} expects a Module, or another object or container of Variables, "
            f"got {type(model).__name__}."
        )


def parts_of(root: Any, *, without: Container[int] = ()) -> list[ModelPart]:
    """All nodes and Variables of an object, itself first.

    Leaves out the contents of objects with the identities ``without``, unless there are
    other ways to them.
    """
    is_new = walks.Once()

    def below(x: Any, _: Path) -> list[tuple[Any, Any]] | None:
        if not is_new(x):
            return None
        return [] if id(x) in without else _below(x)

    return [ModelPart(path, x) for path, x in walks.walk(root, below)]


def places_of(root: Any) -> dict[int, list[Path]]:
    """All places of each object and Variable, by its identity.

    A place is the first path to an object that refers to it, and the key.
    """
    found: dict[int, list[Path]] = collections.defaultdict(list, {id(root): [()]})
    for path, part in parts_of(root):
        for key, value in _below(part):
            if nodes.is_graph_node(value):
                found[id(value)].append((*path, key))
    return found


def _below(x: Any) -> list[tuple[Any, Any]]:
    return [
        (key, value)
        for key, value, is_data in nodes.children(x)
        if is_data is not False and value is not None
        if isinstance(value, Variable) or nodes.is_node(value)
    ]


def find(
    root: Any,
    where: Any,
    call: str,
    *,
    among: Sequence[Callable[[Any], bool]] = (nodes.is_node_module,),
    what: str = "module",
) -> list[ModelPart]:
    """The parts that are selected.

    Args:
        root: The model.
        where: A pattern, class or predicate, or a list of these.
        call: The function that was called, with its argument, for messages.
        among: The parts to choose from: of several kinds, the first one that matches.
        what: Their kind, in the singular.

    Raises:
        TypeError: If ``where`` selects nothing by its type.
        ValueError: If a pattern is malformed, or nothing matches; each selection of a
            list must match something.
    """
    every = parts_of(root)
    known = [path for path, x in every if path and any(kind(x) for kind in among)]
    chosen: set[int] = set()
    for single in where if isinstance(where, (list, tuple)) else [where]:
        predicate = patterns.to_predicate(single)
        matches: set[int] = set()
        for kind in among:
            if isinstance(predicate, patterns.Pattern):
                matches = {id(x) for x in _matched(root, predicate) if kind(x)}
            else:
                matches = {id(x) for path, x in every if kind(x) and predicate(path, x)}
            if matches:
                break
        if not matches:
            raise patterns.no_match_error(call, single, known, noun=what)
        chosen |= matches
    if not chosen:
        raise patterns.no_match_error(call, where, [], noun=what)
    return [part for part in every if id(part.value) in chosen]


def _matched(root: Any, pattern: patterns.Pattern) -> Iterator[Any]:
    """The parts at paths that match; cycles are followed once."""
    # Ways to an object differ only in the rest of the pattern, so there are few.
    progress_at: dict[Path, patterns.Progress] = {(): pattern.begin()}
    seen: dict[tuple[int, patterns.Progress], Any] = {}

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        progress = progress_at[path]
        if (id(x), progress) in seen:
            return None
        seen[id(x), progress] = x
        listed = []
        for key, child in _below(x):
            if further := pattern.advance(progress, key):
                progress_at[*path, key] = further
                listed.append((key, child))
        return listed

    for path, x in walks.walk(root, below):
        if pattern.is_complete(progress_at[path]):
            yield x


def inside(root: Any, where: Any, call: str) -> list[ModelPart]:
    """The selected parts and everything in them; ``...`` selects all.

    Args:
        root: The model.
        where: As for `find`.
        call: The function that was called, for messages.
    """
    every = parts_of(root)
    if where is ...:
        return every
    found = find(root, where, f"{call}: where", among=(lambda x: True,), what="part")
    ids = {id(x) for _, part in found for _, x in parts_of(part)}
    return [part for part in every if id(part.value) in ids]


def refuse(
    parts: Iterable[tuple[Path, Any]],
    reason_against: Callable[[Any], str | None],
    what: str,
    way_out: str,
) -> None:
    """Raises a ValueError if there is a reason against one of some parts.

    Args:
        parts: The parts.
        reason_against: Gives the reason why a part is refused, if there is one.
        what: The first line of the message.
        way_out: Its last lines.
    """
    found = [(path, reason_against(x)) for path, x in parts]
    refused = [f"{paths.dotted(path)}: {reason}" for path, reason in found if reason]
    if refused:
        where = "\n".join(refused)
        raise ValueError(errors.message(what, where=where, way_out=way_out))


_OVERWRITING = (reparametrization.SpectralNorm, reparametrization.WeightNorm)


def ids_overwritten(model: Any) -> set[int]:
    """The identities of objects in layers whose weights each call overwrites."""
    return {
        id(part)
        for _, x in parts_of(model)
        if isinstance(x, _OVERWRITING)
        for _, part in parts_of(x.layer_instance)
    }
