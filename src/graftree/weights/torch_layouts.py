"""Names and layouts with which PyTorch stores the parameters of our layers.

A table has, for each class of layers, the name of a tensor in their PyTorch
counterpart, the attributes it is made from, and its layout. Subclasses are stored like
the class. Attributes that a layer does not have, such as a bias, are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graftree.core.variables.variables import Variable
from graftree.nn import activations, conv, linear, multi_head_attention, normalization


class TorchTensor(NamedTuple):
    """A tensor of a layer.

    Attributes:
        name: Its name in PyTorch, below the layer.
        attributes: The attributes of our layer it is made from, as ``"query.bias"``.
        layout: As in `layouts`; ``None`` if it is the same on both sides.
    """

    name: str
    attributes: tuple[str, ...]
    layout: str | None


def tensors_of(layer: Any) -> list[TorchTensor] | None:
    """Returns the tensors of a layer; ``None`` if it is not one of ours."""
    for kind in type(layer).__mro__:
        if kind in _TABLE:
            rows = _TABLE[kind]
            rows = rows(layer) if callable(rows) else rows
            tensors = [TorchTensor(name, tuple(x.split()), y) for name, x, y in rows]
            return [x for x in tensors if all(_has(layer, y) for y in x.attributes)]
    return None


def layout_of(layer: Any, attribute: Any) -> str | None:
    """Returns the layout of a layer's attribute; ``None`` if it is the same as ours."""
    for tensor in tensors_of(layer) or ():
        if tensor.attributes == (attribute,):
            return tensor.layout
    return None


def _has(layer: Any, path: str) -> bool:
    names = path.split(".")
    value = functools.reduce(lambda x, name: getattr(x, name, None), names, layer)
    return (value.get_raw_value() if isinstance(value, Variable) else value) is not None


# Name, attributes with spaces between them, layout.
_Row = tuple[str, str, str | None]


def _linear_general(layer: Any) -> list[_Row]:
    """PyTorch has one axis for all inputs, and one for all outputs."""
    if layer.batch_axis:
        return []
    ins, outs = _axes("i", layer.in_features), _axes("o", layer.out_features)
    return [
        ("weight", "kernel", f"({outs}) ({ins}) -> {ins} {outs}"),
        ("bias", "bias", f"({outs}) -> {outs}"),
    ]


def _axes(letter: str, sizes: Any) -> str:
    count = len(sizes) if isinstance(sizes, tuple | list) else 1
    return " ".join(f"{letter}{axis}" for axis in range(count))


def _conv(layer: Any) -> list[_Row]:
    axes = _axes("k", layer.kernel_size)
    return [("weight", "kernel", f"o i {axes} -> {axes} i o"), ("bias", "bias", None)]


def _conv_transpose(layer: Any) -> list[_Row]:
    """PyTorch's is the gradient of a convolution, whose kernel runs backwards."""
    axes, back = _axes("k", layer.kernel_size), _axes("~k", layer.kernel_size)
    layout = f"i o {back} -> {axes} i o"
    if layer.transpose_kernel:
        layout = f"i o {axes} -> {axes} o i"
    return [("weight", "kernel", layout), ("bias", "bias", None)]


def _attention(layer: Any) -> list[_Row]:
    """`torch.nn.MultiheadAttention`.

    Queries, keys and values are in one tensor, if their inputs have the same size.
    """
    kernels = "query.kernel key.kernel value.kernel"
    inputs = [("in_proj_weight", kernels, "+(h d) e -> e h d")]
    if layer.in_kv_features != layer.in_features:
        inputs = [
            (f"{kernel[0]}_proj_weight", kernel, "(h d) e -> e h d")
            for kernel in kernels.split()
        ]
    return [
        *inputs,
        ("in_proj_bias", "query.bias key.bias value.bias", "+(h d) -> h d"),
        ("out_proj.weight", "out.kernel", "e (h d) -> h d e"),
        ("out_proj.bias", "out.bias", None),
    ]


_AFFINE: list[_Row] = [("weight", "scale", None), ("bias", "bias", None)]
_STATISTICS: list[_Row] = [("running_mean", "mean", None), ("running_var", "var", None)]

_TABLE: dict[type, Sequence[_Row] | Callable[[Any], Sequence[_Row]]] = {
    linear.Linear: [("weight", "kernel", "o i -> i o"), ("bias", "bias", None)],
    linear.LinearGeneral: _linear_general,
    conv.Conv: _conv,
    conv.ConvTranspose: _conv_transpose,
    linear.Embed: [("weight", "embedding", None)],
    normalization.LayerNorm: _AFFINE,
    normalization.RMSNorm: _AFFINE,
    normalization.GroupNorm: _AFFINE,
    normalization.InstanceNorm: _AFFINE,
    normalization.BatchNorm: [*_AFFINE, *_STATISTICS],
    activations.PReLU: [("weight", "negative_slope", "1 ->")],
    multi_head_attention.MultiHeadAttention: _attention,
}
