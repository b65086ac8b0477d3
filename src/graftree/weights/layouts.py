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

from graftree.weights.stored_tensors import usage_error

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
        sizes = {**self.sizes, PART: 1}
        for names, size in zip(self.ours, shape, strict=True):
            product = math.prod(sizes[name] for name in names if name in sizes)
            rest = [name for name in names if name not in sizes]
            if product == 0 or size % product or (not rest and size != product):
                raise ValueError(f"{self.text!r} can't split {size} into {names}")
            sizes.update(dict.fromkeys(rest, size // product))
        return sizes


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
        self, position: int, index: Index, get: Callable[[Index], np.ndarray]
    ) -> np.ndarray:
        """Reads a piece of one of our arrays.

        Args:
            position: Which of the arrays in the tensor.
            index: The piece of it.
            get: Returns a piece of the tensor, as a view of shape ``view_shape``.
        """
        wanted, cut = self._wanted(position, index)
        x = get(self._slices(position, wanted))
        return self._arrange(x, position, wanted)[cut]

    def view_index(self, position: int, index: Index) -> Index:
        """Returns the piece of the view that `read` asks for."""
        return self._slices(position, self._wanted(position, index)[0])

    def _wanted(self, position: int, index: Index) -> tuple[dict[str, slice], Index]:
        """Returns slices of axes that cover a piece of an array, and where in them."""
        sizes = self.sizes[position]
        wanted = {PART: slice(0, 1)}
        cuts = []
        for names, piece in zip(self.layout.ours, index, strict=True):
            lengths = [sizes[name] for name in names]
            cover, cut = _cover(lengths, piece)
            wanted.update(zip(names, cover, strict=True))
            cuts.append(cut)
        return wanted, tuple(cuts)

    def _slices(self, position: int, wanted: Mapping[str, slice]) -> Index:
        return tuple(self._slice(unit, position, wanted) for unit in self.layout.units)

    def _slice(self, unit: Unit, position: int, wanted: Mapping[str, slice]) -> slice:
        """Returns the slice of a unit in the file that contains the wanted piece."""
        sizes = self.sizes[position]
        first, *others = unit.axes
        outer = wanted[first.name]
        if first.is_reversed:
            size = sizes[first.name]
            outer = slice(size - outer.stop, size - outer.start)
        inner = math.prod(sizes[axis.name] for axis in others)
        start = (
            sum(self._product(unit, i) for i in range(position)) if unit.is_fused else 0
        )
        return slice(start + outer.start * inner, start + outer.stop * inner)

    def _arrange(
        self, x: np.ndarray, position: int, wanted: Mapping[str, slice]
    ) -> np.ndarray:
        """Gives a piece of the view the axes of our array."""
        axes, order = self.layout.axes, self.layout.order
        names = [axis.name for axis in axes]
        firsts = {unit.axes[0].name for unit in self.layout.units}
        # Within a unit, only the first axis was cut.
        lengths = self.sizes[position] | {x: _length(wanted[x]) for x in firsts}
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
        views = [self._view(x, i) for i, x in enumerate(arrays)]
        fused = [axis for axis, unit in enumerate(self.layout.units) if unit.is_fused]
        tensor = np.concatenate(views, fused[0]) if fused else views[0]
        return tensor.reshape(self.file_shape)

    def _view(self, x: np.ndarray, position: int) -> np.ndarray:
        order = self.layout.order
        axes = [axis for axis in self.layout.axes if axis.name != PART]
        x = x.reshape([self.sizes[position][name] for name in order])
        x = _flipped(x.transpose([order.index(axis.name) for axis in axes]), axes)
        return x.reshape([self._product(unit, position) for unit in self.layout.units])

    def _total(self, unit: Unit) -> int:
        """Returns the size of a unit, for all arrays together."""
        products = [self._product(unit, i) for i in range(len(self.sizes))]
        if unit.is_fused:
            return sum(products)
        if len({*products}) > 1:
            names = " ".join(axis.name for axis in unit.axes)
            raise ValueError(
                f"{self.layout.text!r}: {names} has the sizes {products} in the arrays"
            )
        return products[0]

    def _product(self, unit: Unit, position: int) -> int:
        """Returns the size of a unit, for one array."""
        return math.prod(self.sizes[position][axis.name] for axis in unit.axes)


def _flipped(x: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    return np.flip(x, tuple(i for i, axis in enumerate(axes) if axis.is_reversed))


def _length(piece: slice) -> int:
    return piece.stop - piece.start


def _cover(lengths: Sequence[int], piece: slice) -> tuple[list[slice], slice]:
    """Returns slices of axes that cover a piece of a group, and where in them.

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


# Reading a text. Up to `parse`, errors are ValueErrors with only the reason.


def solved(layout: Layout | str | None, shapes: Sequence[Shape]) -> Solved:
    """Finds the sizes of a layout; for ``None``, the file has the axes that we have."""
    if layout is None:
        axes = " ".join(f"a{axis}" for axis in range(len(shapes[0])))
        layout = f"{axes} -> {axes}"
    if isinstance(layout, str):
        layout = parse(layout, {}, len(shapes))
    return layout.solve(shapes)


def parse(text: str, sizes: Mapping[str, int], num_arrays: int) -> Layout:
    """Reads a layout.

    Args:
        text: As in ``"(h d) e -> e h d"``.
        sizes: Sizes of axes that don't follow from shapes.
        num_arrays: How many arrays of ours; more than one if the tensor is fused.

    Raises:
        ValueError: If it is malformed, or can't be read in both directions.
    """
    try:
        left, right = _sides(text)
        ours = tuple(tuple(x.name for unit in y for x in unit.axes) for y in right)
        layout = Layout(text, left, ours, dict(sizes))
        _check(layout, num_arrays)
    except ValueError as error:
        raise usage_error(
            f"The layout {text!r} is invalid: {error}.",
            way_out="Write the axes of the file, '->', and those of the array, as "
            "in '(h d) e -> e h d'; each axis once on each side.",
        ) from None
    return layout


_Groups = tuple[tuple[Unit, ...], ...]


def _sides(text: str) -> tuple[_Groups, _Groups]:
    """Returns the groups of the file, and ours."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError("it needs one '->', with the axes of the file on its left")
    left, right = map(_groups, sides)
    units = [unit for group in right for unit in group]
    if any(x.is_fused or any(a.is_reversed for a in x.axes) for x in units):
        raise ValueError(f"'+', '~' and {PART!r} belong on the left, the file's side")
    return left, right


def _groups(side: str) -> _Groups:
    """Reads the groups of one side."""
    groups = []
    for plus, inner, axis in _items(side):
        if plus and inner is not None:
            units = [Unit(tuple(a for x in _items(inner) for a in _axes(x[2])), True)]
        else:
            items = [(plus, None, axis)] if inner is None else _items(inner)
            units = [Unit(_axes(a), bool(p) or a == PART) for p, _, a in items]
        groups.append(tuple(unit for unit in units if unit.axes))
    return tuple(groups)


_ITEM = re.compile(r"\s*(\+?)(?:\(([^()]*)\)|(~?[A-Za-z_]\w*|1)(?![\w~]))")


def _items(side: str) -> list[tuple[str, Any, Any]]:
    """Reads plus, group and axis of each item; the group or the axis is ``None``."""
    items, position, side = [], 0, side.rstrip()
    while position < len(side):
        match = _ITEM.match(side, position)
        if match is None:
            raise ValueError(f"{side[position:].strip()!r} can't be read")
        items.append(match.groups())
        position = match.end()
    return items


def _axes(text: str | None) -> tuple[Axis, ...]:
    if text is None or text == "1":
        return ()
    return (Axis(text.removeprefix("~"), text.startswith("~")),)


def _check(layout: Layout, num_arrays: int) -> None:
    """Raises unless the layout can be read in both directions."""
    left, right = [axis.name for axis in layout.axes], layout.order
    for name in (*left, *right):
        if left.count(name) > 1 or right.count(name) > 1:
            raise ValueError(f"the axis {name!r} occurs twice on one side")
        if name != PART and (name not in left or name not in right):
            raise ValueError(f"the axis {name!r} is on one side only")
    if sum(unit.is_fused for unit in layout.units) != (num_arrays > 1):
        if num_arrays == 1:
            raise ValueError(f"'+' and {PART!r} need several paths, in a list")
        raise ValueError(
            f"{num_arrays} arrays in one tensor need one '+' or {PART!r}, on the left"
        )
    for name, size in layout.sizes.items():
        if name not in right or not isinstance(size, int) or size < 1:
            raise ValueError(f"the size {name}={size!r} is of no use")
    for group in layout.ours:
        unknown = [name for name in group if name not in layout.sizes]
        if len(unknown) > 1:
            names = " and ".join(unknown)
            raise ValueError(f"of {names} on the right, all but one need a size")
