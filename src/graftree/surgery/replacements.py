"""Sub-modules replaced by others, in place, wherever they are.

A module is replaced wherever the rest of the model refers to it. What the module itself
refers to stays, so its replacement may contain it. Lists and dicts are changed in
place; tuples, which can't be, are replaced by new ones.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import nodes
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import attributes, bookkeeping, classes, pytrees
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.pytrees import Pytree
from graftree.surgery import selections
from graftree.surgery.selections import ModelPart


def replace(model: Any, where: Any, by: Any) -> list[Path]:
    """Replaces sub-modules of a model, in place.

    A shared module is replaced once, in all its places. All new modules are made and
    checked before the first one is put in.

    Args:
        model: A Module, or another object or container of modules.
        where: The modules to replace: a pattern of paths such as
            ``"encoder.blocks[3].mlp"`` (see `at`), a class, a function of path and
            module, or a list of these.
        by: A function that gets a module and returns what takes its place: another
            module, which may contain the old one, a function such as ``nnx.relu``, or
            the module itself to keep it. Or a module, for exactly one match.

    Returns:
        The first path of each module that was replaced.

    Raises:
        ValueError: If nothing is selected, the model itself, or a module inside another
            selected one; if ``by`` returns ``None`` or something that does not fit; or
            if it is a module and several match. Then nothing is replaced.
        TypeError: If ``model``, ``where`` or ``by`` have the wrong type.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> first, last = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        >>> model = nnx.Sequential(first, nnx.Dropout(0.5), last)
        >>> nnx.surgery.replace(model, nnx.Dropout, lambda old: nnx.relu)
        [('layers', 1)]
        >>> head = nnx.Linear(3, 10, rngs=rngs)
        >>> nnx.surgery.replace(model, "layers[2]", head)
        [('layers', 2)]
        >>> model(jnp.ones((1, 2))).shape
        (1, 10)
    """
    call = "nnx.surgery.replace"
    selections.check_model(model, call)
    is_object = isinstance(by, DataObject)
    if not (is_object or callable(by)):
        raise TypeError(
            f"{call} expects a module, or a function from the old to the new one, as "
            f"`by`, got {type(by).__name__}."
        )
    found = selections.find(model, where, f"{call}: where")
    check_separate(model, found, call)
    if is_object and len(found) > 1:
        raise ValueError(
            errors.message(
                f"{call}: `by` is one {type(by).__name__}, but {len(found)} modules "
                "match.",
                where=", ".join(paths.dotted(path) for path, _ in found),
                way_out="Pass a function that makes a new module for each, or select "
                "one of them.",
            )
        )
    make: Any = (lambda _: by) if is_object else by
    new = {id(x): make(x) for _, x in found}
    _check_new(found, new)
    put_in(
        model, [part for part in found if new[id(part.value)] is not part.value], new
    )
    return [path for path, x in found if new[id(x)] is not x]


def check_separate(model: Any, found: list[ModelPart], call: str) -> None:
    """Raises if the model itself is selected, or one module inside of another."""
    selected = {id(x): path for path, x in found}
    if id(model) in selected:
        raise ValueError(
            f"{call}: the model itself, a {type(model).__name__}, is selected; only "
            "what is in it can be replaced."
        )
    outer = {id(x) for _, x in selections.parts_of(model, without=selected)}
    for path, x in found:
        for _, part in selections.parts_of(x):
            is_other = part is not x and id(part) in selected
            # In a cycle each is in the other one, and both are in the model.
            if is_other and not (id(part) in outer and _is_in(x, part)):
                raise ValueError(
                    f"{call}: {paths.dotted(selected[id(part)])} is inside of "
                    f"{paths.dotted(path)}, and both are selected.\n"
                    "Select one of them, or replace them one after the other."
                )


def _is_in(part: Any, x: Any) -> bool:
    return any(value is part for _, value in selections.parts_of(x))


def _check_new(found: list[ModelPart], new: Mapping[int, Any]) -> None:
    for path, x in found:
        if new[id(x)] is None or isinstance(new[id(x)], (list, tuple, dict)):
            raise ValueError(
                f"nnx.surgery.replace: `by` returned {type(new[id(x)]).__name__} for "
                f"{paths.dotted(path)}.\nReturn the module, or the function, that "
                "takes its place."
            )


def put_in(model: Any, found: list[ModelPart], new: Mapping[int, Any]) -> None:
    """Puts others in the place of some parts, by the identity of these.

    Args:
        model: What they are in.
        found: The parts.
        new: What takes the place of each.

    Raises:
        ValueError: If one does not fit where it would be; then nothing is changed.
        TraceContextError: If another trace owns an object that would change.
    """
    steps: list[Callable[[], None]] = []
    wanted = {id(x) for _, x in found}
    # What each object becomes: itself, or another one if it can't change.
    done: dict[int, tuple[Any, Any]] = {}
    above, cyclic = walks.Above(), set[int]()
    owners: dict[Path, Pytree | None] = {}
    changes: dict[Path, dict[Any, Any]] = collections.defaultdict(dict)

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        now = new[id(x)] if id(x) in wanted else done.get(id(x), (x, x))[1]
        if now is not x:
            changes[path[:-1]][path[-1]] = now
        if id(x) in wanted or isinstance(nodes.kind_of(x), Leaf):
            return None
        if id(x) in done:
            if above(x, path) is not None:
                cyclic.add(id(x))
            return None
        above(x, path)
        done[id(x)] = x, x
        owners[path] = x if isinstance(x, Pytree) else owners.get(path[:-1])
        listed = nodes.children(x)
        return [(key, child) for key, child, is_data in listed if is_data is not False]

    for path, x in walks.walk(model, below, children_first=True):
        kind: Any = nodes.kind_of(x)
        inner = changes.pop(path, {})
        if inner and kind.set_key is None:
            if id(x) in cyclic:
                raise ValueError(
                    f"nnx.surgery: a {type(x).__name__} contains a module to replace, "
                    "and itself by way of another object. Use a list."
                )
            children, metadata = kind.flatten(x)
            items = [(key, inner.get(key, child)) for key, child, _ in children]
            rebuilt = kind.unflatten(items, metadata)
            done[id(x)] = x, rebuilt
            if path:
                changes[path[:-1]][path[-1]] = rebuilt
            continue
        for key, now in inner.items():
            steps.append(_setting(x, kind, owners[path], key, now))
    for step in steps:
        step()


def _setting(
    x: Any, kind: Any, owner: Pytree | None, key: Any, now: Any
) -> Callable[[], None]:
    """What sets a child of an object, which may be set."""
    if owner is not None:
        bookkeeping.check_owned(owner, str(key))
    if isinstance(x, Pytree):
        name = classes.name_of(type(x), key)
        pytrees.check_assignment(x, name, now)
        if nodes.kind_of(now) is Leaf.STATIC:
            # Else it would be a leaf, which transforms refuse.
            now = attributes.static(now)
    return functools.partial(kind.set_key, x, key, now)
