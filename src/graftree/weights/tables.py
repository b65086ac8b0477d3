"""Tables: which tensors of a file are which arrays of a model.

A table is read against a model, in either direction: `Mapping.tensors` gives the list
of all tensors that a file of this model has, each with the arrays it is made of, their
layout, and its shape. Loading and saving both follow that list.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Key, Path
from graftree.core import paths, patterns
from graftree.core.graph import flattening, nodes
from graftree.core.graph.nodes import Leaf
from graftree.core.rng.streams import RngState
from graftree.core.text import short_forms
from graftree.core.variables.kinds import Cache, Intermediate
from graftree.core.variables.variables import Variable
from graftree.nn import stacks
from graftree.surgery import selections
from graftree.weights import layouts, names, torch_layouts
from graftree.weights.layouts import Layout, Shape, Solved
from graftree.weights.names import Place


class Array(NamedTuple):
    """An array of a model.

    Attributes:
        path: The first path that leads to it.
        leaf: The Variable, or the array itself.
        value: The array; also an abstract one.
    """

    path: Path
    leaf: Any
    value: Any


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: What it is called there.
        arrays: What it is made of; several if it is fused.
        at: Its place in arrays that stack several tensors along their first axes.
        solved: Its layout.
    """

    name: str
    arrays: tuple[Array, ...]
    at: tuple[int, ...]
    solved: Solved


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A line of a table; ``layout`` is ``None`` where the layer knows it."""

    name: str
    paths: tuple[str, ...]
    layout: Layout | None


class Mapping:
    """A table of the names in files of weights, and the paths in a model.

    Each line has a name in the file on its left, and on its right:

    - a path: ``"lm_head.weight": "head.kernel"``. A layer of this library knows how
      PyTorch stores it, so that its kernel is transposed as it must be; what is not in
      such a layer is the same on both sides.
    - the path of a layer: ``"lm_head": "head"`` is all that the layer has, as PyTorch
      calls it: ``lm_head.weight``, and ``lm_head.bias`` if there is one. For any other
      Module it is what its attributes have, under their own names.
    - a path and a layout: ``("head.kernel", "i o -> i o")``, for a file that stores it
      otherwise; sizes may follow: ``("x", "(g k) o -> (k g) o", {"g": 2})``.
    - a list of paths and a layout with ``+`` or ``part``, for a tensor that is made of
      several: ``(["q.kernel", "k.kernel"], "+(h d) e -> e h d")``.

    ``{i}`` stands for an index: ``"layers.{i}.norm": "blocks[{i}].norm"``. The blocks
    may be a list, or a `Stack`, whose arrays have all layers along their first axis. An
    index that is only in the name is stacked, too. One table fits both forms. Elements
    that lack what a line is about are not in that line, so that the layers of a list
    may differ.

    Args:
        entries: The lines.
        ignore: Patterns of names in files that the model has no use for, such as
            ``"**.rotary_emb.inv_freq"``.
        tied: Names that are others once more: ``{"lm_head.weight":
            "model.embed_tokens.weight"}``. A file may lack them; where it has them,
            they must be equal. They are not written.

    Raises:
        TypeError: If a line has another form.
        ValueError: If a layout can't be read in both directions, or two lines have the
            same name or path.

    Example:
        >>> mapping = nnx.weights.Mapping(
        ...     {"fc": "up", "mix": ("mix", "a b -> b a")}, ignore=["fc.extra"]
        ... )
        >>> mapping
        Mapping('fc': 'up', 'mix': ('mix', 'a b -> b a'))
    """

    def __init__(
        self,
        entries: MappingABC[str, Any],
        *,
        ignore: Sequence[str] = (),
        tied: MappingABC[str, str] | None = None,
    ) -> None:
        if isinstance(ignore, str):
            raise TypeError(f"ignore= is a list of patterns, got {ignore!r}.")
        self.entries = dict(entries)
        self.ignore = tuple(ignore)
        self.tied = dict(tied or {})
        self._lines = tuple(_read(name, x) for name, x in self.entries.items())
        self._patterns = tuple(map(patterns.Pattern, self.ignore))
        _check_unique(self._lines)

    def __repr__(self) -> str:
        lines = [f"{name!r}: {value!r}" for name, value in self.entries.items()]
        return f"Mapping({', '.join(lines)})"

    def ignores(self, name: str) -> bool:
        """Whether a name in a file is ignored."""
        path = tuple(name.split("."))
        return name in self.ignore or any(p(path) for p in self._patterns)

    def tensors(self, model: Any) -> list[Tensor]:
        """All tensors that a file of a model has, in the order of the table.

        Lines that follow each other and have indices are taken index by index.

        Raises:
            ValueError: If a path leads nowhere, or the model does not fit a layout, or
                two lines lead to the same array or name, or a name is tied to none.
        """
        reader = _Reader(model, self._lines)
        found = []
        for _, lines in itertools.groupby(self._lines, lambda x: names.places(x.name)):
            of_lines = [pair for line in lines for pair in reader.read(line)]
            of_lines.sort(key=lambda pair: pair[0])
            found += [tensor for _, tensor in of_lines]
        _check_single(found)
        _check_tied(self.tied, {tensor.name for tensor in found})
        return found


def as_mapping(mapping: Any) -> Mapping:
    """A `Mapping`, also of a plain dict."""
    if isinstance(mapping, Mapping):
        return mapping
    if isinstance(mapping, MappingABC):
        return Mapping(mapping)
    raise TypeError(
        f"mapping= is a dict or an nnx.weights.Mapping, got {type(mapping).__name__}."
    )


# Reading lines.


def _read(name: Any, value: Any) -> _Entry:
    if not isinstance(name, str):
        raise TypeError(
            errors.message(
                f"The line {name!r}: {value!r} of a table of weights has no name.",
                way_out="A line is about one tensor; its name is a string. Several "
                "tensors that are one array in the model: give the model an array for "
                "each, or join them first, and load the dict of tensors.",
            )
        )
    paths, layout, sizes = _parts(name, value)
    listed = (paths,) if isinstance(paths, str) else tuple(paths)
    for path in listed:
        lost = {*_places(path)} - {*names.places(name)}
        if lost:
            raise _wrong(
                name, f"the index {lost.pop()!r} of {path!r} is not in its name"
            )
    if layout is None:
        return _Entry(name, listed, None)
    return _Entry(name, listed, layouts.parse(layout, sizes, len(listed)))


def _parts(name: str, value: Any) -> tuple[Any, str | None, MappingABC[str, int]]:
    """The path or paths, the layout and the sizes of a line."""
    if isinstance(value, str):
        return value, None, {}
    if isinstance(value, tuple) and 2 <= len(value) <= 3:
        paths, layout = value[:2]
        sizes = value[2] if len(value) == 3 else {}
        is_path = isinstance(paths, str) or (
            isinstance(paths, list) and len(paths) > 1 and _are_strings(paths)
        )
        if is_path and isinstance(layout, str) and isinstance(sizes, MappingABC):
            return paths, layout, sizes
    raise TypeError(
        errors.message(
            f"The line {name!r}: {value!r} of a table of weights has another form.",
            way_out="Write a path; or (path, layout); or ([path, path], layout) for a "
            "tensor that is made of several arrays; sizes may follow as a dict.",
        )
    )


def _are_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _places(path: str) -> list[str]:
    return [step.name for step in names.steps(path) if isinstance(step, Place)]


def _check_unique(lines: Sequence[_Entry]) -> None:
    seen: dict[Any, str] = {}
    for line in lines:
        for path in line.paths:
            other = seen.setdefault(names.steps(path), line.name)
            if other is not line.name:
                raise _wrong(line.name, f"{path!r} is in the line {other!r} too")


def _wrong(name: str, reason: str) -> ValueError:
    return ValueError(f"The line {name!r} of the table of weights: {reason}.")


# Reading a model.


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A part of a model that a path leads to.

    Attributes:
        value: The part.
        parent: What it is an attribute of.
        key: Its key there.
        path: The path by which it was reached.
        indices: The indices on the way, by the names of their places.
        stacked: The places whose indices are along the first axes of its arrays.
    """

    value: Any
    parent: Any
    key: Key
    path: Path
    indices: MappingABC[str, int]
    stacked: tuple[str, ...]

    def child(self, key: Key, value: Any) -> _Spot:
        return dataclasses.replace(
            self, value=value, parent=self.value, key=key, path=(*self.path, key)
        )


