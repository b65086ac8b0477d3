"""Layers with a low-rank adaptation: those that can have it, and their new classes.

Each stays a layer of its kind, with the same Variables at the same paths, and gets one
more attribute, ``lora``. Its kernel counts as ``kernel + scale * lora_a @ lora_b``,
computed from left to right, so that the product of the two is never made:

    layer            lora_a                      lora_b
    Linear           [in, rank]                  [rank, out]
    LinearGeneral    [*batch, *in, rank]         [*batch, rank, *out]
    Conv             [*kernel_size, in, rank]    [rank, out]
    Embed            [num_embeddings, rank]      [rank, features]

A `Stack` adds leading axes in front.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax
from graftree.annotations import Dtype, Initializer, Path
from graftree.core import paths
from graftree.core.objects import bookkeeping
from graftree.core.variables import metadata as variable_metadata, values, variables
from graftree.core.variables.variables import Variable
from graftree.nn import conv, linear, lora
from graftree.nn.support import arguments, meshes
from graftree.surgery import selections


class LowRank(lora.LoRA):
    """The low-rank part of a layer: two Variables and a scale.

    Args:
        layer: The layer.
        lora_a: The Variable that meets the inputs.
        lora_b: The Variable that gives the outputs.
        scale: A factor, ``alpha / rank``.
        param_dtype: The dtype in which the Variables are stored.

    Attributes:
        adapts_attend: For an `Embed`, whether `attend` is adapted like the lookup.
    """

    def __init__(
        self,
        layer: Any,
        lora_a: Variable[Any],
        lora_b: Variable[Any],
        *,
        scale: float,
        param_dtype: Dtype,
    ):
        _, ins, outs = sizes_of(layer)
        is_matrix = len(ins) == len(outs) == 1
        self.in_features = ins[0] if is_matrix else ins
        self.out_features = outs[0] if is_matrix else outs
        self.scale = scale
        self.adapts_attend = True
        self.dtype = vars(layer)["dtype"]  # of an Embed, only if one was set
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
        """The change to the outputs of a Linear."""
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


def _sum(
    compute: Callable[..., Any],
    change: Callable[..., Any],
    inputs: Any,
    out_sharding: Any,
) -> Any:
    """The outputs of a layer plus the low-rank change, in the dtype of the outputs."""
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
        return _sum(super().__call__, self._change_of_rows, inputs, out_sharding)

    def _change_of_rows(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        _, a, b = self.lora.operands(jnp.zeros((), self.lora.lora_a.dtype))
        numbers = arguments.as_array(inputs)
        between = lora.along_batch(out_sharding, numbers.ndim + 1)
        rows = meshes.look_up(a, numbers, between)
        return _last_with(rows, b, **arguments.if_set(out_sharding=out_sharding))

    def attend(self, query: Any, out_sharding: Any = None) -> Any:
        """Multiplies ``query`` with every row, as the `Embed` does."""
        if not self.lora.adapts_attend:
            return super().attend(query, **arguments.if_set(out_sharding=out_sharding))
        return _sum(super().attend, self._change_of_scores, query, out_sharding)

    def _change_of_scores(self, query: Any, **options: Any) -> jax.Array:
        x, a, b = self.lora.operands(query)
        return _chained(x, b.T, a.T, (x.ndim - 1,), 0, **options)


# The sizes of the batch axes, of those that meet the inputs, and of the outputs.
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Adaptable(NamedTuple):
    """The adaptation of a class of layers.

    Attributes:
        adapted: The class that a layer gets.
        axes: ``layer -> (batch sizes, in sizes, out sizes)`` of the kernel.
        kernel: The name of its kernel.
    """

    adapted: type
    axes: Callable[[Any], Sizes]
    kernel: str = "kernel"


def _of_general(layer: Any) -> Sizes:
    batch = tuple(layer.batch_axis[axis] for axis in sorted(layer.batch_axis))
    return batch, layer.in_features, layer.out_features


ADAPTABLE: dict[type, Adaptable] = {
    linear.Linear: Adaptable(
        LoRALinear, lambda x: ((), (x.in_features,), (x.out_features,))
    ),
    linear.LinearGeneral: Adaptable(LoRALinearGeneral, _of_general),
    conv.Conv: Adaptable(
        LoRAConv, lambda x: ((), tuple(x.kernel_shape[:-1]), (x.out_features,))
    ),
    linear.Embed: Adaptable(
        LoRAEmbed, lambda x: ((), (x.num_embeddings,), (x.features,)), "embedding"
    ),
}
# The classes of layers with LoRA, and the classes that they get back.
PLAIN: dict[type, type] = {x.adapted: plain for plain, x in ADAPTABLE.items()}
PLAIN[lora.LoRALinear] = linear.Linear


def is_adapted(layer: Any) -> bool:
    """Whether `add_lora` has adapted a layer."""
    return type(layer) in PLAIN and type(layer) is not lora.LoRALinear


def plain_of(layer: Any) -> type:
    """The class of a layer, or the one that it had without LoRA."""
    return PLAIN.get(type(layer), type(layer))


def is_adaptable(layer: Any) -> bool:
    """Whether its class is adapted, or can be."""
    return plain_of(layer) in ADAPTABLE


def kernel_of(layer: Any) -> Variable[Any]:
    """The kernel of a layer, with or without LoRA."""
    return getattr(layer, ADAPTABLE[plain_of(layer)].kernel)


def sizes_of(layer: Any) -> Sizes:
    """The sizes of the axes of its kernel, except leading ones."""
    return ADAPTABLE[plain_of(layer)].axes(layer)


def _reason_against(layer: Any, is_wrapped: bool) -> str | None:
    """The reason why a layer can't be adapted, if there is one."""
    cls = type(layer)
    if cls not in ADAPTABLE:
        return _reason_against_class(cls)
    name, kernel = ADAPTABLE[cls].kernel, kernel_of(layer)
    expected = tuple(size for sizes in sizes_of(layer) for size in sizes)
    shape = getattr(kernel, "shape", ())
    if hasattr(layer, "lora"):
        return f"this {cls.__name__} has an attribute `lora`"
    if not isinstance(kernel, Variable) or tuple(shape[-len(expected) :]) != expected:
        return f"its {name} is {shape}, and not {expected}"
    if is_wrapped:
        return "SpectralNorm or WeightNorm overwrites its weights in each call"
    if cls is conv.Conv and layer.feature_group_count != 1:
        return f"a Conv with feature_group_count={layer.feature_group_count}"
    if cls is conv.Conv and layer.mask is not None:
        return "a Conv with a mask"
    return None


