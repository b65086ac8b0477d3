"""Equal layers in a loop.

A program that applies 24 layers one by one is 24 times as large as a loop over one
layer, and takes that much longer to trace and to compile. A `Stack` keeps one layer,
whose Variables have a first axis with an entry per layer, and applies it with `scan`
(`stack_loops.py`). Its numbers are those of a list of layers made by the same calls.

Equal layers are one program, so they may differ only in values: `check_alike` checks
this wherever a layer joins them. The end of the file splits and joins stacked arrays,
which may be abstract.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, functional, updates
from graftree.core.graph.graphdefs import LEAF, Static
from graftree.core.graph.matching import Misfit
from graftree.core.modules import refs
from graftree.core.modules.modules import EqualLayers, Module
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.states import pure_dicts, states
from graftree.core.text import descriptions, representations
from graftree.core.variables import partitioning, sharding, variables
from graftree.core.variables.variables import Variable
from graftree.surgery import stack_loops
from graftree.transforms import maps
from graftree.transforms.control_flow import loop_bodies, loops

L = TypeVar("L", bound=Module)


class Stack(EqualLayers, Generic[L]):
    """Equal layers, applied one after the other by one loop.

    The size of the compiled program, and the time to trace it, don't depend on the
    number of layers. Parameters, random streams, statistics and caches are those of a
    list of layers, each stacked along a first axis.

    Args:
        make: Makes a layer from the random streams that it gets. It is traced once. A
            layer that needs its own streams forks them, as `Dropout` does.
        length: The number of layers, at least one.
        rngs: The streams for ``make``; the layers draw from them in order.
        remat: Whether gradients compute the layers again, as by `remat`; or the policy
            for that, from ``jax.checkpoint_policies`` or ``nnx.memory``, whose paths
            begin at the layer.
        unroll: How many layers a step of the loop has, as in `scan`.
        axis_name: The logical or mesh axis of the layers: the first axis in the
            sharding annotations of their Variables, including those without one.
            ``None``: not sharded.

    Attributes:
        layers: The layer, whose Variables have ``length`` as their first axis.

    Raises:
        ValueError: If ``length`` is not positive, or a layer keeps Variables that
            ``make`` did not make, such as streams of ``rngs``.
        TypeError: If ``length`` is not a whole number, ``rngs`` is not an `Rngs`, or
            ``make`` does not return a Module.

    Example:
        >>> def make(rngs):
        ...     return nnx.Linear(4, 4, rngs=rngs)
        >>> stack = nnx.Stack(make, 24, rngs=nnx.Rngs(0))
        >>> stack.layers.kernel.shape
        (24, 4, 4)
        >>> rngs = nnx.Rngs(0)
        >>> x = y = jnp.ones((1, 4))
        >>> for layer in [make(rngs) for _ in range(24)]:
        ...     x = layer(x)
        >>> jnp.allclose(x, stack(y), rtol=1e-5)
        Array(True, dtype=bool)
    """

    def __init__(
        self,
        make: Callable[[Rngs], L],
        length: int,
        *,
        rngs: Rngs,
        remat: bool | Callable[..., bool] = False,
        unroll: int | bool = 1,
        axis_name: str | None = None,
    ):
        self.length = operator.index(length)
        if length < 1:
            raise ValueError(f"A Stack has at least one layer, got length={length}.")
        if not isinstance(rngs, Rngs | RngStream):
            raise TypeError(
                f"A Stack expects an nnx.Rngs as rngs, got {type(rngs).__name__}.\n"
                "Pass `rngs=nnx.Rngs(0)`, or the `Rngs` of the outer module."
            )
        self.remat = remat
        self.unroll = unroll
        self.axis_name = axis_name
        self.layers = _construct(make, self.length, rngs, axis_name)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers: ``x = layer(x, *args, **kwargs)`` for each.

        Args:
            x: The input of the first layer: an array, or a pytree of arrays. If the
                layers return another floating dtype, it is first cast to that.
            *args: Further arguments, the same for all layers. Changes of a layer to an
                object, such as an `Rngs`, reach the next one and the caller.
            **kwargs: Further keyword arguments, likewise. Arguments without arrays,
                such as flags, stay as they are.

        Returns:
            The output of the last layer.

        Raises:
            TypeError: If a layer changes the structure, shape or dtype of ``x``.
        """
        return stack_loops.run(self._options(False), self.layers, x, None, args, kwargs)

    def scan(self, x: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Applies the layers with a value for each, and collects their outputs.

        Each step is ``x, output = layer(x, value, *args, **kwargs)``.

        Args:
            x: The input of the first layer.
            values: A pytree of arrays whose first axis has an entry per layer.
            *args: As for a call.
            **kwargs: As for a call.

        Returns:
            The output ``x`` of the last layer, and the other outputs, stacked along a
            first axis.

        Raises:
            ValueError: If an array in ``values`` has another first axis.
            TypeError: As for a call; if a layer does not return a pair.

        Example:
            >>> class Scale(nnx.Module):
            ...     def __call__(self, x, factor):
            ...         return x * factor, x
            >>> stack = nnx.Stack(lambda rngs: Scale(), 3, rngs=nnx.Rngs(0))
            >>> stack.scan(jnp.ones(()), jnp.array([2.0, 3.0, 4.0]))
            (Array(24., dtype=float32), Array([1., 2., 6.], dtype=float32))
        """
        stack_loops.check_values(values, len(self))
        return stack_loops.run(
            self._options(True), self.layers, x, values, args, kwargs
        )

    def _options(self, is_scan: bool) -> stack_loops.Options:
        unroll = Static(self.unroll)
        return stack_loops.Options(
            is_scan, len(self), self.remat, unroll, self.axis_name
        )

    def each(self, function: Callable[[L], Any]) -> Any:
        """Calls a function with every layer, as by `vmap`, and keeps its changes.

        Args:
            function: A function of a layer, e.g. one that makes its cache.

        Returns:
            The results, stacked along a first axis.

        Example:
            >>> def make(rngs):
            ...     return nnx.Linear(4, 4, rngs=rngs)
            >>> stack = nnx.Stack(make, 3, rngs=nnx.Rngs(0))
            >>> stack.each(lambda layer: jnp.sum(layer.bias[...]))
            Array([0., 0., 0.], dtype=float32)
        """
        mapped = maps.vmap(
            function,
            axis_size=len(self),
            transform_metadata=_names(self.axis_name),
            graph=True,
            graph_updates=True,
        )
        results = mapped(self.layers)
        partitioning.annotate_first_axis(self.layers, self.axis_name)
        return results

    def __len__(self) -> int:
        return count(self.layers, self.length)

    @overload
    def __getitem__(self, index: int) -> L: ...
    @overload
    def __getitem__(self, index: slice) -> Stack[L]: ...
    def __getitem__(self, index: int | slice) -> L | Stack[L]:
        """Returns a layer, or a Stack of some, with copies of Variables to read only.

        Raises:
            IndexError: If there is no such layer, or none in a slice.
        """
        if isinstance(index, slice):
            return self._slice(index)
        return refs.with_vars(layer_at(self, index), mutable=False)

    def _slice(self, index: slice) -> Stack[L]:
        length = len(range(*index.indices(len(self))))
        if not length:
            raise IndexError(f"A Stack of {len(self)} layers has none in {index}.")
        stack = functional.clone(self)
        stack.length = length
        stack.layers = _take(self, lambda x: entry_of(x, index))
        return refs.with_vars(stack, mutable=False)

    def __setitem__(self, index: int, layer: L) -> None:
        """Replaces the values of one layer by those of a layer like these.

        Raises:
            IndexError: If there is no such layer.
            StateMismatchError: If it differs from the layers in more than values: in a
                class, a static attribute, metadata, a shape or dtype; then nothing has
                changed.
        """
        position = self._position(index)
        check_alike(
            f"The layer does not fit the place {position} of the Stack.",
            layer_at(self, position),
            layer,
            ("in the Stack", "in the layer"),
            "Layers of a Stack differ in nothing but values; others are for a List.",
        )
        # Values only: annotations are those of the Stack.
        updates.update(
            self.layers,
            jax.tree.map(
                lambda old, x: with_layer(old, position, x),
                _pure_state(self.layers),
                _pure_state(layer),
            ),
        )

    def _position(self, index: int) -> int:
        index, length = operator.index(index), len(self)
        if not -length <= index < length:
            raise IndexError(f"A Stack of {length} layers has no layer {index}.")
        return index % length


def layer_at(stack: Stack[L], index: int) -> L:
    """Makes a layer of a Stack, as it would be in a List.

    Raises:
        IndexError: If there is no such layer.
    """
    position = stack._position(index)
    layer = _take(stack, lambda x: entry_of(x, position))
    partitioning.remove_axis(layer, 0, _names(stack.axis_name))
    partitioning.drop_empty(layer)
    return layer


def _take(stack: Stack[L], take: Callable[[Any], Any]) -> L:
    """Makes layers with some of the values of a Stack."""

    def take_from(leaf: Any) -> Any:
        if not isinstance(leaf, Variable):
            return take(leaf)
        return leaf.copy(jax.tree.map(take, pure_dicts.as_pure(leaf)))

    graphdef, state = functional.split(stack.layers)
    new_state = jax.tree.map(
        take_from, state, is_leaf=lambda x: isinstance(x, Variable)
    )
    return functional.merge(graphdef, new_state)


def _names(axis_name: str | None) -> dict[str, Any]:
    return {partitioning.PARTITION_NAME: axis_name}


def _pure_state(node: Any) -> Any:
    return pure_dicts.as_pure(functional.state(node))


# How layers are made.


def _construct(
    make: Callable[[Rngs], L], length: int, rngs: Rngs, axis_name: str | None
) -> L:
    """Makes the layers of ``length`` calls of ``make``, stacked."""

    def step(rngs: Rngs) -> tuple[Rngs, L]:
        layer = make(rngs)
        _check_layer(layer, rngs)
        return rngs, layer

    loop = loops.scan(
        step,
        length=length,
        in_axes=loop_bodies.Carry,
        out_axes=(loop_bodies.Carry, 0),
        transform_metadata=_names(axis_name),
        graph=True,
        graph_updates=True,
    )
    return partitioning.annotate_first_axis(loop(rngs)[1], axis_name)


def _check_layer(layer: Any, rngs: Rngs) -> None:
    """Raises if something else was made, or parts that all layers would share."""
    if not isinstance(layer, Pytree):
        raise TypeError(
            f"A Stack is made of Modules, but make(rngs) is of type "
            f"{type(layer).__name__}.\nReturn a Module with a method __call__(x)."
        )
    stream_ids = {id(leaf) for leaf in representations.variables_in(rngs)}
    for path, leaf in states.to_flat_state(functional.state(layer, Variable)):
        problem = way_out = ""
        if id(leaf) in stream_ids:
            problem = (
                "A layer of a Stack keeps random streams that it was given, so all "
                "layers would draw from the same ones."
            )
            way_out = "Give it streams of its own: rngs.fork()."
        elif not variables.is_owned(leaf):
            problem = (
                "A layer of a Stack has a Variable that make(rngs) did not make, so "
                "all layers would share it."
            )
            way_out = "Call the Stack with what they share: stack(x, shared)."
        if problem:
            location = f"{paths.to_string(path)}: {type(leaf).__name__}"
            raise ValueError(errors.message(problem, where=location, way_out=way_out))


# Comparing layers.


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Shape and dtype of an array, as JAX computes with it."""

    shape: tuple[int, ...]
    dtype: str
    is_weak: bool
    is_abstract: bool = False

    def __str__(self) -> str:
        weak = ", weak" * self.is_weak + ", abstract" * self.is_abstract
        return f"{descriptions.describe(self)}{weak}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class _LeafKinds:
    """A Variable, or a bare array, with the kinds of its values."""

    fact: Any
    treedef: Any
    kinds: tuple[Any, ...]

    def __str__(self) -> str:
        value_text = str(self.treedef.unflatten(self.kinds))
        if self.fact is LEAF:
            return value_text
        suffix = ", in a ref" * getattr(self.fact, "is_ref", False)
        return f"{differences.describe(self.fact)} {value_text}{suffix}"


def check_alike(
    message: str, first: Any, other: Any, names: tuple[str, str], way_out: str
) -> None:
    """Raises unless two layers differ only in values.

    Args:
        message: The first line of the error.
        first: A layer.
        other: Another one.
        names: Where each of them is, as in "in layer 0".
        way_out: The last lines.

    Raises:
        StateMismatchError: If they differ in classes, static attributes, metadata,
            sharing, structure, or in shapes and dtypes.
    """
    changes = differences.between(_facts(first), _facts(other))
    if not changes:
        return
    lines = differences.in_words(changes, *names)
    raise errors.StateMismatchError(
        errors.message(message, where="\n".join(lines), way_out=way_out),
        [x.path for x in changes if x.new is differences.ABSENT],
        [x.path for x in changes if x.old is differences.ABSENT],
        [misfit for x in changes if (misfit := _misfit(x)) is not None],
    )


def _misfit(difference: differences.Difference) -> Misfit | None:
    """Returns the difference between the values of two leaves, if it is one."""
    path, old, new = difference
    if not (isinstance(old, _LeafKinds) and isinstance(new, _LeafKinds)):
        return None
    shapes = [[getattr(x, "shape", None) for x in leaf.kinds] for leaf in (old, new)]
    kind = "value" if old.treedef != new.treedef else "dtype"
    return Misfit(path, kind if shapes[0] == shapes[1] else "shape", str(old), str(new))


def _facts(layer: Any) -> dict[Path, Any]:
    """Returns the facts that equal layers share, by path."""
    graphdef, leaves = flattening.flatten_graph(layer)
    facts = differences.facts(graphdef, identity=False)
    for path, leaf in zip(graphdef.paths(), leaves, strict=True):
        values, treedef = jax.tree.flatten(flattening.raw_of(leaf))
        facts[path] = _LeafKinds(
            facts.get(path, LEAF), treedef, tuple(map(_kind, values))
        )
    # Layers of a Stack are read-only when they are looked at.
    return {path: x for path, x in facts.items() if path[-1:] != _MUTABLE}


_MUTABLE = (differences.MetadataKey("mutable"),)


def _kind(x: Any) -> Any:
    """Returns the kind of an array or number; for anything else its type, in words."""
    if type(x) in descriptions.SCALARS:
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(type(x)))
        is_fitting = type(x) is not int or x in _range(dtype)
        return _Kind((), dtype.name if is_fitting else "int", type(x) is not bool)
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return f"a {type(x).__name__}"
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    is_weak = bool(getattr(x, "weak_type", False))
    return _Kind(tuple(x.shape), str(x.dtype), is_weak, is_abstract)


