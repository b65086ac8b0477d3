"""What LoRA adapters of PEFT can adapt: layers, and parameters of modules.

Of each, its factors in a file of PEFT and in our model, with their layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftree.annotations import Path
from graftree.core import paths
from graftree.core.variables import values
from graftree.nn import compute_dtypes, linear, own_params
from graftree.sharding import process_arrays
from graftree.surgery import lora_layers, lora_targets, selections
from graftree.surgery.lora_targets import LoRATarget
from graftree.weights import tables
from graftree.weights.layouts import PART, Axis, Layout, Shape, Solved, Unit
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
        targets: It, in the model; several if its weight in a file is fused. They have
            factor A in common there, and each a part of B and of the magnitude.
        weight: Its weight in a file.
        layouts: Those of its factors A and B, and of its magnitude, in PEFT; the last
            is ``None`` if PEFT has no such magnitude.
        attributes: Which of ours these are.
        module: Its module in PEFT, if it is a parameter there.
        is_doubtful: Whether nothing says which of its axes meets inputs.
    """

    targets: tuple[LoRATarget, ...]
    weight: Tensor
    layouts: tuple[Layout, Layout, Layout | None]
    attributes: tuple[str, str, str] = ("lora_a", "lora_b", "magnitude")
    module: str | None = None
    is_doubtful: bool = False

    @property
    def target(self) -> LoRATarget:
        """The first one."""
        return self.targets[0]

    @property
    def paths(self) -> list[Path]:
        """Its paths in the model."""
        return [target.own_path for target in self.targets]

    def shapes(self, attribute: str, rank: int) -> list[Shape]:
        """Shapes in the model of what one tensor of PEFT has; of one layer of Stacks.

        Args:
            attribute: ``"lora_a"``, ``"lora_b"`` or ``"magnitude"``.
            rank: The rank.
        """
        shapes = []
        for target in self.with_own(attribute):
            axes = target.axes
            stacked = len(target.kernel.shape) - len(axes.shape)
            batch = axes.batch[max(0, len(self.weight.at) - stacked) :]
            by_name = {
                "lora_a": (*batch, *axes.ins, rank),
                "lora_b": (*batch, rank, *axes.outs),
                "magnitude": (*batch, *axes.outs),
            }
            shapes.append(by_name[attribute])
        return shapes

    def with_own(self, attribute: str) -> tuple[LoRATarget, ...]:
        """The targets whose arrays one tensor of PEFT has; the first, if all share."""
        return self.targets[:1] if attribute == self.attributes[0] else self.targets

    @property
    def factors(self) -> tuple[str, str, str]:
        """Names of its factors in PEFT."""
        return FACTORS_OF_EMBED if self.is_embed else FACTORS

    @property
    def is_embed(self) -> bool:
        """Whether it is the table of an `Embed`."""
        return self.target.name is None and isinstance(self.target.layer, linear.Embed)

    @property
    def can_drop(self) -> bool:
        """Whether dropout acts on its inputs, here and in PEFT."""
        return self.module is None and self.target.name is None

    @property
    def is_adapted(self) -> bool:
        """Whether `nnx.surgery.add_lora` has adapted it, or all its parts."""
        return all(isinstance(x.change, lora_layers.LowRank) for x in self.targets)


def layers_of(model: Any, tensors: Sequence[Tensor]) -> dict[str, AdaptableLayer]:
    """Finds what can be adapted, by names in PEFT: of modules, or their parameters."""
    modules = {x.path: x.value for x in selections.parts_of(model)}
    layers = {}
    for tensor in tensors:
        targets = _targets_of(tensor, modules)
        layer = None
        if targets and targets[0].name is None and tensor.name.endswith(".weight"):
            layer = _known_layer(targets, tensor)
        elif targets:
            layer = _own_param(targets, tensor)
        if layer is not None:
            is_module = layer.module is None
            name = tensor.name.removesuffix(".weight") if is_module else tensor.name
            layers[name] = layer
    return layers


