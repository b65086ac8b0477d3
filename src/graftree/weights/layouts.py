"""Layouts: how the axes of a tensor in a file become those of an array.

A layout has the axes in the file on the left and ours on the right, in the notation of
einops:

    o i -> i o                  transposed
    (h d) e -> e h d            an axis of the file that is two of ours
    o i k -> k i o              a convolution
    o 1 -> o                    an axis of size 1 that only the file has
    i o ~k -> k i o             ``k`` runs backwards in the file

A tensor that consists of several arrays is *fused*. They lie one after the other along
the axis or group with a plus, each with its own size; or they alternate along the axis
``part``:

    +(h d) e -> e h d           queries, keys and values, one after the other
    (g +h d) e -> e (g h) d     within each of g groups
    (h part d) e -> e h d       within each head

All sizes follow from the shapes of our arrays. Only in a group on our side, all axes
but one need sizes, as ``g`` does here. So each layout can be read in both directions,
and one that can't is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftree.weights.stored_tensors import misuse

PART = "part"

Index = tuple[slice, ...]
Shape = tuple[int, ...]


class Axis(NamedTuple):
    """An axis in the file."""

    name: str
    is_reversed: bool


class Unit(NamedTuple):
    """Axes of the file that are read as one: an axis, or those with a plus."""

    axes: tuple[Axis, ...]
    is_fused: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that has been read and is valid.

    Attributes:
        text: Its text, as written.
        groups: The axes of the tensor in the file, each with its units.
        ours: The axes of our array, each with its names.
        sizes: The sizes that were given.
    """

    text: str
    groups: tuple[tuple[Unit, ...], ...]
    ours: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int] = dataclasses.field(hash=False)

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units, in the order of the file."""
        return tuple(unit for group in self.groups for unit in group)

    @functools.cached_property
    def axes(self) -> list[Axis]:
        """All axes of the file, in its order."""
        return [axis for unit in self.units for axis in unit.axes]

    @functools.cached_property
    def order(self) -> list[str]:
        """All names of our axes, in our order."""
        return [name for group in self.ours for name in group]

    def solve(self, shapes: Sequence[Shape]) -> Solved:
        """Finds the sizes of all axes.

        Args:
            shapes: The shapes of our arrays, several if the tensor is fused.

        Raises:
            ValueError: If a shape does not fit.
        """
        return Solved(self, tuple(self._sizes(tuple(shape)) for shape in shapes))

    def _sizes(self, shape: Shape) -> dict[str, int]:
        if len(shape) != len(self.ours):
            raise ValueError(f"{self.text!r} has {len(self.ours)} axes on its right")
        found = {**self.sizes, PART: 1}
        for names, size in zip(self.ours, shape, strict=True):
            known = math.prod(found[name] for name in names if name in found)
            rest = [name for name in names if name not in found]
            if known == 0 or size % known or (not rest and size != known):
                raise ValueError(f"{self.text!r} can't cut {size} into {names}")
            found.update(dict.fromkeys(rest, size // known))
        return found


class Solved:
    """A layout with the sizes of all axes.

    Attributes:
        layout: The layout.
        sizes: The sizes of the axes, for each of our arrays.
        file_shape: The shape of the tensor in the file.
        view_shape: The same, with an axis for each unit; `read` uses it.
    """

    def __init__(self, layout: Layout, sizes: Sequence[dict[str, int]]) -> None:
        self.layout = layout
        self.sizes = sizes
        lengths = {unit: self._total(unit) for unit in layout.units}
        self.view_shape = tuple(lengths[unit] for unit in layout.units)
        self.file_shape = tuple(
            math.prod(lengths[unit] for unit in group) for group in layout.groups
        )

    def read(
        self, part: int, index: Index, get: Callable[[Index], np.ndarray]
    ) -> np.ndarray:
        """Reads a piece of one of our arrays.

        Args:
            part: The number of the array.
            index: The piece of it.
            get: Returns a piece of the tensor, as a view of shape ``view_shape``.
        """
        wanted, inside = self._wanted(part, index)
        x = get(self._places(part, wanted))
        return self._arrange(x, part, wanted)[inside]

    def view_index(self, part: int, index: Index) -> Index:
        """The piece of the view that `read` asks for."""
        return self._places(part, self._wanted(part, index)[0])

    def _wanted(self, part: int, index: Index) -> tuple[dict[str, slice], Index]:
        """Pieces of axes that contain a piece of an array, and its place in these."""
        sizes = self.sizes[part]
        wanted = {PART: slice(0, 1)}
        inside = []
        for names, piece in zip(self.layout.ours, index, strict=True):
            lengths = [sizes[name] for name in names]
            cover, cut = _cover(lengths, piece)
            wanted.update(zip(names, cover, strict=True))
            inside.append(cut)
        return wanted, tuple(inside)

    def _places(self, part: int, wanted: Mapping[str, slice]) -> Index:
        return tuple(self._place(unit, part, wanted) for unit in self.layout.units)

    def _place(self, unit: Unit, part: int, wanted: Mapping[str, slice]) -> slice:
        """The piece of a unit in the file that contains the wanted piece."""
        sizes = self.sizes[part]
        first, *others = unit.axes
        outer = wanted[first.name]
        if first.is_reversed:
            size = sizes[first.name]
            outer = slice(size - outer.stop, size - outer.start)
        inner = math.prod(sizes[axis.name] for axis in others)
        start = sum(self._product(unit, i) for i in range(part)) if unit.is_fused else 0
        return slice(start + outer.start * inner, start + outer.stop * inner)

    def _arrange(
        self, x: np.ndarray, part: int, wanted: Mapping[str, slice]
    ) -> np.ndarray:
        """Gives a piece of the view the axes of our array."""
        axes, order = self.layout.axes, self.layout.order
        names = [axis.name for axis in axes]
        firsts = {unit.axes[0].name for unit in self.layout.units}
        # Within a unit, only the first axis was cut.
        lengths = self.sizes[part] | {x: _length(wanted[x]) for x in firsts}
        x = _flipped(x.reshape([lengths[name] for name in names]), axes)
        x = x[tuple(slice(None) if y in firsts else wanted[y] for y in names)]
        if PART in names:
            x = x.squeeze(names.index(PART))
            names.remove(PART)
        x = x.transpose([names.index(name) for name in order])
        ours = self.layout.ours
        return x.reshape([math.prod(_length(wanted[y]) for y in z) for z in ours])

    def to_file(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Makes the tensor of the file from our arrays, the inverse of reading."""
        views = [self._view(x, part) for part, x in enumerate(arrays)]
        fused = [i for i, unit in enumerate(self.layout.units) if unit.is_fused]
        whole = np.concatenate(views, fused[0]) if fused else views[0]
        return whole.reshape(self.file_shape)

    def _view(self, x: np.ndarray, part: int) -> np.ndarray:
        order = self.layout.order
        axes = [axis for axis in self.layout.axes if axis.name != PART]
        x = x.reshape([self.sizes[part][name] for name in order])
        x = _flipped(x.transpose([order.index(axis.name) for axis in axes]), axes)
        return x.reshape([self._product(unit, part) for unit in self.layout.units])

    def _total(self, unit: Unit) -> int:
        """The size of a unit, of all parts together."""
        products = [self._product(unit, part) for part in range(len(self.sizes))]
        if unit.is_fused:
            return sum(products)
        if len({*products}) > 1:
            names = " ".join(axis.name for axis in unit.axes)
            raise ValueError(
                f"{self.layout.text!r}: {names} has the sizes {products} in the arrays"
            )
        return products[0]

    def _product(self, unit: Unit, part: int) -> int:
        """The size of a unit, of one part."""
        return math.prod(self.sizes[part][axis.name] for axis in unit.axes)


