"""What can have a low-rank adaptation, and how it computes with it.

A kernel, or a Param of a user's own module, counts as ``kernel + scale * lora_a @
lora_b``. Its module stays a layer of its kind, with the same Variables at the same
paths, and gets one more attribute, ``lora``. Known layers get a class that computes
from left to right, so that the product of the two is never made:

    layer            lora_a                      lora_b
    Linear           [in, rank]                  [rank, out]
    LinearGeneral    [*batch, *in, rank]         [*batch, rank, *out]
    Einsum           [*batch, *in, rank]         [*batch, rank, *out]
    Conv             [*kernel_size, in, rank]    [rank, out]
    Embed            [num_embeddings, rank]      [rank, features]
    GroupedLinear    [groups, in, rank]          [groups, rank, out]

What the code of another module computes with its Param is not known, so it reads the
sum (``nn/own_params.py``):

    own Param        [*leading, in, rank]        [*leading, rank, out]

A `Stack` adds leading axes in front.

With a magnitude, ``[*batch, *out]``, this is DoRA: the kernel counts as the sum, each
column scaled to the length ``magnitude``. That length is a constant in the gradient, as
in section 4.3 of the paper (Liu et al., 2024, "DoRA: Weight-Decomposed Low-Rank
Adaptation", eq. 5 and 11).
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Dtype, Shape
from graftree.core.objects import attributes
from graftree.core.variables.variables import Variable
from graftree.nn import conv, linear, lora
from graftree.nn.dropout import Dropout
from graftree.nn.mixtures import experts
from graftree.nn.support import arguments, meshes


class LowRank(lora.LoRA):
    """Low-rank part of a layer: two Variables and a scale.

    Args:
        target: The `LoRATarget` that is adapted.
        lora_a: The Variable that meets the inputs.
        lora_b: The Variable that gives the outputs.
        alpha: The scale times the rank.
        use_rslora: Whether it is the scale times the root of the rank.
        dropout: Drops entries of the inputs that ``lora_a`` meets; ``None``: none.
        param_dtype: The dtype in which the Variables are stored.

    Attributes:
        magnitude: Lengths of the columns, for DoRA; ``None``: those of the sum.
        adapts_attend: For an `Embed`, whether `attend` is adapted like the lookup.
    """

    def __init__(
        self,
        target: Any,
        lora_a: Variable[Any],
        lora_b: Variable[Any],
        *,
        alpha: float,
        use_rslora: bool,
        dropout: Dropout | None,
        param_dtype: Dtype,
    ):
        _, ins, outs, _ = target.axes
        is_matrix = len(ins) == len(outs) == 1
        self.in_features = ins[0] if is_matrix else ins
        self.out_features = outs[0] if is_matrix else outs
        self.alpha = alpha
        self.use_rslora = use_rslora
        self.adapts_attend = True
        # Of an Embed, only if one was set.
        self.dtype = vars(target.layer)["dtype"] if target.name is None else None
        self.param_dtype = param_dtype
        self.promote_dtype = arguments.promote_dtype
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.dropout: Any = attributes.data(dropout)
        self.magnitude: Any = attributes.data(None)

    @property
    def rank(self) -> int:
        """Size of the axis between the two Variables."""
        return self.lora_a.shape[-1]

    @property
    def scale(self) -> float:
        """Factor of the product of the two Variables."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def is_dropping(self) -> bool:
        """Whether it drops entries of its inputs, as in training."""
        return self.dropout is not None and not self.dropout.deterministic

    def added_to(self, kernel: jax.Array) -> jax.Array:
        """Changes a module's own Param, in the dtype of that."""
        *batch, ins, outs = kernel.shape
        axes = Axes(tuple(batch), (ins,), (outs,))
        dtypes = [_wide_enough(kernel.dtype), self.lora_a.dtype, self.lora_b.dtype]
        wide = functools.reduce(jnp.promote_types, dtypes)
        return adapted(kernel, self, axes, wide).astype(kernel.dtype)

    def lengths(self, kernel: Any, axes: Axes) -> jax.Array:
        """Measures the columns of the sum, without making it: ``[*batch, *outs]``.

        The square of ``w + a @ b`` is ``w² + 2 b · aᵀw + b · aᵀa b``.
        """
        wide = jnp.promote_types(_wide_enough(kernel.dtype), jnp.float32)
        arrays = kernel, self.lora_a[...], self.lora_b[...]
        w, a, b = [meshes.whole(jnp.asarray(x)).astype(wide) for x in arrays]
        w, a, b = axes.flat(w, a, b * self.scale)
        times = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        a_transposed = jnp.swapaxes(a, -1, -2)
        mixed = 2 * times(a_transposed, w) + times(times(a_transposed, a), b)
        squares = jnp.sum(w * w, -2) + jnp.sum(b * mixed, -2)
        return jnp.sqrt(squares).reshape(*squares.shape[:-1], *axes.outs)

    def operands(self, inputs: Any) -> tuple[Any, Any, Any]:
        """Brings inputs and both arrays, the second one scaled, to one dtype."""
        unpromoted = (arguments.as_array(inputs), self.lora_a[...], self.lora_b[...])
        promoted: Any = self.promote_dtype(unpromoted, dtype=self.dtype)
        x, a, b = promoted
        return x, a, b if self.scale == 1 else b * jnp.asarray(self.scale, b.dtype)

    def __call__(self, x: Any, **kwargs: Any) -> jax.Array:
        """Computes the change to the outputs of a Linear."""
        inputs, a, b = self.operands(x)
        return _chained(inputs, a, b, (inputs.ndim - 1,), 0, **kwargs)