_Ordered = tuple[tuple[int, ...], Tensor]


class _Reader:
    """Reads lines against a model."""

    def __init__(self, model: Any, lines: Sequence[_Entry]) -> None:
        self._root = _Spot(model, None, None, (), {}, ())
        self._arrays = arrays_of(model)
        self._named: dict[int, str] = {}
        for line in lines:
            for path in line.paths:
                for spot in self._find(path):
                    self._named.setdefault(id(spot.value), line.name)

    def read(self, line: _Entry) -> Iterator[_Ordered]:
        """The tensors of a line, each with its indices."""
        found = [self._find(path) for path in line.paths]
        if len({*map(len, found)}) > 1:
            raise _wrong(line.name, "its paths lead to different numbers of arrays")
        if any(len({*map(_indices, spots)}) > 1 for spots in zip(*found, strict=True)):
            raise _wrong(line.name, "its paths lead to layers of different indices")
        for spots in zip(*found, strict=True):
            if line.layout is None and not _is_array(spots[0].value):
                yield from self._module(line.name, spots[0], line.name)
            else:
                layout = line.layout or _known_layout(spots[0])
                yield from self._tensors(line.name, line.name, spots, layout)

    def _module(self, line: str, spot: _Spot, prefix: str) -> Iterator[_Ordered]:
        """The tensors of a module, by the names of PyTorch or of its attributes."""
        known = torch_layouts.tensors_of(spot.value)
        if known is None:
            for child in self._children(spot):
                # What has a line of its own goes by that.
                if self._named.get(id(child.value)) is None:
                    name = f"{prefix}.{child.key}".removeprefix(".")
                    if _is_array(child.value):
                        layout = _known_layout(child)
                        yield from self._tensors(line, name, [child], layout)
                    else:
                        yield from self._module(line, child, name)
            return
        for tensor in known:
            spots = [_below(spot, path) for path in tensor.attributes]
            if all(self._named.get(id(found.value)) is None for found in spots):
                layout = tensor.layout and layouts.parse(tensor.layout, {}, len(spots))
                name = f"{prefix}.{tensor.name}".removeprefix(".")
                yield from self._tensors(line, name, spots, layout or None)

    def _children(self, spot: _Spot) -> Iterator[_Spot]:
        for key, value, is_data in nodes.children(spot.value):
            is_part = is_data is not False and (_is_array(value) or _is_node(value))
            if is_part and not is_transient(value):
                yield spot.child(key, value)

    def _tensors(
        self, line: str, name: str, spots: Sequence[_Spot], layout: Layout | None
    ) -> Iterator[_Ordered]:
        """The tensors of a name: one, or as many as are stacked."""
        spot = spots[0]
        order = names.places(line)
        stacked = (
            *spot.stacked,
            *[p for p in order if p not in spot.indices and p not in spot.stacked],
        )
        arrays = tuple(self._array(line, each) for each in spots)
        depth = len(stacked)
        shapes = [tuple(array.value.shape) for array in arrays]
        ahead = {shape[:depth] for shape in shapes}
        if len(ahead) > 1 or any(len(shape) < depth for shape in shapes):
            raise _wrong(line, f"arrays of the shapes {shapes} are not stacked alike")
        try:
            solved = _solved(layout, [shape[depth:] for shape in shapes])
        except ValueError as error:
            where = ", ".join(map(describe, arrays))
            raise _wrong(line, f"{error}; it leads to {where}") from None
        for at in itertools.product(*map(range, *ahead)):
            indices = {**spot.indices, **dict(zip(stacked, at, strict=True))}
            full = names.filled(name, indices)
            key = tuple(indices[place] for place in order)
            yield key, Tensor(full, arrays, at, solved)

    def _array(self, line: str, spot: _Spot) -> Array:
        if isinstance(spot.value, Variable):
            found = self._arrays.get(id(spot.value))
        else:
            found = self._arrays.get((id(spot.parent), spot.key))
        if found is None or not hasattr(found.value, "shape"):
            raise _wrong(
                line,
                f"{paths.dotted(spot.path, 'the model')} is {_kind(spot)}, which "
                "holds no single array; a line with a layout leads to arrays, such as "
                "'head.kernel'",
            )
        if jnp.issubdtype(found.value.dtype, jax.dtypes.prng_key):
            raise _wrong(
                line,
                f"{describe(found)} is a random key, which no file of weights has. Let "
                "it be a stream of nnx.Rngs, which is left out, or keep numbers in the "
                "model: jax.random.key_data(key)",
            )
        return found

    def _find(self, path: str) -> list[_Spot]:
        """Where a path leads: elements of lists that lack it are left out.

        Nothing is lost by that, since all arrays and all tensors are accounted for.
        """
        spots, nowhere = [self._root], None
        for step in names.steps(path):
            found = []
            for spot in spots:
                reached = [*_taken(spot, step, path)]
                found += reached
                if not reached:
                    nowhere = nowhere or _nowhere(spot, step, path)
                    if not spot.indices:
                        raise nowhere
            spots = found
        if nowhere is not None and not spots:
            raise nowhere
        return spots


