"""How layers compute: the dtype of a computation, and the calls of JAX's functions.

A layer has a *parameter dtype*, in which its Params are stored, and a computation
dtype, to which inputs and Params are brought before they meet. The latter is what the
layer's ``dtype`` says or, where that is ``None``, what JAX's promotion of all of them
gives; integers become floats on the way. A Param of lower rank than the inputs is
reshaped before it meets them, since users can forbid implicit rank promotion.

Libraries that quantize, count or record put functions of their own in place of
JAX's, for a while. So a layer looks a function up when it calls it, also the default of
an argument, and calls what it finds there. In a trace, and only while JAX's functions
are its own, some are called through an inlined `jax.jit` (`traced_once`): derivatives
are then found once per shape, and not at each call, as those of ``jnp.matmul`` are.

Eagerly, each operation is a program of its own, and gives the same bits wherever it
stands. Some of JAX's functions take four times as long as the program to find it, in
Python; these are called through a `jax.jit` of their own (`one_program`), in which they
stay alone but for changes of shape.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from graftree import _jax, errors
from graftree.annotations import Dtype, Shape
from graftree.core.text import short_forms
from graftree.core.variables import values
from graftree.core.variables.variables import Variable
from graftree.nn.support import arguments

# For `jax.jit(inline=...)`: operations are put into the program that is traced. What
# `True` means in newer versions costs a function, lowered for itself, for each program.
_EARLY: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def canonicalize_dtype(
    *args: Any, dtype: Dtype | None = None, inexact: bool = True
) -> Dtype:
    """Finds the dtype in which a computation on ``args`` is done.

    Args:
        *args: Arrays or Python scalars; ``None`` entries are ignored.
        dtype: The answer, if already known; returned as it is.
        inexact: Whether the result must be a floating or complex dtype. An inferred
            integer or bool dtype is then promoted with float32.

    Returns:
        ``dtype`` itself (the same object) if given, else the promoted dtype of
        ``args``.

    Raises:
        ValueError: If ``inexact`` and the given ``dtype`` is not; or if there is
            neither an array nor a dtype.

    Example:
        >>> from graftree.nn.support import computation
        >>> computation.canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1.0)
        dtype(bfloat16)
        >>> computation.canonicalize_dtype(jnp.ones(2, jnp.int32), None)
        dtype('float32')
    """
    if dtype is None:
        given = [x for x in args if x is not None]
        arrays = [x if values.is_array(x) else _as_array(x) for x in given]
        dtype = jnp.result_type(*arrays)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Dtype must be inexact: {dtype}\n"
            "Pass a floating or complex dtype, or None to infer one from the inputs."
        )
    return dtype


def promote_dtype(
    args: Sequence[Any], /, *, dtype: Dtype | None = None, inexact: bool = True
) -> tuple[jax.Array | None, ...]:
    """Converts several arrays to one dtype.

    This is the default of every layer's ``promote_dtype`` argument. A replacement takes
    the same arguments and may do something else, such as quantize.

    Args:
        args: Arrays, Python scalars, lists of numbers, or ``None``.
        dtype: The wanted dtype; ``None`` takes what `canonicalize_dtype` infers.
        inexact: Whether integers become floats.

    Returns:
        A tuple with one entry per entry of ``args``: a JAX array of the common dtype,
        or ``None`` where the entry was ``None``.

    Raises:
        ValueError: As `canonicalize_dtype`.

    Example:
        >>> from graftree.nn.support import computation
        >>> x, kernel, bias = computation.promote_dtype(
        ...     (jnp.ones(2, jnp.bfloat16), jnp.ones((2, 3)), None)
        ... )
        >>> x.dtype, kernel.dtype, bias
        (dtype('float32'), dtype('float32'), None)
    """
    if dtype is None and common_dtype(*args) is not None:
        return tuple(args)
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return tuple([None if x is None else _converted(x, dtype) for x in args])


# Promotion gives these dtypes for themselves, whatever JAX's settings say.
_SETTLED = frozenset(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def common_dtype(*args: Any) -> Dtype | None:
    """The dtype that all arguments have already, if promotion would not change it.

    To ask JAX takes 5 us, half of what an eager product does.
    """
    found = None
    for x in args:
        if x is None:
            continue
        if not values.is_array(x) or (found is not None and x.dtype is not found):
            return None
        # Random keys, which are no numbers, have no weak type to ask for.
        if x.dtype not in _SETTLED or x.weak_type:
            return None
        found = x.dtype
    return found


def _converted(x: Any, dtype: Dtype) -> jax.Array:
    # Usually there is nothing to do, which `jnp.asarray` is slow to find out: more
    # than half of the time of an eager `Linear`.
    if values.is_array(x) and x.dtype == dtype and not x.weak_type:
        return x
    return _as_array(x, dtype)


def _as_array(x: Any, dtype: Dtype | None = None) -> jax.Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            errors.message(
                "A layer computes with an abstract array: it has a shape, but no "
                "values yet.",
                where=short_forms.describe(x),
                way_out="If it is a parameter, load values first: "
                "nnx.checkpoints.load_state(model, state) lists all that are missing.",
            )
        )
    return jnp.asarray(x, dtype)


def read(variable: Variable[jax.Array] | None) -> jax.Array | None:
    """Returns the value of a Variable, or ``None`` for an absent one."""
    return None if variable is None else variable[...]


def promoted(layer: Any, inputs: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The inputs, kernel and bias of a layer in the dtype in which it computes."""
    operands = (arguments.as_array(inputs), layer.kernel[...], read(layer.bias))
    return layer.promote_dtype(operands, dtype=layer.dtype)