def _wide_enough(dtype: Any) -> Any:
    """A dtype that JAX promotes: float32 instead of float8."""
    return jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype


def adapted(
    kernel: jax.Array, change: Any, axes: Axes, dtype: Any, **options: Any
) -> jax.Array:
    """Makes what a kernel counts as with its change, in a dtype that is wide enough."""
    arrays = kernel, change.lora_a[...], change.lora_b[...]
    w, a, b = axes.flat(*[x.astype(dtype) for x in arrays])
    product = jnp.matmul(a, b, **options) * getattr(change, "scale", 1.0)
    total = w + product.astype(dtype)
    magnitude = getattr(change, "magnitude", None)
    if magnitude is not None:
        squares = jnp.sum(jnp.square(total), axis=-2, keepdims=True)
        lengths = jax.lax.stop_gradient(jnp.sqrt(squares))
        total *= magnitude[...].astype(dtype).reshape(lengths.shape) / lengths
    return axes.unflat(total, kernel.shape)


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
    axes = (axis, kernel_axis), (batch, batch)
    (a,) = meshes.beside(x, (*axis, *batch), (a,))
    between = lora.along_batch(out_sharding, x.ndim - len(axis) + 1)
    hidden = jax.lax.dot_general(x, a, axes, precision=precision, out_sharding=between)
    return _last_with(
        hidden, b, num_batch, precision=precision, out_sharding=out_sharding
    )


def _last_with(x: jax.Array, b: jax.Array, num_batch: int = 0, **options: Any) -> Any:
    """Contracts the last axis of ``x`` with ``b``."""
    batch = tuple(range(num_batch))
    axes = ((x.ndim - 1,), (num_batch,)), (batch, batch)
    (b,) = meshes.beside(x, (-1, *batch), (b,))
    return jax.lax.dot_general(x, b, axes, **options)


def _adapted(
    layer: Any,
    compute: Callable[..., Any],
    change: Callable[..., Any],
    inputs: Any,
    out_sharding: Any = None,
    along: Callable[..., Any] | None = None,
) -> Any:
    """Computes the outputs of a layer with its change, in the dtype of the layer.

    With DoRA, these are ``compute(x) + (gain - 1) * compute(kept) + gain * change``,
    where a column of the kernel has the gain ``magnitude / length``.

    Args:
        layer: The adapted layer.
        compute: The layer without its change.
        change: Its change.
        inputs: Its inputs.
        out_sharding: That of both, where it is set.
        along: ``(layer, columns, outputs)``, gives columns the axes of the outputs.
    """
    along = along or _along
    low_rank: LowRank = layer.lora
    options = arguments.if_set(out_sharding=out_sharding)
    outputs, kept = compute(inputs, **options), inputs
    # Rows are looked up by numbers: an Embed has no inputs to drop.
    is_dropping = low_rank.is_dropping and not isinstance(layer, linear.Embed)
    if is_dropping:
        kept = low_rank.dropout(arguments.as_array(inputs))
    changes = change(kept, **options)
    if low_rank.magnitude is not None:
        base = compute(kept, **options) if is_dropping else outputs
        gain = _gain(layer)
        bias = arguments.read(getattr(layer, "bias", None))
        if bias is not None:
            base = base - along(layer, bias.reshape(gain.shape), base)
        gain = along(layer, gain, outputs)
        changes = (gain - 1) * base + gain * changes
    return outputs + changes.astype(outputs.dtype)