def _targets_of(tensor: Tensor, modules: Mapping[Path, Any]) -> tuple[LoRATarget, ...]:
    """Returns the targets that have the arrays of a tensor; none unless all can be."""
    targets = []
    for array in tensor.arrays:
        (*above, key), leaf = array.path, array.leaf
        module = modules.get(tuple(above))
        if not compute_dtypes.is_param(leaf):
            return ()
        target = lora_targets.of_param(array.path, module, leaf, len(tensor.at))
        if target.name is not None and key not in own_params.names_in(module):
            return ()
        targets.append(target)
    of_layers = {target.name is None for target in targets}
    return tuple(targets) if len(of_layers) == 1 else ()


def _known_layer(
    targets: tuple[LoRATarget, ...], tensor: Tensor
) -> AdaptableLayer | None:
    """Describes a known layer; ``None`` if its weight has no axis of just outputs."""
    weight, axes = tensor.solved, targets[0].axes
    if len({(*map(len, x.axes[:3]), x.axes.order) for x in targets}) > 1:
        return None
    stacked = len(targets[0].kernel.shape) - len(axes.shape)
    if len(axes.batch) == len(tensor.at) - stacked:  # a file has each by itself
        axes = axes._replace(batch=())
    ours, groups = axes.grouped(weight.layout.ours), [*weight.layout.groups]
    split = len(ours) - len(axes.outs)
    ins = {name for names in ours[:split] for name in names}
    outs = {name for names in ours[split:] for name in names}
    names = [_names_of(group) for group in groups]
    of_outputs = [i for i, x in enumerate(names) if x & outs]
    if axes.batch or len(of_outputs) != 1 or names[of_outputs[0]] & ins:
        return None
    out = groups.pop(of_outputs[0])
    if any(unit.is_fused for group in groups for unit in group):
        return None
    ones = [()] * len(groups[1:])
    layouts = (
        _layout(weight, [(_RANK,), *groups], [*ours[:split], (_RANK_NAME,)]),
        _layout(weight, [out, (_RANK,), *ones], [(_RANK_NAME,), *ours[split:]]),
        _layout(weight, [(), out, *ones] if ones else [out], ours[split:]),
    )
    return AdaptableLayer(targets, tensor, layouts)


def _own_param(
    targets: tuple[LoRATarget, ...], tensor: Tensor
) -> AdaptableLayer | None:
    """Describes a parameter of a module; ``None`` if PEFT has no factors of this form.

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
    is_last, is_layer = _names_of(y) == {*last}, targets[0].name is None
    meets_last = last == ("i",) or first == ("o",) if batch else is_last
    meets_last = meets_last and not is_layer
    ins, outs = (y, x) if is_last == meets_last else (x, y)
    if any(unit.is_fused for unit in ins):
        return None
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
    *_, rows, columns = targets[0].kernel.shape
    is_said = is_layer or not batch or {first, last} & {("i",), ("o",)}
    return AdaptableLayer(
        targets,
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
            f"{call}: two axes of a parameter have the same size, so it is unclear "
            "which of them meets the inputs.",
            doubtful,
            "Name them i and o in the layout of its line: ('experts.up', 'e o i -> "
            "e o i').",
        )


_RANK_NAME = "rank of LoRA"  # Not a name in a weight.
_RANK = Unit((Axis(_RANK_NAME, False),), False)


def _names_of(group: Sequence[Unit]) -> set[str]:
    """Returns the names of our axes in a group of a file's axes."""
    return {axis.name for unit in group for axis in unit.axes} - {PART}


def _layout(weight: Solved, file: Sequence[Any], ours: Sequence[Any]) -> Layout:
    """Makes the layout of a factor, in the file and in our adapted layers."""
    names = {name for axis in ours for name in axis} - {_RANK_NAME}
    by_array = {name: {sizes[name] for sizes in weight.sizes} for name in names}
    # Those along which arrays are fused may differ; they follow from shapes.
    sizes = {name: next(iter(x)) for name, x in by_array.items() if len(x) == 1}
    return Layout("the factor", tuple(file), tuple(ours), sizes)


