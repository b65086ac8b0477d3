"""Targets of low-rank adaptations: the kernels and Params that can have one.

A target is adapted, and made plain again, in the same way whether it is the kernel of a
layer that is known (``lora_layers.py``) or a Param that another module computes with
(``nn/own_params.py``). Its new Variables are made here, sharded as its axes are.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax, errors
from graftree.annotations import Dtype, Initializer, Path
from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.modules.modules import Module
from graftree.core.objects import bookkeeping
from graftree.core.rng.streams import RngStream
from graftree.core.variables import metadata as variable_metadata, values, variables
from graftree.core.variables.variables import Variable
from graftree.nn import compute_dtypes, conv, linear, lora, own_params
from graftree.nn.dropout import Dropout
from graftree.surgery import lora_layers, selections, stacks


class LoRATarget(NamedTuple):
    """What an adaptation changes.

    Attributes:
        path: The path of the layer.
        layer: The module.
        name: The attribute that is a Param of its own; ``None``: the kernel of a layer
            that is known.
        depth: How many leading axes are those of Stacks.
    """

    path: Path
    layer: Any
    name: Any = None
    depth: int = 0

    @property
    def own_path(self) -> Path:
        """Path of the layer, or of the Param."""
        return self.path if self.name is None else (*self.path, self.name)

    @property
    def is_known(self) -> bool:
        """Whether its layer is of a class that has an adaptation."""
        return type(self.layer) in (*lora_layers.ADAPTABLE, *lora_layers.PLAIN)

    @property
    def adaptable(self) -> lora_layers.Adaptable:
        """How its class is adapted."""
        cls = type(self.layer)
        return lora_layers.ADAPTABLE[lora_layers.PLAIN.get(cls, cls)]

    @property
    def kernel(self) -> Variable[Any]:
        """What counts with the change, as it is stored."""
        return vars(self.layer)[
            self.adaptable.kernel if self.name is None else self.name
        ]

    @property
    def axes(self) -> lora_layers.Axes:
        """Axes of the kernel."""
        if self.name is None:
            return self.adaptable.axes(self.layer)
        *batch, ins, outs = self.kernel.shape[self.depth :]
        return lora_layers.Axes(tuple(batch), (ins,), (outs,))

    @property
    def change(self) -> Any:
        """Its `LowRank`; ``None`` if it has none."""
        if self.name is not None:
            return own_params.adaptations_of(self.layer).get(self.name)
        return self.layer.lora if type(self.layer) in lora_layers.PLAIN else None

    def put_on(self, change: lora_layers.LowRank) -> None:
        """Adapts the layer."""
        if self.name is None:
            self.layer.__class__ = self.adaptable.adapted
            self.layer.lora = change
            return
        if not own_params.adaptations_of(self.layer):
            self.layer.lora = own_params.AdaptedParams()
        self.layer.lora[self.name] = change
        own_params.update(self.layer)

    def take_off(self) -> None:
        """Makes the layer what it was before."""
        if self.name is None:
            del self.layer.lora
            self.layer.__class__ = lora_layers.PLAIN[type(self.layer)]
            return
        del self.layer.lora[self.name]
        if not self.layer.lora:
            del self.layer.lora
        own_params.update(self.layer)


def adapted_in(item: selections.ModelPart) -> list[LoRATarget]:
    """Lists what is adapted in a module itself, by `add_lora` or as a `LoRALinear`."""
    if type(item.value) in lora_layers.PLAIN:
        return [LoRATarget(*item)]
    is_module = isinstance(item.value, Module)
    names = own_params.adaptations_of(item.value) if is_module else ()
    return [LoRATarget(*item, name) for name in names]


def select(model: Any, selection: Any, call: str) -> list[LoRATarget]:
    """Finds the layers that are selected, or else the Params, as targets.

    A Param that is the kernel of a layer that can be adapted stands for the layer.
    """
    items = selections.find(
        model,
        selection,
        f"{call}: where",
        among=(nodes.is_node_module, compute_dtypes.is_param),
        kind="layer",
    )
    modules = {x.path: x.value for x in selections.parts_of(model)}
    wrapped = selections.ids_overwritten(model)
    targets = []
    for path, x in items:
        if not isinstance(x, Variable):
            targets.append(LoRATarget(path, x))
            continue
        above = [modules[path[:end]] for end in range(len(path))]
        depth = sum(
            isinstance(y, stacks.Stack) and key != "rest"
            for y, key in zip(above, path, strict=True)
        )
        targets.append(of_param(path, above[-1], x, depth, wrapped))
    return [*{(id(x.layer), x.name): x for x in targets}.values()]


def of_param(
    path: Path, layer: Any, param: Any, depth: int, wrapped: Container[int] = ()
) -> LoRATarget:
    """Returns the target that a Param is: its layer, if that has a way for its kernel.

    Args:
        path: The path of the Param.
        layer: The module that has it.
        param: The Param that is selected.
        depth: How many leading axes are those of Stacks.
        wrapped: The ids of layers whose weights others overwrite.
    """
    target = LoRATarget(path[:-1], layer)
    if target.is_known and target.kernel is param:
        is_adapted = type(layer) in lora_layers.PLAIN
        if is_adapted or _reason_against(target, wrapped) is None:
            return target
    return LoRATarget(path[:-1], layer, path[-1], depth)


def _reason_against(target: LoRATarget, wrapped: Container[int]) -> str | None:
    """Says why something can't be adapted, if it can't."""
    if target.name is not None:
        return _reason_against_own(target, wrapped)
    layer, cls = target.layer, type(target.layer)
    if cls not in lora_layers.ADAPTABLE:
        return _reason_against_class(cls)
    if cls is linear.Einsum and (reason := _reason_against_equation(layer)):
        return reason
    name, kernel, expected = target.adaptable.kernel, target.kernel, target.axes.shape
    shape = getattr(kernel, "shape", ())
    if hasattr(layer, "lora"):
        return f"this {cls.__name__} has an attribute `lora`"
    if not isinstance(kernel, Variable) or tuple(shape[-len(expected) :]) != expected:
        return f"its {name} is {shape}, not {expected}"
    if id(layer) in wrapped:
        return "SpectralNorm or WeightNorm overwrites its weights in each call"
    if cls is conv.Conv and layer.feature_group_count != 1:
        return f"a Conv with feature_group_count={layer.feature_group_count}"
    if cls is conv.Conv and layer.mask is not None:
        return "a Conv with a mask"
    return None


def _reason_against_class(cls: type) -> str:
    if cls in lora_layers.PLAIN or issubclass(cls, lora.LoRA):
        return f"{cls.__name__} already has LoRA"
    if issubclass(cls, tuple(lora_layers.ADAPTABLE)):
        return f"{cls.__name__} is a subclass, which may compute something else"
    return f"{cls.__name__} has no kernel that can be adapted"


def _reason_against_equation(layer: linear.Einsum) -> str | None:
    """Says why an `Einsum` can't be adapted, if its equation is the reason."""
    if layer.einsum_str is None:
        return "an Einsum without an equation of its own"
    inputs, kernel = layer.einsum_str.split("->")[0].split(",")
    roles = _, ins, outs = lora_layers.roles(layer.einsum_str)
    letters = inputs.replace("...", "")
    is_product = all(
        [
            ins and outs and "." not in kernel,
            len({*kernel}) == len(kernel) == sum(map(len, roles)),
            len({*letters}) == len(letters),
        ]
    )
    if not is_product:
        return f"not a product of inputs and a matrix: {layer.einsum_str!r}"
    return None