def _range(dtype: Any) -> range:
    limits = np.iinfo(dtype)
    return range(int(limits.min), int(limits.max) + 1)


def check_values(message: str, layer: Any, way_out: str) -> None:
    """Raises unless the values of a layer are the same as parts of arrays.

    Args:
        message: The first line of the error.
        layer: The layer.
        way_out: The last lines.

    Raises:
        StateMismatchError: If there are values that no JAX array can hold.
    """
    wrong = [
        Misfit(path, "value", "an array", str(kind))
        for path, leaf in _facts(layer).items()
        for kind in (leaf.kinds if isinstance(leaf, _LeafKinds) else ())
        if not _is_known_to_jax(kind)
    ]
    if wrong:
        lines = "\n".join([f"{paths.to_string(x.path)}: {x.given}" for x in wrong])
        text = errors.message(message, where=lines, way_out=way_out)
        raise errors.StateMismatchError(text, misfits=wrong)


def _is_known_to_jax(kind: Any) -> bool:
    """Whether a JAX array can have the same dtype: 64 bits may be switched off."""
    if not isinstance(kind, _Kind) or kind.dtype == "int":
        return False
    if kind.dtype.startswith("key<"):
        return True
    dtype = np.dtype(kind.dtype)
    is_number = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype


def count(layers: Any, length: int) -> int:
    """Counts the layers that are stacked here.

    If each device has some of the layers, as in `shard_map`, the arrays decide.

    Args:
        layers: The layers.
        length: How many there were when they were made.

    Raises:
        ValueError: If a Variable lacks the axis of layers, such as one that a method
            made in the layers as if they were one.
    """
    shapes = [
        (path, getattr(x, "shape", ()))
        for path, leaf in states.to_flat_state(functional.state(layers))
        for x in jax.tree.leaves(flattening.raw_of(leaf))
    ]
    counts = {shape[:1] for _, shape in shapes} or {(length,)}
    leading = (length,) if (length,) in counts else max(counts)
    if len(counts) > 1 or not leading:
        raise _axis_error(shapes, leading or (length,))
    return leading[0]


