"""What LoRA adapters of PEFT can adapt: layers, and parameters of modules.

Of each, its factors in a file of PEFT and in our model, with their layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graftree.annotations import Path
from graftree.nn import compute_dtypes, linear, own_params
from graftree.surgery import lora_layers, selections
from graftree.surgery.lora_targets import Target
from graftree.weights import tables
from graftree.weights.layouts import Axis, Layout, Solved, Unit
from graftree.weights.stored_tensors import usage_error
from graftree.weights.tables import Tensor

# The names of the factors of a layer, and of an embedding, and of the magnitude.
FACTORS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
FACTORS_OF_EMBED = "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"


class Adaptation(NamedTuple):
    """Settings of an adapter for a layer, as in `nnx.surgery.add_lora`."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool

    @property
    def plain_alpha(self) -> float:
        """The scale times the rank."""
        return self.alpha * (math.sqrt(self.rank) if self.use_rslora else 1)

    def __str__(self) -> str:
        dora = ", DoRA" if self.use_dora else ""
        return f"rank {self.rank}, alpha {self.plain_alpha:g}{dora}"


class AdaptableLayer(NamedTuple):
    """What can be adapted.

    Attributes:
        target: It, in the model.
        weight: Its weight in a file.
        layouts: Those of its factors A and B, and of its magnitude, in PEFT; the last
            is ``None`` if PEFT has no such magnitude.
        attributes: Which of ours these are.
        module: Its module in PEFT, if it is a parameter there.
        is_doubtful: Whether nothing says which of its axes meets inputs.
    """

    target: Target
    weight: Tensor
    layouts: tuple[Layout, Layout, Layout | None]
    attributes: tuple[str, str, str] = ("lora_a", "lora_b", "magnitude")
    module: str | None = None
    is_doubtful: bool = False

    @property
    def path(self) -> Path:
        """Its path in the model."""
        return self.target.own_path

    @property
    def factors(self) -> tuple[str, str, str]:
        """Names of its factors in PEFT."""
        return FACTORS_OF_EMBED if self.is_embed else FACTORS

    @property
    def is_embed(self) -> bool:
        """Whether it is the table of an `Embed`."""
        return self.target.name is None and isinstance(self.target.layer, linear.Embed)

    @property
    def is_adapted(self) -> bool:
        """Whether `nnx.surgery.add_lora` has adapted it."""
        return isinstance(self.target.change, lora_layers.LowRank)


def layers_of(model: Any, tensors: Sequence[Tensor]) -> dict[str, AdaptableLayer]:
    """Finds what can be adapted, by names in PEFT: of modules, or their parameters."""
    modules = {x.path: x.value for x in selections.parts_of(model)}
    layers = {}
    for tensor in tensors:
        (*above, key), leaf = tensor.arrays[0].path, tensor.arrays[0].leaf
        if len(tensor.arrays) > 1 or not compute_dtypes.is_param(leaf):
            continue
        target = Target(tuple(above), modules.get(tuple(above)))
        is_kernel = target.is_known and target.kernel is leaf
        if is_kernel and tensor.name.endswith(".weight"):
            layer = _known_layer(target, tensor)
        elif key in own_params.names_in(target.layer):
            layer = _own_param(target._replace(name=key, depth=len(tensor.at)), tensor)
        else:
            layer = None
        if layer is not None:
            is_module = layer.module is None
            name = tensor.name.removesuffix(".weight") if is_module else tensor.name
            layers[name] = layer
    return layers


def _known_layer(target: Target, tensor: Tensor) -> AdaptableLayer | None:
    """Describes a known layer; ``None`` if its weight has no axis of just outputs."""
    weight, axes = tensor.solved, target.axes
    ours, groups = axes.grouped(weight.layout.ours), [*weight.layout.groups]
    split = len(ours) - len(axes.outs)
    ins = {name for names in ours[:split] for name in names}
    outs = {name for names in ours[split:] for name in names}
    names = [_names_of(group) for group in groups]
    of_outputs = [i for i, x in enumerate(names) if x & outs]
    if axes.batch or len(of_outputs) != 1 or names[of_outputs[0]] & ins:
        return None
    out = groups.pop(of_outputs[0])
    ones = [()] * len(groups[1:])
    layouts = (
        _layout(weight, [(_RANK,), *groups], [*ours[:split], (_RANK_NAME,)]),
        _layout(weight, [out, (_RANK,), *ones], [(_RANK_NAME,), *ours[split:]]),
        _layout(weight, [(), out, *ones] if ones else [out], ours[split:]),
    )
    return AdaptableLayer(target, tensor, layouts)


