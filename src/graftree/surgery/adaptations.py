"""LoRA onto the layers of a model.

A layer stays the same object with the same Variables at the same paths; it only becomes
one of a class in `lora_layers.py`, with the attribute ``lora``. So what is shared stays
shared, and the checkpoints of the plain model still fit.
"""

from __future__ import annotations

from typing import Any

from graftree.annotations import Dtype, Initializer, Path
from graftree.core.rng.streams import Rngs
from graftree.core.variables.variables import Variable
from graftree.nn import lora
from graftree.nn.support import arguments, parameters
from graftree.surgery import adaptable_layers, selections
from graftree.surgery.factors import Factors
from graftree.surgery.lora_layers import LowRank


def add_lora(
    model: Any,
    where: Any,
    *,
    rank: int,
    rngs: Rngs,
    alpha: float | None = None,
    param_dtype: Dtype | None = None,
    a_initializer: Initializer = lora.default_a_initializer,
    b_initializer: Initializer = lora.default_b_initializer,
    param_type: type[Variable[Any]] = lora.LoRAParam,
) -> list[Path]:
    """Adds a low-rank adaptation to layers, in place.

    The kernel of a layer then counts as ``kernel + alpha / rank * lora_a @ lora_b``.
    Its own Variables stay at their paths; the new ones are below them, at
    ``lora.lora_a`` and ``lora.lora_b``, and are sharded like the axes of the kernel
    that they have. Since ``lora_b`` starts with zeros, the outputs are what they were.
    `Linear`, `LinearGeneral` (so the four of attention), `Conv` and `Embed` can be
    adapted, also in a `Stack`.

    Args:
        model: A Module, or another object or container of layers.
        where: The layers: a pattern of paths such as ``"**.attention.{query,value}"``
            (see `at`), a class, a function of path and module, or a list of these.
        rank: The rank of the adaptations.
        rngs: Gives each layer two keys of the stream ``params``, in the order of paths.
        alpha: The scale times the rank; ``None``: the scale is one.
        param_dtype: The dtype in which the new Variables are stored; ``None``: the
            ``param_dtype`` of the layer.
        a_initializer: Initializer of ``lora_a``, called with the shape of a matrix.
        b_initializer: Initializer of ``lora_b``, called with the shape of a matrix.
        param_type: The class of the new Variables.

    Returns:
        The paths of the layers, of each the first.

    Raises:
        ValueError: If nothing is selected, or something that can't be adapted: another
            kind of module, one with LoRA already, a subclass of the user's, grouped and
            masked convolutions, layers in `SpectralNorm` or `WeightNorm`. Then nothing
            has changed.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the layers.

    Example:
        >>> attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
        >>> model = nnx.Dict(attention=attention)
        >>> where = "attention.{query,value}"
        >>> nnx.surgery.add_lora(model, where, rank=2, alpha=4, rngs=nnx.Rngs(1))
        [('attention', 'query'), ('attention', 'value')]
        >>> adapted = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
        >>> [".".join(path) for path in adapted.paths][:2]
        ['attention.query.lora.lora_a', 'attention.query.lora.lora_b']

    References:
        Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models", eq. 3.
    """
    call = "nnx.surgery.add_lora"
    selections.check_model(model, call)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{call} expects a positive integer as `rank`, got {rank!r}.")
    found = selections.find(model, where, f"{call}: where", what="layer")
    adaptable_layers.check(model, found, call)
    adaptable_layers.check_owned(found)
    scale = 1.0 if alpha is None else alpha / rank
    made = []
    with arguments.undone_on_failure(*_streams(rngs)):
        for _, layer in found:
            keys = parameters.draw_key(rngs), parameters.draw_key(rngs)
            dtype = layer.param_dtype if param_dtype is None else param_dtype
            factors = Factors(layer, rank, dtype, param_type)
            a = factors.a(keys[0], a_initializer)
            b = factors.b(keys[1], b_initializer)
            made.append(_low_rank(layer, a, b, scale, dtype))
    for (_, layer), adaptation in zip(found, made, strict=True):
        layer.__class__ = adaptable_layers.KINDS[type(layer)].adapted
        layer.lora = adaptation
    return [path for path, _ in found]


def _streams(rngs: Any) -> list[Any]:
    """The streams from which keys are drawn."""
    return [rngs.params] if isinstance(rngs, Rngs) else []


def _low_rank(layer: Any, a: Any, b: Any, scale: float, dtype: Dtype) -> LowRank:
    _, in_sizes, out_sizes = adaptable_layers.sizes_of(layer)
    is_matrix = len(in_sizes) == len(out_sizes) == 1
    return LowRank(
        a,
        b,
        scale=scale,
        in_features=in_sizes[0] if is_matrix else in_sizes,
        out_features=out_sizes[0] if is_matrix else out_sizes,
        dtype=layer.dtype,
        param_dtype=dtype,
    )
