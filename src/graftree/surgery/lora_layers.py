"""Layers with a low-rank adaptation: what `add_lora` makes of layers.

Each is a layer of the kind that it was, with the same Variables at the same paths, and
one more attribute, ``lora``. Its kernel counts as ``kernel + scale * lora_a @ lora_b``,
computed from left to right, so that the product of the two is never made:

    layer            lora_a                      lora_b
    Linear           [in, rank]                  [rank, out]
    LinearGeneral    [*batch, *in, rank]         [*batch, rank, *out]
    Conv             [*kernel_size, in, rank]    [rank, out]
    Embed            [num_embeddings, rank]      [rank, features]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree.annotations import Dtype
from graftree.core.variables.variables import Variable
from graftree.nn import conv, linear, lora
from graftree.nn.support import arguments


class LowRank(lora.LoRA):
    """The low-rank part of a layer: two Variables and a scale.

    Args:
        lora_a: The Variable that meets the inputs.
        lora_b: The Variable that gives the outputs.
        scale: A factor, ``alpha / rank``.
        in_features: That of the layer.
        out_features: That of the layer.
        dtype: The dtype of the computation; ``None``: inferred.
        param_dtype: The dtype in which the Variables are stored.

    Attributes:
        adapts_attend: Of an `Embed`, whether `attend` is adapted as the lookup is.
    """

    def __init__(
        self,
        lora_a: Variable[Any],
        lora_b: Variable[Any],
        *,
        scale: float,
        in_features: Any,
        out_features: Any,
        dtype: Dtype | None,
        param_dtype: Dtype,
    ):
        self.in_features = in_features
        self.out_features = out_features
        self.scale = scale
        self.adapts_attend = True
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = arguments.promote_dtype
        self.lora_a = lora_a
        self.lora_b = lora_b

    @property
    def rank(self) -> int:
        """The size of the axis between the two Variables."""
        return self.lora_a.shape[-1]

    def operands(self, inputs: Any) -> tuple[Any, Any, Any]:
        """The inputs and the two arrays, the second one scaled, in one dtype."""
        given = (arguments.as_array(inputs), self.lora_a[...], self.lora_b[...])
        promoted: Any = self.promote_dtype(given, dtype=self.dtype)
        x, a, b = promoted
        return x, a, b if self.scale == 1 else b * jnp.asarray(self.scale, b.dtype)

    def __call__(self, x: Any, **kwargs: Any) -> jax.Array:
        """What is added to the outputs of a Linear."""
        inputs, a, b = self.operands(x)
        return _chained(inputs, a, b, (inputs.ndim - 1,), 0, **kwargs)


def _chained(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    axis: tuple[int, ...],
    num_batch: int,
    out_sharding: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Contracts axes of ``x`` with ``a``, and the last axis of that with ``b``."""
    batch = tuple(range(num_batch))
    kernel_axis = tuple(range(num_batch, num_batch + len(axis)))
    between = lora.along_batch(out_sharding, x.ndim - len(axis) + 1)
    hidden = jax.lax.dot_general(
        x,
        a,
        ((axis, kernel_axis), (batch, batch)),
        precision=precision,
        out_sharding=between,
    )
    return jax.lax.dot_general(
        hidden,
        b,
        (((hidden.ndim - 1,), (num_batch,)), (batch, batch)),
        precision=precision,
        out_sharding=out_sharding,
    )


def _sum(
    compute: Callable[..., Any],
    change: Callable[..., Any],
    inputs: Any,
    out_sharding: Any,
) -> Any:
    """What a layer computes plus its low-rank change, in the dtype of the first."""
    options = arguments.if_set(out_sharding=out_sharding)
    outputs = compute(inputs, **options)
    return outputs + change(inputs, **options).astype(outputs.dtype)


class LoRALinear(lora.LoRALinear):
    """A `Linear` with a low-rank adaptation that has a scale."""

    def __call__(self, x: Any, out_sharding: Any = None) -> Any:
        """Maps the last axis of ``x``, as the `Linear` does."""
        compute = functools.partial(linear.Linear.__call__, self)
        return _sum(compute, self._change, x, out_sharding)

    def _change(self, x: Any, **options: Any) -> jax.Array:
        return self.lora(x, precision=self.precision, **options)


class LoRALinearGeneral(linear.LinearGeneral):
    """A `LinearGeneral` with a low-rank adaptation."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Maps the axes ``axis`` of ``inputs``, as the `LinearGeneral` does."""
        return _sum(super().__call__, self._change, inputs, out_sharding)

    def _change(self, inputs: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(inputs)
        axis = tuple(sorted(n + x.ndim if n < 0 else n for n in self.axis))
        num_batch = len(self.batch_axis)
        return _chained(x, a, b, axis, num_batch, precision=self.precision, **options)


class LoRAConv(conv.Conv):
    """A `Conv` with a low-rank adaptation: one to ``rank`` channels, and from these."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Convolves ``inputs``, as the `Conv` does."""
        return _sum(super().__call__, self._change, inputs, out_sharding)

    def _change(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        x, a, b = self.lora.operands(inputs)
        between = lora.along_batch(out_sharding, x.ndim)
        options = arguments.if_set(out_sharding=between)
        hidden = conv.convolve(self, x, a, None, **options)
        return jax.lax.dot_general(
            hidden,
            b.astype(hidden.dtype),
            (((hidden.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            **arguments.if_set(out_sharding=out_sharding),
        )


class LoRAEmbed(linear.Embed):
    """An `Embed` with a low-rank adaptation of its table."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Looks up rows by number, as the `Embed` does."""
        return _sum(super().__call__, self._change_of_rows, inputs, out_sharding)

    def _change_of_rows(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        _, a, b = self.lora.operands(jnp.zeros((), self.lora.lora_a.dtype))
        numbers = arguments.as_array(inputs)
        if self.num_embeddings == 1:
            numbers = jnp.zeros_like(numbers)
        between = lora.along_batch(out_sharding, numbers.ndim + 1)
        options = arguments.if_set(out_sharding=between)
        rows = a.at[numbers].get(mode="fill", **options)
        axes = (((numbers.ndim,), (0,)), ((), ()))
        options = arguments.if_set(out_sharding=out_sharding)
        return jax.lax.dot_general(rows, b, axes, **options)

    def attend(self, query: Any, out_sharding: Any = None) -> Any:
        """Multiplies ``query`` with every row, as the `Embed` does."""
        if not self.lora.adapts_attend:
            return super().attend(query, **arguments.if_set(out_sharding=out_sharding))
        return _sum(super().attend, self._change_of_scores, query, out_sharding)

    def _change_of_scores(self, query: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(query)
        return _chained(x, b.T, a.T, (x.ndim - 1,), 0, **options)
