"""Layers that contract their inputs with a kernel.

``Linear`` contracts the last axis, ``LinearGeneral`` any axes, ``Einsum`` those of an
equation. ``Embed`` looks rows up, and contracts with them where outputs are tied.
The contraction itself is an argument, so you can replace it, for example with a
quantized one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import (
    Array,
    ArrayLike,
    DotGeneralT,
    Dtype,
    EinsumT,
    Inexact,
    Initializer,
    Integer,
    Num,
    PrecisionLike,
    PromoteDtypeFn,
    Shape,
)
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes, bookkeeping, methods, pytrees
from graftree.core.rng.streams import Rngs
from graftree.core.variables.kinds import Param
from graftree.core.variables.metadata import VariableMetadata
from graftree.nn import initializers
from graftree.nn.support import arguments, eager, jax_functions, meshes

default_kernel_init = arguments.lecun_normal
"""The kernel initializer of all layers: truncated normal, variance ``1 / fan_in``."""
default_bias_init = initializers.zeros
"""The bias initializer of all layers."""


class Contraction(Module):
    """Base of layers that contract their inputs with a kernel."""

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike
    promote_dtype: PromoteDtypeFn
    preferred_element_type: Dtype | None


def promoted(
    layer: Contraction, inputs: Any, *params: Any, axes: Sequence[int] = (-1,)
) -> tuple[Any, ...]:
    """Casts operands to one dtype and gathers Params, to contract ``axes``."""
    inputs, *others = layer.promote_dtype((inputs, *params), dtype=layer.dtype)
    return (inputs, *meshes.beside(inputs, axes, others))


def contraction_options(layer: Contraction, out_sharding: Any) -> dict[str, Any]:
    """Collects the keywords of a contraction: ``precision``, and others if set.

    The user's own contraction need not have these.
    """
    options = arguments.if_set(
        preferred_element_type=layer.preferred_element_type, out_sharding=out_sharding
    )
    return {"precision": layer.precision, **options}


def add_bias(
    outputs: jax.Array, bias: jax.Array | None, shape: Shape | None = None
) -> jax.Array:
    """Adds a bias, if there is one; in full rank, as users can forbid to promote it."""
    if bias is None:
        return outputs
    shape = (1,) * (outputs.ndim - 1) + (-1,) if shape is None else shape
    return outputs + jnp.reshape(bias, shape)


class Linear(Contraction):
    """An affine map of the last axis.

    Computes ``inputs @ kernel + bias``.

    Args:
        in_features: Size of the last axis of the inputs.
        out_features: Size of the last axis of the outputs.
        use_bias: Whether there is a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        dot_general: The contraction; called like ``jax.lax.dot_general``.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[in_features, out_features]``.
        bias: Param, ``[out_features]``, or ``None``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> layer.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
        >>> layer(jnp.array([[1.0, 1.0]]))
        Array([[1., 2., 4.]], dtype=float32)
    """

    in_features: int
    out_features: int
    use_bias: bool
    dot_general: DotGeneralT

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: DotGeneralT = jax.lax.dot_general,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, in_features=in_features, out_features=out_features)
        kernel_shape = (in_features, out_features)
        self.kernel = arguments.make_param(
            kernel_init, rngs, kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                bias_init, rngs, (out_features,), param_dtype, bias_metadata
            )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @eager.compiled_contraction
    def __call__(
        self, inputs: Num[ArrayLike, "*batch in_features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch out_features"]:
        """Maps the last axis of ``inputs``.

        Args:
            inputs: ``[*batch, in_features]``, an array or a list of numbers; any number
                of leading axes, or none.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array ``[*batch, out_features]``.

        Raises:
            TypeError: If the last axis of ``inputs`` has the wrong size, or ``inputs``
                is not numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        x = arguments.as_array(inputs)
        x, kernel, bias = promoted(self, x, self.kernel[...], arguments.read(self.bias))
        dot_general = jax_functions.current(self.dot_general)
        last_with_first = (((x.ndim - 1,), (0,)), ((), ()))
        options = contraction_options(self, out_sharding)
        return add_bias(dot_general(x, kernel, last_with_first, **options), bias)