def _axis_error(shapes: Any, leading: tuple[int, ...]) -> ValueError:
    lines = [
        f"layers.{paths.dotted(path)}: shape {shape}"
        for path, shape in shapes
        if shape[:1] != leading
    ]
    return ValueError(
        errors.message(
            f"A Stack of {leading[0]} layers has Variables without an entry per layer.",
            where="\n".join(differences.bounded(lines)),
            way_out="Call what makes them, or changes their shape, for each layer: "
            "stack.each(lambda layer: layer.init_cache(...)).",
        )
    )


# Parts of stacked arrays, which may be abstract ones.


def entry_of(x: Any, index: int | slice) -> Any:
    """Returns the entry of a layer, or the entries of some."""
    is_slice = isinstance(index, slice)
    if isinstance(x, jax.ShapeDtypeStruct):
        sizes = [len(range(*index.indices(x.shape[0])))] if is_slice else []
        layout = x.sharding
        if isinstance(layout, jax.NamedSharding):
            spec = layout.spec if is_slice else layout.spec[1:]
            layout = layout.update(spec=jax.P(*spec))
        return x.update(shape=(*sizes, *x.shape[1:]), sharding=layout)
    if (spec := _explicit_spec(x)) is None:
        return x[index]
    spec = jax.P(*[None] * is_slice, *spec[1:])
    return x.at[index].get(out_sharding=spec)


