"""Loops over the layers of a `Stack`.

It does the same as a list of the layers. Always, in every mode:

- Changes that a layer makes to itself are kept, Variables and other attributes.
- Changes to an object among the arguments, such as ``rngs``, reach the next layer and
  the caller: objects go round with ``x``. Arrays are the same for all.
- A loop has one type of ``x`` for all layers; a list need not: its first layer may get
  another dtype, or sharding, than the rest. If all layers return one type, ``x`` is
  converted to it before the first.

If layers differ by a pattern, a step of the loop applies all layers of the pattern, and
those that are left after the last whole pattern follow the loop:

    layer      0 1 2   3 4 5   6 7        of [a, b, c], for 8 layers
    step       0       1       rest

So everything that belongs to the layers is `Periodic`; equal layers are a pattern of
one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import _jax, config, errors
from graftree.core import paths
from graftree.core.graph import functional
from graftree.core.graph.graphdefs import Static
from graftree.core.objects import attributes
from graftree.core.objects.pytrees import Pytree
from graftree.core.text import representations
from graftree.core.variables import partitioning
from graftree.core.variables.variables import Variable
from graftree.transforms.control_flow import loop_bodies, loops
from graftree.transforms.derivatives import grad
from graftree.transforms.lifting import decorators


class Periodic(NamedTuple):
    """Something that belongs to each layer, in the order of a pattern of layers.

    Attributes:
        pattern: For each layer of the pattern, what belongs to all layers like it,
            stacked along a first axis.
        rest: For each layer after the last whole pattern, what belongs to it.
    """

    pattern: tuple[Any, ...]
    rest: tuple[Any, ...] = ()


class Options(NamedTuple):
    """Settings of a loop; hashable.

    Attributes:
        is_scan: Whether layers take a value each, and return an output besides ``x``.
        length: The number of steps.
        remat: As in `Stack`; likewise the rest.
        unroll: As a `Static`: unrolling once differs from unrolling everything.
    """

    is_scan: bool
    length: int
    remat: bool | Callable[..., bool]
    unroll: Static
    axis_name: str | None


def run(
    options: Options,
    layers: Periodic,
    x: Any,
    values: Periodic,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Periodic]:
    """Applies layers: the last ``x``, and all other outputs."""
    if options.axis_name is not None:
        _check_undivided(layers.pattern, options.axis_name)
    args, kwargs, statics = _split_arguments(args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
    are_objects = tuple(map(_is_object, leaves))
    objects = [leaf for leaf in leaves if _is_object(leaf)]
    arrays = [leaf for leaf in leaves if not _is_object(leaf)]
    make = _kept_loop if config.caches.are_used else _loop
    loop, step = make(options, statics, treedef, are_objects)

    def apply(x: Any) -> tuple[Any, Periodic]:
        (x, _), outputs = loop((x, objects), layers.pattern, values.pattern, arrays)
        rest = []
        for layer, value in zip(layers.rest, values.rest, strict=True):
            try:
                x, output = step(x, objects, layer, value, arrays)
            except _UnsettledError as found:  # too late to convert x before the first
                raise found.type_error() from None
            rest.append(output)
        return x, Periodic(outputs, tuple(rest))

    try:
        return apply(x)
    except _UnsettledError as found:
        settled = found.settle(x)
    try:
        return apply(settled)
    except _UnsettledError as found:
        raise found.type_error() from None


def _check_undivided(layers: Any, axis_name: str) -> None:
    """Raises if JAX can't loop over the layers, because of an Explicit mesh axis."""
    for x in jax.tree.leaves(functional.state(layers)):
        if not isinstance(x, jax.ShapeDtypeStruct) and any(
            jax.typeof(x).sharding.spec[:1]
        ):
            raise ValueError(
                f"The layers of a Stack are divided by {axis_name!r}, an Explicit axis "
                "of the mesh: JAX can't loop over them.\nMake the axis Auto, or call "
                "the Stack in nnx.shard_map, where each device has some of the layers."
            )