def _own_param(target: Target, tensor: Tensor) -> AdaptableLayer | None:
    """Describes a user's Param; ``None`` if PEFT has no factors of this form.

    Factor A meets the last axis of a matrix in the file. Of an array of matrices, a
    file has it at either axis: it meets the one called ``i`` in the layout, or opposite
    to ``o``, or else the last but one of ours.
    """
    module, _, key = tensor.name.rpartition(".")
    layout = tensor.solved.layout
    if not module or not _are_matrices(layout):
        return None
    *batch, first, last = layout.ours
    *experts, x, y = layout.groups
    is_last = _names_of(y) == {*last}
    meets_last = last == ("i",) or first == ("o",) if batch else is_last
    ins, outs = (y, x) if is_last == meets_last else (x, y)
    factors = [
        ("lora_a", [*batch, first, (_RANK_NAME,)]),
        ("lora_b", [*batch, (_RANK_NAME,), last]),
    ]
    (a, ours_of_a), (b, ours_of_b) = factors[::-1] if meets_last else factors
    leading = experts[0] if batch else ()
    is_module = key == "weight" and not batch
    has_magnitude = is_module and not meets_last  # ours are of the last axis
    layouts = (
        _layout(tensor.solved, [(*leading, _RANK), ins], ours_of_a),
        _layout(tensor.solved, [outs, (_RANK, *leading)], ours_of_b),
        _layout(tensor.solved, [outs], [last]) if has_magnitude else None,
    )
    *_, rows, columns = target.kernel.shape
    is_said = not batch or {first, last} & {("i",), ("o",)}
    return AdaptableLayer(
        target,
        tensor,
        layouts,
        (a, b, "magnitude"),
        None if is_module else module,
        is_doubtful=not is_said and rows == columns,
    )


def _are_matrices(layout: Layout) -> bool:
    """Whether a file has a matrix, or several along a first axis, as we have them."""
    names = [_names_of(group) for group in layout.groups]
    *batch, first, last = ((), (), *layout.ours)[-max(len(layout.ours), 2) :]
    leading = [{name for axis in batch for name in axis}] if batch else []
    sides = [{*first}, {*last}]
    return names in ([*leading, *sides], [*leading, *reversed(sides)]) and all(names)


def check_axes(layers: Mapping[str, AdaptableLayer], call: str) -> None:
    """Raises if it is not known which axis of a parameter meets its inputs."""
    doubtful = [name for name, layer in layers.items() if layer.is_doubtful]
    if doubtful:
        raise usage_error(
            f"{call}: two axes of a parameter have the same size, so nothing says "
            "which of them meets the inputs.",
            doubtful,
            "Call them i and o in the layout of its line: ('experts.up', 'e o i -> "
            "e o i').",
        )


_RANK_NAME = "rank of LoRA"  # Not a name in a weight.
_RANK = Unit((Axis(_RANK_NAME, False),), False)


def _names_of(group: Sequence[Unit]) -> set[str]:
    """Returns the names of the axes in a group of a file's axes."""
    return {axis.name for unit in group for axis in unit.axes}


def _layout(weight: Solved, file: Sequence[Any], ours: Sequence[Any]) -> Layout:
    """Makes the layout of a factor, in the file and in our adapted layers."""
    names = {name for axis in ours for name in axis} - {_RANK_NAME}
    sizes = {name: weight.sizes[0][name] for name in names}
    return Layout("the factor", tuple(file), tuple(ours), sizes)


def factors_of(layer: AdaptableLayer, names: Mapping[str, str]) -> list[Tensor]:
    """Describes the factors of what is adapted, as tensors of a file."""
    tensors, at = [], layer.weight.at
    count = 3 if layer.target.change.magnitude is not None else 2
    named = [*zip(layer.factors, layer.attributes, layer.layouts, strict=True)][:count]
    subpath = () if layer.target.name is None else (layer.target.name,)
    for factor, attribute, layout in named:
        leaf = getattr(layer.target.change, attribute)
        path = (*layer.target.path, "lora", *subpath, attribute)
        array = tables.Array(path, leaf, leaf.get_raw_value())
        assert layout is not None, "checked before"
        solved = layout.solve([tuple(leaf.shape)[len(at) :]])
        tensors.append(Tensor(names[factor], (array,), at, solved))
    return tensors


def modules_of(layers: Mapping[str, AdaptableLayer]) -> dict[str, str]:
    """Returns the adapted layers, by the modules whose factors PEFT writes."""
    modules: dict[str, str] = {}
    for name, layer in reversed([*layers.items()]):
        module = layer.module or name
        while module in modules:
            module += ".base_layer"
        modules[module] = name
    return {module: modules[module] for module in reversed([*modules])}


def adaptation_of(target: Target) -> Adaptation:
    """Returns the settings of what is adapted."""
    change = target.change
    is_dora = change.magnitude is not None
    return Adaptation(change.rank, change.alpha, change.use_rslora, is_dora)


def check_magnitudes(layers: Mapping[str, AdaptableLayer], call: str) -> None:
    """Raises if PEFT has no DoRA for one of these parameters."""
    others = [name for name, layer in layers.items() if layer.layouts[2] is None]
    if others:
        raise usage_error(
            f"{call}: PEFT has no DoRA (use_dora) for parameters of modules, or none "
            "for this axis. Nothing has changed.",
            others,
            "Merge them by nnx.surgery.merge_lora, and share the merged weights.",
        )