def _reason_against_own(target: LoRATarget, wrapped: Container[int]) -> str | None:
    layer, name = target.layer, target.name
    if name not in own_params.names_in(layer):
        return f"it is in a {type(layer).__name__}, not an attribute of a module"
    if target.change is not None:
        return "it already has LoRA"
    if isinstance(layer, lora.LoRA):
        return "it is itself part of LoRA"
    if hasattr(layer, "lora") and not own_params.adaptations_of(layer):
        return f"its {type(layer).__name__} has an attribute `lora`"
    kernel = target.kernel
    if id(kernel) in wrapped:
        return "SpectralNorm or WeightNorm overwrites its weights in each call"
    raw = kernel.get_raw_value()
    shape: Any = getattr(raw, "shape", ())
    dtype: Any = getattr(raw, "dtype", None)
    if len(shape) - target.depth < 2:
        return f"it has fewer than two axes of its own: its shape is {shape}"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return f"its dtype is {dtype}"
    return None


def check(
    model: Any, targets: Sequence[LoRATarget], call: str, *, dropout: float = 0.0
) -> None:
    """Raises a ValueError unless all that is selected can be adapted."""
    own = [target for target in targets if target.name is not None]
    if dropout and own:
        raise ValueError(
            errors.message(
                f"{call}: dropout={dropout} drops inputs of a layer, but only the code "
                "of their modules knows which inputs these Params meet.",
                where="\n".join([paths.dotted(target.own_path) for target in own]),
                way_out="Adapt them without dropout, in a separate call.",
            )
        )
    wrapped = selections.ids_overwritten(model)
    class_names = ", ".join(sorted(cls.__name__ for cls in lora_layers.ADAPTABLE))
    selections.check_all(
        [(target.own_path, target) for target in targets],
        lambda target: _reason_against(target, wrapped),
        f"{call}: some of what is selected can't be adapted.",
        f"Select layers of the classes {class_names}, for example with "
        "nnx.All(nnx.Linear, nnx.surgery.at('blocks.**')); or matrices that are "
        "attributes of other modules, by their own paths: 'experts.up'.",
    )


def check_owned(targets: Sequence[LoRATarget]) -> None:
    """Raises unless the current trace may change all of the layers."""
    for target in targets:
        bookkeeping.check_owned(target.layer, paths.dotted(target.path))


