"""LoRA adapters in the format of PEFT: a file of factors, and a config beside it.

PEFT names the factors of a layer after its weight: ``q_proj.lora_A.weight``, or
``wte.lora_embedding_A`` for an embedding. The table that loads the weights of the model
has the layer of each. Beside the factors of embeddings and of the head, PEFT writes
their own weights, which must be those of the model. The weight determines how factors
are stored; inputs and outputs are in the same order as there, heads included:

    weight in the file      lora_A               lora_B
    [out, in]               [rank, in]           [out, rank]
    [in, out]               [rank, in]           [out, rank]           GPT-2's Conv1D
    [out, in, *kernel]      [rank, in, *kernel]  [out, rank, 1, ...]
    [rows, features]        [rank, rows]         [features, rank]      an embedding
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import updates
from graftree.core.rng.streams import Rngs
from graftree.nn import linear
from graftree.sharding import collectives
from graftree.surgery import adaptations, lora_layers, selections
from graftree.weights import loading, saving, sources, tables
from graftree.weights.layouts import Axis, Layout, Solved, Unit
from graftree.weights.stored_tensors import Source, misuse
from graftree.weights.tables import Tensor

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<factor>lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.weight)"
)
_BASE = "base_layer.weight"


class _Adaptation(NamedTuple):
    """The settings of an adapter for a layer: the rank, and the scale times it."""

    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}"


class _AdaptableLayer(NamedTuple):
    """A layer that can be adapted.

    Attributes:
        path: Its path in the model.
        layer: The layer.
        weight: Its weight in a file.
        layouts: Those of its factors.
    """

    path: Path
    layer: Any
    weight: Tensor
    layouts: tuple[Layout, Layout]

    @property
    def factors(self) -> tuple[str, str]:
        """The names of its factors in PEFT."""
        if isinstance(self.layer, linear.Embed):
            return "lora_embedding_A", "lora_embedding_B"
        return "lora_A.weight", "lora_B.weight"


def load_adapter(folder: Any, model: Any, mapping: Any) -> list[Path]:
    """Loads a LoRA adapter of PEFT onto a model, in place: all of it, or none.

    If the model has no adapted layers, the layers for which the adapter has factors are
    adapted, as by `nnx.surgery.add_lora`. If it has some, they must be the same layers,
    with the same rank and scale. As in PEFT, the `attend` of an Embed is not adapted.

    Args:
        folder: Has an ``adapter_config.json`` and an ``adapter_model.safetensors``.
        model: The model, with its own weights.
        mapping: The table that loads the weights of the model.

    Returns:
        The paths of the adapted layers.

    Raises:
        ValueError: If the adapter has layers that the table or the model lacks, or is
            more than two factors per layer: DoRA, trained biases, whole modules, or
            factors for weights other than the model's. Then nothing has changed.
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
    folder = pathlib.Path(folder).expanduser()
    config = _config(folder / CONFIG)
    tensors = tables.as_mapping(mapping).tensors(model)
    known = _layers(model, tensors)
    with sources.open(folder / FILE) as source:
        names = _names(source, known, tensors)
        layers = {name: known[name] for name in names}
        kinds = {name: _configured(config, name) for name in layers}
        for name, layer in layers.items():
            _check_factors(name, source, layer, names[name], kinds[name].rank)
        adapted, is_new = _prepare(model, layers, kinds)
        try:
            factors = [
                x for n, layer in layers.items() for x in _factors(layer, names[n])
            ]
            arrays = loading.arrays_from(source, factors)
        except BaseException:  # also Ctrl-C: the model is as it was before
            if is_new:
                adaptations.remove_lora(model)
            raise
    updates.write_at(model, arrays)
    for layer in layers.values():
        if isinstance(layer.layer, lora_layers.LoRAEmbed):
            layer.layer.lora.adapts_attend = False
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
        mapping: The table that loads its weights.
        base_model: Where PEFT finds the model itself.
        task_type: The task for which PEFT wraps the model; ``None``: no special one.

    Raises:
        ValueError: If no layer is adapted, the table lacks an adapted one, or the
            `attend` of an Embed is adapted too.

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
    folder = pathlib.Path(folder).expanduser()
    contents: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "task_type": task_type,
    }

    def prepare() -> list[Tensor]:
        tensors, config = _adapter_of(model, mapping)
        contents.update(config)
        return tensors

    def write_config() -> None:
        text = json.dumps(contents, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG).write_text(text)

    saving.save_tensors(folder / FILE, prepare, metadata={"format": "pt"})
    collectives.by_first("nnx.weights.save_adapter", write_config)


