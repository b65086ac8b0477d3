"""Sub-modules replaced by others, in place, wherever they are.

A module is replaced wherever the rest of the model refers to it. Its own references
stay, so its replacement may contain it. Lists and dicts are changed in
place; tuples, which can't be, are replaced by new ones.

`stack` and `unstack` replace lists of equal layers by one `Stack`, and back.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import nodes
from graftree.core.modules import containers
from graftree.core.objects import attributes, bookkeeping, pytrees
from graftree.surgery import equal_layers, selections, stacks
from graftree.surgery.selections import ModelPart
from graftree.surgery.stacks import Stack


def replace(model: Any, where: Any, by: Any) -> list[Path]:
    """Replaces sub-modules of a model, in place.

    A shared module is replaced once, in all its places. All new modules are made and
    checked before the first one is put in.

    Args:
        model: A Module, or another object or container of modules.
        where: The modules to replace: a pattern of paths such as
            ``"encoder.blocks[3].mlp"`` (see `at`), a class, a function of path and
            module, or a list of these.
        by: A function that gets a module and returns its replacement: another
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
    is_object = isinstance(by, attributes.DataObject)
    if not (is_object or callable(by)):
        raise TypeError(
            f"{call} expects a module, or a function from the old to the new one, as "
            f"`by`, got {type(by).__name__}."
        )
    selected = selections.find(model, where, f"{call}: where")
    _check_separate(model, selected, call)
    if is_object and len(selected) > 1:
        raise ValueError(
            errors.message(
                f"{call}: `by` is one {type(by).__name__}, but {len(selected)} modules "
                "match.",
                where=", ".join(paths.dotted(path) for path, _ in selected),
                way_out="Pass a function that makes a new module for each, or select "
                "one of them.",
            )
        )
    make: Any = (lambda _: by) if is_object else by
    new = {id(x): make(x) for _, x in selected}
    _check_new(selected, new)
    replaced = [item for item in selected if new[id(item.value)] is not item.value]
    _put_in(model, {id(x): new[id(x)] for _, x in replaced})
    return [path for path, _ in replaced]


def _check_separate(model: Any, items: list[ModelPart], call: str) -> None:
    """Raises if the model itself is selected, or one module inside of another."""
    selected = {id(x): path for path, x in items}
    if id(model) in selected:
        raise ValueError(
            f"{call}: the model itself, a {type(model).__name__}, is selected; only "
            "parts of it can be replaced."
        )
    outer = {id(x) for _, x in selections.parts_of(model, without=selected)}
    for path, x in items:
        for _, inner in selections.parts_of(x):
            is_other = inner is not x and id(inner) in selected
            # In a cycle each is in the other, and both are in the model.
            if is_other and not (id(inner) in outer and _is_in(x, inner)):
                raise ValueError(
                    f"{call}: {paths.dotted(selected[id(inner)])} is inside "
                    f"{paths.dotted(path)}, and both are selected.\n"
                    "Select one of them, or replace them one after the other."
                )


def _is_in(obj: Any, x: Any) -> bool:
    return any(value is obj for _, value in selections.parts_of(x))


def _check_new(selected: list[ModelPart], new: Mapping[int, Any]) -> None:
    for path, x in selected:
        if new[id(x)] is None or isinstance(new[id(x)], (list, tuple, dict)):
            raise ValueError(
                f"nnx.surgery.replace: `by` returned {type(new[id(x)]).__name__} for "
                f"{paths.dotted(path)}.\nReturn the module, or the function, that "
                "takes its place."
            )


