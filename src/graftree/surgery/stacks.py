"""Equal layers in a loop.

A program that applies 24 layers one by one is 24 times as large as a loop over one
layer, and takes that much longer to trace and to compile. A `Stack` keeps one layer,
whose Variables have a first axis with an entry per layer, and applies it with `scan`
(`stack_loops.py`). Its numbers are those of a list of layers made by the same calls.

Equal layers are one program, so they may differ only in values: `equal_layers.py`
checks this wherever a layer joins them. Layers that differ by a pattern are equal
layers at each place of it:

    layer       0   1   2   3   4   5   6   7         of [a, b, c], for 8 layers
    is in       a0  b0  c0  a1  b1  c1                layers = [a, b, c], stacked
                                        0   1         rest

The end of the file splits and joins stacked arrays, which may be abstract.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, functional, updates
from graftree.core.graph.graphdefs import Static
from graftree.core.modules import containers, refs
from graftree.core.modules.modules import EqualLayers, Module
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.states import pure_dicts, states
from graftree.core.text import representations
from graftree.core.variables import partitioning, sharding, variables
from graftree.core.variables.variables import Variable
from graftree.surgery import equal_layers, stack_loops
from graftree.transforms import maps, recordings
from graftree.transforms.control_flow import loop_bodies, loops

L = TypeVar("L", bound=Module)
N = TypeVar("N")


class Stack(EqualLayers, Generic[L]):
    """Equal layers, or layers that differ by a pattern, applied by one loop.

    The size of the compiled program, and the time to trace it, don't depend on the
    number of layers. Parameters, random streams, statistics and caches are those of a
    list of layers, each stacked along a first axis. So an optimizer with a norm or a
    rule for each array, such as LAMB or Muon, sees those of all layers as one.

    Args:
        make: Makes a layer from the random streams that it gets. It is traced once. A
            layer that needs its own streams forks them, as `Dropout` does. For layers
            that differ by a pattern, such as every sixth without a window, a list of
            these: layer ``i`` is made by ``make[i % len(make)]``. A step of the loop
            then applies all layers of the pattern, which may differ in everything.
        length: The number of layers, at least one.
        rngs: The streams for ``make``; the layers draw from them in order.
        remat: Whether gradients compute the layers again, as by `remat`; or the policy
            for that, from ``jax.checkpoint_policies`` or ``nnx.memory``, whose paths
            begin at the layer.
        unroll: How many layers, or patterns, a step of the loop has, as in `scan`.
        axis_name: The logical or mesh axis of the layers: the first axis in the
            sharding annotations of their Variables, including those without one.
            ``None``: not sharded.

    Attributes:
        layers: The layer, whose Variables have ``length`` as their first axis. With a
            pattern, a List of its layers, which are stacked each.
        rest: With a pattern, a List of the layers after the last whole one.
        period: The number of layers in the pattern; ``None`` without one.

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

        Two layers of one width to each of another, and two that are left:

        >>> def make_of(width):
        ...     return lambda rngs: nnx.LoRA(4, width, 4, rngs=rngs)
        >>> stack = nnx.Stack([make_of(2), make_of(2), make_of(3)], 8, rngs=rngs)
        >>> [layer.lora_a.shape for layer in stack]
        [(4, 2), (4, 2), (4, 3), (4, 2), (4, 2), (4, 3), (4, 2), (4, 2)]
        >>> stack.layers[2].lora_a.shape, len(stack.rest)
        ((2, 4, 3), 2)
    """

    rest: Sequence[L] = ()
    period: int | None = None

    def __init__(
        self,
        make: Callable[[Rngs], L] | Sequence[Callable[[Rngs], L]],
        length: int,
        *,
        rngs: Rngs,
        remat: bool | Callable[..., bool] = False,
        unroll: int | bool = 1,
        axis_name: str | None = None,
    ):
        self.length = operator.index(length)
        if length < 1:
            raise ValueError(f"A Stack needs at least one layer, got length={length}.")
        if not isinstance(rngs, Rngs | RngStream):
            raise TypeError(
                f"A Stack expects an nnx.Rngs as rngs, got {type(rngs).__name__}.\n"
                "Pass `rngs=nnx.Rngs(0)`, or the `Rngs` of the outer module."
            )
        self.remat = remat
        self.unroll = unroll
        self.axis_name = axis_name
        if callable(make):
            self.layers = _construct(make, self.length, rngs, axis_name)
            return
        makes = [*make][: self.length]
        if not makes:
            raise ValueError("A Stack needs a function that makes a layer, got [].")
        self.period = len(makes)
        steps, num_left = divmod(self.length, self.period)
        self.layers = _construct(_in_a_row(makes), steps, rngs, axis_name)
        self.rest = _in_a_row(makes[:num_left])(rngs)

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
        layers = self.parts
        nothing = stack_loops.Periodic(*[(None,) * len(part) for part in layers])
        options = self._options(False)
        return stack_loops.run(options, layers, x, nothing, args, kwargs)[0]

    def scan(self, x: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Applies the layers with a value for each, and collects their outputs.

        Each step is ``x, output = layer(x, value, *args, **kwargs)``.

        Args:
            x: The input of the first layer.
            values: A pytree of arrays whose first axis has an entry per layer; or what
                `each` returns, such as caches.
            *args: As for a call.
            **kwargs: As for a call.

        Returns:
            The output ``x`` of the last layer, and the other outputs, stacked along a
            first axis. Grouped by the pattern if ``values`` are.

        Raises:
            ValueError: If an array in ``values`` has another first axis.
            TypeError: As for a call; if a layer does not return a pair; if layers that
                differ return outputs of different shapes.

        Example:
            >>> class Scale(nnx.Module):
            ...     def __call__(self, x, factor):
            ...         return x * factor, x
            >>> stack = nnx.Stack(lambda rngs: Scale(), 3, rngs=nnx.Rngs(0))
            >>> stack.scan(jnp.ones(()), jnp.array([2.0, 3.0, 4.0]))
            (Array(24., dtype=float32), Array([1., 2., 6.], dtype=float32))
        """
        layers = self.parts
        grouped = stack_loops.grouped(values, len(self), layers)
        x, outputs = stack_loops.run(
            self._options(True), layers, x, grouped, args, kwargs
        )
        if isinstance(values, stack_loops.Periodic):
            return x, outputs
        return x, stack_loops.joined(outputs)

    @property
    def parts(self) -> stack_loops.Periodic:
        """The stacked layers of the pattern, and those after the last whole one."""
        pattern = (self.layers,) if self.period is None else tuple(self.layers)
        return stack_loops.Periodic(pattern, tuple(self.rest))

    def _options(self, is_scan: bool) -> stack_loops.Options:
        unroll, steps = Static(self.unroll), self._count_steps()
        return stack_loops.Options(is_scan, steps, self.remat, unroll, self.axis_name)

    def _count_steps(self) -> int:
        steps = self.length // (self.period or 1)
        count_here = count(self.layers, steps)
        if count_here != steps and self.rest:
            raise ValueError(
                f"A Stack of {self.length} layers has {len(self.rest)} left after its "
                "last whole pattern, so it can't be divided by layers.\nKeep these out "
                "of the Stack, and apply them after it."
            )
        return count_here

    def each(self, function: Callable[[L], Any]) -> Any:
        """Calls a function with every layer, as by `vmap`, and keeps its changes.

        Args:
            function: A function of a layer, e.g. one that makes its cache.

        Returns:
            The results, stacked along a first axis. With a pattern, a named tuple:
            ``pattern`` has the results of each layer of the pattern, stacked, and
            ``rest`` those of the layers in ``rest``.

        Example:
            >>> def make(rngs):
            ...     return nnx.Linear(4, 4, rngs=rngs)
            >>> stack = nnx.Stack(make, 3, rngs=nnx.Rngs(0))
            >>> stack.each(lambda layer: jnp.sum(layer.bias[...]))
            Array([0., 0., 0.], dtype=float32)
        """
        if self.period is None:
            return self.each_step(function)
        results = self.each_step(lambda layers: tuple(map(function, layers)))
        return stack_loops.Periodic(results, tuple(map(function, self.rest)))

    def each_step(self, function: Callable[[Any], Any]) -> Any:
        """Calls a function with ``layers`` of every step, and keeps its changes."""
        mapped = maps.vmap(
            function,
            axis_size=self._count_steps(),
            transform_metadata=_names(self.axis_name),
            graph=True,
            graph_updates=True,
        )
        results = mapped(self.layers)
        partitioning.annotate_first_axis(self.layers, self.axis_name)
        return results

    def __len__(self) -> int:
        return self._count_steps() * (self.period or 1) + len(self.rest)

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
        return _read_only(layer_at(self, index))

    def _slice(self, index: slice) -> Stack[L]:
        indices = range(len(self))[index]
        if not indices:
            raise IndexError(f"A Stack of {len(self)} layers has no layers in {index}.")
        if self.period is not None:
            period = self.period // math.gcd(self.period, indices.step)
            layers = [layer_at(self, i) for i in indices]
            stack = of_layers(layers, period, **self.settings)
        else:
            stack = functional.clone(self)
            stack.length = len(indices)
            stack.layers = _take(self.layers, lambda x: entry_of(x, index))
        return _read_only(stack)

    def __setitem__(self, index: int, layer: L) -> None:
        """Replaces the values of one layer by those of a layer like these.

        Raises:
            IndexError: If there is no such layer.
            StateMismatchError: If it differs from the layers in more than values: in a
                class, a static attribute, metadata, a shape or dtype; then nothing has
                changed.
        """
        position = self._position(index)
        equal_layers.check_alike(
            f"The layer does not fit position {position} of the Stack.",
            layer_at(self, position),
            layer,
            ("in the Stack", "in the layer"),
            "Layers in a Stack may differ only in their values. Keep other layers in "
            "an nnx.List.",
        )
        # Values only: annotations are those of the Stack.
        part, entry = self._part(position)
        state = _pure_state(layer)
        if entry is not None:
            state = jax.tree.map(
                lambda old, x: with_layer(old, entry, x), _pure_state(part), state
            )
        updates.update(part, state)

    @property
    def settings(self) -> dict[str, Any]:
        """The options with which a Stack of other layers would be made."""
        names = ("remat", "unroll", "axis_name")
        return {name: getattr(self, name) for name in names}

    def _part(self, position: int) -> tuple[L, int | None]:
        """Returns the part that has a layer, and its entry there if it is stacked."""
        pattern, rest = self.parts
        entry, k = divmod(position, len(pattern))
        if position < len(self) - len(rest):
            return pattern[k], entry
        return rest[k], None

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
    part, entry = stack._part(stack._position(index))
    if entry is None:
        return functional.clone(part)
    layer = _take(part, lambda x: entry_of(x, entry))
    partitioning.remove_axis(layer, 0, _names(stack.axis_name))
    partitioning.drop_empty(layer)
    return layer