def _gain(layer: Any) -> jax.Array:
    """The gain of each column, its axes in the order of the outputs."""
    change, adaptable = layer.lora, ADAPTABLE[PLAIN[type(layer)]]
    kernel, axes = getattr(layer, adaptable.kernel)[...], adaptable.axes(layer)
    lengths = jax.lax.stop_gradient(change.lengths(kernel, axes))
    gain = change.magnitude[...].astype(lengths.dtype) / lengths
    if not isinstance(layer, linear.Einsum):
        return gain
    equation: Any = layer.einsum_str
    batch, _, outs = roles(equation)
    outputs = [x for x in equation.split("->")[1] if x in batch + outs]
    return jnp.transpose(gain, [(batch + outs).index(x) for x in outputs])


def _along(layer: Any, columns: jax.Array, outputs: jax.Array) -> jax.Array:
    """Gives an array of columns the rank of outputs, beside which it is on a mesh."""
    columns = _in_rank(layer, columns, outputs.ndim)
    own = [axis for axis, size in enumerate(columns.shape) if size > 1]
    return meshes.beside(outputs, own, (columns,))[0]


def _in_rank(layer: Any, columns: jax.Array, ndim: int) -> jax.Array:
    """Gives an array of columns an axis for each that the outputs have."""
    missing = ndim - columns.ndim
    if not isinstance(layer, linear.Einsum):
        num_batch = len(getattr(layer, "batch_axis", ()))
        batch, outs = columns.shape[:num_batch], columns.shape[num_batch:]
        return columns.reshape(*batch, *(1,) * missing, *outs)
    equation: Any = layer.einsum_str
    operands, outputs = equation.split("->")
    _, kernel = operands.split(",")
    others = len(outputs.replace("...", ""))
    labels = outputs.replace("...", " " * (ndim - others))
    absent = [i for i, x in enumerate(labels) if x not in kernel]
    return jnp.expand_dims(columns, absent)


class LoRALinear(lora.LoRALinear):
    """A `Linear` with a low-rank adaptation that has a scale."""

    def __call__(self, x: Any, out_sharding: Any = None) -> Any:
        """Maps the last axis of ``x``, as the `Linear` does."""
        compute = functools.partial(linear.Linear.__call__, self)
        return _adapted(self, compute, self._change, x, out_sharding)

    def _change(self, x: Any, **options: Any) -> jax.Array:
        return self.lora(x, precision=self.precision, **options)