def factors_of(layer: AdaptableLayer, names: Mapping[str, str]) -> list[Tensor]:
    """Describes the factors of what is adapted, as tensors of a file."""
    count = 3 if layer.target.change.magnitude is not None else 2
    named = [*zip(layer.factors, layer.attributes, layer.layouts, strict=True)][:count]
    return [
        _factor(layer, layout, names[factor], attribute, targets)
        for factor, attribute, layout in named
        for targets in _together(layer, attribute)
    ]


def _together(layer: AdaptableLayer, attribute: str) -> list[tuple[LoRATarget, ...]]:
    """Groups targets by the tensor that has their factors; each has all of factor A."""
    is_shared = len(layer.with_own(attribute)) < len(layer.targets)
    return [(x,) for x in layer.targets] if is_shared else [layer.targets]


def _factor(
    layer: AdaptableLayer,
    layout: Layout | None,
    name: str,
    attribute: str,
    targets: Sequence[LoRATarget],
) -> Tensor:
    """Describes a factor, of several targets if it is fused."""
    assert layout is not None, "checked before"
    at, arrays = layer.weight.at, []
    for target in targets:
        leaf = getattr(target.change, attribute)
        subpath = () if target.name is None else (target.name,)
        path = (*target.path, "lora", *subpath, attribute)
        arrays.append(tables.Array(path, leaf, leaf.get_raw_value()))
    solved = layout.solve([tuple(x.leaf.shape)[len(at) :] for x in arrays])
    return Tensor(name, tuple(arrays), at, solved)


def modules_of(layers: Mapping[str, AdaptableLayer]) -> dict[str, str]:
    """Returns the adapted layers, by the modules whose factors PEFT writes."""
    modules: dict[str, str] = {}
    for name, layer in reversed([*layers.items()]):
        module = layer.module or name
        while module in modules:
            module += ".base_layer"
        modules[module] = name
    return {module: modules[module] for module in reversed([*modules])}


def adaptation_of(target: LoRATarget) -> Adaptation:
    """Returns the settings of what is adapted."""
    change = target.change
    is_dora = change.magnitude is not None
    return Adaptation(change.rank, change.alpha, change.use_rslora, is_dora)


def check_fused(layers: Mapping[str, AdaptableLayer]) -> None:
    """Raises unless the parts of each fused weight have factor A and scale in common.

    Values that are not there are taken to be equal.
    """
    differing = []
    for name, layer in layers.items():
        first, *others = layer.targets
        for other in others:
            kinds = [str(adaptation_of(x)) for x in (first, other)]
            if kinds[0] != kinds[1]:
                differing.append(f"{name}: {kinds[0]}; {kinds[1]}")
            elif not _share_a(layer.attributes[0], first, other):
                pair = " and ".join(paths.dotted(x.own_path) for x in (first, other))
                differing.append(f"{name}: {layer.attributes[0]} of {pair}")
    if differing:
        raise usage_error(
            "nnx.weights.save_adapter: a weight in the file is several layers here. "
            "PEFT has one factor A, rank and scale for all of it, but these differ. "
            "Nothing was written.",
            differing,
            "Before training, make them share it: model.key.lora.lora_a = "
            "model.query.lora.lora_a. After training, merge them with "
            "nnx.surgery.merge_lora, and share the merged weights.",
        )


def _share_a(attribute: str, *targets: LoRATarget) -> bool:
    x, y = (getattr(x.change, attribute).get_value() for x in targets)
    if values.is_stand_in(x) or x.shape != y.shape:
        return x.shape == y.shape
    return bool(np.array_equal(process_arrays.read(x), process_arrays.read(y)))


def check_magnitudes(layers: Mapping[str, AdaptableLayer], call: str) -> None:
    """Raises if PEFT has no DoRA for one of these parameters."""
    others = [name for name, layer in layers.items() if layer.layouts[2] is None]
    if others:
        raise usage_error(
            f"{call}: PEFT has no DoRA (use_dora) for parameters of modules, or none "
            "for this axis. Nothing has changed.",
            others,
            "Merge them with nnx.surgery.merge_lora, and share the merged weights.",
        )