def _split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divides arguments into those that are traced, and static ones."""
    chosen = decorators.Chosen(
        tuple(i for i, x in enumerate(args) if _is_constant(x)),
        tuple(name for name, x in kwargs.items() if _is_constant(x)),
    )
    return decorators.take(chosen, args, kwargs, "Stack")


def _is_constant(x: Any) -> bool:
    """Whether an argument is a flag, a number, a function: nothing to trace."""
    return not isinstance(x, list | dict) and not attributes.is_data(x)


def _is_object(x: Any) -> bool:
    return isinstance(x, Pytree | Variable)


def _loop(
    options: Options,
    statics: decorators.Statics,
    treedef: Any,
    are_objects: tuple[bool, ...],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makes the loop, and the step of a single layer, for given static arguments."""

    def call(
        x: Any, objects: list[Any], layer: Any, value: Any, arrays: list[Any]
    ) -> tuple[Any, Any]:
        iterators = {True: iter(objects), False: iter(arrays)}
        leaves = [next(iterators[is_object]) for is_object in are_objects]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        args, kwargs = decorators.put(args, kwargs, statics)
        if options.is_scan:
            return _as_pair(layer(x, value, *args, **kwargs))
        return layer(x, *args, **kwargs), None

    # In every mode: layers in a list keep their changes.
    keeps_all = {"graph": True, "graph_updates": True}

    def make_step(is_in_loop: bool) -> Callable[..., Any]:
        run = call
        if options.remat:
            call.__qualname__ = "a layer of nnx.Stack"  # as messages call it
            policy = None if options.remat is True else options.remat
            # A loop already keeps XLA from merging both passes.
            run = grad.remat(
                call, policy=policy, prevent_cse=not is_in_loop, **keeps_all
            )

        def step(x: Any, objects: list[Any], *of_layer: Any) -> tuple[Any, Any]:
            old_forms = _forms(objects)
            out, output = run(x, objects, *of_layer)
            if _forms(objects) != old_forms:
                raise TypeError(
                    "The layers of this Stack change the structure of a Variable's "
                    "value, in an argument that all layers share, which a compiled "
                    "loop can't do. Sow and record in the layers themselves, or use a "
                    "List."
                )
            return _fitting(x, out), output

        return step

    step = make_step(is_in_loop=True)

    def body(carry: Any, layers: Any, values: Any, arrays: Any) -> Any:
        (x, objects), outputs = carry, []
        for layer, value in zip(layers, values, strict=True):
            x, output = step(x, objects, layer, value, arrays)
            outputs.append(output)
        return (x, objects), tuple(outputs)

    loop = loops.scan(
        body,
        length=options.length,
        unroll=options.unroll.value,
        in_axes=(loop_bodies.Carry, 0, 0, None),
        out_axes=(loop_bodies.Carry, 0),
        transform_metadata={partitioning.PARTITION_NAME: options.axis_name},
        **keeps_all,
    )
    return loop, make_step(is_in_loop=False)


# One function for equal calls, as `scan` keeps plans for its function.
_kept_loop = functools.lru_cache(maxsize=256)(_loop)


def _forms(objects: list[Any]) -> list[Any]:
    boxes = representations.variables_in(objects)
    return [jax.tree.structure(variable.get_raw_value()) for variable in boxes]


def _as_pair(out: Any) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise TypeError(
        "Stack.scan: a layer must return a pair, x for the next layer and its output, "
        f"got {_in_words(out)}.\nCall the Stack if its layers return nothing but x."
    )


# The type of the value that goes from layer to layer.


class _UnsettledError(Exception):
    """A layer returned ``x`` of another type than it got."""

    def __init__(self, old_types: Any, new_types: Any) -> None:
        super().__init__("x of another type")
        self.old_types = old_types
        self.new_types = new_types

    def settle(self, x: Any) -> Any:
        """Converts ``x`` to the type that the layer returned.

        Raises:
            TypeError: If that is wider, or not a floating type for a floating type.
        """
        pairs = zip(
            *map(jax.tree.leaves, (self.old_types, self.new_types)), strict=True
        )
        if not all(_may_become(old.dtype, new.dtype) for old, new in pairs):
            raise self.type_error() from None
        return jax.tree.map(_cast, x, self.new_types)

    def type_error(self) -> TypeError:
        """Makes the error that says how the types differ."""
        return _type_error(self.old_types, self.new_types)


def _fitting(x: Any, out: Any) -> Any:
    """Returns the output of a layer, if the next one can take it."""
    if any(map(_is_object, jax.tree.leaves((x, out), is_leaf=_is_object))):
        return out  # the loop itself compares objects
    old_types, new_types = (jax.tree.map(jax.typeof, tree) for tree in (x, out))
    if jax.tree.structure(x) != jax.tree.structure(out):
        raise _type_error(old_types, new_types)
    pairs = [*zip(jax.tree.leaves(old_types), jax.tree.leaves(new_types), strict=True)]
    if any(old.shape != new.shape for old, new in pairs):
        raise _type_error(old_types, new_types)
    if not all(_is_settled(old, new) for old, new in pairs):
        raise _UnsettledError(old_types, new_types)
    # Values equal on all devices may go where each device has its own.
    return jax.tree.map(
        lambda x, t: _jax.as_varying(x, _jax.varying(t)), out, old_types
    )


def _is_settled(old: Any, new: Any) -> bool:
    specs = {tuple(t.sharding.spec) for t in (old, new) if any(t.sharding.spec)}
    is_placed = len(specs) == 0 or tuple(old.sharding.spec) == tuple(new.sharding.spec)
    is_varying = _jax.varying(new) <= _jax.varying(old)
    return old.dtype == new.dtype and is_placed and is_varying


