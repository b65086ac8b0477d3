"""How PyTorch stores the parameters of our layers: names and layouts.

A table has, for each class of layers, what their PyTorch counterpart calls a tensor,
which attributes it is made of, and its layout. Subclasses are stored like the class.
Attributes that a layer does not have, such as a bias, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from graftree.core.variables.variables import Variable
from graftree.nn import (
    activations,
    conv,
    embed,
    linear,
    multi_head_attention,
    normalization,
)


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """A tensor of a layer.

    Attributes:
        name: What PyTorch calls it, below the layer.
        attributes: Which attributes of our layer it is made of, each as a path.
        layout: As in `layouts`; ``None`` if it is the same on both sides.
    """

    name: str
    attributes: tuple[tuple[str, ...], ...]
    layout: str | None


def tensors_of(layer: Any) -> list[TorchTensor] | None:
    """The tensors of a layer; ``None`` if it is none of ours."""
    for kind in type(layer).__mro__:
        if kind in _TABLE:
            listed = _TABLE[kind](layer)
            return [
                tensor
                for tensor in listed
                if all(_has(layer, path) for path in tensor.attributes)
            ]
    return None


def layout_of(layer: Any, attribute: Any) -> str | None:
    """The layout of one attribute of a layer; ``None`` if it is as ours."""
    for tensor in tensors_of(layer) or ():
        if tensor.attributes == ((attribute,),):
            return tensor.layout
    return None


def _has(layer: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        layer = getattr(layer, name, None)
    held = layer.get_raw_value() if isinstance(layer, Variable) else layer
    return held is not None


def _one(name: str, attribute: str, layout: str | None = None) -> TorchTensor:
    return TorchTensor(name, ((attribute,),), layout)


def _same(**names: str) -> Callable[[Any], list[TorchTensor]]:
    """Tensors that are the same on both sides."""
    tensors = [_one(name, attribute) for name, attribute in names.items()]
    return lambda layer: tensors


def _linear(layer: Any) -> list[TorchTensor]:
    return [_one("weight", "kernel", "o i -> i o"), _one("bias", "bias")]


def _linear_general(layer: Any) -> list[TorchTensor]:
    """PyTorch has one axis for all inputs, and one for all outputs."""
    if layer.batch_axis:
        return []
    ins = " ".join(f"i{k}" for k in range(_count(layer.in_features)))
    outs = " ".join(f"o{k}" for k in range(_count(layer.out_features)))
    return [
        _one("weight", "kernel", f"({outs}) ({ins}) -> {ins} {outs}"),
        _one("bias", "bias", f"({outs}) -> {outs}"),
    ]


def _count(features: Any) -> int:
    return len(features) if isinstance(features, tuple | list) else 1


def _conv(layer: Any) -> list[TorchTensor]:
    axes = _spatial(layer)
    return [
        _one("weight", "kernel", f"o i {axes} -> {axes} i o"),
        _one("bias", "bias"),
    ]


def _conv_transpose(layer: Any) -> list[TorchTensor]:
    """PyTorch's is the gradient of a convolution, whose kernel runs backwards."""
    axes = _spatial(layer)
    if layer.transpose_kernel:
        layout = f"i o {axes} -> {axes} o i"
    else:
        back = " ".join(f"~{axis}" for axis in axes.split())
        layout = f"i o {back} -> {axes} i o"
    return [_one("weight", "kernel", layout), _one("bias", "bias")]


def _spatial(layer: Any) -> str:
    return " ".join(f"k{axis}" for axis in range(_count(layer.kernel_size)))


def _attention(layer: Any) -> list[TorchTensor]:
    """`torch.nn.MultiheadAttention`.

    Queries, keys and values are in one tensor, if their inputs have the same size.
    """
    parts = ("query", "key", "value")
    kernels = tuple((part, "kernel") for part in parts)
    biases = tuple((part, "bias") for part in parts)
    if layer.in_kv_features == layer.in_features:
        inputs = [TorchTensor("in_proj_weight", kernels, "+(h d) e -> e h d")]
    else:
        inputs = [
            TorchTensor(f"{part[0]}_proj_weight", (kernel,), "(h d) e -> e h d")
            for part, kernel in zip(parts, kernels, strict=True)
        ]
    return [
        *inputs,
        TorchTensor("in_proj_bias", biases, "+(h d) -> h d"),
        TorchTensor("out_proj.weight", (("out", "kernel"),), "e (h d) -> h d e"),
        TorchTensor("out_proj.bias", (("out", "bias"),), None),
    ]


_AFFINE = _same(weight="scale", bias="bias")

_TABLE: dict[type, Callable[[Any], list[TorchTensor]]] = {
    linear.Linear: _linear,
    linear.LinearGeneral: _linear_general,
    conv.Conv: _conv,
    conv.ConvTranspose: _conv_transpose,
    embed.Embed: _same(weight="embedding"),
    normalization.LayerNorm: _AFFINE,
    normalization.RMSNorm: _AFFINE,
    normalization.GroupNorm: _AFFINE,
    normalization.InstanceNorm: _AFFINE,
    normalization.BatchNorm: _same(
        weight="scale", bias="bias", running_mean="mean", running_var="var"
    ),
    activations.PReLU: lambda layer: [_one("weight", "negative_slope", "1 ->")],
    multi_head_attention.MultiHeadAttention: _attention,
}