# What arguments of layers are by default, and where JAX has it.
_DEFAULTS: tuple[tuple[Any, Any, str], ...] = (
    (jax.lax.dot_general, jax.lax, "dot_general"),
    (jax.lax.conv_general_dilated, jax.lax, "conv_general_dilated"),
    (jnp.einsum, jnp, "einsum"),
    (jnp.multiply, jnp, "multiply"),
    (jnp.tanh, jnp, "tanh"),
    (jax.nn.sigmoid, jax.nn, "sigmoid"),
)


def current(function: Any) -> Any:
    """What JAX has now for a default; any other function as it is."""
    for default, module, name in _DEFAULTS:
        if function is default:
            return getattr(module, name)
    return function


F = TypeVar("F", bound=Callable[..., Any])


_PLACES = {"lax": jax.lax, "numpy": jax.numpy, "nn": jax.nn, "random": jax.random}
_code_of = operator.attrgetter("__code__")


def watched(*names: str) -> Callable[[], bool]:
    """Tells whether JAX's functions are those it had when this package was imported.

    Libraries that quantize or record put functions of their own in place of JAX's,
    or other code into these, for a while.

    Args:
        *names: Which functions count, as ``lax.add``; all 700 if none is named.
    """
    if 0 < len(names) < 4:
        return _few(*names)
    chosen: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
    for place, entries in ((name, vars(module)) for name, module in _PLACES.items()):
        found = [
            name
            for name, x in entries.items()
            if callable(x) and (not names or f"{place}.{name}" in names)
        ]
        if found:
            chosen.append((operator.itemgetter(*found, found[0]), entries))

    def attributes_now() -> list[Any]:
        return [pick(entries) for pick, entries in chosen]

    attributes = attributes_now()
    written = [x for x in itertools.chain(*attributes) if inspect.isfunction(x)]
    codes = [*map(_code_of, written)]

    def holds() -> bool:
        # Compared in C: 20 us for all, 1 us for some.
        return attributes_now() == attributes and [*map(_code_of, written)] == codes

    return holds


def _few(*names: str) -> Callable[[], bool]:
    watched = [
        (vars(_PLACES[place]), name, function, getattr(function, "__code__", None))
        for place, name in (path.split(".") for path in names)
        for function in [getattr(_PLACES[place], name)]
    ]

    def holds() -> bool:
        # 0.1 us for each; an eager operation takes 4.
        for entries, name, function, code in watched:
            if entries[name] is not function:
                return False
            if getattr(function, "__code__", None) is not code:
                return False
        return True

    return holds


