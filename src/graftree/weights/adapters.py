"""LoRA adapters in the format of PEFT: a file of factors, and a config beside it.

PEFT names the factors of a layer after its weight, ``q_proj.lora_A.weight``, and
``wte.lora_embedding_A`` of an embedding; the table that loads the weights of the model
says which layer that is. Beside the factors of embeddings and of the head PEFT writes
their own weights, which must be those of the model.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import updates
from graftree.core.rng.streams import Rngs
from graftree.nn import embed
from graftree.surgery import adaptable_layers, adaptations, lora_layers, selections
from graftree.surgery.selections import Part
from graftree.weights import (
    adapter_configs,
    factor_layouts,
    loading,
    saving,
    sources,
    tables,
)
from graftree.weights.adapter_configs import Adaptation
from graftree.weights.factor_layouts import FactorLayouts
from graftree.weights.stored_tensors import Source
from graftree.weights.tables import Array, Tensor

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<factor>lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.weight)"
)
_BASE = "base_layer.weight"
_FACTORS = ("lora_A.weight", "lora_B.weight")
_FACTORS_OF_EMBED = ("lora_embedding_A", "lora_embedding_B")


class _Layer(NamedTuple):
    """A layer that can be adapted.

    Attributes:
        path: Its path in the model.
        layer: The layer.
        at: Which one it is, if several are stacked.
        weight: Its weight in a file.
        layouts: Those of its factors.
    """

    path: Path
    layer: Any
    at: tuple[int, ...]
    weight: Tensor
    layouts: FactorLayouts

    @property
    def factors(self) -> tuple[str, str]:
        """What PEFT calls its factors."""
        is_embed = isinstance(self.layer, embed.Embed)
        return _FACTORS_OF_EMBED if is_embed else _FACTORS


def load_adapter(folder: Any, model: Any, mapping: Any) -> list[Path]:
    """Loads a LoRA adapter of PEFT onto a model, in place: all of it, or none.

    If the model has no adapted layers, those that the adapter has factors for are
    adapted, as by `nnx.surgery.add_lora`. If it has some, they must be the same ones,
    with the same rank and scale. As in PEFT, the `attend` of an Embed is not adapted.

    Args:
        folder: Has an ``adapter_config.json`` and an ``adapter_model.safetensors``.
        model: The model, with its own weights.
        mapping: The table by which the weights of the model are loaded.

    Returns:
        The paths of the adapted layers.

    Raises:
        ValueError: If the adapter has layers that the table or the model lacks, or is
            more than two factors by layer: DoRA, trained biases, whole modules, factors
            that go with other weights than the model's. Nothing has changed then.
        WeightsError: If a file is damaged.

    Example:
        >>> import tempfile
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> adapted = nnx.clone(model)
        >>> nnx.surgery.add_lora(adapted, "up", rank=1, rngs=nnx.Rngs(1))
        [('up',)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nnx.weights.save_adapter(folder, adapted, {"fc": "up"})
        ...     nnx.weights.load_adapter(folder, model, {"fc": "up"})
        [('up',)]
        >>> jnp.array_equal(model.up.lora.lora_a, adapted.up.lora.lora_a)
        Array(True, dtype=bool)

    References:
        Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    folder = pathlib.Path(os.path.expanduser(folder))
    config = adapter_configs.read(folder / CONFIG)
    layers = _layers(model, mapping)
    with sources.open(folder / FILE) as source:
        modules = _modules(source, layers, _fused(model, mapping))
        kinds = {name: _checked(name, source, config, layers) for name in modules}
        adapted = _prepare(model, {name: layers[name] for name in modules}, kinds)
        tensors = [
            tensor
            for name in modules
            for tensor in _tensors(layers[name], modules[name])
        ]
        arrays = loading.arrays_from(source, tensors)
    updates.write_at(model, arrays)
    for name in modules:
        layer = layers[name].layer
        if isinstance(layer, lora_layers.LoRAEmbed):
            layer.lora.adapts_attend = False
    return adapted


def save_adapter(
    folder: Any,
    model: Any,
    mapping: Any,
    *,
    base_model: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Writes the LoRA factors of a model in the format of PEFT.

    Args:
        folder: Gets an ``adapter_config.json`` and an ``adapter_model.safetensors``.
        model: The model; its adapted layers are found.
        mapping: The table by which its weights are loaded.
        base_model: Where PEFT finds the model itself.
        task_type: What PEFT wraps the model for; ``None``: nothing in particular.

    Raises:
        ValueError: If no layer is adapted, the table lacks one that is, or `attend` of
            an Embed is adapted, too.

    Example:
        >>> import pathlib, tempfile
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.surgery.add_lora(model, "up", rank=1, rngs=nnx.Rngs(1))
        [('up',)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nnx.weights.save_adapter(folder, model, {"fc": "up"})
        ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    layers = _layers(model, mapping)
    adapted = {
        name: x for name, x in layers.items() if adaptable_layers.is_adapted(x.layer)
    }
    known = {id(x.layer) for x in adapted.values()}
    unknown = [
        part.path
        for part in selections.parts_of(model)
        if adaptable_layers.is_adapted(part.value) and id(part.value) not in known
    ]
    if unknown or not adapted:
        raise ValueError(
            errors.message(
                "nnx.weights.save_adapter: "
                + (
                    "the table lacks adapted layers."
                    if unknown
                    else "no layer is adapted."
                )
                + " Nothing was written.",
                where="\n".join(map(paths.dotted, unknown[:12])),
                way_out="nnx.surgery.add_lora adapts layers; each needs a line in the "
                "table for its weight.",
            )
        )
    _check_embeds(adapted)
    tensors = [
        tensor
        for name, layer in adapted.items()
        for tensor in _tensors(layer, {f: f"{PREFIX}{name}.{f}" for f in layer.factors})
    ]
    kinds = {name: _adaptation_of(x.layer) for name, x in adapted.items()}
    config = adapter_configs.write(kinds, [*layers], base_model, task_type)
    folder = pathlib.Path(os.path.expanduser(folder))
    saving.write(folder / FILE, tensors, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _check_embeds(adapted: Mapping[str, _Layer]) -> None:
    """Raises if an embedding is adapted in a way that PEFT can't do."""
    wrong = [
        paths.dotted(x.path)
        for x in adapted.values()
        if isinstance(x.layer, lora_layers.LoRAEmbed) and x.layer.lora.adapts_attend
    ]
    if wrong:
        raise ValueError(
            errors.message(
                "nnx.weights.save_adapter: PEFT adapts what an embedding looks up, and "
                "not its `attend`. Nothing was written.",
                where="\n".join(wrong),
                way_out="If the model does not call it, or should not adapt it, set "
                "`lora.adapts_attend = False` there.",
            )
        )


# ------------------------------------------------------------------------- the layers


def _layers(model: Any, mapping: Any) -> dict[str, _Layer]:
    """The layers that can be adapted, by the names of their weights in files."""
    modules = {
        part.path: part.value
        for part in selections.parts_of(model)
        if selections.is_module(part.value)
    }
    found = {}
    for tensor in tables.as_mapping(mapping).tensors(model):
        path = tensor.arrays[0].path[:-1]
        layer = modules.get(path)
        is_kernel = (
            len(tensor.arrays) == 1
            and tensor.name.endswith(".weight")
            and adaptable_layers.is_adaptable(layer)
            and adaptable_layers.kernel_of(layer) is tensor.arrays[0].leaf
        )
        if is_kernel:
            batch, _, outs = adaptable_layers.sizes_of(layer)
            of_factors = factor_layouts.of_weight(tensor.solved, len(outs))
            if of_factors is not None and not batch:
                name = tensor.name.removesuffix(".weight")
                found[name] = _Layer(path, layer, tensor.at, tensor, of_factors)
    return found


def _fused(model: Any, mapping: Any) -> set[str]:
    """The names of weights that are several arrays in the model."""
    return {
        tensor.name.removesuffix(".weight")
        for tensor in tables.as_mapping(mapping).tensors(model)
        if len(tensor.arrays) > 1
    }


def _checked(
    name: str, source: Source, config: Mapping[str, Any], layers: Mapping[str, _Layer]
) -> Adaptation:
    """How a layer is adapted; its factors have the shapes for that."""
    adaptation = adapter_configs.adaptation_of(config, name)
    stored = {
        found["factor"]: source.tensors[full].shape
        for full in source.tensors
        if (found := _NAME.fullmatch(full)) and found["module"] == name
    }
    layer = layers[name]
    if stored.pop(_BASE, None) is not None:
        _check_base(name, source, layer)
    _, ins, outs = adaptable_layers.sizes_of(layer.layer)
    rank = adaptation.rank
    shapes = (*ins, rank), (rank, *outs)
    expected = {
        factor: layout.solve([shape]).file_shape
        for factor, layout, shape in zip(
            layer.factors, layer.layouts, shapes, strict=True
        )
    }
    if stored != expected:
        raise ValueError(
            errors.message(
                f"{source.name}: the factors of {name!r} have other shapes. Nothing "
                "has changed.",
                where=f"expected {expected}\ngot      {stored}",
                way_out="Is it the adapter of another model?",
            )
        )
    return adaptation


def _check_base(name: str, source: Source, layer: _Layer) -> None:
    """Raises unless the weight of a layer in the adapter is that of the model."""
    solved, at = layer.weight.solved, layer.weight.at
    held = layer.weight.arrays[0].value
    found = next(
        full
        for full in source.tensors
        if (match := _NAME.fullmatch(full))
        and (match["module"], match["factor"]) == (name, _BASE)
    )
    is_same = source.tensors[found].shape == solved.file_shape
    if is_same and not isinstance(held, jax.ShapeDtypeStruct):
        whole = tuple(slice(0, size) for size in held.shape[len(at) :])
        given = solved.read(
            0, whole, lambda view: source.read(found, view, solved.view_shape)
        )
        is_same = bool(jnp.array_equal(held[at], given.astype(held.dtype)))
    if not is_same:
        raise ValueError(
            errors.message(
                f"{source.name}: the adapter has a weight of its own for {name!r}, "
                "which is not that of the model. Nothing has changed.",
                way_out="Is it the adapter of another model? If its weights were "
                "trained, merge it in PEFT, and load the merged weights.",
            )
        )


def _modules(
    source: Source, layers: Mapping[str, _Layer], fused: Container[str]
) -> dict[str, dict[str, str]]:
    """The names of both factors of each layer; raises for those that are unknown."""
    found: dict[str, dict[str, str]] = {}
    unknown = []
    for name in source.tensors:
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in layers:
            is_fused = match is not None and match["module"] in fused
            unknown.append(name + ": several layers in the model" * is_fused)
        else:
            found.setdefault(match["module"], {})[match["factor"]] = name
    unknown += [
        f"{name}: a factor is missing"
        for name, x in found.items()
        if len({*x} - {_BASE}) < 2
    ]
    if unknown or not found:
        raise ValueError(
            errors.message(
                f"{source.name}: the adapter has layers that the model, or its table "
                "of weights, does not have. Nothing has changed.",
                where="\n".join(sorted(unknown)[:20]),
                way_out=f"Layers that it may have: {', '.join([*layers][:8])}, ...\n"
                "For others merge it in PEFT, and load the merged weights.",
            )
        )
    return found


def _adaptation_of(layer: Any) -> Adaptation:
    """Rank and scale of a layer that is adapted."""
    rank = layer.lora.lora_a.shape[-1]
    return Adaptation(rank, layer.lora.scale * rank)


def _prepare(
    model: Any, layers: Mapping[str, _Layer], kinds: Mapping[str, Adaptation]
) -> list[Path]:
    """Adapts the layers, or checks that these, and these alone, are adapted."""
    wanted: dict[Path, Adaptation] = {}
    for name, layer in layers.items():
        if wanted.setdefault(layer.path, kinds[name]) != kinds[name]:
            raise ValueError(
                f"The layers at {paths.dotted(layer.path)} are stacked, so their "
                "adaptations need the same rank and scale."
            )
    _check_stacked(layers)
    adapted = {
        part.path: _adaptation_of(part.value)
        for part in selections.parts_of(model)
        if adaptable_layers.is_adapted(part.value)
    }
    if adapted and adapted != wanted:
        raise ValueError(
            errors.message(
                "The adapter does not fit the layers that are adapted. Nothing has "
                "changed.",
                where="\n".join(_differences(adapted, wanted)[:12]),
                way_out="Load it onto the model as it was before, or adapt just these "
                "layers, with this rank and alpha.",
            )
        )
    if not adapted:
        parts = [Part(layer.path, layer.layer) for layer in layers.values()]
        adaptable_layers.check(model, parts, "nnx.weights.load_adapter")
        for adapter in {*wanted.values()}:
            where = [paths.dotted(p) for p, x in wanted.items() if x == adapter]
            adaptations.add_lora(
                model, where, rank=adapter.rank, alpha=adapter.alpha, rngs=Rngs(0)
            )
    return sorted(wanted)


def _check_stacked(layers: Mapping[str, _Layer]) -> None:
    """Raises unless all of the layers that are stacked are there."""
    found: dict[Path, set[tuple[int, ...]]] = {}
    for layer in layers.values():
        found.setdefault(layer.path, set()).add(layer.at)
    for layer in layers.values():
        depth = len(layer.at)
        shape = adaptable_layers.kernel_of(layer.layer).shape[:depth]
        if len(found[layer.path]) != math.prod(shape):
            raise ValueError(
                f"The adapter has factors for {len(found[layer.path])} of the "
                f"{math.prod(shape)} layers stacked at {paths.dotted(layer.path)}; "
                "nnx.surgery.unstack takes them apart."
            )


def _differences(
    adapted: Mapping[Path, Adaptation], wanted: Mapping[Path, Adaptation]
) -> list[str]:
    """What differs between the adapted layers and those of the adapter."""

    def said(adapter: Adaptation | None) -> str:
        if adapter is None:
            return "none"
        return f"rank {adapter.rank}, alpha {adapter.alpha:g}"

    return [
        f"{paths.dotted(path)}: the model has {said(adapted.get(path))}, the "
        f"adapter {said(wanted.get(path))}"
        for path in sorted({*adapted, *wanted})
        if adapted.get(path) != wanted.get(path)
    ]


def _tensors(layer: _Layer, names: Mapping[str, str]) -> list[Tensor]:
    """Both factors of a layer that is adapted, as tensors of a file."""
    found = []
    for factor, attribute, layout in zip(
        layer.factors, ("lora_a", "lora_b"), layer.layouts, strict=True
    ):
        leaf = getattr(layer.layer.lora, attribute)
        array = Array((*layer.path, "lora", attribute), leaf, leaf.get_raw_value())
        solved = layout.solve([tuple(leaf.shape)[len(layer.at) :]])
        found.append(Tensor(names[factor], (array,), layer.at, solved))
    return found