def _may_become(old: Any, new: Any) -> bool:
    """Whether values of a dtype may be those of another one."""
    if old == new:
        return True
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind):
            return True
    is_number = jnp.issubdtype(old, jnp.number) or jnp.issubdtype(old, bool)
    is_wider = jnp.issubdtype(new, jnp.number) and jnp.issubdtype(new, jnp.inexact)
    return bool(is_number and is_wider and jnp.promote_types(old, new) == new)


def _cast(x: Any, kind: Any) -> Any:
    x = _jax.as_varying(jnp.asarray(x, kind.dtype), _jax.varying(kind))
    if any(kind.sharding.spec):
        return jax.sharding.reshard(x, kind.sharding)
    return x


def _type_error(old_types: Any, new_types: Any) -> TypeError:
    hint = ""
    if isinstance(new_types, tuple) and not isinstance(old_types, tuple):
        hint = " stack.scan(x, values) collects what they return besides x."
    return TypeError(
        errors.message(
            "The layers of a Stack must return x as they get it, for the next layer.",
            where=f"x: {_in_words(old_types)} in, {_in_words(new_types)} out",
            way_out="Use a List for layers that change the shape or type of x." + hint,
        )
    )


def _in_words(tree: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(tree)
    if len(named) == 1 and not named[0][0]:
        return str(named[0][1])
    kind = type(tree).__name__
    return f"a {kind} of {', '.join(str(leaf) for _, leaf in named) or 'nothing'}"


# Values of layers.


def grouped(values: Any, length: int, like: Periodic) -> Periodic:
    """Groups values by the layers that they belong to.

    Args:
        values: Arrays with an entry per layer along their first axis; or `Periodic`.
        length: The number of layers.
        like: The layers.

    Raises:
        ValueError: If the first axis of an array has another size.
        TypeError: If an object has values for layers that differ by a pattern: each
            would get a copy of a part, whose changes were lost.
    """
    size = len(like.pattern)
    count = (length - len(like.rest)) // size
    if isinstance(values, Periodic):
        if [*map(len, values)] != [*map(len, like)]:
            raise ValueError(
                "Stack.scan: the values are for layers of a different pattern.\nPass "
                "what each(function) of this Stack returns."
            )
        for k, part in enumerate(values.pattern):
            _check_values(part, count, f".pattern[{k}]")
        return values
    _check_values(values, length)
    if size == 1:
        return Periodic((values,))
    leaves = jax.tree.leaves(values, is_leaf=_is_object)
    if any(map(_is_object, leaves)):
        raise TypeError(
            "Stack.scan: layers that differ by a pattern can't share one "
            f"{type(next(filter(_is_object, leaves))).__name__}.\nPass what "
            "stack.each(function) returns, in which each layer has its own."
        )
    whole = count * size
    entries = [*[slice(k, whole, size) for k in range(size)], *range(whole, length)]
    parts = [jax.tree.map(operator.itemgetter(x), values) for x in entries]
    return Periodic(tuple(parts[:size]), tuple(parts[size:]))


def joined(outputs: Periodic) -> Any:
    """Stacks the outputs of all layers along a first axis, in the order of the layers.

    Raises:
        TypeError: If they have different structures, shapes or dtypes.
    """
    if len(outputs.pattern) == 1:
        return outputs.pattern[0]
    kinds = {_entry_kinds(x, 1) for x in outputs.pattern}
    kinds |= {_entry_kinds(x, 0) for x in outputs.rest}
    if len(kinds) > 1:
        raise TypeError(
            "Stack.scan: the layers return outputs of different shapes or dtypes, "
            "which can't be stacked.\nPass values as stack.each(function) returns "
            "them, so that the outputs have that form, too."
        )

    def join(*parts: Any) -> Any:
        pattern, rest = parts[: len(outputs.pattern)], parts[len(outputs.pattern) :]
        whole = jnp.stack(pattern, 1).reshape(-1, *jnp.shape(pattern[0])[1:])
        return jnp.concatenate([whole, *[x[None] for x in rest]])

    return jax.tree.map(join, *outputs.pattern, *outputs.rest)


def _entry_kinds(tree: Any, depth: int) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x)[depth:], jnp.result_type(x)) for x in leaves)


def _check_values(values: Any, length: int, name: str = "") -> None:
    """Raises unless all arrays have an entry per layer."""
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if jnp.shape(x)[:1] != (length,):
            suffix = name + paths.keystr(path)
            raise ValueError(
                errors.message(
                    f"Stack.scan expects values for {length} layers.",
                    where=f"values{suffix}: shape {jnp.shape(x)}",
                    way_out="Give arrays an entry per layer along their first axis; "
                    "pass what is the same for all layers as a further argument.",
                )
            )