def _read_only(layers: N) -> N:
    return refs.with_vars(layers, mutable=False, allow_duplicates=True)


class Numbered(NamedTuple):
    """A part of a Stack, with the numbers of its layers.

    Attributes:
        path: Where it is in the Stack.
        value: A layer, or several that are stacked.
        numbers: Which layers of the Stack they are.
        is_stacked: Whether its Variables have an axis for them.
    """

    path: Path
    value: Any
    numbers: range
    is_stacked: bool = True


def numbered(stack: Stack[Any]) -> list[Numbered]:
    """Lists the parts of a Stack."""
    pattern, rest = stack.parts
    if stack.period is None:
        return [Numbered(("layers",), pattern[0], range(stack.length))]
    whole = stack.length - len(rest)
    stacked_parts = [
        Numbered(("layers", k), part, range(k, whole, len(pattern)))
        for k, part in enumerate(pattern)
    ]
    single = [
        Numbered(("rest", i), part, range(whole + i, whole + i + 1), is_stacked=False)
        for i, part in enumerate(rest)
    ]
    return stacked_parts + single


def _take(layers: L, take: Callable[[Any], Any]) -> L:
    """Makes layers with some of the values of stacked ones."""

    def take_from(leaf: Any) -> Any:
        if not isinstance(leaf, Variable):
            return take(leaf)
        return leaf.copy(jax.tree.map(take, pure_dicts.as_pure(leaf)))

    graphdef, state = functional.split(layers)
    new_state = jax.tree.map(
        take_from, state, is_leaf=lambda x: isinstance(x, Variable)
    )
    return functional.merge(graphdef, new_state)