def _indices(spot: _Spot) -> tuple[Any, ...]:
    return (*sorted(spot.indices.items()), spot.stacked)


def _taken(spot: _Spot, step: Key | Place, path: str) -> Iterator[_Spot]:
    """Where a step leads from a part of a model, if anywhere."""
    if isinstance(step, Place):
        yield from _indexed(spot, step, path)
        return
    for key, value, _ in nodes.children(spot.value):
        if key == step and type(key) is type(step):
            yield spot.child(key, value)
            return


def _nowhere(spot: _Spot, step: Key | Place, path: str) -> ValueError:
    """The error for a step that leads nowhere."""
    if isinstance(step, Place):
        return ValueError(
            f"The path {path!r} of the table of weights has an index at "
            f"{paths.dotted(spot.path)}, which is {_kind(spot)} without elements."
        )
    found = [
        key for key, _, is_data in nodes.children(spot.value) if is_data is not False
    ]
    where = paths.dotted(spot.path, "the model")
    held = f"it has: {', '.join(map(str, found))}" if found else f"it is {_kind(spot)}"
    return ValueError(
        errors.message(
            f"The path {path!r} of the table of weights leads nowhere: "
            f"{where} has no {step!r}.",
            where=held,
        )
    )


def _kind(spot: _Spot) -> str:
    return "None" if spot.value is None else f"a {type(spot.value).__name__}"