def with_layer(old: Any, position: int, x: Any) -> Any:
    """Puts new values for a layer into stacked ones."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old
    if _explicit_spec(old) is None:
        return old.at[position].set(x)
    is_there = jnp.arange(old.shape[0]) == position
    is_there = is_there.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(is_there, jnp.asarray(x)[None], old)


def _explicit_spec(x: Any) -> Any:
    """Returns the spec of an array whose first axis is divided, if its type says so."""
    spec = jax.typeof(x).sharding.spec
    return spec if spec and spec[0] is not None else None


def stacked(axis_name: str | None, *values: Any) -> Any:
    """Stacks values along a first axis; each stays divided, the axis may be, too."""
    first = values[0]
    is_traced = isinstance(first, _jax.Tracer)
    layout = None if is_traced else getattr(first, "sharding", None)
    if isinstance(layout, jax.NamedSharding):
        (entry,) = sharding.get_pspec((axis_name,))
        names = entry if isinstance(entry, tuple) else (entry,)
        mesh = layout.mesh
        is_auto = {*mesh.axis_types} == {jax.sharding.AxisType.Auto}
        is_axis = is_auto and {*names} <= {*mesh.axis_names}
        layout = layout.update(spec=jax.P(entry if is_axis else None, *layout.spec))
    if isinstance(first, jax.ShapeDtypeStruct):
        return first.update(shape=(len(values), *first.shape), sharding=layout)
    joined = jnp.stack([*map(jnp.asarray, values)])
    is_placed = isinstance(layout, jax.NamedSharding)
    return jax.device_put(joined, layout) if is_placed else joined