# The metadata that factors take over from their kernel.
_INHERITED = frozenset(
    {"out_sharding", "mesh", "sharding_rules", *variable_metadata.REQUIRED}
)


class Factors:
    """Makes the Variables for a target.

    Args:
        target: What can be adapted.
        rank: The rank of the adaptation.
        dtype: The dtype of the Variables.
        kind: Their class.
    """

    def __init__(self, target: LoRATarget, rank: int, dtype: Dtype, kind: Any) -> None:
        self._kernel = target.kernel
        self._dtype = dtype
        self._kind = kind
        self._axes = axes = target.axes
        in_sizes, out_sizes = axes.ins, axes.outs
        shape = axes.grouped(self._kernel.shape)
        self._apart = shape[: len(shape) - len(in_sizes) - len(out_sizes)]
        self._sizes = (*in_sizes, rank), (rank, *out_sizes)
        rows, columns = math.prod(in_sizes), math.prod(out_sizes)
        self._flat = (rows, rank), (rank, columns)

    def make(
        self, keys: Sequence[jax.Array], initializers: Sequence[Initializer]
    ) -> list[Variable[Any]]:
        """Makes ``lora_a`` and ``lora_b``."""
        pairs = enumerate(zip(keys, initializers, strict=True))
        return [self._variable(i, self._initial(i, *pair)) for i, pair in pairs]

    def magnitude(self, change: lora_layers.LowRank) -> Variable[Any]:
        """Makes the lengths of the columns, as they are now."""
        kernel = self._kernel.get_value()
        if values.is_stand_in(kernel):
            shape = (*self._apart, *self._axes.outs)
            return self._variable(2, jax.ShapeDtypeStruct(shape, self._dtype))
        lengths = change.lengths(kernel, self._axes)
        return self._variable(2, lengths.astype(self._dtype))

    def dropout(self, rate: float, stream: RngStream) -> Dropout:
        """Makes a Dropout, with a stream for each layer of a `Stack`."""
        dropout = Dropout(rate)
        num_stacked = len(self._kernel.shape) - len(self._axes.shape)
        stacked = self._kernel.shape[:num_stacked]
        dropout.rngs = stream.split(stacked) if stacked else stream.fork()
        return dropout

    def _initial(self, i: int, key: jax.Array, initializer: Initializer) -> Any:
        shape, flat = (*self._apart, *self._sizes[i]), self._flat[i]

        def make(key: jax.Array) -> jax.Array:
            if not self._apart:
                return jnp.reshape(initializer(key, flat, self._dtype), shape)
            keys = jax.random.split(key, math.prod(self._apart))
            stacked = jax.vmap(lambda key: initializer(key, flat, self._dtype))(keys)
            return jnp.reshape(stacked, shape)

        is_abstract = values.is_stand_in(self._kernel.get_value())
        return jax.eval_shape(make, key) if is_abstract else make(key)

    def _variable(self, i: int, value: Any) -> Variable[Any]:
        """Makes a Variable with the annotation of the kernel, where the kernel is."""
        metadata = variables.metadata_of(self._kernel)
        entries = {name: metadata[name] for name in metadata if name in _INHERITED}
        if "out_sharding" in entries:
            entries["out_sharding"] = self._annotation_of(i, entries["out_sharding"])
        layout = getattr(self._kernel.get_value(), "sharding", None)
        if isinstance(layout, NamedSharding) and not isinstance(value, _jax.Tracer):
            value = _moved(value, self._annotation_of(i, layout))
        elif entries.get("mesh") or not jax.sharding.get_abstract_mesh().empty:
            return self._kind(value, **entries)
        # It is where the kernel is. There may be no mesh now to place it.
        eager = entries.pop("eager_sharding")
        variable = self._kind(value, **entries, eager_sharding=False)
        variable.set_metadata(eager_sharding=eager)
        return variable

    def _annotation_of(self, i: int, annotation: Any) -> Any:
        """Returns the kernel's annotation for the axes that one of them has."""
        if isinstance(annotation, NamedSharding):
            spec = self._annotation_of(i, annotation.spec)
            return NamedSharding(annotation.mesh, spec)
        if not isinstance(annotation, (tuple, list, PartitionSpec)) or not annotation:
            return annotation if isinstance(annotation, PartitionSpec) else None
        missing = len(self._kernel.shape) - len(annotation)
        entries = self._axes.grouped((*annotation, *[None] * missing))
        inputs = len(self._apart) + len(self._axes.ins)
        apart, outputs = entries[: len(self._apart)], entries[inputs:]
        annotations = (
            (*entries[:inputs], None),
            (*apart, None, *outputs),
            (*apart, *outputs),
        )
        is_spec = isinstance(annotation, PartitionSpec)
        return PartitionSpec(*annotations[i]) if is_spec else annotations[i]


def _moved(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(sharding=sharding)
    return jax.device_put(value, sharding)
