"""Which layers can be adapted, and why others can't.

A kernel has leading axes, which are those of a `Stack`, batch axes, and then the axes
that meet the inputs and those of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graftree import errors
from graftree.core import paths
from graftree.core.objects import bookkeeping
from graftree.core.variables.variables import Variable
from graftree.nn import conv, linear, lora
from graftree.surgery import lora_layers, selections
from graftree.surgery.selections import Part

# The sizes of the batch axes, of those that meet the inputs, and of the outputs.
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Kind(NamedTuple):
    """How a class of layers is adapted.

    Attributes:
        adapted: The class that a layer gets.
        kernel: The name of its kernel.
        axes: ``layer -> (batch sizes, in sizes, out sizes)`` of the kernel.
    """

    adapted: type
    kernel: str
    axes: Callable[[Any], Sizes]


def _of_general(layer: Any) -> Sizes:
    batch = tuple(layer.batch_axis[axis] for axis in sorted(layer.batch_axis))
    return batch, layer.in_features, layer.out_features


KINDS: dict[type, Kind] = {
    linear.Linear: Kind(
        lora_layers.LoRALinear,
        "kernel",
        lambda x: ((), (x.in_features,), (x.out_features,)),
    ),
    linear.LinearGeneral: Kind(lora_layers.LoRALinearGeneral, "kernel", _of_general),
    conv.Conv: Kind(
        lora_layers.LoRAConv,
        "kernel",
        lambda x: ((), tuple(x.kernel_shape[:-1]), (x.out_features,)),
    ),
    linear.Embed: Kind(
        lora_layers.LoRAEmbed,
        "embedding",
        lambda x: ((), (x.num_embeddings,), (x.features,)),
    ),
}
# The classes that layers have with LoRA, and those that they get back.
PLAIN: dict[type, type] = {kind.adapted: plain for plain, kind in KINDS.items()}
PLAIN[lora.LoRALinear] = linear.Linear


def is_adapted(layer: Any) -> bool:
    """Whether `add_lora` has adapted a layer."""
    return type(layer) in {kind.adapted for kind in KINDS.values()}


def is_adaptable(layer: Any) -> bool:
    """Whether it is of a class that is, or can be, adapted."""
    cls = type(layer)
    return PLAIN.get(cls, cls) in KINDS


def kernel_of(layer: Any) -> Variable[Any]:
    """The kernel of a layer, with or without LoRA."""
    cls = type(layer)
    return getattr(layer, KINDS[PLAIN.get(cls, cls)].kernel)


def sizes_of(layer: Any) -> Sizes:
    """The sizes of the axes of its kernel, but for leading ones."""
    cls = type(layer)
    return KINDS[PLAIN.get(cls, cls)].axes(layer)


def _reason_against(layer: Any, is_wrapped: bool) -> str | None:
    """Why a layer can't be adapted, if it can't."""
    cls = type(layer)
    if cls not in KINDS:
        return _reason_against_class(cls)
    kind = KINDS[cls]
    kernel = getattr(layer, kind.kernel)
    expected = tuple(size for sizes in kind.axes(layer) for size in sizes)
    shape = getattr(kernel, "shape", ())
    if hasattr(layer, "lora"):
        return f"this {cls.__name__} has an attribute `lora`"
    if not isinstance(kernel, Variable) or tuple(shape[-len(expected) :]) != expected:
        return f"its {kind.kernel} is {shape}, and not {expected}"
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
    if issubclass(cls, tuple(KINDS)):
        return f"{cls.__name__} is a subclass, which may compute something else"
    return f"{cls.__name__} has no kernel that can be adapted"


def check(model: Any, layers: Sequence[Part], call: str) -> None:
    """Raises a ValueError unless all of the selected parts can be adapted."""
    wrapped = selections.ids_overwritten(model)
    refused = [
        f"{paths.dotted(path)}: {reason}"
        for path, layer in layers
        if (reason := _reason_against(layer, id(layer) in wrapped))
    ]
    if refused:
        known = ", ".join(sorted(kind.__name__ for kind in KINDS))
        raise ValueError(
            errors.message(
                f"{call}: some of what is selected can't be adapted.",
                where="\n".join(refused),
                way_out=f"Select layers of the classes {known}, for example by "
                "nnx.All(nnx.Linear, nnx.surgery.at('blocks.**')).",
            )
        )


def check_owned(layers: Sequence[Part]) -> None:
    """Raises unless the current trace may change all of the layers."""
    for path, layer in layers:
        bookkeeping.check_owned(layer, paths.dotted(path))
