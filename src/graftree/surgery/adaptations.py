"""LoRA onto the layers of a model.

A layer stays the same object with the same Variables at the same paths; only its class
changes, to one in `lora_layers.py`, and it gets the attribute ``lora``. So shared
parts stay shared, and checkpoints of the plain model still fit.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from graftree import _jax
from graftree.annotations import Dtype, Initializer, Path
from graftree.core import paths, patterns
from graftree.core.rng.streams import Rngs
from graftree.core.variables import values, variables
from graftree.nn import lora
from graftree.nn.support import arguments
from graftree.surgery import (
    frozen_variables,
    lora_layers,
    lora_targets,
    quantized_params,
    selections,
)
from graftree.surgery.lora_layers import LowRank
from graftree.surgery.lora_targets import Factors, LoRATarget


def add_lora(
    model: Any,
    where: Any,
    *,
    rank: int,
    rngs: Rngs,
    alpha: float | None = None,
    dropout: float = 0.0,
    use_dora: bool = False,
    use_rslora: bool = False,
    param_dtype: Dtype | None = None,
    a_initializer: Initializer = lora.default_a_initializer,
    b_initializer: Initializer = lora.default_b_initializer,
    param_type: type[variables.Variable[Any]] = lora.LoRAParam,
) -> list[Path]:
    """Adds a low-rank adaptation to layers, in place.

    The kernel of a layer then counts as ``kernel + alpha / rank * lora_a @ lora_b``.
    Its own Variables stay at their paths; the new ones are below them, at
    ``lora.lora_a`` and ``lora.lora_b``, and are sharded like the axes that they share
    with the kernel. Since ``lora_b`` starts as zeros, the outputs do not change yet.
    With DoRA, each column of that sum (its entries for one output) is scaled to the
    length at ``lora.magnitude``, which starts as the present one: load weights before.
    You can adapt `Linear`, `LinearGeneral` (so the four of attention), `Einsum`, `Conv`
    and `Embed`, even in a `Stack`. If you select a Param that a module of your own has
    as an attribute, the module's code reads the sum instead: of its last two axes, with
    factors for each entry of leading ones, at ``lora.<name>.lora_a``.

    Args:
        model: A Module, or another object or container of layers.
        where: The layers: a pattern of paths such as ``"**.attention.{query,value}"``
            (see `at`), a class, a function of path and module, or a list of these. What
            selects no layer selects Params.
        rank: The rank of the adaptations.
        rngs: Gives each layer two keys of the stream ``params``, in the order of paths,
            and for ``dropout`` a stream made from one key of the stream ``dropout``.
        alpha: The scale times the rank; ``None``: a scale of one.
        dropout: How likely an entry of the inputs that the adaptation sees is zero
            while training, until ``model.eval()``; that of `Dropout`. The rows that an
            `Embed` looks up have no inputs.
        use_dora: Whether to train magnitudes and directions of columns apart.
        use_rslora: Whether the scale is ``alpha`` by the root of the rank.
        param_dtype: The dtype in which the new Variables are stored; ``None``: the
            ``param_dtype`` of the layer.
        a_initializer: Initializer of ``lora_a``, called with the shape of a matrix.
        b_initializer: Initializer of ``lora_b``, called with the shape of a matrix.
        param_type: The class of the new Variables.

    Returns:
        The first path of each layer, or Param.

    Raises:
        ValueError: If nothing is selected, or something that can't be adapted: another
            kind of module, one that already has LoRA, your own subclass, grouped and
            masked convolutions, layers in `SpectralNorm` or `WeightNorm`; Params with
            ``dropout``; with DoRA, a kernel with a column of zeros. Or if ``dropout``
            is not in ``[0, 1]``. Then nothing has changed.
        TypeError: If ``model`` or ``where`` have the wrong type.
        KeyError: If ``rngs`` lacks a stream for ``dropout``.
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
        Liu et al., 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5 and 11.
        Kalajdzievski, 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with
        LoRA", eq. 4.
    """
    call = "nnx.surgery.add_lora"
    selections.check_model(model, call)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{call} expects a positive integer as `rank`, got {rank!r}.")
    targets = lora_targets.select(model, where, call)
    lora_targets.check(model, targets, call, dropout=dropout)
    lora_targets.check_owned(targets)
    if alpha is None:
        alpha = math.sqrt(rank) if use_rslora else rank
    streams = [rngs.params] if isinstance(rngs, Rngs) else []
    streams += [rngs["dropout"]] if dropout else []
    changes = []
    with arguments.undone_on_failure(*streams):
        for target in targets:
            keys = arguments.draw_key(rngs), arguments.draw_key(rngs)
            dtype = _param_dtype(target) if param_dtype is None else param_dtype
            factors = Factors(target, rank, dtype, param_type)
            change = LowRank(
                target,
                *factors.make(keys, (a_initializer, b_initializer)),
                alpha=float(alpha),
                use_rslora=use_rslora,
                dropout=factors.dropout(dropout, streams[-1]) if dropout else None,
                param_dtype=dtype,
            )
            if use_dora:
                change.magnitude = factors.magnitude(change)
            changes.append(change)
        _check_magnitudes(targets, changes, call)
    for target, change in zip(targets, changes, strict=True):
        target.put_on(change)
    return [target.own_path for target in targets]


def _check_magnitudes(
    targets: Sequence[LoRATarget], changes: Sequence[LowRank], call: str
) -> None:
    """Raises if a column has no length, and so no direction; ignores tracers."""

    def reason_against(change: LowRank) -> str | None:
        lengths = None if change.magnitude is None else change.magnitude.get_value()
        if not values.is_array(lengths) or isinstance(lengths, _jax.Tracer):
            return None
        count = int(jnp.sum(lengths == 0))
        return f"{count} of its columns are zeros" if count else None

    selections.check_all(
        [(x.own_path, change) for x, change in zip(targets, changes, strict=True)],
        reason_against,
        f"{call}: DoRA scales the columns of a kernel, but some columns are zero. "
        "Nothing has changed.",
        "Adapt these layers without use_dora.",
    )


def _param_dtype(target: LoRATarget) -> Dtype:
    """Returns the dtype in which a layer stores its Params."""
    if target.name is None:
        return target.layer.param_dtype
    dtype = target.kernel.get_raw_value().dtype
    return jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype


def merge_lora(model: Any, where: Any = ...) -> list[Path]:
    """Adds the changes that low-rank adaptations learned to the kernels, in place.

    Each kernel becomes ``kernel + scale * lora_a @ lora_b``, computed in float32 or
    wider, in its own dtype; the layer is then as it was before `add_lora`. Layers
    made as `nnx.LoRALinear` become Linear.

    Args:
        model: A Module, or another object or container of layers.
        where: The parts of the model in which the layers are: a pattern of paths, a
            class, a function of path and module, or a list of these.

    Returns:
        The first path of each layer.

    Raises:
        ValueError: If no layer there has LoRA; or if the kernel of one is shared, so
            that others would change, or the layer does not compute with it; or, outside
            transforms, if a sum is not finite in the dtype of the kernel. Then nothing
            has changed.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the layers.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> paths = nnx.surgery.add_lora(model, nnx.Linear, rank=1, rngs=nnx.Rngs(1))
        >>> model.layers[0].lora.lora_b[...] += 1.0
        >>> x = jnp.ones((1, 2))
        >>> before = model(x)
        >>> nnx.surgery.merge_lora(model)
        [('layers', 0)]
        >>> type(model.layers[0]).__name__, bool(jnp.allclose(model(x), before))
        ('Linear', True)
    """
    call = "nnx.surgery.merge_lora"
    targets = _adapted(model, where, call)
    _check_mergeable(model, targets, call)
    lora_targets.check_owned(targets)
    merged = [_merged(target) for target in targets]
    _check_finite(targets, merged, call)
    variables.write_all([target.kernel for target in targets], merged)
    for target in targets:
        target.take_off()
    return [target.own_path for target in targets]


def remove_lora(model: Any, where: Any = ...) -> list[Path]:
    """Removes low-rank adaptations, in place, and discards the changes they learned.

    Args:
        model: A Module, or another object or container of layers.
        where: The parts of the model in which the layers are, as for `merge_lora`.

    Returns:
        The first path of each layer.

    Raises:
        ValueError: If no layer there has LoRA.
        TypeError: If ``model`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the layers.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> paths = nnx.surgery.add_lora(model, nnx.Linear, rank=1, rngs=nnx.Rngs(1))
        >>> nnx.surgery.remove_lora(model)
        [('layers', 0)]
        >>> list(nnx.state(model.layers[0]))
        ['bias', 'kernel']
    """
    targets = _adapted(model, where, "nnx.surgery.remove_lora")
    lora_targets.check_owned(targets)
    for target in targets:
        target.take_off()
    return [target.own_path for target in targets]


def _adapted(model: Any, selection: Any, call: str) -> list[LoRATarget]:
    """Finds what has LoRA in the selected parts of a model."""
    selections.check_model(model, call)
    items = selections.within(model, selection, call)
    ids = {id(item.value) for item in items}
    targets = [
        target
        for item in selections.parts_of(model)
        for target in lora_targets.adapted_in(item)
        if {id(target.layer), id(target.kernel)} & ids
    ]
    known_changes = {id(target.change) for target in targets}
    others = [item for item in items if isinstance(item.value, lora.LoRA)]
    selections.check_all(
        others,
        lambda x: None if id(x) in known_changes else type(x).__name__,
        f"{call}: found LoRA that does not belong to a layer it knows.",
        "Use `where` to select what nnx.surgery.add_lora changed.",
    )
    if not targets:
        there = "the model" if selection is ... else patterns.describe(selection)
        raise ValueError(f"{call}: no layer in {there} has LoRA.")
    return targets


def _check_mergeable(model: Any, targets: Sequence[LoRATarget], call: str) -> None:
    """Raises unless all adaptations can be merged."""
    paths_by_id = selections.paths_by_id(model)
    wrapped = selections.ids_overwritten(model)
    selections.check_all(
        [(target.own_path, target) for target in targets],
        lambda target: _reason_to_keep(target, paths_by_id, wrapped),
        f"{call}: some adaptations can't be merged.",
        "Exclude them with `where`, or give the layer its own kernel: "
        "layer.kernel = nnx.clone(layer.kernel).",
    )


def _reason_to_keep(
    target: LoRATarget, paths_by_id: Mapping[int, list[Path]], wrapped: Container[int]
) -> str | None:
    """Says why an adaptation can't be merged, if it can't."""
    kernel = target.kernel
    cls = type(kernel)
    if len(paths_by_id[id(kernel)]) > 1:
        aliases = ", ".join(map(paths.dotted, paths_by_id[id(kernel)]))
        return f"its kernel is shared: {aliases}"
    if id(target.layer) in wrapped:
        return "SpectralNorm or WeightNorm overwrites its weights in each call"
    if isinstance(kernel, quantized_params.Quantized):
        return "its kernel is quantized; nnx.surgery.dequantize makes it an array"
    if behaviour := frozen_variables.own_behaviour(cls):
        return f"its kernel, a {cls.__name__}, has custom behaviour: {behaviour}"
    if "on_get_value" in variables.metadata_of(kernel):
        return "its kernel has a hook `on_get_value`"
    if values.is_stand_in(kernel.get_raw_value()):
        return "its kernel is abstract"
    if not getattr(target.change, "adapts_attend", True):
        return "merging would adapt its `attend`, too: set lora.adapts_attend = True"
    return None


def _check_finite(
    targets: Sequence[LoRATarget], merged: Sequence[Any], call: str
) -> None:
    """Raises if a finite kernel would no longer be finite; ignores tracers."""

    def reason_against(pair: tuple[LoRATarget, Any]) -> str | None:
        target, new = pair
        if isinstance(new, _jax.Tracer):
            return None
        kernel = target.kernel[...]
        lost = int(jnp.sum(jnp.isfinite(kernel) & ~jnp.isfinite(new)))
        most = float(jnp.finfo(new.dtype).max)
        words = f"{lost} of {new.size} numbers are no longer finite in {new.dtype}"
        return f"{words}, whose largest is {most:g}" if lost else None

    pairs = zip(targets, merged, strict=True)
    selections.check_all(
        [(pair[0].own_path, pair) for pair in pairs],
        reason_against,
        f"{call}: some kernels would overflow. Nothing has changed.",
        "Give these a wider dtype first: kernel.set_value(kernel[...].astype("
        "jnp.float32)). If the adaptation itself has such numbers, use an earlier one.",
    )


def _merged(target: LoRATarget) -> jax.Array:
    """Adds the adaptation to a kernel; its dtype and sharding stay."""
    kernel = jnp.asarray(target.kernel[...])
    # JAX promotes no float8.
    is_tiny = kernel.dtype.itemsize == 1
    wide = jnp.float32 if is_tiny else jnp.promote_types(kernel.dtype, jnp.float32)
    total = lora_layers.adapted(
        kernel, target.change, target.axes, wide, precision=jax.lax.Precision.HIGHEST
    )
    merged = total.astype(kernel.dtype)
    if isinstance(merged, _jax.Tracer) or not isinstance(
        kernel.sharding, NamedSharding
    ):
        return merged
    return jax.device_put(merged, kernel.sharding)