def _names(axis_name: str | None) -> dict[str, Any]:
    return {partitioning.PARTITION_NAME: axis_name}


def _pure_state(node: Any) -> Any:
    return pure_dicts.as_pure(functional.state(node))


# How layers are made.


def _in_a_row(
    makes: Sequence[Callable[[Rngs], L]],
) -> Callable[[Rngs], containers.List[L]]:
    """Makes a layer with each function, one after the other."""

    def make_all(rngs: Rngs) -> containers.List[L]:
        layers = []
        for make in makes:
            layers.append(make(rngs))
            _check_layer(layers[-1], rngs)
        return containers.List(layers)

    return make_all


def _construct(
    make: Callable[[Rngs], L], length: int, rngs: Rngs, axis_name: str | None
) -> L:
    """Makes the layers of ``length`` calls of ``make``, stacked."""

    def step(rngs: Rngs) -> tuple[Rngs, L]:
        layer = make(rngs)
        _check_layer(layer, rngs)
        # An object from outside of `make`, such as a RoPE, can't be a result of scan.
        return rngs, functional.clone(layer, variables=False, graph=True)

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
            way_out = "Give it its own streams: rngs.fork()."
        elif not variables.is_owned(leaf):
            problem = (
                "A layer of a Stack has a Variable that make(rngs) did not make, so "
                "all layers would share it."
            )
            way_out = (
                "Make it in `make`, or call the Stack with what the layers share: "
                "stack(x, shared)."
            )
        if problem:
            location = f"{paths.to_string(path)}: {type(leaf).__name__}"
            raise ValueError(errors.message(problem, where=location, way_out=way_out))