class LoRALinearGeneral(linear.LinearGeneral):
    """A `LinearGeneral` with a low-rank adaptation."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Maps the axes ``axis`` of ``inputs``, as the `LinearGeneral` does."""
        return _adapted(self, super().__call__, self._change, inputs, out_sharding)

    def _change(self, inputs: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(inputs)
        axis = tuple(sorted(n + x.ndim if n < 0 else n for n in self.axis))
        num_batch = len(self.batch_axis)
        return _chained(x, a, b, axis, num_batch, precision=self.precision, **options)


class LoRAEinsum(linear.Einsum):
    """An `Einsum` with a low-rank adaptation for its own equation."""

    lora: LowRank

    def __call__(
        self, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None
    ) -> Any:
        """Contracts ``inputs`` with the kernel, as the `Einsum` does.

        Raises:
            ValueError: If the equation is another one than that of the layer.
        """
        if einsum_str is not None and einsum_str.replace(" ", "") != self.einsum_str:
            raise ValueError(
                errors.message(
                    f"An Einsum with LoRA for {self.einsum_str!r} was called with "
                    f"another equation: {einsum_str!r}.",
                    way_out="Make it with einsum_str=None before nnx.surgery.add_lora, "
                    "and select its kernel by path; it then serves all equations.",
                )
            )
        return _adapted(self, super().__call__, self._change, inputs, out_sharding)

    def _change(self, inputs: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(inputs)
        first, second = _low_rank_equations(self.einsum_str)
        hidden = self.einsum_op(first, x, a, precision=self.precision)
        return self.einsum_op(second, hidden, b, precision=self.precision, **options)


def roles(equation: str) -> tuple[str, str, str]:
    """Returns the letters of a kernel: of batch axes, of inputs and of outputs."""
    operands, outputs = equation.split("->")
    inputs, kernel = operands.split(",")
    return (
        "".join(x for x in kernel if x in inputs and x in outputs),
        "".join(x for x in kernel if x in inputs and x not in outputs),
        "".join(x for x in kernel if x not in inputs and x in outputs),
    )


def _low_rank_equations(equation: Any) -> tuple[str, str]:
    """Makes the equations of inputs with ``lora_a``, and of that with ``lora_b``."""
    operands, outputs = equation.split("->")
    inputs, _ = operands.split(",")
    batch, ins, outs = roles(equation)
    rank = next(x for x in string.ascii_letters if x not in equation)
    hidden = "".join(x for x in inputs if x not in ins) + rank
    return (
        f"{inputs},{batch}{ins}{rank}->{hidden}",
        f"{hidden},{batch}{rank}{outs}->{outputs}",
    )


class LoRAConv(conv.Conv):
    """A `Conv` with a low-rank adaptation: one to ``rank`` channels, and from these."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Convolves ``inputs``, as the `Conv` does."""
        return _adapted(self, super().__call__, self._change, inputs, out_sharding)

    def _change(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        x, a, b = self.lora.operands(inputs)
        between = lora.along_batch(out_sharding, x.ndim)
        hidden = conv.convolve(
            self, x, a, None, **arguments.if_set(out_sharding=between)
        )
        options = arguments.if_set(out_sharding=out_sharding)
        b = b.astype(hidden.dtype)
        return _last_with(hidden, b, precision=self.precision, **options)


class LoRAEmbed(linear.Embed):
    """An `Embed` with a low-rank adaptation of its table."""

    lora: LowRank

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        """Looks up rows by number, as the `Embed` does."""
        return _adapted(
            self, super().__call__, self._change_of_rows, inputs, out_sharding
        )

    def _change_of_rows(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        _, a, b = self.lora.operands(jnp.zeros((), self.lora.lora_a.dtype))
        numbers = arguments.as_array(inputs)
        between = lora.along_batch(out_sharding, numbers.ndim + 1)
        rows = meshes.look_up(a, numbers, between)
        return _last_with(rows, b, **arguments.if_set(out_sharding=out_sharding))

    def attend(self, query: Any, out_sharding: Any = None) -> Any:
        """Multiplies ``query`` with every row, as the `Embed` does."""
        options = arguments.if_set(out_sharding=out_sharding)
        if not self.lora.adapts_attend:
            return super().attend(query, **options)
        x = arguments.as_array(query)
        if self.lora.magnitude is not None:  # scales the columns, which meet the query
            x = (x * _along(self, _gain(self), x)).astype(x.dtype)
        kept = self.lora.dropout(x) if self.lora.is_dropping else x
        outputs = super().attend(x, **options)
        return outputs + self._change_of_scores(kept, **options).astype(outputs.dtype)

    def _change_of_scores(self, query: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(query)
        return _chained(x, b.T, a.T, (x.ndim - 1,), 0, **options)


class LoRAGroupedLinear(experts.GroupedLinear):
    """A `GroupedLinear` with a low-rank adaptation of each group."""

    lora: LowRank

    def __call__(self, rows: Any, group_sizes: Any) -> Any:
        """Maps the rows of each group, as the `GroupedLinear` does."""
        compute = functools.partial(super().__call__, group_sizes=group_sizes)

        def change(rows: Any) -> jax.Array:
            x, a, b = self.lora.operands(rows)
            hidden = experts.grouped_dot(self, x, a, group_sizes)
            return experts.grouped_dot(self, hidden, b, group_sizes)

        def along(layer: Any, columns: jax.Array, outputs: jax.Array) -> jax.Array:
            return experts.of_rows(columns, outputs.shape[0], group_sizes)

        return _adapted(self, compute, change, rows, along=along)


class Axes(NamedTuple):
    """Axes of a kernel, except leading ones of a `Stack`.

    Attributes:
        batch: The sizes of those in both factors.
        ins: The sizes of those that meet inputs.
        outs: The sizes of those that outputs have.
        order: Which of these, numbered one after the other, each axis is.
    """

    batch: Shape
    ins: Shape
    outs: Shape
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """Shape of the kernel."""
        sizes = (*self.batch, *self.ins, *self.outs)
        return tuple([sizes[i] for i in self.order]) if self.order else sizes

    def grouped(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Orders entries of the kernel's axes by role, after those of leading axes."""
        lead = len(entries) - len(self.shape)
        order = self.order or range(len(self.shape))
        kernel_entries = entries[lead:]
        return (
            *entries[:lead],
            *[kernel_entries[order.index(i)] for i in range(len(kernel_entries))],
        )

    def ungrouped(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Puts entries back in the kernel's order: the inverse of `grouped`."""
        lead = len(entries) - len(self.shape)
        order = self.order or range(len(self.shape))
        return (*entries[:lead], *[entries[lead + i] for i in order])

    def flat(self, kernel: Any, a: Any, b: Any) -> tuple[Any, Any, Any]:
        """Makes matrices of a kernel and its factors, with batch axes in front."""
        kernel = jnp.transpose(kernel, self.grouped(range(kernel.ndim)))
        apart = kernel.shape[: kernel.ndim - len(self.ins) - len(self.outs)]
        shape = math.prod(self.ins), math.prod(self.outs)
        rank = a.shape[-1]
        return (
            kernel.reshape(*apart, *shape),
            a.reshape(*apart, shape[0], rank),
            b.reshape(*apart, rank, shape[1]),
        )

    def unflat(self, matrices: Any, shape: Shape) -> Any:
        """Gives matrices the shape of a kernel: the inverse of `flat`."""
        order = self.ungrouped(range(len(shape)))
        return jnp.transpose(matrices.reshape(self.grouped(shape)), order)


class Adaptable(NamedTuple):
    """How a class of layers is adapted.

    Attributes:
        adapted: The class that a layer gets.
        axes: ``layer -> Axes`` of the kernel.
        kernel: The name of its kernel.
    """

    adapted: type
    axes: Callable[[Any], Axes]
    kernel: str = "kernel"


def _of_general(layer: Any) -> Axes:
    batch = tuple(layer.batch_axis[axis] for axis in sorted(layer.batch_axis))
    return Axes(batch, layer.in_features, layer.out_features)


def _of_einsum(layer: Any) -> Axes:
    letters = layer.einsum_str.split("->")[0].split(",")[1]
    sizes = dict(zip(letters, layer.kernel_shape, strict=True))
    by_role = roles(layer.einsum_str)
    order = tuple(["".join(by_role).index(x) for x in letters])
    batch, ins, outs = (tuple([sizes[x] for x in role]) for role in by_role)
    return Axes(batch, ins, outs, order)


def _of_grouped(layer: Any) -> Axes:
    num_groups, in_features, out_features = layer.kernel.shape[-3:]
    return Axes((num_groups,), (in_features,), (out_features,))


ADAPTABLE: dict[type, Adaptable] = {
    linear.Linear: Adaptable(
        LoRALinear, lambda x: Axes((), (x.in_features,), (x.out_features,))
    ),
    linear.LinearGeneral: Adaptable(LoRALinearGeneral, _of_general),
    linear.Einsum: Adaptable(LoRAEinsum, _of_einsum),
    conv.Conv: Adaptable(
        LoRAConv, lambda x: Axes((), tuple(x.kernel_shape[:-1]), (x.out_features,))
    ),
    linear.Embed: Adaptable(
        LoRAEmbed, lambda x: Axes((), (x.num_embeddings,), (x.features,)), "embedding"
    ),
    experts.GroupedLinear: Adaptable(LoRAGroupedLinear, _of_grouped),
}
# The classes of layers with LoRA, and the classes that they get back.
PLAIN: dict[type, type] = {x.adapted: plain for plain, x in ADAPTABLE.items()}
PLAIN[lora.LoRALinear] = linear.Linear
