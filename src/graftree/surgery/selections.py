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
    """Makes a filter that matches paths, for all functions that take filters.

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
    """Lists all nodes and Variables of an object, itself first.

    Leaves out the contents of objects with the identities ``without``, unless there are
    other ways to them.
    """
    is_new = walks.Once()

    def below(x: Any, _: Path) -> list[tuple[Any, Any]] | None:
        if not is_new(x):
            return None
        return [] if id(x) in without else _below(x)

    return [ModelPart(path, x) for path, x in walks.walk(root, below)]


def paths_by_id(root: Any) -> dict[int, list[Path]]:
    """Returns all paths of each object and Variable, by its identity.

    Each is the first path to an object that refers to it, and the key there.
    """
    paths_by_id: dict[int, list[Path]] = collections.defaultdict(list, {id(root): [()]})
    for path, node in parts_of(root):
        for key, value in _below(node):
            if nodes.is_graph_node(value):
                paths_by_id[id(value)].append((*path, key))
    return paths_by_id


def _below(x: Any) -> list[tuple[Any, Any]]:
    return [
        (key, value)
        for key, value, is_data in nodes.children(x)
        if is_data is not False and value is not None
        if isinstance(value, Variable) or nodes.is_node(value)
    ]


def find(
    root: Any,
    selection: Any,
    call: str,
    *,
    among: Sequence[Callable[[Any], bool]] = (nodes.is_node_module,),
    kind: str = "module",
) -> list[ModelPart]:
    """Finds the selected parts.

    Args:
        root: The model.
        selection: A pattern, class or predicate, or a list of these.
        call: The function that was called, with its argument, for messages.
        among: The parts to choose from: of several kinds, the first one that matches.
        kind: What they are called in messages, in the singular.

    Raises:
        TypeError: If ``selection`` selects nothing by its type.
        ValueError: If a pattern is malformed, or nothing matches; each selection of a
            list must match something.
    """
    every = parts_of(root)
    candidate_paths = [
        path for path, x in every if path and any(is_of_kind(x) for is_of_kind in among)
    ]
    chosen: set[int] = set()
    for single in selection if isinstance(selection, (list, tuple)) else [selection]:
        predicate = patterns.to_predicate(single)
        matches: set[int] = set()
        for is_of_kind in among:
            if isinstance(predicate, patterns.Pattern):
                matches = {id(x) for x in _matched(root, predicate) if is_of_kind(x)}
            else:
                matches = {
                    id(x) for path, x in every if is_of_kind(x) and predicate(path, x)
                }
            if matches:
                break
        if not matches:
            raise patterns.no_match_error(call, single, candidate_paths, noun=kind)
        chosen |= matches
    if not chosen:
        raise patterns.no_match_error(call, selection, [], noun=kind)
    return [item for item in every if id(item.value) in chosen]


def _matched(root: Any, pattern: patterns.Pattern) -> Iterator[Any]:
    """Yields the parts at paths that match; cycles are followed once."""
    # Ways to an object differ only in the rest of the pattern, so there are few.
    progress_at: dict[Path, patterns.Progress] = {(): pattern.begin()}
    visited: dict[tuple[int, patterns.Progress], Any] = {}

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        progress = progress_at[path]
        if (id(x), progress) in visited:
            return None
        visited[id(x), progress] = x
        children = []
        for key, child in _below(x):
            if further := pattern.advance(progress, key):
                progress_at[*path, key] = further
                children.append((key, child))
        return children

    for path, x in walks.walk(root, below):
        if pattern.is_complete(progress_at[path]):
            yield x


def within(root: Any, selection: Any, call: str) -> list[ModelPart]:
    """Finds the selected parts and everything in them; ``...`` selects all.

    Args:
        root: The model.
        selection: As for `find`.
        call: The function that was called, for messages.
    """
    every = parts_of(root)
    if selection is ...:
        return every
    selected = find(
        root, selection, f"{call}: where", among=(lambda x: True,), kind="part"
    )
    ids = {id(x) for _, item in selected for _, x in parts_of(item)}
    return [item for item in every if id(item.value) in ids]


def check_all(
    items: Iterable[tuple[Path, Any]],
    reason_against: Callable[[Any], str | None],
    message: str,
    way_out: str,
) -> None:
    """Raises a ValueError if there is a reason against one of some parts.

    Args:
        items: The parts.
        reason_against: Gives the reason why a part is refused, if there is one.
        message: The first line of the message.
        way_out: Its last lines.
    """
    reasons = [(path, reason_against(x)) for path, x in items]
    refused = [f"{paths.dotted(path)}: {reason}" for path, reason in reasons if reason]
    if refused:
        lines = "\n".join(refused)
        raise ValueError(errors.message(message, where=lines, way_out=way_out))


_OVERWRITING = (reparametrization.SpectralNorm, reparametrization.WeightNorm)


def ids_overwritten(model: Any) -> set[int]:
    """Returns the identities of objects in layers that overwrite their weights."""
    return {
        id(inner)
        for _, x in parts_of(model)
        if isinstance(x, _OVERWRITING)
        for _, inner in parts_of(x.layer_instance)
    }