def of_layers(layers: Sequence[L], period: int | None, **settings: Any) -> Stack[L]:
    """Makes a Stack with the values of layers that are alike, or by a pattern.

    Args:
        layers: The layers.
        period: The number of layers in the pattern; ``None`` without one.
        **settings: Options of the Stack.
    """
    copies = [functools.partial(_copy_of, layer) for layer in layers[: period or 1]]
    make, length = copies[0] if period is None else copies, len(layers)
    # Abstract: otherwise the first layer's values would exist once per layer.
    stack = recordings.eval_shape(lambda: Stack(make, length, rngs=Rngs(0), **settings))
    size, axis_name = stack.period or 1, stack.axis_name
    whole = length - length % size
    pattern, rest = stack.parts
    join = functools.partial(stacked, axis_name)
    for k, part in enumerate(pattern):
        # Values only: annotations already have the axis.
        values = [_pure_state(layer) for layer in layers[k:whole:size]]
        updates.update(part, jax.tree.map(join, *values))
        for variable in representations.variables_in(part):
            raw, metadata = variable.get_raw_value(), variables.metadata_of(variable)
            if not _jax.is_ref(raw):
                placed = sharding.place_named(raw, metadata, axis_name)
                variables.store(variable, placed)
    for part, layer in zip(rest, layers[whole:], strict=True):
        updates.update(part, _pure_state(layer))
    return stack


def _copy_of(layer: L, _: Rngs) -> L:
    return functional.clone(layer)


# Counting layers.


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