def _put_in(model: Any, new: Mapping[int, Any]) -> None:
    """Replaces parts of a model, which are found by identity.

    Args:
        model: The model that they are in.
        new: The replacement of each.

    Raises:
        ValueError: If one does not fit where it would be; then nothing is changed.
        TraceContextError: If another trace owns an object that would change.
    """
    steps: list[Callable[[], None]] = []
    # The new form of each object: of those met, itself, or another if it can't change.
    forms = {**new}
    above, cyclic = walks.Above(), set[int]()
    owners: dict[Path, pytrees.Pytree | None] = {}
    changes: dict[Path, dict[Any, Any]] = collections.defaultdict(dict)

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        new_form = forms.get(id(x), x)
        if new_form is not x:
            changes[path[:-1]][path[-1]] = new_form
        if id(x) in new or not nodes.is_node(x):
            return None
        if id(x) in forms:
            if above(x, path) is not None:
                cyclic.add(id(x))
            return None
        above(x, path)
        forms[id(x)] = x
        owners[path] = x if isinstance(x, pytrees.Pytree) else owners.get(path[:-1])
        children = nodes.children(x)
        return [
            (key, child) for key, child, is_data in children if is_data is not False
        ]

    for path, x in walks.walk(model, below, children_first=True):
        kind: Any = nodes.kind_of(x)
        inner = changes.pop(path, {})
        if inner and kind.set_key is None:
            if id(x) in cyclic:
                raise ValueError(
                    f"nnx.surgery: a {type(x).__name__} contains a module to replace "
                    "and, through another object, itself. Use a list."
                )
            child_items, metadata = kind.flatten(x)
            items = [(key, inner.get(key, child)) for key, child, _ in child_items]
            rebuilt = kind.unflatten(items, metadata)
            forms[id(x)] = rebuilt
            if path:
                changes[path[:-1]][path[-1]] = rebuilt
            continue
        for key, new_form in inner.items():
            steps.append(_setting(x, kind, owners[path], key, new_form))
    for step in steps:
        step()


def _setting(
    x: Any, kind: Any, owner: pytrees.Pytree | None, key: Any, value: Any
) -> Callable[[], None]:
    """Checks that a child of an object may be set; returns a function that does it."""
    if owner is not None:
        bookkeeping.check_owned(owner, str(key))
    if isinstance(x, pytrees.Pytree):
        name = attributes.name_of(type(x), key)
        pytrees.check_assignment(x, name, value)
        if nodes.kind_of(value) is nodes.Leaf.STATIC:
            # Otherwise it would be a leaf, which transforms refuse.
            value = attributes.static(value)
    return functools.partial(kind.set_key, x, key, value)


def stack(
    model: Any,
    where: Any,
    *,
    period: int | None = None,
    remat: bool | Callable[..., bool] = False,
    unroll: int | bool = 1,
    axis_name: str | None = None,
) -> list[Path]:
    """Turns Lists of equal layers into a `Stack` each, in place.

    The values are those of the layers, which leave the model. Code that applied the
    layers in a loop must call the Stack instead. Load a checkpoint of the old model
    beforehand, or into `unstack` of an abstract model.

    Args:
        model: A Module, or another object or container of modules; also an abstract
            one.
        where: The Lists: a pattern of paths such as ``"encoder.blocks"`` (see `at`), a
            function of path and module, or a list of these.
        period: After how many layers their kinds repeat, if they differ by a pattern.
        remat: As for `Stack`.
        unroll: As for `Stack`.
        axis_name: As for `Stack`.

    Returns:
        The paths of the Lists.

    Raises:
        ValueError: If nothing is selected, something other than a List of layers, a
            List in a `Stack`, or layers that share Variables; if ``period`` is not
            positive. Then nothing has changed, nor in the next case.
        StateMismatchError: If layers differ in more than values (dtypes included), or
            JAX arrays can't hold these. NumPy arrays and Python numbers become arrays.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        >>> model = nnx.Dict(blocks=blocks)
        >>> x = jnp.ones((1, 4))
        >>> expected = blocks[2](blocks[1](blocks[0](x)))
        >>> nnx.surgery.stack(model, "blocks")
        [('blocks',)]
        >>> jnp.allclose(model.blocks(x), expected)
        Array(True, dtype=bool)
    """
    if period is not None and period < 1:
        raise ValueError(f"nnx.surgery.stack: period={period} must be positive.")
    settings = {"remat": remat, "unroll": unroll, "axis_name": axis_name}
    paths_by_id = selections.paths_by_id(model)
    shared = {identity for identity, aliases in paths_by_id.items() if len(aliases) > 1}
    _check_outside_stacks(model, where, "nnx.surgery.stack")

    def stack_of(layers: Any) -> Stack[Any]:
        _check_layers(layers, shared, period or 1)
        return stacks.of_layers(layers, period, **settings)

    return replace(model, where, stack_of)


