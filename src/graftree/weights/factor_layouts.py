"""How PEFT stores the factors of a layer, given how PyTorch stores its weight.

    weight in the file      lora_A             lora_B
    [out, in]               [rank, in]         [out, rank]
    [in, out]               [rank, in]         [out, rank]           (GPT-2's Conv1D)
    [out, in, *kernel]      [rank, in, *kernel]  [out, rank, 1, ...]
    [rows, features]        [rank, rows]       [features, rank]      (an embedding)

Inputs and outputs are in the order that they have in the weight, heads included.
"""

from __future__ import annotations

from typing import NamedTuple

from graftree.weights import layouts
from graftree.weights.layouts import Layout, Solved, Unit

_RANK = "rank_of_lora"


class FactorLayouts(NamedTuple):
    """The layouts of both factors, in the file and in our adapted layers."""

    a: Layout
    b: Layout


def of_weight(weight: Solved, num_outputs: int) -> FactorLayouts | None:
    """The layouts of the factors of a weight.

    Args:
        weight: The layout of the weight, which is no fused one.
        num_outputs: How many of our axes, the last ones, are outputs.

    Returns:
        ``None`` if the weight in the file has not just one axis of outputs.
    """
    ours = [name for names in weight.layout.ours for name in names]
    split = len(weight.layout.ours) - num_outputs
    outputs = {name for names in weight.layout.ours[split:] for name in names}
    met = [
        {axis.name for unit in group for axis in unit.axes} for group in _groups(weight)
    ]
    of_outputs = [i for i, names in enumerate(met) if names & outputs]
    if len(of_outputs) != 1 or met[of_outputs[0]] - outputs:
        return None
    groups = [_written(group) for group in _groups(weight)]
    out = groups.pop(of_outputs[0])
    right = [_grouped(names) for names in weight.layout.ours]
    ins, outs = " ".join(right[:split]), " ".join(right[split:])
    ones = " ".join("1" for _ in groups[1:])
    sizes = {name: weight.sizes[0][name] for name in ours}

    def parsed(text: str, names: set[str]) -> Layout:
        return layouts.parse(text, {n: sizes[n] for n in ours if n in names}, 1)

    return FactorLayouts(
        parsed(f"{_RANK} {' '.join(groups)} -> {ins} {_RANK}", {*ours} - outputs),
        parsed(f"{out} {_RANK} {ones} -> {_RANK} {outs}", outputs),
    )


def _groups(weight: Solved) -> tuple[tuple[Unit, ...], ...]:
    return weight.layout.groups


def _written(group: tuple[Unit, ...]) -> str:
    """An axis of the file as it is written in a layout."""
    axes = [axis for unit in group for axis in unit.axes]
    return _grouped([("~" if a.is_reversed else "") + a.name for a in axes])


def _grouped(names: list[str] | tuple[str, ...]) -> str:
    if not names:
        return "1"
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
