"""Stack: equal layers as one layer with stacked Variables, applied by one loop.

A program that applies 24 layers one by one is 24 times as large as the program of one
layer in a loop, and takes as much longer to trace and to compile. A `Stack` keeps one
layer, whose Variables have a first axis with an entry per layer, and applies it with
`scan`. Its numbers are those of a list of layers that the same calls made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import fits, functional, updates
from graftree.core.modules import refs
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.states import states
from graftree.core.variables import partitioning
from graftree.core.variables.variables import Variable
from graftree.transforms import remat as remats
from graftree.transforms.control_flow import loop_bodies, scan
from graftree.transforms.crossing import arguments
from graftree.transforms.mapped import vmap_pmap

L = TypeVar("L", bound=Module)


class Stack(Module, Generic[L]):
    """Equal layers, applied one after the other by one loop.

    The size of the compiled program, and the time to trace it, don't depend on the
    number of layers. Parameters, random streams, statistics and caches are those of a
    list of layers, each stacked along a first axis.

    Args:
        make: Makes a layer with the random streams that it is given. It is traced once.
            A layer that needs streams of its own forks them, as `Dropout` does.
        length: The number of layers, at least one.
        rngs: The streams for ``make``; the layers draw from them in order.
        remat: Whether the layers are computed again in gradients, as by `remat`; or the
            policy of that, from ``jax.checkpoint_policies`` or ``nnx.memory``, whose
            paths begin at the layer.
        unroll: How many layers a step of the loop has, as in `scan`.
        axis_name: The logical or mesh axis of the layers, for the first axis in the
            sharding annotations of their Variables; ``None``: not sharded.

    Attributes:
        layers: The layer, whose Variables have ``length`` as their first axis.

    Raises:
        ValueError: If ``length`` is not positive, or a layer keeps streams of ``rngs``.

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
        if length < 1:
            raise ValueError(f"A Stack has at least one layer, got length={length}.")
        self.length = length
        self.remat = remat
        self.unroll = unroll
        self.axis_name = axis_name
        self.layers = _construct(make, length, rngs, axis_name)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers: ``x = layer(x, *args, **kwargs)`` for each.

        Args:
            x: The input of the first layer: an array, or a pytree of arrays.
            *args: Further arguments, the same for all layers.
            **kwargs: Further keyword arguments, the same for all layers. Arguments
                without arrays, such as flags, stay what they are.

        Returns:
            The output of the last layer.

        Raises:
            TypeError: If a layer changes the structure, shape or dtype of ``x``.
        """
        args, kwargs, statics = _parted(args, kwargs)
        run = _loop(statics, False, self.remat, self.unroll, self.axis_name)
        return run(x, self.layers, None, args, kwargs)

    def scan(self, x: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Applies the layers with a value for each, and collects what each returns.

        Each step is ``x, output = layer(x, value, *args, **kwargs)``.

        Args:
            x: The input of the first layer.
            values: A pytree of arrays whose first axis has an entry per layer.
            *args: As for a call.
            **kwargs: As for a call.

        Returns:
            The output ``x`` of the last layer, and the other outputs, stacked along a
            first axis.

        Example:
            >>> class Scale(nnx.Module):
            ...     def __call__(self, x, factor):
            ...         return x * factor, x
            >>> stack = nnx.Stack(lambda rngs: Scale(), 3, rngs=nnx.Rngs(0))
            >>> stack.scan(jnp.ones(()), jnp.array([2.0, 3.0, 4.0]))
            (Array(24., dtype=float32), Array([1., 2., 6.], dtype=float32))
        """
        args, kwargs, statics = _parted(args, kwargs)
        run = _loop(statics, True, self.remat, self.unroll, self.axis_name)
        return run(x, self.layers, values, args, kwargs)

    def each(self, function: Callable[[L], Any]) -> Any:
        """Calls a function with every layer, as by `vmap`: what it writes is kept.

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
        names = {partitioning.PARTITION_NAME: self.axis_name}
        return vmap_pmap.vmap(function, transform_metadata=names)(self.layers)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> L:
        """A layer; its Variables are copies, so they can't be written.

        Raises:
            IndexError: If there is no such layer.
        """
        index = self._position(index)
        graphdef, state = functional.split(self.layers)
        layer = functional.merge(graphdef, jax.tree.map(lambda x: x[index], state))
        names = {partitioning.PARTITION_NAME: self.axis_name}
        return refs.with_vars(partitioning.remove_axis(layer, 0, names), mutable=False)

    def __setitem__(self, index: int, layer: L) -> None:
        """Copies the values of a layer like these to the place of one.

        Raises:
            IndexError: If there is no such layer.
            StateMismatchError: If it has other Variables, or other shapes or dtypes;
                then nothing has changed.
        """
        index = self._position(index)
        new = functional.state(layer)
        error = fits.compare(self[index], new).error(
            f"The layer does not fit the place {index} of the Stack."
        )
        if error is not None:
            raise error
        stacked = functional.state(self.layers)
        updates.update(
            self.layers,
            jax.tree.map(lambda old, x: old.at[index].set(x), stacked, new),
        )

    def _position(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"A Stack of {self.length} layers has no layer {index}.")
        return index % self.length


def _construct(
    make: Callable[[Rngs], L], length: int, rngs: Rngs, axis_name: str | None
) -> L:
    """The layers that so many calls of ``make`` would make, stacked."""

    def step(rngs: Rngs) -> tuple[Rngs, L]:
        layer = make(rngs)
        _check_apart(layer, rngs)
        return rngs, layer

    loop = scan.scan(
        step,
        length=length,
        in_axes=loop_bodies.Carry,
        out_axes=(loop_bodies.Carry, 0),
        transform_metadata={partitioning.PARTITION_NAME: axis_name},
    )
    return loop(rngs)[1]


def _check_apart(layer: Any, rngs: Rngs) -> None:
    """Raises if a layer keeps streams that all layers would have in common."""
    given = {id(leaf) for leaf in _variables(rngs).values()}
    for path, leaf in _variables(layer).items():
        if id(leaf) in given:
            raise ValueError(
                errors.message(
                    "A layer of a Stack keeps random streams that it was given, so all "
                    "layers would draw from the same ones.",
                    where=f"{paths.to_string(path)}: {type(leaf).__name__}",
                    way_out="Give it streams of its own: rngs.fork().",
                )
            )


def _variables(node: Any) -> dict[Path, Any]:
    return dict(states.to_flat_state(functional.state(node, Variable)))


def _parted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that are traced, and the static ones."""
    chosen = arguments.Chosen(
        tuple(i for i, x in enumerate(args) if _is_constant(x)),
        tuple(name for name, x in kwargs.items() if _is_constant(x)),
    )
    return arguments.take(chosen, args, kwargs, "Stack")