def _indexed(spot: _Spot, place: Place, path: str) -> Iterator[_Spot]:
    """All elements of a list; the layers of a Stack, all at once."""
    if place.name in spot.indices or place.name in spot.stacked:
        raise ValueError(f"The path {path!r} has the index {place.name!r} twice.")
    if isinstance(spot.value, stacks.Stack):
        below = spot.child("layers", spot.value.layers)
        yield dataclasses.replace(below, stacked=(*spot.stacked, place.name))
        return
    for key, value, is_data in nodes.children(spot.value):
        if isinstance(key, int) and not isinstance(key, bool) and is_data is not False:
            yield dataclasses.replace(
                spot.child(key, value), indices={**spot.indices, place.name: key}
            )


def _below(spot: _Spot, path: Sequence[str]) -> _Spot:
    for name in path:
        spot = spot.child(name, getattr(spot.value, name))
    return spot


def _known_layout(spot: _Spot) -> Layout | None:
    text = torch_layouts.layout_of(spot.parent, spot.key)
    return None if text is None else layouts.parse(text, {}, 1)


def _solved(layout: Layout | None, shapes: Sequence[Shape]) -> Solved:
    if layout is None:
        axes = " ".join(f"a{axis}" for axis in range(len(shapes[0])))
        layout = layouts.parse(f"{axes} -> {axes}", {}, 1)
    return layout.solve(shapes)


def _check_single(tensors: Sequence[Tensor]) -> None:
    """Raises if two lines lead to the same name, or to the same place of an array."""
    seen_names, seen_arrays = set[str](), dict[Any, str]()
    for tensor in tensors:
        if tensor.name in seen_names:
            raise _wrong(tensor.name, "several lines lead to this name")
        seen_names.add(tensor.name)
        for array in tensor.arrays:
            other = seen_arrays.setdefault((array.path, tensor.at), tensor.name)
            if other != tensor.name:
                raise _wrong(
                    tensor.name, f"{describe(array)} is {other!r} of the file already"
                )


def _check_tied(tied: MappingABC[str, str], known: Container[str]) -> None:
    """Raises unless names are tied to tensors of the model, and are none themselves."""
    for name, other in tied.items():
        if other not in known:
            raise _wrong(name, f"it is tied to {other!r}, to which no line leads")
        if name in known:
            raise _wrong(
                name,
                f"it is tied to {other!r}, and has an array of its own in the model. "
                f"Let the model use that of {other!r} in both places, as by "
                "nnx.Embed.attend, or take the name out of tied=",
            )


# Arrays of a model.

# What no file of weights has: random streams, caches, and what calls leave behind.
TRANSIENT = (RngState, Cache, Intermediate)


def is_transient(leaf: Any) -> bool:
    """Whether no file of weights has such a leaf."""
    return isinstance(leaf, TRANSIENT)


def _is_array(x: Any) -> bool:
    return isinstance(x, Variable) or nodes.kind_of(x) in (Leaf.ARRAY, Leaf.REF)


def _is_node(x: Any) -> bool:
    return not isinstance(nodes.kind_of(x), Leaf)


def arrays_of(model: Any) -> dict[Any, Array]:
    """All arrays of a model, by what identifies where they are.

    A Variable is where it is, however many paths there are; an array that is an
    attribute is where its object has it.
    """
    found: dict[Any, Array] = {}
    for path, part in selections.parts_of(model):
        if isinstance(part, Variable):
            found.setdefault(id(part), Array(path, part, flattening.raw_of(part)))
            continue
        for key, value, is_data in nodes.children(part):
            if is_data is not False and nodes.kind_of(value) in (Leaf.ARRAY, Leaf.REF):
                found[id(part), key] = Array((*path, key), value, value)
    return found


def describe(array: Array) -> str:
    """An array of a model, for messages."""
    return f"{paths.dotted(array.path)}: {short_forms.describe(array.value)}"
