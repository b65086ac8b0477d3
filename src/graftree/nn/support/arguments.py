"""The arguments of layers, and the checks and conversions before they compute.

A layer computes before it writes: a call that fails leaves running statistics, caches
and the counts of random streams as they were (`undone_on_failure`). It need not
check values that JAX refuses, since every error in a layer gets a note with its place
and inputs (`running.py`). It checks values that JAX would silently broadcast or stack
into something else; such checks read shapes and dtypes only. An argument that may be an
int may be a NumPy integer too; one that may be a tuple, a list.

A layer has a *parameter dtype*, in which its Params are stored, and a computation
dtype, to which inputs and Params are converted before they meet. The latter is the
layer's ``dtype`` or, if that is ``None``, the result of JAX's promotion of all of them;
integers become floats on the way.

A Param draws exactly one key from the stream ``params``, even when its initializer
ignores the key, so switching an initializer never changes the other Params. An absent
Param is ``None`` in a *data* attribute, so that you can assign one later.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from numpy.lib.array_utils import normalize_axis_index

from graftree import _jax, _python, errors
from graftree.annotations import Dtype, Initializer, LaxPadding, PaddingLike, Shape
from graftree.core.objects import attributes, running
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.text import descriptions
from graftree.core.variables import values, variables
from graftree.core.variables.kinds import Param
from graftree.nn.support import eager

F = TypeVar("F", bound=Callable[..., Any])


def as_array(inputs: Any) -> jax.Array:
    """Turns the inputs of a layer into an array, if they are not one yet.

    Objects of other kinds that have a shape, as quantization hooks take, stay as they
    are.
    """
    if values.is_array(inputs):
        return inputs
    try:
        return jnp.asarray(inputs)
    except (TypeError, ValueError):
        if hasattr(inputs, "shape") and not isinstance(inputs, np.ndarray):
            return inputs
        raise


def setting(layer: Any, attribute: str, argument: bool | None) -> bool:
    """Chooses a setting: the argument of a call, or else the layer's attribute."""
    if argument is None:
        argument = getattr(layer, attribute)
    if argument is None:
        name = type(layer).__name__
        in_all_layers = ""
        if attribute in ("deterministic", "use_running_average"):
            in_all_layers = "Call model.train() or model.eval(), which set it; or:\n"
        raise ValueError(
            f"No `{attribute}` argument was provided to {name}, as argument of the "
            f"call or as attribute.\n{in_all_layers}"
            f"Pass it to the constructor: {name}(..., {attribute}=False)\n"
            f"or to the call: layer(x, {attribute}=False)\n"
            f"or to a view: nnx.view(model, {attribute}=False)"
        )
    return argument


def stream(layer: Any, argument: Any, tag: str) -> RngStream | None:
    """Chooses the stream a call draws from: its argument's, or else the layer's own."""
    rngs = layer.rngs if argument is None else argument
    if isinstance(rngs, Rngs):
        return getattr(rngs, tag)
    if rngs is None or isinstance(rngs, RngStream):
        return rngs
    raise TypeError(f"rngs must be a Rngs, RngStream or None, but got {type(rngs)}.")


def dropout_stream(
    layer: Any, deterministic: bool | None, rngs: Any
) -> RngStream | None:
    """Chooses the stream for dropout; ``None`` if nothing is dropped."""
    drops = layer.dropout_rate > 0
    if not drops or setting(layer, "deterministic", deterministic):
        return None
    chosen = stream(layer, rngs, "dropout")
    if chosen is None:
        raise ValueError(
            "'rngs' must be provided to the call, for dropout.\n"
            "Pass `rngs=nnx.Rngs(dropout=0)` or `deterministic=True`."
        )
    return chosen


def cell_stream(
    rngs: Rngs, keep_rngs: bool, carry_init: Initializer | None
) -> RngStream | None:
    """Makes the attribute ``rngs`` of a cell; warns of deprecated arguments."""
    if carry_init is not None:
        _python.warn_user(
            "carry_init is provided in __init__, so that cells which differ in nothing "
            "else have different graphdefs. Pass it to `initialize_carry` instead.",
            UserWarning,
        )
    if not keep_rngs:
        return attributes.data(None)
    _python.warn_user(
        "keep_rngs argument is deprecated. Pass `rngs` to `initialize_carry`, or to "
        "the call of nnx.RNN, instead.",
        UserWarning,
    )
    return rngs.carry.fork()