def traced_once(*static: str, calls: Sequence[str] = ()) -> Callable[[F], F]:
    """Makes a function of JAX's operations one that is traced once for equal shapes.

    Where it is traced again, JAX puts in the operations that it found, and their
    derivatives. The program is the same; an eager call runs each operation by itself.

    Args:
        *static: The names of the keyword parameters that are no arrays.
        calls: The public functions of JAX that run in it, at any depth, as ``lax.add``;
            if none is named, all of JAX's are looked at, which takes 20 us.
    """

    def decorate(function: F) -> F:
        inlined = jax.jit(function, static_argnames=static, inline=_EARLY)
        is_as_imported = watched(*calls)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_traced = any([isinstance(x, _jax.Tracer) for x in args])
            is_known = is_traced and is_as_imported()
            return (inlined if is_known else function)(*args, **kwargs)

        return cast("F", call)

    return decorate


def one_program(*static: str, calls: Sequence[str]) -> Callable[[F], F]:
    """Makes a function of arrays one that runs as a program of its own, when eager.

    It may hold one operation that computes, and others that change shapes: XLA could
    compute several together otherwise than one by one.

    Args:
        *static: The names of the keyword parameters that are no arrays.
        calls: The functions of JAX that it calls, as for `traced_once`. While something
            else is in their place, that is called.
    """
    is_original = watched(*calls)

    def decorate(function: F) -> F:
        program = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _jax.current_trace() is _jax.no_trace and is_original():
                for x in args:
                    if not _jax.is_concrete(type(x)):
                        break
                else:
                    return program(*args, **kwargs)
            return function(*args, **kwargs)

        return cast("F", call)

    return decorate


_DOT_GENERAL = jax.lax.dot_general
_OPTIONS = "dimension_numbers", "precision", "preferred_element_type", "out_sharding"
_DOT = ["lax.dot_general", "lax.dot"]
_known_dot_general = one_program(*_OPTIONS, calls=_DOT)(
    traced_once(*_OPTIONS, calls=_DOT)(_DOT_GENERAL)
)


def contract(
    function: Any, x: jax.Array, kernel: jax.Array, axes: Any, **options: Any
) -> jax.Array:
    """Contracts inputs with a kernel, by JAX's function or the user's."""
    function = current(function)
    if function is not _DOT_GENERAL or isinstance(options.get("precision"), list):
        return function(x, kernel, axes, **options)
    return _known_dot_general(x, kernel, dimension_numbers=axes, **options)


_RESHAPE = ["numpy.reshape", "lax.reshape"]


@traced_once("shape", calls=_RESHAPE)
def aligned(x: jax.Array, *, shape: Shape) -> jax.Array:
    """A Param with the rank of the inputs that it meets."""
    return jnp.reshape(x, shape)


@one_program("shape", calls=_RESHAPE)
def plus(x: jax.Array, bias: jax.Array, *, shape: Shape) -> jax.Array:
    """Adds a Param, in this shape."""
    return x + aligned(bias, shape=shape)


@one_program("shape", calls=_RESHAPE)
def times(x: jax.Array, scale: jax.Array, *, shape: Shape) -> jax.Array:
    """Multiplies with a Param, in this shape."""
    return x * aligned(scale, shape=shape)


def shape_along(axes: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """The sizes of ``shape`` along ``axes``, and one elsewhere."""
    return tuple([n if axis in axes else 1 for axis, n in enumerate(shape)])


def add_bias(outputs: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias along the last axis, if there is one."""
    if bias is None:
        return outputs
    if not values.is_array(outputs):  # but what a contraction of the user's own gave
        return outputs + aligned(bias, shape=(1,) * (outputs.ndim - 1) + (-1,))
    return _sum(outputs, bias)


@one_program(calls=_RESHAPE)
@traced_once(calls=[*_RESHAPE, "numpy.add", "lax.add", "lax.dtype"])
def _sum(outputs: jax.Array, bias: jax.Array) -> jax.Array:
    # In one: a program of its own for the reshape costs as much as one for the sum.
    return outputs + jnp.reshape(bias, (1,) * (outputs.ndim - 1) + (-1,))
