"""Lists of equal layers as one `Stack`, and back, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import functional, traversals, updates
from graftree.core.modules import containers
from graftree.core.rng.streams import Rngs
from graftree.core.states import pure_dicts
from graftree.core.text import representations
from graftree.core.variables import sharding as variable_sharding, variables
from graftree.surgery import replacements, selections, stacks
from graftree.surgery.stacks import Stack
from graftree.transforms import recordings


def stack(
    model: Any,
    where: Any,
    *,
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
        remat: As for `Stack`.
        unroll: As for `Stack`.
        axis_name: As for `Stack`.

    Returns:
        The paths of the Lists.

    Raises:
        ValueError: If nothing is selected, something other than a List of layers, or
            layers that share Variables; then nothing has changed, nor in the next case.
        StateMismatchError: If layers differ in more than values (dtypes included), or
            hold what no JAX array can. NumPy arrays and Python numbers become arrays.
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
    shared = _shared(model)

    def make(layers: Any) -> Stack[Any]:
        return _stack_of(layers, shared, remat, unroll, axis_name)

    return replacements.replace(model, where, make)


def unstack(model: Any, where: Any = Stack) -> list[Path]:
    """Turns each `Stack` into a List of its layers, in place: the inverse of `stack`.

    Args:
        model: A Module, or another object or container of modules; also an abstract
            one.
        where: Which ones, as for `stack`; all by default.

    Returns:
        The paths of the Stacks.

    Raises:
        ValueError: If nothing is selected, or something other than a Stack; then
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
    return replacements.replace(model, where, _layers_of)


def _layers_of(stack: Any) -> containers.List[Any]:
    if not isinstance(stack, Stack):
        raise ValueError(
            f"nnx.surgery.unstack: a {type(stack).__name__} is selected, which is not "
            "a Stack."
        )
    return containers.List([stacks.layer_at(stack, i) for i in range(len(stack))])


def _shared(model: Any) -> set[int]:
    """The identities of what occurs more than once in a model."""
    groups = traversals.find_duplicates(model)
    found = dict(traversals.iter_graph(model, graph=True))
    return {id(found[path]) for group in groups for path in group if path in found}


def _stack_of(
    layers: Any,
    shared: set[int],
    remat: bool | Callable[..., bool],
    unroll: int | bool,
    axis_name: str | None,
) -> Stack[Any]:
    """A Stack with the values of equal layers."""
    _check_layers(layers, shared)
    first, count = layers[0], len(layers)

    def make() -> Stack[Any]:
        return Stack(
            lambda rngs: functional.clone(first),
            count,
            rngs=Rngs(0),
            remat=remat,
            unroll=unroll,
            axis_name=axis_name,
        )

    # Abstract: else the values of the first layer would be there once per layer.
    stack = recordings.eval_shape(make)
    # Values only: annotations know of the axis already.
    states = [pure_dicts.as_pure(functional.state(layer)) for layer in layers]
    stacked = functools.partial(stacks.stacked, axis_name)
    updates.update(stack.layers, jax.tree.map(stacked, *states))
    for variable in representations.variables_in(stack.layers):
        raw, metadata = variable.get_raw_value(), variables.metadata_of(variable)
        if not _jax.is_ref(raw):
            placed = variable_sharding.place_named(raw, metadata, axis_name)
            variables.store(variable, placed)
    return stack


def _check_layers(layers: Any, shared: set[int]) -> None:
    """Raises unless they are layers that differ in nothing but values."""
    if not isinstance(layers, containers.List) or not len(layers):
        raise ValueError(
            f"nnx.surgery.stack: a {type(layers).__name__} is selected, which is not "
            "a List of layers.\nSelect nnx.Lists, with at least one layer each."
        )
    _check_apart(layers, shared)
    call = "nnx.surgery.stack:"
    for i, other in enumerate(layers):
        stacks.check_alike(
            f"{call} the layers 0 and {i} are not alike.",
            layers[0],
            other,
            ("in layer 0", f"in layer {i}"),
            "Stack layers that differ in nothing but their values.",
        )
    stacks.check_values(
        f"{call} the layers have values that can't be parts of a JAX array.",
        layers[0],
        "Give Variables values of types that JAX computes with.",
    )


def _check_apart(layers: Sequence[Any], shared: set[int]) -> None:
    """Raises if a layer has Variables in common with another one, or the model."""
    found = [
        paths.dotted(path)
        for path, x in selections.parts_of(layers)
        if x is not layers and id(x) in shared
    ]
    if found:
        raise ValueError(
            errors.message(
                "nnx.surgery.stack: parts of the layers are shared, and would not be "
                "afterwards.",
                where=", ".join(found[:8]),
                way_out="Give each layer Variables of its own: nnx.clone(layer).",
            )
        )