# Dtypes.


def canonicalize_dtype(
    *args: Any, dtype: Dtype | None = None, inexact: bool = True
) -> Dtype:
    """Finds the dtype for a computation on ``args``.

    Args:
        *args: Arrays or Python scalars; ``None`` entries are ignored.
        dtype: The answer, if already known; returned as it is.
        inexact: Whether the result must be a floating or complex dtype. An inferred
            integer or bool dtype is then promoted with float32.

    Returns:
        ``dtype`` itself (the same object) if given, else the promoted dtype of
        ``args``.

    Raises:
        ValueError: If ``inexact`` is set and the given ``dtype`` is not inexact; or if
            there is neither an array nor a dtype.

    Example:
        >>> from graftree.nn.support import arguments
        >>> arguments.canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1.0)
        dtype(bfloat16)
        >>> arguments.canonicalize_dtype(jnp.ones(2, jnp.int32), None)
        dtype('float32')
    """
    if dtype is None:
        present = [x for x in args if x is not None]
        arrays = [x if values.is_array(x) else _as_array(x) for x in present]
        dtype = jnp.result_type(*arrays)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Dtype must be inexact: {dtype}\n"
            "Pass a floating or complex dtype, or None to infer one from the inputs."
        )
    return dtype


def own_arithmetic(function: F) -> F:
    """For formulas that are not the program's own, such as those of a metric.

    ``jax.numpy_dtype_promotion("strict")`` and ``jax.transfer_guard("disallow")`` find
    what a program doesn't mean. Here a sum may be divided by an integer count, and the
    numbers of a formula, such as a learning rate, may go to the device.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        allowed = jax.transfer_guard_host_to_device("allow")
        with jax.numpy_dtype_promotion("standard"), allowed:
            return function(*args, **kwargs)

    return cast("F", call)


def promote_dtype(
    args: Sequence[Any], /, *, dtype: Dtype | None = None, inexact: bool = True
) -> tuple[jax.Array | None, ...]:
    """Converts several arrays to one dtype.

    This is the default of every layer's ``promote_dtype`` argument. A replacement takes
    the same arguments and may do something else, such as quantize.

    Args:
        args: Arrays, Python scalars, lists of numbers, or ``None``.
        dtype: The dtype to convert to; ``None``: `canonicalize_dtype` infers it.
        inexact: Whether integers become floats.

    Returns:
        A tuple with one entry per entry of ``args``: a JAX array of the common dtype,
        or ``None`` where the entry was ``None``.

    Raises:
        ValueError: As `canonicalize_dtype`.

    Example:
        >>> from graftree.nn.support import arguments
        >>> x, kernel, bias = arguments.promote_dtype(
        ...     (jnp.ones(2, jnp.bfloat16), jnp.ones((2, 3)), None)
        ... )
        >>> x.dtype, kernel.dtype, bias
        (dtype('float32'), dtype('float32'), None)
    """
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return tuple([None if x is None else _as_array(x, dtype) for x in args])


def _as_array(x: Any, dtype: Dtype | None = None) -> jax.Array:
    if values.is_array(x) and x.dtype == dtype and not x.weak_type:
        return x  # which `jnp.asarray` takes 8 us to find
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            errors.message(
                "A layer computes with an abstract array: it has a shape, but no "
                "values yet.",
                where=descriptions.describe(x),
                way_out="If it is a parameter, load values first: "
                "nnx.checkpoints.load_state(model, state) lists all that are missing.",
            )
        )
    return jnp.asarray(x, dtype)


def read(variable: variables.Variable[jax.Array] | None) -> jax.Array | None:
    """Returns the value of a Variable, or ``None`` for an absent one."""
    return None if variable is None else variable[...]


# Sizes, axes and padding.


def sizes(value: int | Sequence[int]) -> tuple[int, ...]:
    """Normalizes one size or several to a tuple."""
    if isinstance(value, int | np.integer):
        return (int(value),)
    return tuple(operator.index(size) for size in value)


def check_sizes(layer: Any, **values: Any) -> None:
    """Refuses arguments of a constructor that can't be sizes.

    Args:
        layer: The layer that is constructed.
        **values: Sizes, or sequences of them, by the names of the arguments.

    Raises:
        TypeError: If one is ``None``, a float, or otherwise no number.
        ValueError: If one is negative.
    """
    for name, value in values.items():
        entries = value if isinstance(value, tuple | list) else (value,)
        for size in entries:
            if size is None or isinstance(size, float | str | Rngs | RngStream):
                raise TypeError(_no_size(layer, name, value, "integers as sizes"))
            if is_int(size) and size < 0:
                raise ValueError(_no_size(layer, name, value, "sizes of at least 0"))


def _no_size(layer: Any, name: str, value: Any, expected: str) -> str:
    way_out = "A size is the number of entries along an axis, such as x.shape[-1]."
    if value is None:
        way_out = (
            "Layers don't infer sizes from their inputs: pass x.shape[-1]. If other "
            "layers\nmake x, nnx.eval_shape gets its shape from an example: "
            "docs/guides/initialization.md."
        )
    elif isinstance(value, float):
        way_out = "For a quotient, write a // b: a / b is a float."
    return errors.message(
        f"{type(layer).__name__} expects {expected}.",
        where=f"{name}={running.describe(value)}",
        way_out=way_out,
    )


def check_not_empty(layer: str, inputs: Any, outputs: Any, way_out: str) -> None:
    """Refuses an empty result of inputs that are not empty."""
    if 0 in outputs.shape[:-1] and 0 not in inputs.shape:
        raise ValueError(
            errors.message(
                f"{layer} has an empty result: no window fits into its padded inputs.",
                where=f"inputs: {descriptions.describe(inputs)}\n"
                f"outputs: {descriptions.describe(outputs)}",
                way_out=way_out,
            )
        )


def is_int(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a Python or NumPy integer."""
    return isinstance(value, int | np.integer)