class LinearGeneral(Contraction):
    """An affine map of any axes of the inputs to any number of new axes.

    Contracts the inputs with the kernel over ``axis``. Along the ``batch_axis``, if
    any, kernel and bias differ from entry to entry.

    The kernel is initialized as a matrix and then reshaped, so its values, and their
    variance, are those of a `Linear` between flattened features.

    Args:
        in_features: Sizes of the contracted axes of the inputs, in the order of these
            axes there. An int means one axis, here and below.
        out_features: Sizes of the new axes, which come last in the outputs.
        axis: The axes to contract, always taken from left to right, in whatever order
            you give them.
        batch_axis: Leading axes along which kernel and bias vary, mapped to their
            sizes: ``{0: size}``, ``{0: size, 1: size}`` and so on.
        use_bias: Whether there is a bias.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        kernel_init: Initializer of ``kernel``, called with the shape of a matrix.
        bias_init: Initializer of ``bias``, called with the shape of a vector.
        precision: Passed to the contraction.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        dot_general: The contraction; ``None``: ``jax.lax.dot_general``.
        dot_general_cls: Makes the contraction on each call; takes precedence over
            ``dot_general``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, ``[*batch sizes, *in_features, *out_features]``.
        bias: Param, ``[*batch sizes, *out_features]``, or ``None``.

    Raises:
        ValueError: If ``in_features`` and ``axis`` differ in length, or if the batch
            axes are not ``0, 1, ...``.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, 2), rngs=nnx.Rngs(0))
        >>> layer.kernel.shape, layer(jnp.ones((7, 2, 3))).shape
        ((2, 3, 4, 5), (7, 4, 5))
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = arguments.NO_METADATA,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        dot_general: DotGeneralT | None = None,
        dot_general_cls: Callable[[], DotGeneralT] | None = None,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, in_features=in_features, out_features=out_features)
        self.in_features = arguments.sizes(in_features)
        self.out_features = arguments.sizes(out_features)
        self.axis = arguments.sizes(axis)
        self.batch_axis = HashableMapping(batch_axis)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                "in_features and axis must have the same length. "
                f"Got {self.in_features} and {self.axis}."
            )
        batch = _batch_sizes(batch_axis)
        num_rows = math.prod(batch) * math.prod(self.in_features)
        num_columns = math.prod(self.out_features)
        self.kernel = arguments.make_param(
            _on_flat_shape(kernel_init, (num_rows, num_columns)),
            rngs,
            (*batch, *self.in_features, *self.out_features),
            param_dtype,
            kernel_metadata,
        )
        self.bias = attributes.data(None)
        if use_bias:
            self.bias = arguments.make_param(
                _on_flat_shape(bias_init, (math.prod(batch) * num_columns,)),
                rngs,
                (*batch, *self.out_features),
                param_dtype,
                bias_metadata,
            )

    @eager.compiled_contraction
    def __call__(
        self, inputs: Num[ArrayLike, "*shape"], out_sharding: Any = None
    ) -> Inexact[Array, "*out_shape"]:
        """Maps the axes ``axis`` of ``inputs``.

        Args:
            inputs: An array, or list, with ``in_features`` entries along ``axis``.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            An array with the batch axes, the axes of ``inputs`` that are not
            contracted, and then the axes ``out_features``.

        Raises:
            TypeError: If ``inputs`` lacks an axis, has the wrong sizes, or is not
                numeric.
            ValueError: If ``dtype`` is neither floating nor complex.
        """
        x = arguments.as_array(inputs)
        ndim = len(x.shape)
        axis = tuple(sorted([a + ndim if a < 0 else a for a in self.axis]))
        remaining = [n for n in range(ndim) if n not in axis]
        batch = tuple(range(len(self.batch_axis)))
        kernel_axis = tuple(range(len(batch), len(batch) + len(axis)))
        bias_sizes = [x.shape[n] if n in batch else 1 for n in remaining]
        kernel, bias = self.kernel[...], arguments.read(self.bias)
        x, kernel, bias = promoted(self, x, kernel, bias, axes=(*axis, *batch))
        dot_general = jax_functions.current(self._contraction())
        contracted = ((axis, kernel_axis), (batch, batch))
        options = contraction_options(self, out_sharding)
        y = dot_general(x, kernel, contracted, **options)
        return add_bias(y, bias, (*bias_sizes, *self.out_features))

    def _contraction(self) -> DotGeneralT:
        """Chooses the function that contracts inputs and kernel."""
        if self.dot_general_cls is not None:
            return self.dot_general_cls()
        return jax.lax.dot_general if self.dot_general is None else self.dot_general


def _batch_sizes(batch_axis: Mapping[int, int]) -> tuple[int, ...]:
    """Lists the sizes of the batch axes, which must be the leading ones."""
    axes = tuple(sorted(batch_axis))
    if axes != tuple(range(len(axes))):
        raise ValueError(
            f"The batch axes {axes} of LinearGeneral must be consecutive leading "
            "dimensions starting from 0."
        )
    return tuple(batch_axis[axis] for axis in axes)


def _on_flat_shape(initializer: Initializer, flat_shape: Shape) -> Initializer:
    """An initializer that calls another with ``flat_shape``, then reshapes the result.

    Initializers scale their values by the fan-in, which they read off a matrix.
    """

    def initialize(key: jax.Array, shape: Shape, dtype: Dtype) -> Any:
        value = arguments.initial_value(initializer, key, flat_shape, dtype)
        if isinstance(value, VariableMetadata):
            raw_value = jnp.reshape(value.raw_value, shape)
            return dataclasses.replace(value, raw_value=raw_value)
        return jnp.reshape(value, shape)

    return initialize


class Einsum(Contraction):
    """Contracts its inputs with a kernel as an Einstein summation, and adds a bias.

    The bias varies along those axes of the result whose letters the kernel also has.
    Its elements are laid out in the order of these letters in the result.

    Args:
        einsum_str: The equation, ``"inputs,kernel->outputs"``, optionally with
            ellipses; spaces are ignored. ``None``: each call gives one.
        kernel_shape: The shape of the kernel.
        bias_shape: The shape of the bias; ``None``: there is none.
        dtype: The dtype of the computation and the output; ``None``: inferred from
            inputs and Params.
        param_dtype: The dtype in which the Params are stored.
        precision: Passed to the contraction.
        kernel_init: Initializer of ``kernel``.
        bias_init: Initializer of ``bias``.
        promote_dtype: Called as ``promote_dtype((inputs, kernel, bias), dtype=dtype)``.
        einsum_op: The contraction; called like ``jax.numpy.einsum``.
        preferred_element_type: Dtype in which the contraction accumulates and returns
            its result; ``None``: that of its operands.
        rngs: Gives one key to ``kernel``, then one to ``bias``.
        kernel_metadata: Metadata of the Param ``kernel``.
        bias_metadata: Metadata of the Param ``bias``.

    Attributes:
        kernel: Param, of shape ``kernel_shape``.
        bias: Param, of shape ``bias_shape``, or ``None``.

    Raises:
        ValueError: If the equation lacks ``->`` or two operands.
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Einsum("...hd,hdo->...o", (2, 3, 4), (4,), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((5, 7, 2, 3))).shape
        (5, 7, 4)
    """

    einsum_str: str | None
    kernel_shape: Shape
    bias_shape: Shape | int | None
    einsum_op: EinsumT

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Shape,
        bias_shape: Shape | int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        einsum_op: EinsumT = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = arguments.NO_METADATA,
        bias_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        if einsum_str is not None:
            einsum_str = _checked(einsum_str)
        arguments.check_sizes(
            self, kernel_shape=kernel_shape, bias_shape=bias_shape or ()
        )
        self.kernel = arguments.make_param(
            kernel_init, rngs, kernel_shape, param_dtype, kernel_metadata
        )
        self.bias = attributes.data(None)
        if bias_shape is not None:
            self.bias = arguments.make_param(
                bias_init, rngs, bias_shape, param_dtype, bias_metadata
            )
        self.einsum_str = einsum_str
        self.kernel_shape = kernel_shape
        self.bias_shape = bias_shape
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type

    @eager.compiled
    def __call__(
        self,
        inputs: Num[ArrayLike, "*shape"],
        einsum_str: str | None = None,
        out_sharding: Any = None,
    ) -> Inexact[Array, "*out_shape"]:
        """Contracts ``inputs`` with the kernel.

        Args:
            inputs: The first operand of the equation, an array or a list of numbers.
            einsum_str: An equation to use instead of the attribute.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            A new array, with the shape that the equation gives.

        Raises:
            ValueError: If there is no equation, if it lacks ``->`` or two operands; if
                ``inputs`` or kernel do not have its axes; or if ``dtype`` is neither
                floating nor complex.
            TypeError: If the bias does not fit the result, or ``inputs`` is not
                numeric.
        """
        einsum_str = self.einsum_str if einsum_str is None else einsum_str
        if einsum_str is None:
            raise ValueError(
                "No `einsum_str` argument was provided to Einsum, as argument of the "
                "call or as attribute."
            )
        equation = _checked(einsum_str)
        x, kernel = arguments.as_array(inputs), self.kernel[...]
        x_labels, kernel_labels, y_labels = _all_labels(equation, x.ndim, kernel.ndim)
        shared = [n for n, label in enumerate(x_labels) if label in [*kernel_labels]]
        x, kernel, bias = promoted(
            self, x, kernel, arguments.read(self.bias), axes=shared
        )
        einsum = jax_functions.current(self.einsum_op)
        y = einsum(equation, x, kernel, **contraction_options(self, out_sharding))
        sizes = dict(zip(kernel_labels, kernel.shape, strict=False))
        # One where the kernel does not vary.
        return add_bias(y, bias, tuple([sizes.get(label, 1) for label in y_labels]))


def _checked(einsum_str: str) -> str:
    """Returns the equation without spaces, if it is one of two operands."""
    einsum_str = einsum_str.replace(" ", "")
    if "->" not in einsum_str:
        raise ValueError(
            '`einsum_str` equation must be explicit and include "->", got '
            f"{einsum_str!r}."
        )
    if einsum_str.count(",") != 1:
        raise ValueError(
            "`einsum_str` equation must have exactly two operands and therefore, "
            f"exactly one comma character, instead of {einsum_str.count(',')}: "
            f"{einsum_str!r}."
        )
    return einsum_str


def _all_labels(
    equation: str, inputs_ndim: int, kernel_ndim: int
) -> list[Sequence[str | int]]:
    """Labels the axes of inputs, kernel and result."""
    operands, outputs = equation.split("->")
    inputs, kernel = operands.split(",")
    widths = _ellipsis(inputs, inputs_ndim), _ellipsis(kernel, kernel_ndim)
    return [*map(_labels, (inputs, kernel, outputs), (*widths, max(widths)))]


def _ellipsis(subscripts: str, ndim: int) -> int:
    """Counts the axes that the ellipsis of an operand stands for."""
    return ndim - len(subscripts.replace("...", "")) if "..." in subscripts else 0


def _labels(subscripts: str, width: int) -> Sequence[str | int]:
    """One label per axis; those of an ellipsis are counted from its right end."""
    if "..." not in subscripts:
        return subscripts
    before, after = subscripts.split("...")
    return [*before, *range(-width, 0), *after]


default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
"""The initializer of embeddings: normal, standard deviation ``1 / sqrt(features)``."""


class Embed(Module):
    """A table with one vector per integer.

    Args:
        num_embeddings: Number of rows of the table.
        features: Size of each row.
        dtype: The dtype of the result; ``None``: that of the table.
        param_dtype: The dtype in which the table is stored.
        embedding_init: Initializer of ``embedding``.
        promote_dtype: Called as ``promote_dtype((embedding,), dtype=dtype,
            inexact=False)`` by a look-up, and as ``promote_dtype((query, embedding),
            dtype=dtype)`` by `attend`.
        rngs: Gives one key to ``embedding``.
        embedding_metadata: Metadata of the Param ``embedding``.

    Attributes:
        embedding: Param, ``[num_embeddings, features]``.

    Raises:
        AttributeError: If ``rngs`` has no stream ``params``.

    Example:
        >>> layer = nnx.Embed(num_embeddings=3, features=2, rngs=nnx.Rngs(0))
        >>> layer.embedding[...] = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> layer(jnp.array([2, 0]))
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
        >>> layer.attend(jnp.array([1.0, 0.0]))
        Array([0., 2., 4.], dtype=float32)
    """

    embedding: Param[jax.Array]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtypeFn = arguments.promote_dtype,
        rngs: Rngs,
        embedding_metadata: Mapping[str, Any] = arguments.NO_METADATA,
    ):
        arguments.check_sizes(self, num_embeddings=num_embeddings, features=features)
        shape = (num_embeddings, features)
        self.embedding = arguments.make_param(
            embedding_init, rngs, shape, param_dtype, embedding_metadata
        )
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    @property
    def dtype(self) -> Dtype:
        """The dtype of the result: the one that was set, or else that of the table.

        ``vars(layer)["dtype"]`` is what was set.
        """
        dtype = vars(self).get("dtype")
        return self.embedding.dtype if dtype is None else dtype

    @dtype.setter
    def dtype(self, dtype: Dtype | None) -> None:
        bookkeeping.check_owned(self, "dtype")
        pytrees.store_attribute(self, "dtype", dtype, False)

    def __call__(
        self, inputs: Integer[ArrayLike, "*shape"], out_sharding: Any = None
    ) -> Num[Array, "*shape features"]:
        """Looks up rows by number.

        Negative numbers count from the end. A number outside the table gives a row of
        NaN, but a table with a single row gives that row for every number.

        Args:
            inputs: Integers, signed or unsigned, of any shape.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: that of ``inputs``.

        Returns:
            An array ``[*inputs.shape, features]`` in ``dtype``.

        Raises:
            ValueError: If ``inputs`` holds numbers other than integers.
            TypeError: If ``inputs`` is not numeric.
        """
        indices = arguments.as_array(inputs)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError("Input type must be an integer or unsigned integer.")
        (embedding,) = self.promote_dtype(
            (self.embedding[...],), dtype=self.dtype, inexact=False
        )
        return meshes.look_up(embedding, indices, out_sharding)

    @methods.named
    def attend(
        self, query: Num[ArrayLike, "*batch features"], out_sharding: Any = None
    ) -> Inexact[Array, "*batch num_embeddings"]:
        """Multiplies ``query`` with every row, as tied output layers do.

        Args:
            query: ``[*batch, features]``.
            out_sharding: The sharding of the result on a mesh with explicit axes;
                ``None``: the one that follows from the operands.

        Returns:
            The dot products, ``[*batch, num_embeddings]``.

        Raises:
            TypeError: If the last axis of ``query`` is not ``features`` long, or
                ``query`` is not numeric.

        References:
            Press and Wolf, 2017, "Using the Output Embedding to Improve Language
            Models".
        """
        operands = (arguments.as_array(query), self.embedding[...])
        x, embedding = self.promote_dtype(operands, dtype=self.dtype)
        (embedding,) = meshes.beside(x, (-1,), (embedding,))
        axes = (((x.ndim - 1,), (1,)), ((), ()))
        options = arguments.if_set(out_sharding=out_sharding)
        return jax.lax.dot_general(x, embedding, axes, **options)