def _flipped(x: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    return np.flip(x, tuple(i for i, axis in enumerate(axes) if axis.is_reversed))


def _length(piece: slice) -> int:
    return piece.stop - piece.start


def _cover(lengths: Sequence[int], piece: slice) -> tuple[list[slice], slice]:
    """Pieces of axes that contain a piece of a group, and its place in these.

    All axes but the first are whole.
    """
    if not lengths:
        return [], slice(0, 1)
    inner = math.prod(lengths[1:])
    start, stop, _ = piece.indices(lengths[0] * inner)
    first = start // inner if inner else 0
    last = max(first, -(-stop // inner)) if inner else 0
    pieces = [slice(first, last), *[slice(0, length) for length in lengths[1:]]]
    return pieces, slice(start - first * inner, stop - first * inner)


# Reading a text. Up to `parse`, a refusal is a ValueError with only the reason.


def solved(layout: Layout | str | None, shapes: Sequence[Shape]) -> Solved:
    """A layout with the sizes of our arrays; ``None``: the file has the same axes."""
    if layout is None:
        axes = " ".join(f"a{axis}" for axis in range(len(shapes[0])))
        layout = f"{axes} -> {axes}"
    if isinstance(layout, str):
        layout = parse(layout, {}, len(shapes))
    return layout.solve(shapes)


def parse(text: str, sizes: Mapping[str, int], parts: int) -> Layout:
    """Reads a layout.

    Args:
        text: As in ``"(h d) e -> e h d"``.
        sizes: Sizes of axes that don't follow from shapes.
        parts: The number of our arrays; more than one if the tensor is fused.

    Raises:
        ValueError: If it is malformed, or can't be read in both directions.
    """
    try:
        left, right = _sides(text)
        ours = tuple(tuple(x.name for unit in y for x in unit.axes) for y in right)
        layout = Layout(text, left, ours, dict(sizes))
        _check(layout, parts)
    except ValueError as error:
        raise misuse(
            f"The layout {text!r} is refused: {error}.",
            way_out="Write the axes of the file, '->', and those of the array, as "
            "in '(h d) e -> e h d'; each axis once on each side.",
        ) from None
    return layout


_Groups = tuple[tuple[Unit, ...], ...]


def _sides(text: str) -> tuple[_Groups, _Groups]:
    """The groups of the file, and ours."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError("it needs one '->', with the axes of the file on its left")
    left, right = map(_groups, sides)
    units = [unit for group in right for unit in group]
    if any(x.is_fused or any(a.is_reversed for a in x.axes) for x in units):
        raise ValueError(f"'+', '~' and {PART!r} belong to the left, where the file is")
    return left, right


def _groups(side: str) -> _Groups:
    """The groups of one side."""
    groups = []
    for plus, inner, axis in _items(side):
        if plus and inner is not None:
            units = [Unit(tuple(a for x in _items(inner) for a in _axes(x[2])), True)]
        else:
            listed = [(plus, None, axis)] if inner is None else _items(inner)
            units = [Unit(_axes(a), bool(p) or a == PART) for p, _, a in listed]
        groups.append(tuple(unit for unit in units if unit.axes))
    return tuple(groups)


_ITEM = re.compile(r"\s*(\+?)(?:\(([^()]*)\)|(~?[A-Za-z_]\w*|1)(?![\w~]))")


def _items(side: str) -> list[tuple[str, Any, Any]]:
    """Plus, group and axis of each item; the group or the axis is ``None``."""
    items, position, side = [], 0, side.rstrip()
    while position < len(side):
        found = _ITEM.match(side, position)
        if found is None:
            raise ValueError(f"{side[position:].strip()!r} can't be read")
        items.append(found.groups())
        position = found.end()
    return items


def _axes(text: str | None) -> tuple[Axis, ...]:
    if text is None or text == "1":
        return ()
    return (Axis(text.removeprefix("~"), text.startswith("~")),)


def _check(layout: Layout, parts: int) -> None:
    """Raises unless the layout can be read in both directions."""
    left, right = [axis.name for axis in layout.axes], layout.order
    for name in (*left, *right):
        if left.count(name) > 1 or right.count(name) > 1:
            raise ValueError(f"the axis {name!r} occurs twice on one side")
        if name != PART and (name not in left or name not in right):
            raise ValueError(f"the axis {name!r} is on one side only")
    if sum(unit.is_fused for unit in layout.units) != (parts > 1):
        if parts == 1:
            raise ValueError(f"'+' and {PART!r} need several paths, in a list")
        places = f"one '+' or {PART!r}, on the left"
        raise ValueError(f"{parts} arrays in one tensor need {places}")
    for name, size in layout.sizes.items():
        if name not in right or not isinstance(size, int) or size < 1:
            raise ValueError(f"the size {name}={size!r} is of no use")
    for group in layout.ours:
        unknown = [name for name in group if name not in layout.sizes]
        if len(unknown) > 1:
            names = " and ".join(unknown)
            raise ValueError(f"of {names} on the right, all but one need a size")