def per_axis(value: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Returns one entry per spatial axis, from one for all, or ``None`` for ones."""
    entries = sizes(1 if value is None else value)
    return entries * rank if value is None or is_int(value) else entries


def if_set(**options: Any) -> dict[str, Any]:
    """Drops keywords that are ``None``, for functions that may not have them."""
    return {key: value for key, value in options.items() if value is not None}


def canonical_axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Lists axes as non-negative numbers in ascending order, without repeats."""
    return tuple(sorted({normalize_axis_index(axis, ndim) for axis in sizes(axes)}))


def canonicalize_padding(padding: PaddingLike, rank: int) -> LaxPadding:
    """Brings the accepted forms of padding to those of ``jax.lax``.

    Args:
        padding: A name; an int; or a sequence with an int or a pair (tuple or list of
            two ints) per spatial axis.
        rank: The number of spatial axes.

    Returns:
        A name unchanged, else a list of ``rank`` pairs ``(low, high)``.

    Raises:
        ValueError: If ``padding`` has another form.

    Example:
        >>> from graftree.nn.support import arguments
        >>> arguments.canonicalize_padding(2, 2)
        [(2, 2), (2, 2)]
        >>> arguments.canonicalize_padding([1, (0, 2)], 2)
        [(1, 1), (0, 2)]
    """
    if isinstance(padding, str):
        return padding
    if is_int(padding):
        padding = [int(padding)] * rank
    if isinstance(padding, Sequence | np.ndarray):
        pairs = [pair for entry in padding if (pair := _pair(entry)) is not None]
        if len(pairs) == len(padding) == rank:
            return pairs
    raise ValueError(
        f"Invalid padding format: {padding}, should be str, int, or a sequence of "
        f"len {rank} where each element is an int or pair of ints."
    )


def _pair(entry: Any) -> tuple[int, int] | None:
    """Reads the padding of one axis; ``None`` if it cannot be read."""
    if is_int(entry):
        return (int(entry), int(entry))
    is_sequence = isinstance(entry, tuple | list | np.ndarray)
    if is_sequence and len(entry) == 2 and all(map(is_int, entry)):
        return (int(entry[0]), int(entry[1]))
    return None


def split_features(
    num_features: int, num_groups: int | None, group_size: int | None
) -> tuple[int, int]:
    """Returns number and size of the groups that features are split into."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            "Either `num_groups` or `group_size` should be specified, not both, got "
            f"num_groups={num_groups} and group_size={group_size}.\n"
            "Pass `num_groups=None` with `group_size`, to override the default of "
            "`num_groups`, which is 32."
        )
    if group_size is not None:
        if group_size <= 0 or num_features % group_size:
            raise ValueError(
                f"Number of features ({num_features}) is not multiple of the group "
                f"size ({group_size})."
            )
        return num_features // group_size, group_size
    if not is_int(num_groups) or num_groups <= 0 or num_features % num_groups:
        raise ValueError(
            f"Number of groups ({num_groups}) does not divide the number of channels "
            f"({num_features})."
        )
    return num_groups, num_features // num_groups


def shape_along(axes: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Keeps the sizes of ``shape`` along ``axes``; others become one."""
    return tuple([n if axis in axes else 1 for axis, n in enumerate(shape)])


# State.


@contextlib.contextmanager
def undone_on_failure(*state: Any) -> Iterator[None]:
    """Restores the values of Variables, and counts of streams, if the block fails.

    A layer checks first and writes last where it can. It cannot if it hands its state
    to a function of the user, or to another layer.
    """
    counts = [stream.count for stream in state if isinstance(stream, RngStream)]
    boxes = [*counts, *(leaf for leaf in state if isinstance(leaf, variables.Variable))]
    before = [_content(variable) for variable in boxes]
    try:
        yield
    except BaseException:
        # Variables that can't be written now were not written in the block.
        changed = [
            (variable, content)
            for variable, content in zip(boxes, before, strict=True)
            if variables.may_write(variable) and _content(variable) is not content
        ]
        variables.store_all([v for v, _ in changed], [x for _, x in changed])
        raise


def _content(variable: variables.Variable[Any]) -> Any:
    """Reads a stored value past all hooks, which would change it on its way back."""
    raw = variable.get_raw_value()
    # A trace that fails drops its writes; reading would add an operation.
    is_eager_ref = _jax.is_ref(raw) and not isinstance(raw, _jax.Tracer)
    return raw[...] if is_eager_ref else raw


NO_METADATA: Mapping[Any, Any] = MappingProxyType({})
"""The default of the ``..._metadata`` arguments of layers: nothing."""

lecun_normal: Any = initializers.lecun_normal()
"""The default initializer of weights."""


def make_param(
    initializer: Initializer,
    rngs: Rngs,
    shape: Shape | int,
    dtype: Dtype,
    metadata: Mapping[str, Any],
) -> Param[Any]:
    """Makes a Param; takes one key from the stream ``params``, used or not.

    Args:
        initializer: Called as ``initializer(key, shape, dtype)``. It may return a value
            with metadata, as ``nnx.with_partitioning`` makes; this metadata wins.
        rngs: Gives the key.
        shape: The shape of the value.
        dtype: The dtype of the value.
        metadata: Of the Param.
    """
    value = initial_value(initializer, draw_key(rngs), shape, dtype)
    return Param(value, **metadata)


def initial_value(
    initializer: Initializer, key: jax.Array | None, shape: Shape | int, dtype: Dtype
) -> Any:
    """Calls ``initializer(key, shape, dtype)``."""
    if isinstance(shape, tuple) and all(type(n) is int for n in shape):
        if _jax.concrete_mesh() is None:
            return _initialized(key, initializer=initializer, shape=shape, dtype=dtype)
    return cast("Any", initializer)(key, shape, dtype)


# Most initializers recompute values that depend only on the shape: 70 of 90 us.
@eager.compiled
def _initialized(
    key: jax.Array | None, *, initializer: Initializer, shape: Shape, dtype: Dtype
) -> Any:
    return cast("Any", initializer)(key, shape, dtype)


def draw_key(rngs: Rngs) -> jax.Array:
    """Takes the next key of the stream ``params``."""
    try:
        stream = rngs.params
    except AttributeError:
        if isinstance(rngs, Rngs):
            raise
        raise AttributeError(
            f"{type(rngs).__name__!r} object has no attribute 'params': a layer takes "
            "its keys from an nnx.Rngs.\nPass `rngs=nnx.Rngs(0)`, or the `Rngs` of the "
            "outer module."
        ) from None
    return stream()