def _adapter_of(model: Any, mapping: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """What a model's adapter consists of: tensors, and lines of its config.

    Raises:
        ValueError: If it can't be written.
    """
    layers = _layers(model, tables.as_mapping(mapping).tensors(model))
    adapted = {n: x for n, x in layers.items() if lora_layers.is_adapted(x.layer)}
    known = {id(x.layer) for x in adapted.values()}
    unknown = [
        paths.dotted(path)
        for path, x in selections.parts_of(model)
        if lora_layers.is_adapted(x) and id(x) not in known
    ]
    if unknown or not adapted:
        what = "the table lacks adapted layers" if unknown else "no layer is adapted"
        raise misuse(
            f"nnx.weights.save_adapter: {what}. Nothing was written.",
            unknown,
            "nnx.surgery.add_lora adapts layers; each needs a line in the table for "
            "its weight.",
        )
    wrong = [
        paths.dotted(x.path)
        for x in adapted.values()
        if isinstance(x.layer, lora_layers.LoRAEmbed) and x.layer.lora.adapts_attend
    ]
    if wrong:
        raise misuse(
            "nnx.weights.save_adapter: PEFT adapts what an embedding looks up, and not "
            "its `attend`. Nothing was written.",
            wrong,
            "If the model does not call it, or should not adapt it, set "
            "`lora.adapts_attend = False` there.",
        )
    tensors = [
        tensor
        for name, x in adapted.items()
        for tensor in _factors(x, {f: f"{PREFIX}{name}.{f}" for f in x.factors})
    ]
    kinds = {name: _adaptation_of(x.layer) for name, x in adapted.items()}
    return tensors, _written(kinds, [*layers])


# ------------------------------------------------------------------------- the layers


def _layers(model: Any, tensors: Sequence[Tensor]) -> dict[str, _AdaptableLayer]:
    """The layers that can be adapted, by the names of their weights in files."""
    modules = {x.path: x.value for x in selections.parts_of(model)}
    found = {}
    for tensor in tensors:
        path = tensor.arrays[0].path[:-1]
        layer = modules.get(path)
        is_kernel = (
            len(tensor.arrays) == 1
            and tensor.name.endswith(".weight")
            and lora_layers.is_adaptable(layer)
            and lora_layers.kernel_of(layer) is tensor.arrays[0].leaf
        )
        if is_kernel:
            batch, _, outs = lora_layers.sizes_of(layer)
            of_factors = _layouts(tensor.solved, len(outs))
            if of_factors is not None and not batch:
                name = tensor.name.removesuffix(".weight")
                found[name] = _AdaptableLayer(path, layer, tensor, of_factors)
    return found


def _layouts(weight: Solved, num_outputs: int) -> tuple[Layout, Layout] | None:
    """The layouts of both factors of a weight, in the file and in our adapted layers.

    Args:
        weight: The layout of the weight, which is not fused.
        num_outputs: How many of our axes, the last ones, are outputs.

    Returns:
        ``None`` if the weight in the file has not just one axis of outputs.
    """
    ours, groups = weight.layout.ours, [*weight.layout.groups]
    split = len(ours) - num_outputs
    ins = {name for names in ours[:split] for name in names}
    outs = {name for names in ours[split:] for name in names}
    names = [{x.name for unit in group for x in unit.axes} for group in groups]
    of_outputs = [i for i, found in enumerate(names) if found & outs]
    if len(of_outputs) != 1 or names[of_outputs[0]] & ins:
        return None
    out = groups.pop(of_outputs[0])
    rank = "rank of LoRA"  # Not a name in the weight.
    of_rank = (Unit((Axis(rank, False),), False),)
    ones = [()] * len(groups[1:])

    def made(file: Sequence[Any], ours: Sequence[Any], known: set[str]) -> Layout:
        sizes = {name: weight.sizes[0][name] for name in known}
        return Layout("the factor", tuple(file), tuple(ours), sizes)

    return (
        made([of_rank, *groups], [*ours[:split], (rank,)], ins),
        made([out, of_rank, *ones], [(rank,), *ours[split:]], outs),
    )


def _factors(layer: _AdaptableLayer, names: Mapping[str, str]) -> list[Tensor]:
    """Both factors of a layer that is adapted, as tensors of a file."""
    found, at = [], layer.weight.at
    named = zip(layer.factors, ("lora_a", "lora_b"), layer.layouts, strict=True)
    for factor, attribute, layout in named:
        leaf = getattr(layer.layer.lora, attribute)
        path = (*layer.path, "lora", attribute)
        array = tables.Array(path, leaf, leaf.get_raw_value())
        solved = layout.solve([tuple(leaf.shape)[len(at) :]])
        found.append(Tensor(names[factor], (array,), at, solved))
    return found


def _adaptation_of(layer: Any) -> _Adaptation:
    """Rank and scale of a layer that is adapted."""
    return _Adaptation(layer.lora.rank, layer.lora.scale * layer.lora.rank)


# --------------------------------------------------------------- an adapter's contents


def _names(
    source: Source, layers: Mapping[str, _AdaptableLayer], tensors: Sequence[Tensor]
) -> dict[str, dict[str, str]]:
    """The names of both factors of each layer; raises for those that are unknown."""
    fused = {tensor.name for tensor in tensors if len(tensor.arrays) > 1}
    found: dict[str, dict[str, str]] = {}
    unknown = []
    for name in source.tensors:
        match = _NAME.fullmatch(name)
        if match is not None and match["module"] in layers:
            found.setdefault(match["module"], {})[match["factor"]] = name
        else:
            is_fused = match is not None and f"{match['module']}.weight" in fused
            unknown.append(name + ": several layers in the model" * is_fused)
    unknown += [
        f"{name}: a factor is missing"
        for name, x in found.items()
        if len({*x} - {_BASE}) < 2
    ]
    if unknown or not found:
        raise misuse(
            f"{source.name}: the adapter has layers that the model, or its table of "
            "weights, does not have. Nothing has changed.",
            sorted(unknown),
            f"Layers that it may have: {', '.join([*layers][:8])}, ...\n"
            "For others merge it in PEFT, and load the merged weights.",
        )
    return found


def _check_factors(
    name: str,
    source: Source,
    layer: _AdaptableLayer,
    names: Mapping[str, str],
    rank: int,
) -> None:
    """Raises unless the factors of a layer have the right shapes."""
    stored = {factor: source.tensors[full].shape for factor, full in names.items()}
    if stored.pop(_BASE, None) is not None:
        _check_base(name, source, layer, names[_BASE])
    _, ins, outs = lora_layers.sizes_of(layer.layer)
    shapes = [(*ins, rank), (rank, *outs)]
    solved = [x.solve([y]) for x, y in zip(layer.layouts, shapes, strict=True)]
    expected = {f: x.file_shape for f, x in zip(layer.factors, solved, strict=True)}
    if stored != expected:
        raise misuse(
            f"{source.name}: the factors of {name!r} have other shapes. Nothing has "
            "changed.",
            [f"expected {expected}", f"got      {stored}"],
            "Is it the adapter of another model?",
        )


def _check_base(name: str, source: Source, layer: _AdaptableLayer, base: str) -> None:
    """Raises unless the weight of a layer in the adapter is that of the model."""
    stored, out = source.tensors[base], saving.out_of(layer.weight)
    is_same = stored.shape == out.stored.shape
    if is_same and not isinstance(layer.weight.arrays[0].value, jax.ShapeDtypeStruct):
        given = source.read(base, [slice(None)] * len(stored.shape))
        is_same = np.array_equal(out.make(), given.astype(out.stored.dtype))
    if not is_same:
        raise misuse(
            f"{source.name}: the adapter has a weight of its own for {name!r}, which "
            "is not that of the model. Nothing has changed.",
            way_out="Is it the adapter of another model? If its weights were trained, "
            "merge it in PEFT, and load the merged weights.",
        )


def _prepare(
    model: Any, layers: Mapping[str, _AdaptableLayer], kinds: Mapping[str, _Adaptation]
) -> tuple[list[Path], bool]:
    """Adapts the layers, or checks that exactly these are adapted.

    Returns:
        Their paths, and whether they were not adapted before.
    """
    wanted: dict[Path, _Adaptation] = {}
    places: dict[Path, set[tuple[int, ...]]] = {}
    for name, layer in layers.items():
        places.setdefault(layer.path, set()).add(layer.weight.at)
        if wanted.setdefault(layer.path, kinds[name]) != kinds[name]:
            raise ValueError(
                f"The layers at {paths.dotted(layer.path)} are stacked, so their "
                "adaptations need the same rank and scale."
            )
    for layer in layers.values():
        shape = lora_layers.kernel_of(layer.layer).shape[: len(layer.weight.at)]
        count = len(places[layer.path])
        if count != math.prod(shape):
            raise ValueError(
                f"The adapter has factors for {count} of the {math.prod(shape)} layers "
                f"stacked at {paths.dotted(layer.path)}; nnx.surgery.unstack takes "
                "them apart."
            )
    adapted = {
        path: _adaptation_of(x)
        for path, x in selections.parts_of(model)
        if lora_layers.is_adapted(x)
    }
    if adapted and adapted != wanted:
        differing = [
            f"{paths.dotted(path)}: the model has {adapted.get(path, 'none')}, the "
            f"adapter {wanted.get(path, 'none')}"
            for path in sorted({*adapted, *wanted})
            if adapted.get(path) != wanted.get(path)
        ]
        raise misuse(
            "The adapter does not fit the layers that are adapted. Nothing has "
            "changed.",
            differing,
            "Load it onto the model as it was before, or adapt just these layers, with "
            "this rank and alpha.",
        )
    if not adapted:
        parts = [(x.path, x.layer) for x in layers.values()]
        lora_layers.check(model, parts, "nnx.weights.load_adapter")
        for rank, alpha in {*wanted.values()}:
            where = [paths.dotted(p) for p, x in wanted.items() if x == (rank, alpha)]
            adaptations.add_lora(model, where, rank=rank, alpha=alpha, rngs=Rngs(0))
    return sorted(wanted), not adapted


# ------------------------------------------------------------------ an adapter's config

# The keys of a config that fit LoRA as it is here; other keys must be off.
_KNOWN = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path corda_config "
    "ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode "
    "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha "
    "lora_dropout lora_ga_config megatron_config megatron_core peft_type peft_version "
    "qalora_group_size r rank_pattern revision runtime_config target_modules task_type "
    "use_rslora velora_config".split()
)
_OFF = (None, False, "none", [], {})
# Initializations that leave the weights of the model as they were.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def _config(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config.

    Raises:
        ValueError: If the adapter has more than LoRA factors.
        WeightsError: If the file is damaged.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise errors.WeightsError(f"nnx.weights can't read {path}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not of a LoRA adapter: no peft_type 'LORA'.")
    wrong = [
        f"{key}: {value!r}"
        for key, value in config.items()
        if key not in _KNOWN and value not in _OFF
    ]
    start = config.get("init_lora_weights")
    if start not in _HARMLESS_STARTS:
        wrong.append(f"init_lora_weights: {start!r}, which changes the model's weights")
    if wrong:
        way_out = "Merge it in PEFT, and load the merged weights."
        raise misuse(f"{path}: the adapter has more than LoRA factors.", wrong, way_out)
    return config