def _is_constant(x: Any) -> bool:
    """Whether an argument is a flag, a number, a function: nothing to trace."""
    return not isinstance(x, list | dict) and not attributes.is_data(x)


# An eager loop is compiled for its function, so equal calls use the same function.
@functools.lru_cache(maxsize=256)
def _loop(
    statics: arguments.Statics,
    is_scan: bool,
    remat: bool | Callable[..., bool],
    unroll: int | bool,
    axis_name: str | None,
) -> Callable[..., Any]:
    """The loop over the layers of a Stack, for given static arguments."""

    def step(x: Any, layer: Any, value: Any, *traced: Any) -> Any:
        args, kwargs = arguments.put(traced, statics)
        return (
            layer(x, value, *args, **kwargs) if is_scan else layer(x, *args, **kwargs)
        )

    if remat:
        step.__qualname__ = "a layer of nnx.Stack"  # as messages call it
        policy = None if remat is True else remat
        step = remats.remat(step, policy=policy, prevent_cse=False)
    return scan.scan(
        step,
        unroll=unroll,
        in_axes=(loop_bodies.Carry, 0, 0, None, None),
        out_axes=(loop_bodies.Carry, 0) if is_scan else loop_bodies.Carry,
        transform_metadata={partitioning.PARTITION_NAME: axis_name},
    )