def unstack(model: Any, where: Any = Stack) -> list[Path]:
    """Turns each `Stack` into a List of its layers, in place: the inverse of `stack`.

    Args:
        model: A Module, or another object or container of modules; also an abstract
            one.
        where: Which ones, as for `stack`; all by default.

    Returns:
        The paths of the Stacks.

    Raises:
        ValueError: If nothing is selected, something other than a Stack, one inside of
            another Stack, or one whose arrays are not for its number of layers; then
            nothing has changed.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns an object that would change.

    Example:
        >>> make = lambda rngs: nnx.Linear(4, 4, rngs=rngs)
        >>> model = nnx.Dict(blocks=nnx.Stack(make, 3, rngs=nnx.Rngs(0)))
        >>> nnx.surgery.unstack(model)
        [('blocks',)]
        >>> len(model.blocks), model.blocks[0].kernel.shape
        (3, (4, 4))
    """
    _check_outside_stacks(model, where, "nnx.surgery.unstack")
    return replace(model, where, _layers_of)


def _check_outside_stacks(model: Any, where: Any, call: str) -> None:
    """Raises if a selected module is in a Stack, where it stands for several."""
    selections.check_model(model, call)
    items = selections.find(model, where, f"{call}: where")
    selected = {id(x): path for path, x in items}
    for outer_path, stack in selections.parts_of(model):
        if not isinstance(stack, Stack):
            continue
        for _, x in selections.parts_of(stack):
            if x is not stack and id(x) in selected:
                raise ValueError(
                    f"{call}: {paths.dotted(selected[id(x)])} is inside the Stack "
                    f"{paths.dotted(outer_path)}, so its arrays hold the values of "
                    f"{len(stack)} layers.\nUnstack the outer one first; stack the "
                    "inner ones before the outer one."
                )


def _layers_of(stack: Any) -> containers.List[Any]:
    if not isinstance(stack, Stack):
        raise ValueError(
            f"nnx.surgery.unstack: a {type(stack).__name__} is selected, which is not "
            "a Stack."
        )
    if len(stack) != stack.length:
        raise ValueError(
            f"nnx.surgery.unstack: a Stack of {stack.length} layers has arrays whose "
            f"first axis is that of {len(stack)}.\nIf it is the axis of an ensemble, "
            "made by nnx.vmap, unstack a single member; or make the ensemble of models "
            "with Lists."
        )
    return containers.List([stacks.layer_at(stack, i) for i in range(len(stack))])


def _check_layers(layers: Any, shared: set[int], period: int) -> None:
    """Raises unless layers that are a period apart differ only in values."""
    if not isinstance(layers, containers.List) or not len(layers):
        raise ValueError(
            f"nnx.surgery.stack: a {type(layers).__name__} is selected, which is not "
            "a List of layers.\nSelect nnx.Lists, with at least one layer each."
        )
    _check_apart(layers, shared)
    call = "nnx.surgery.stack:"
    for i, other in enumerate(layers):
        first = i % period
        equal_layers.check_alike(
            f"{call} the layers {first} and {i} are not alike.",
            layers[first],
            other,
            (f"in layer {first}", f"in layer {i}"),
            "Stack layers that differ only in their values. If their kinds repeat, "
            "pass the length of the pattern as period=.",
        )
    for layer in layers[:period]:
        equal_layers.check_values(
            f"{call} the layers have values that can't be parts of a JAX array.",
            layer,
            "Give Variables values that JAX can compute with.",
        )


def _check_apart(layers: Sequence[Any], shared: set[int]) -> None:
    """Raises if a layer has Variables in common with another one, or the model."""
    shared_paths = [
        paths.dotted(path)
        for path, x in selections.parts_of(layers)
        if x is not layers and id(x) in shared
    ]
    if shared_paths:
        raise ValueError(
            errors.message(
                "nnx.surgery.stack: parts of the layers are shared, and would not be "
                "afterwards.",
                where=", ".join(shared_paths[:8]),
                way_out="Give each layer Variables of its own: nnx.clone(layer).",
            )
        )