def _configured(config: Mapping[str, Any], name: str) -> _Adaptation:
    """The settings of a config for a module; reads its patterns as PEFT does."""

    def value(key: str, usual: Any) -> Any:
        for pattern, x in (config.get(key) or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                return x
        return usual

    rank = int(value("rank_pattern", config.get("r", 8)))
    alpha = float(value("alpha_pattern", config["lora_alpha"]))
    by_root = math.sqrt(rank) if config.get("use_rslora") else 1
    return _Adaptation(rank, alpha * by_root)


def _written(kinds: Mapping[str, _Adaptation], known: Sequence[str]) -> dict[str, Any]:
    """The config for PEFT, from the adapted modules and all that could be adapted."""
    listed = [*kinds.values()]
    usual = max({*listed}, key=listed.count)
    return {
        "peft_type": "LORA",
        "r": usual.rank,
        "lora_alpha": _number(usual.alpha),
        "rank_pattern": {n: x.rank for n, x in kinds.items() if x.rank != usual.rank},
        "alpha_pattern": {
            n: _number(x.alpha) for n, x in kinds.items() if x.alpha != usual.alpha
        },
        "target_modules": _targets([*kinds], known),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _number(x: float) -> float:
    return int(x) if x == int(x) else x


def _targets(adapted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The last parts of the names, if they match these layers and no others."""
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in known if name.rpartition(".")[2] in last}
    are_words = not any(map(str.isdigit, last))
    return sorted(last if are_words and meant == {*adapted} else adapted)