def _reason_against_class(cls: type) -> str:
    if cls in PLAIN or issubclass(cls, lora.LoRA):
        return f"{cls.__name__} has LoRA already"
    if issubclass(cls, tuple(ADAPTABLE)):
        return f"{cls.__name__} is a subclass, which may compute something else"
    return f"{cls.__name__} has no kernel that can be adapted"


def check(model: Any, layers: Sequence[tuple[Path, Any]], call: str) -> None:
    """Raises a ValueError unless all of the selected parts can be adapted."""
    wrapped = selections.ids_overwritten(model)
    known = ", ".join(sorted(cls.__name__ for cls in ADAPTABLE))
    selections.refuse(
        layers,
        lambda x: _reason_against(x, id(x) in wrapped),
        f"{call}: some of what is selected can't be adapted.",
        f"Select layers of the classes {known}, for example by "
        "nnx.All(nnx.Linear, nnx.surgery.at('blocks.**')).",
    )


def check_owned(layers: Sequence[selections.ModelPart]) -> None:
    """Raises unless the current trace may change all of the layers."""
    for path, layer in layers:
        bookkeeping.check_owned(layer, paths.dotted(path))


# The metadata that factors take over from their kernel.
_INHERITED = frozenset(
    {"out_sharding", "mesh", "sharding_rules", *variable_metadata.REQUIRED}
)


