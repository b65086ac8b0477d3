"""What adaptations learned, added to the kernels; or forgotten.

The layers become what they were before `add_lora`: the same objects, built as then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.variables import values, variables
from graftree.nn import lora
from graftree.surgery import adaptable_layers, frozen_variables, selections
from graftree.surgery.selections import Part


def merge_lora(model: Any, where: Any = ...) -> list[Path]:
    """Adds what low-rank adaptations learned to the kernels, in place.

    Each kernel becomes ``kernel + scale * lora_a @ lora_b``, computed in float32 or
    wider, in its own dtype; the layer is what it was before `add_lora`. Layers made as
    `nnx.LoRALinear` become Linear.

    Args:
        model: A Module, or another object or container of layers.
        where: The parts of the model in which the layers are: a pattern of paths, a
            class, a function of path and module, or a list of these.

    Returns:
        The paths of the layers, of each the first.

    Raises:
        ValueError: If no layer there has LoRA; or if the kernel of one is shared, which
            would change others, or is not what the layer computes with; or, outside of
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
    found = _adapted(model, where, call)
    _check_mergeable(model, found, call)
    adaptable_layers.check_owned(found)
    kernels = [adaptable_layers.kernel_of(layer) for _, layer in found]
    merged = [_merged(layer) for _, layer in found]
    _check_finite(found, kernels, merged, call)
    variables.write_all(kernels, merged)
    _take_off(found)
    return [path for path, _ in found]


def remove_lora(model: Any, where: Any = ...) -> list[Path]:
    """Takes low-rank adaptations off, in place, and forgets what they learned.

    Args:
        model: A Module, or another object or container of layers.
        where: The parts of the model in which the layers are, as for `merge_lora`.

    Returns:
        The paths of the layers, of each the first.

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
    found = _adapted(model, where, "nnx.surgery.remove_lora")
    adaptable_layers.check_owned(found)
    _take_off(found)
    return [path for path, _ in found]


def _take_off(layers: Sequence[Part]) -> None:
    for _, layer in layers:
        del layer.lora
        layer.__class__ = adaptable_layers.PLAIN[type(layer)]


def _adapted(model: Any, where: Any, call: str) -> list[Part]:
    """The layers with LoRA in the selected parts of a model."""
    selections.check_model(model, call)
    chosen = [Part((), model)]
    if where is not ...:
        chosen = selections.find(
            model, where, f"{call}: where", among=lambda x: True, what="part"
        )
    ids = {id(x) for _, part in chosen for _, x in selections.parts_of(part)}
    inside = [part for part in selections.parts_of(model) if id(part.value) in ids]
    found = [part for part in inside if type(part.value) in adaptable_layers.PLAIN]
    own = {id(layer.lora) for _, layer in found}
    others = [
        f"{paths.dotted(path)}: {type(x).__name__}"
        for path, x in inside
        if isinstance(x, lora.LoRA) and id(x) not in own
    ]
    if others:
        raise ValueError(
            errors.message(
                f"{call}: LoRA that belongs to no layer that it knows.",
                where="\n".join(others),
                way_out="Select by `where` what nnx.surgery.add_lora changed.",
            )
        )
    if not found:
        there = "the model" if where is ... else patterns.describe(where)
        raise ValueError(f"{call}: no layer in {there} has LoRA.")
    return found


def _check_mergeable(model: Any, layers: Sequence[Part], call: str) -> None:
    """Raises unless all adaptations can be merged."""
    places = _places(model)
    wrapped = selections.ids_overwritten(model)
    refused = [
        f"{paths.dotted(path)}: {reason}"
        for path, layer in layers
        if (reason := _reason_to_keep(layer, places, id(layer) in wrapped))
    ]
    if refused:
        raise ValueError(
            errors.message(
                f"{call}: some adaptations can't be merged.",
                where="\n".join(refused),
                way_out="Leave them as they are by `where`, or give the layer a kernel "
                "of its own: layer.kernel = nnx.clone(layer.kernel).",
            )
        )


def _places(model: Any) -> Mapping[int, list[Path]]:
    """All places of each Variable, by its identity."""
    found: dict[int, list[Path]] = {}
    for path, variable in selections.references(model):
        found.setdefault(id(variable), []).append(path)
    return found


def _reason_to_keep(
    layer: Any, places: Mapping[int, list[Path]], is_wrapped: bool
) -> str | None:
    """Why an adaptation can't be merged, if it can't."""
    kernel = adaptable_layers.kernel_of(layer)
    cls = type(kernel)
    if len(places[id(kernel)]) > 1:
        listed = ", ".join(map(paths.dotted, places[id(kernel)]))
        return f"its kernel is shared: {listed}"
    if is_wrapped:
        return "SpectralNorm or WeightNorm overwrites its weights in each call"
    if behaviour := frozen_variables.own_behaviour(cls):
        return f"its kernel, a {cls.__name__}, has behaviour of its own: {behaviour}"
    if "on_get_value" in variables.metadata_of(kernel):
        return "its kernel has a hook `on_get_value`"
    if values.is_stand_in(kernel.get_raw_value()):
        return "its kernel is abstract"
    if not getattr(layer.lora, "adapts_attend", True):
        return "its `attend` is not adapted, but would be; lora.adapts_attend = True"
    return None


def _check_finite(
    layers: Sequence[Part], kernels: Sequence[Any], merged: Sequence[Any], call: str
) -> None:
    """Raises if a finite kernel would no longer be one; of tracers nobody knows."""
    refused = []
    for (path, _), kernel, new in zip(layers, kernels, merged, strict=True):
        if isinstance(new, _jax.Tracer):
            continue
        lost = int(jnp.sum(jnp.isfinite(kernel[...]) & ~jnp.isfinite(new)))
        if lost:
            where, most = paths.dotted(path), float(jnp.finfo(new.dtype).max)
            refused.append(
                f"{where}: {lost} of {new.size} numbers are no longer finite in "
                f"{new.dtype}, whose largest is {most:g}"
            )
    if refused:
        raise ValueError(
            errors.message(
                f"{call}: some kernels would overflow. Nothing has changed.",
                where="\n".join(refused),
                way_out="Give these a wider dtype first: kernel.set_value("
                "kernel[...].astype(jnp.float32)). If the adaptation has such numbers "
                "itself, use an older one.",
            )
        )


def _merged(layer: Any) -> jax.Array:
    """The kernel with its adaptation; its dtype and sharding stay."""
    kernel = jnp.asarray(adaptable_layers.kernel_of(layer)[...])
    # JAX promotes no float8.
    is_tiny = kernel.dtype.itemsize == 1
    wide = jnp.float32 if is_tiny else jnp.promote_types(kernel.dtype, jnp.float32)
    a, b = (x[...].astype(wide) for x in (layer.lora.lora_a, layer.lora.lora_b))
    _, in_sizes, out_sizes = adaptable_layers.sizes_of(layer)
    apart = kernel.shape[: kernel.ndim - len(in_sizes) - len(out_sizes)]
    rank = a.shape[-1]
    a, b = a.reshape(*apart, -1, rank), b.reshape(*apart, rank, -1)
    change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    scale = getattr(layer.lora, "scale", 1.0)
    merged = kernel.astype(wide) + scale * change.reshape(kernel.shape)
    merged = merged.astype(kernel.dtype)
    if isinstance(merged, _jax.Tracer) or not isinstance(
        kernel.sharding, NamedSharding
    ):
        return merged
    return jax.device_put(merged, kernel.sharding)
