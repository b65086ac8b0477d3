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
    [experts, out, in]      [experts * rank, in] [out, rank * experts] a parameter

A Param of a user's own module, or the kernel of all experts, is a ``target_parameter``
there: the factors are named after its module. If several parameters of a module are
adapted, PEFT wraps the module once for each, in the order in which it has them:
``experts.lora_A.weight`` belongs to the last one, ``experts.base_layer.lora_A.weight``
to the one before.

Where a weight of the file is fused from several layers of ours, such as a ``qkv_proj``,
each of these gets all of factor A, and its own part of B.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import updates
from graftree.core.rng.streams import Rngs
from graftree.surgery import adaptations, lora_layers, lora_targets, selections
from graftree.surgery.lora_targets import LoRATarget
from graftree.weights import adapter_layers, loading, saving, sources, tables
from graftree.weights.stored_tensors import Source, usage_error
from graftree.weights.tables import Tensor

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<factor>lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector"
    r"|base_layer\.weight)"
)
_BASE = "base_layer.weight"


def load_adapter(folder: Any, model: Any, mapping: Any) -> list[Path]:
    """Loads a LoRA adapter of PEFT onto a model, in place: all of it, or none.

    If the model has no adapted layers, the layers for which the adapter has factors are
    adapted, as by `nnx.surgery.add_lora`. If it has some, they must be the same layers,
    with the same rank and scale. As in PEFT, the `attend` of an Embed is adapted only
    by an adapter with ``ensure_weight_tying``, and dropout waits for ``model.train()``.

    Args:
        folder: Has an ``adapter_config.json`` and an ``adapter_model.safetensors``.
        model: The model, with its own weights.
        mapping: The table that loads the weights of the model.

    Returns:
        The paths of the adapted layers.

    Raises:
        ValueError: If the adapter has layers that the table or the model lacks, or
            more than LoRA and DoRA: trained biases, whole modules, or factors for
            weights other than the model's. Then nothing has changed.
        WeightsError: If a file is damaged.

    Warns:
        UserWarning: If ``lora_dropout`` does not act on Params that are adapted.

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
    table = tables.as_mapping(mapping)
    tensors = table.tensors(model)
    adaptable = _configurable(config, adapter_layers.layers_of(model, tensors))
    with sources.open(folder / FILE) as source:
        tied = table.tied if config.get("ensure_weight_tying") else {}
        names = _names(source, adaptable, tensors, tied)
        layers = {name: adaptable[name] for name in names}
        kinds = {name: _configured(config, name) for name in layers}
        _check_layers(layers, config)
        for name, layer in layers.items():
            _check_factors(name, source, layer, names[name], kinds[name])
        adapted = _checked(model, layers, kinds)
        is_new = not _adapted_paths(model)
        try:
            if is_new:
                _adapt(model, layers, kinds, float(config.get("lora_dropout") or 0))
            factors = [
                x
                for n, layer in layers.items()
                for x in adapter_layers.factors_of(layer, names[n])
            ]
            arrays = loading.arrays_from(source, factors)
        except BaseException:  # also Ctrl-C: the model is as it was before
            if is_new and _adapted_paths(model):
                adaptations.remove_lora(model)
            raise
    updates.write_at(model, arrays)
    for layer in layers.values():
        if layer.is_embed:
            is_tied = bool(config.get("ensure_weight_tying"))
            layer.target.change.adapts_attend = is_tied
    return adapted


def _check_layers(
    layers: Mapping[str, adapter_layers.AdaptableLayer], config: Mapping[str, Any]
) -> None:
    """Raises if a config asks of a layer what it can't have here."""
    call = "nnx.weights.load_adapter"
    adapter_layers.check_axes(layers, call)
    if not config.get("use_dora"):
        return
    adapter_layers.check_magnitudes(layers, call)
    embeds = [n for n, x in layers.items() if x.is_embed]
    if embeds and config.get("ensure_weight_tying"):
        raise usage_error(
            f"{call}: use_dora with ensure_weight_tying scales rows of a table in the "
            "head, and columns in the embedding. Nothing has changed.",
            embeds,
            "Merge it in PEFT, and load the merged weights.",
        )