class Factors:
    """Makes both Variables for a layer.

    Args:
        layer: The layer, which can be adapted.
        rank: The rank of the adaptation.
        dtype: The dtype of the Variables.
        kind: Their class.
    """

    def __init__(self, layer: Any, rank: int, dtype: Dtype, kind: Any) -> None:
        self._kernel = kernel_of(layer)
        self._dtype = dtype
        self._kind = kind
        _, in_sizes, out_sizes = sizes_of(layer)
        shape = tuple(self._kernel.shape)
        self._apart = shape[: len(shape) - len(in_sizes) - len(out_sizes)]
        self._num_inputs = len(in_sizes)
        self._sizes = (*in_sizes, rank), (rank, *out_sizes)
        rows, columns = math.prod(in_sizes), math.prod(out_sizes)
        self._flat = (rows, rank), (rank, columns)

    def made(
        self, keys: Sequence[jax.Array], initializers: Sequence[Initializer]
    ) -> list[Variable[Any]]:
        """Makes ``lora_a`` and ``lora_b``."""
        pairs = enumerate(zip(keys, initializers, strict=True))
        return [self._placed(i, self._initial(i, *pair)) for i, pair in pairs]

    def _initial(self, number: int, key: jax.Array, initializer: Initializer) -> Any:
        shape, flat = (*self._apart, *self._sizes[number]), self._flat[number]

        def make(key: jax.Array) -> jax.Array:
            if not self._apart:
                return jnp.reshape(initializer(key, flat, self._dtype), shape)
            keys = jax.random.split(key, math.prod(self._apart))
            made = jax.vmap(lambda key: initializer(key, flat, self._dtype))(keys)
            return jnp.reshape(made, shape)

        is_abstract = values.is_stand_in(self._kernel.get_raw_value())
        return jax.eval_shape(make, key) if is_abstract else make(key)

    def _placed(self, number: int, value: Any) -> Variable[Any]:
        """A Variable with the annotation of the kernel, where the kernel is."""
        given = variables.metadata_of(self._kernel)
        entries = {name: given[name] for name in given if name in _INHERITED}
        if "out_sharding" in entries:
            entries["out_sharding"] = self._part(number, entries["out_sharding"])
        own = getattr(self._kernel.get_value(), "sharding", None)
        if isinstance(own, NamedSharding) and not isinstance(value, _jax.Tracer):
            value = _moved(value, self._part(number, own))
        elif entries.get("mesh") or not jax.sharding.get_abstract_mesh().empty:
            return self._kind(value, **entries)
        # It is where the kernel is. There may be no mesh now to place it.
        eager = entries.pop("eager_sharding")
        variable = self._kind(value, **entries, eager_sharding=False)
        variable.set_metadata(eager_sharding=eager)
        return variable

    def _part(self, number: int, annotation: Any) -> Any:
        """The part of a kernel's annotation for the axes that one of the two has."""
        if isinstance(annotation, NamedSharding):
            spec = self._part(number, annotation.spec)
            return NamedSharding(annotation.mesh, spec)
        if not isinstance(annotation, (tuple, list, PartitionSpec)) or not annotation:
            return annotation if isinstance(annotation, PartitionSpec) else None
        missing = len(self._kernel.shape) - len(annotation)
        entries = (*annotation, *[None] * missing)
        inputs = len(self._apart) + self._num_inputs
        parts = (
            (*entries[:inputs], None),
            (*entries[: len(self._apart)], None, *entries[inputs:]),
        )
        is_spec = isinstance(annotation, PartitionSpec)
        return PartitionSpec(*parts[number]) if is_spec else parts[number]


def _moved(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(sharding=sharding)
    return jax.device_put(value, sharding)