def save_adapter(
    folder: Any,
    model: Any,
    mapping: Any,
    *,
    base_model: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Writes the LoRA factors of a model in the format of PEFT.

    If an Embed is adapted, and so its `attend`, the config has ``ensure_weight_tying``:
    PEFT then adapts a head that is tied to the embedding in the same way.

    Args:
        folder: Gets an ``adapter_config.json`` and an ``adapter_model.safetensors``.
        model: The model; its adapted layers are found.
        mapping: The table that loads its weights.
        base_model: Where PEFT finds the model itself.
        task_type: The task for which PEFT wraps the model; ``None``: no special one.

    Raises:
        ValueError: If no layer is adapted, the table lacks an adapted one, or PEFT
            has no adapter like these: layers differ in dropout, DoRA or the `attend` of
            Embeds, or there is DoRA for Params of modules. Then nothing was written.
        WeightsError: If the disk refuses; an earlier adapter is then still there.

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

    def texts() -> dict[str, str]:
        return {CONFIG: json.dumps(contents, indent=2, sort_keys=True) + "\n"}

    options: Any = {"metadata": {"format": "pt"}, "texts": texts}
    saving.save_tensors(folder / FILE, prepare, **options)


def _adapter_of(model: Any, mapping: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """What a model's adapter consists of: tensors, and lines of its config.

    Raises:
        ValueError: If it can't be written.
    """
    layers = adapter_layers.layers_of(model, tables.as_mapping(mapping).tensors(model))
    adapted = {name: x for name, x in layers.items() if x.is_adapted}
    covered_paths = {path for x in adapted.values() for path in x.paths}
    unknown = [paths.dotted(x) for x in _adapted_paths(model) if x not in covered_paths]
    if unknown or not adapted:
        problem = "the table lacks adapted layers" if unknown else "no layer is adapted"
        raise usage_error(
            f"nnx.weights.save_adapter: {problem}. Nothing was written.",
            unknown,
            "nnx.surgery.add_lora adapts layers. Each needs a line in the table for "
            "its weight, which has one axis of inputs and one of outputs there. Of a "
            "fused weight, adapt all parts, or none.",
        )
    adapter_layers.check_fused(adapted)
    dropping = [
        name
        for name, x in adapted.items()
        if not x.can_drop and any(_rate(y.change) for y in x.targets)
    ]
    if dropping:
        raise usage_error(
            "nnx.weights.save_adapter: PEFT has no dropout for parameters of modules. "
            "Nothing was written.",
            dropping,
            "Remove it before you write them: layer.lora.dropout = None.",
        )
    embeds = [x.target for x in adapted.values() if x.is_embed]
    ties = {x.change.adapts_attend for x in embeds}
    use_dora = any(x.target.change.magnitude is not None for x in adapted.values())
    if use_dora:
        adapter_layers.check_magnitudes(adapted, "nnx.weights.save_adapter")
    if True in ties and use_dora:
        raise usage_error(
            "nnx.weights.save_adapter: with DoRA, PEFT has different magnitudes for a "
            "head that shares the table of an embedding. Nothing was written.",
            [paths.dotted(x.path) for x in embeds],
            "If the model does not call `attend`, set `lora.adapts_attend = False`.",
        )
    if len(ties) > 1:
        raise usage_error(
            "nnx.weights.save_adapter: PEFT adapts the `attend` of all embeddings, or "
            "of none. Nothing was written.",
            [f"{paths.dotted(x.path)}: {x.change.adapts_attend}" for x in embeds],
            "If the model does not call it, set `lora.adapts_attend` as in the others.",
        )
    tensors = [
        tensor
        for module, name in adapter_layers.modules_of(adapted).items()
        for tensor in adapter_layers.factors_of(
            adapted[name],
            {f: f"{PREFIX}{module}.{f}" for f in adapted[name].factors},
        )
    ]
    config = _written(adapted, [*layers])
    return tensors, config | {"ensure_weight_tying": True in ties}


def _adapted_paths(model: Any) -> dict[Path, adapter_layers.Adaptation]:
    """What `nnx.surgery.add_lora` has adapted in a model, with its settings."""
    targets = [
        x for y in selections.parts_of(model) for x in lora_targets.adapted_in(y)
    ]
    return {
        target.own_path: adapter_layers.adaptation_of(target)
        for target in targets
        if isinstance(target.change, lora_layers.LowRank)
    }


# --------------------------------------------------------------- an adapter's contents


def _names(
    source: Source,
    layers: Mapping[str, adapter_layers.AdaptableLayer],
    tensors: Sequence[Tensor],
    tied: Mapping[str, str],
) -> dict[str, dict[str, str]]:
    """Finds the names of both factors of each layer; raises for unknown ones."""
    fused = {x.name for x in tensors if len(x.arrays) > 1}
    modules = adapter_layers.modules_of(layers)
    names: dict[str, dict[str, str]] = {}
    heads: dict[str, dict[str, str]] = {}
    unknown = []
    for name in source.tensors:
        match = _NAME.fullmatch(name)
        weight = "" if match is None else f"{match['module']}.weight"
        if match is not None and match["module"] in modules:
            names.setdefault(modules[match["module"]], {})[match["factor"]] = name
        elif match is not None and weight in tied:
            heads.setdefault(tied[weight], {})[match["factor"]] = name
        else:
            reason = ": several layers that can't be adapted together"
            unknown.append(name + reason * (weight in fused))
    unknown += [
        f"{name}: a factor is missing"
        for name, x in names.items()
        if len({*x} - {_BASE}) < 2
    ]
    if unknown or not names:
        raise usage_error(
            f"{source.name}: the adapter has layers that the model, or its table of "
            "weights, does not have. Nothing has changed.",
            sorted(unknown),
            f"Layers that it may have: {', '.join([*layers][:8])}, ...\n"
            "For others, merge it in PEFT, and load the merged weights.",
        )
    for weight, head in heads.items():
        embed = weight.removesuffix(".weight")
        _check_tied(source, head, names.get(embed, {}))
        if _BASE in head:
            _check_base(embed, source, layers[embed], head[_BASE])
    return names


def _check_tied(
    source: Source, head: Mapping[str, str], embed: Mapping[str, str]
) -> None:
    """Raises unless the factors of a tied head are those of its embedding."""
    (a, b, _), (of_embed_a, of_embed_b, _) = (
        adapter_layers.FACTORS,
        adapter_layers.FACTORS_OF_EMBED,
    )
    for factor, other in ((a, of_embed_b), (b, of_embed_a)):
        x, y = (_whole(source, n.get(f)) for n, f in ((head, factor), (embed, other)))
        if x is None or y is None or not np.array_equal(x, y.T):
            raise usage_error(
                f"{source.name}: the factors of a tied head are not those of its "
                "embedding. Nothing has changed.",
                [f"{head.get(factor)}, {embed.get(other)}"],
                "Merge it in PEFT, and load the merged weights.",
            )


def _whole(source: Source, name: str | None) -> np.ndarray | None:
    """Reads a tensor of a file, if there is one of that name."""
    if name is None:
        return None
    return source.read(name, [slice(None)] * len(source.tensors[name].shape))


def _check_factors(
    name: str,
    source: Source,
    layer: adapter_layers.AdaptableLayer,
    names: Mapping[str, str],
    kind: adapter_layers.Adaptation,
) -> None:
    """Raises unless the factors of a layer have the right shapes."""
    stored = {factor: source.tensors[full].shape for factor, full in names.items()}
    if stored.pop(_BASE, None) is not None:
        _check_base(name, source, layer, names[_BASE])
    parts = zip(layer.factors, layer.attributes, layer.layouts, strict=True)
    expected = {
        factor: layout.solve(layer.shapes(attribute, kind.rank)).file_shape
        for factor, attribute, layout in parts
        if layout is not None and (attribute != "magnitude" or kind.use_dora)
    }
    if stored != expected:
        misfit = "have unexpected shapes"
        if len(stored) != len(expected):
            misfit = f"do not fit its config, which has use_dora={kind.use_dora}"
        raise usage_error(
            f"{source.name}: the factors of {name!r} {misfit}. Nothing has changed.",
            [f"expected {expected}", f"got      {stored}"],
            "Is it the adapter of another model? For stacked matrices, the layout in "
            "the table says which axis meets the inputs, as in 'e o i -> e o i'; "
            "parameters of one module must be in the order of PyTorch's module.",
        )


def _check_base(
    name: str, source: Source, layer: adapter_layers.AdaptableLayer, base: str
) -> None:
    """Raises unless the weight of a layer in the adapter is that of the model."""
    stored, out = source.tensors[base], saving.out_of(layer.weight)
    is_same = stored.shape == out.stored.shape
    if is_same and not isinstance(layer.weight.arrays[0].value, jax.ShapeDtypeStruct):
        adapter_weight: Any = _whole(source, base)
        is_same = np.array_equal(out.make(), adapter_weight.astype(out.stored.dtype))
    if not is_same:
        raise usage_error(
            f"{source.name}: the adapter contains a weight for {name!r} that differs "
            "from the model's. Nothing has changed.",
            way_out="Is it the adapter of another model? If its weights were trained, "
            "merge it in PEFT, and load the merged weights.",
        )


def _checked(
    model: Any,
    layers: Mapping[str, adapter_layers.AdaptableLayer],
    kinds: Mapping[str, adapter_layers.Adaptation],
) -> list[Path]:
    """Checks that layers can be adapted, or that exactly these are; gives their paths.

    Raises:
        ValueError: If the model does not fit the adapter.
    """
    wanted: dict[Path, adapter_layers.Adaptation] = {}
    stacked_at: dict[Path, set[tuple[int, ...]]] = {}
    by_path = [(path, name, x) for name, x in layers.items() for path in x.paths]
    for path, name, layer in by_path:
        stacked_at.setdefault(path, set()).add(layer.weight.at)
        if wanted.setdefault(path, kinds[name]) != kinds[name]:
            raise ValueError(
                f"The layers at {paths.dotted(path)} are stacked, so their "
                "adaptations need the same rank and scale."
            )
    for path, _, layer in by_path:
        shape = layer.target.kernel.shape[: len(layer.weight.at)]
        count = len(stacked_at[path])
        if count != math.prod(shape):
            raise ValueError(
                f"The adapter has factors for {count} of the {math.prod(shape)} layers "
                f"stacked at {paths.dotted(path)}; nnx.surgery.unstack takes "
                "them apart."
            )
    adapted = _adapted_paths(model)
    # As texts: one scale can be written as two `alpha`, which differ in a last digit.
    before, after = [
        {path: str(kind) for path, kind in x.items()} for x in (adapted, wanted)
    ]
    if adapted and before != after:
        differing = [
            f"{paths.dotted(path)}: the model has {before.get(path, 'none')}, the "
            f"adapter {after.get(path, 'none')}"
            for path in sorted({*before, *after})
            if before.get(path) != after.get(path)
        ]
        raise usage_error(
            "The adapter does not fit the layers that are already adapted. Nothing has "
            "changed.",
            differing,
            "Load it into the model as it was before, or adapt only these layers, with "
            "this rank and alpha.",
        )
    if not adapted:
        targets = {y.own_path: y for x in layers.values() for y in x.targets}
        lora_targets.check(model, [*targets.values()], "nnx.weights.load_adapter")
    return sorted(wanted)


def _adapt(
    model: Any,
    layers: Mapping[str, adapter_layers.AdaptableLayer],
    kinds: Mapping[str, adapter_layers.Adaptation],
    dropout: float,
) -> None:
    """Adapts layers. Their dropout waits for ``model.train()``, as PEFT's does."""
    groups: dict[Any, dict[Path, LoRATarget]] = {}
    for name, layer in layers.items():
        rate = dropout if layer.can_drop else 0.0
        targets = groups.setdefault((kinds[name], rate), {})
        targets.update(zip(layer.paths, layer.targets, strict=True))
    rngs = Rngs(0)
    for (kind, rate), targets in groups.items():
        where = [paths.dotted(path) for path in targets]
        settings = kind._asdict()
        adaptations.add_lora(model, where, rngs=rngs, dropout=rate, **settings)
        if rate != dropout:
            warnings.warn(
                f"lora_dropout={dropout} of the adapter does not act on these Params, "
                "because only the code of their modules knows which inputs they meet: "
                f"{', '.join(where)}.",
                stacklevel=3,
            )
        for target in targets.values() if rate else ():
            target.change.dropout.deterministic = True


# ------------------------------------------------------------------ an adapter's config

# The keys of a config that fit LoRA as it is here; other keys must be off.
_KNOWN = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path corda_config "
    "ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode "
    "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha "
    "lora_dropout lora_ga_config megatron_config megatron_core peft_type peft_version "
    "qalora_group_size r rank_pattern revision runtime_config target_modules "
    "target_parameters task_type use_dora use_rslora velora_config".split()
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
        raise usage_error(
            f"{path}: the adapter contains more than LoRA factors.", wrong, way_out
        )
    return config


def _configurable(
    config: Mapping[str, Any], layers: Mapping[str, adapter_layers.AdaptableLayer]
) -> dict[str, adapter_layers.AdaptableLayer]:
    """Returns the layers that an adapter may have: all modules, targeted parameters."""
    return {
        name: layer
        for name, layer in layers.items()
        if layer.module is None or _is_targeted(config, name)
    }


def _is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter of this name is a target, by PEFT's rule."""
    targets = config.get("target_parameters") or ()
    return any(name == x or name.endswith(f".{x}") for x in targets)


def _configured(config: Mapping[str, Any], name: str) -> adapter_layers.Adaptation:
    """Returns the settings of a config for a module; reads its patterns like PEFT."""
    if _is_targeted(config, f"{name}.weight"):
        name = f"{name}.weight"

    def value(key: str, usual: Any) -> Any:
        for pattern, x in (config.get(key) or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                return x
        return usual

    rank = int(value("rank_pattern", config.get("r", 8)))
    alpha = float(value("alpha_pattern", config.get("lora_alpha", 8)))
    flags = [bool(config.get(key)) for key in ("use_rslora", "use_dora")]
    return adapter_layers.Adaptation(rank, alpha, *flags)


def _written(
    layers: Mapping[str, adapter_layers.AdaptableLayer], adaptable: Sequence[str]
) -> dict[str, Any]:
    """Makes the config for PEFT, from what is adapted and all that could be."""
    kinds = {name: adapter_layers.adaptation_of(x.target) for name, x in layers.items()}
    modules = [name for name, x in layers.items() if x.module is None]
    use_rslora = all(x.use_rslora for x in kinds.values())
    ranks = {name: x.rank for name, x in kinds.items()}
    alphas = {
        name: _number(x.alpha if use_rslora else x.plain_alpha)
        for name, x in kinds.items()
    }
    rank, alpha = [max({*x.values()}, key=[*x.values()].count) for x in (ranks, alphas)]
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
        "target_modules": _targets(modules, adaptable),
        "target_parameters": [name for name in layers if name not in modules] or None,
        "bias": "none",
        "lora_dropout": _common(layers, "dropout", _rate),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": _common(layers, "use_dora", lambda x: x.magnitude is not None),
        "use_rslora": use_rslora,
    }


def _rate(change: lora_layers.LowRank) -> float:
    return 0.0 if change.dropout is None else change.dropout.rate


def _common(
    layers: Mapping[str, adapter_layers.AdaptableLayer],
    name: str,
    setting: Callable[[lora_layers.LowRank], Any],
) -> Any:
    """Returns a setting of all layers; PEFT has one for all of them."""
    settings = [
        (path, setting(target.change))
        for path, layer in layers.items()
        for target in layer.targets
    ]
    if len({x for _, x in settings}) > 1:
        raise usage_error(
            f"nnx.weights.save_adapter: PEFT has one {name} for all layers and "
            "parameters. Nothing was written.",
            [f"{path}: {x}" for path, x in settings],
            "Write them as several adapters, or adapt all of them in the same way.",
        )
    return settings[0][1]


def _number(x: float) -> float:
    return int(x) if x == int(x) else x


def _targets(adapted: Sequence[str], adaptable: Sequence[str]) -> list[str]:
    """Returns the last steps of the names, if they match these layers and no others."""
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in adaptable if name.rpartition(".")[2] in last}
    are_words = not any(map(str.isdigit, last))
    return sorted(last if are_words and meant == {*adapted} else adapted)
