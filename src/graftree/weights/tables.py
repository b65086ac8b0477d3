"""Tables: they pair the tensors of a file with the arrays of a model.

A table is read against a model, in either direction: `Mapping.tensors` lists all
tensors that a file of this model has, each with its arrays, their layout,
and its shape. Loading and saving both follow that list.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Iterable, Iterator, Mapping as MappingABC, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree.annotations import Key, Path
from graftree.core import paths, patterns, walks
from graftree.core.graph import flattening, nodes
from graftree.core.rng.streams import RngState
from graftree.core.text import descriptions
from graftree.core.variables.kinds import Cache, Intermediate
from graftree.core.variables.variables import Variable
from graftree.surgery import selections, stacks
from graftree.surgery.quantized_params import Quantized
from graftree.weights import layouts, torch_layouts
from graftree.weights.stored_tensors import usage_error


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
        name: Its name there.
        arrays: The arrays it is made from; several if it is fused.
        at: Its place in arrays that stack several tensors along their first axes.
        solved: Its layout.
    """

    name: str
    arrays: tuple[Array, ...]
    at: tuple[int, ...]
    solved: layouts.Solved


class _Entry(NamedTuple):
    """A line of a table; ``layout`` is ``None`` where the layer knows it."""

    name: str
    paths: tuple[str, ...]
    layout: layouts.Layout | None


class Mapping:
    """A table of the names in files of weights, and the paths in a model.

    Each line has a name in the file on its left, and on its right:

    - a path: ``"lm_head.weight": "head.kernel"``. A layer of this library knows how
      PyTorch stores it, so its kernel is transposed as needed; arrays outside of such
      layers are the same on both sides.
    - the path of a layer: ``"lm_head": "head"`` is everything in the layer, under
      PyTorch's names: ``lm_head.weight``, and ``lm_head.bias`` if there is one. For any
      other Module it is everything in its attributes, under their own names.
    - a path and a layout: ``("head.kernel", "i o -> i o")``, for a file that stores it
      differently; sizes may follow: ``("x", "(g k) o -> (k g) o", {"g": 2})``.
    - a list of paths and a layout with ``+`` or ``part``, for a tensor that consists of
      several: ``(["q.kernel", "k.kernel"], "+(h d) e -> e h d")``.

    ``{i}`` stands for an index: ``"layers.{i}.norm": "blocks[{i}].norm"``. The blocks
    may be a list, or a `Stack`, whose arrays have all layers along their first axis. An
    index that is only in the name is stacked too. One table fits both forms. A line
    skips elements that lack its path, so the layers of a list may differ. A number is a
    single layer, including a `Stack`, whose layers may have any names in the file:
    ``"first": "blocks[0]"``, ``"second": "blocks[1]"``.

    Args:
        entries: The lines.
        ignore: Patterns of names in files that the model does not need, such as
            ``"**.rotary_emb.inv_freq"``.
        tied: Names that repeat others: ``{"lm_head.weight":
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
            raise TypeError(f"ignore= must be a list of patterns, got {ignore!r}.")
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
        """Lists all tensors that a file of a model has, in the order of the table.

        Lines that follow each other and have indices are taken index by index.

        Raises:
            ValueError: If a path leads nowhere, or the model does not fit a layout, or
                two lines lead to the same array or name, or a name is tied to none.
        """
        reader = _Reader(model, self._lines)
        tensors: list[Tensor] = []
        for _, lines in itertools.groupby(self._lines, lambda x: _blanks(x.name)):
            of_lines = [pair for line in lines for pair in reader.read(line)]
            of_lines.sort(key=lambda pair: pair[0])
            tensors += [tensor for _, tensor in of_lines]
        _check_tensors(tensors, self.tied)
        return tensors


def as_mapping(mapping: Any) -> Mapping:
    """Returns a `Mapping`, or makes one from a plain dict."""
    if isinstance(mapping, Mapping):
        return mapping
    if not isinstance(mapping, MappingABC):
        kind = type(mapping).__name__
        raise TypeError(f"mapping= is a dict or an nnx.weights.Mapping, got {kind}.")
    return Mapping(mapping)


# Reading lines.


def _read(name: Any, value: Any) -> _Entry:
    if not isinstance(name, str):
        raise usage_error(
            f"The line {name!r}: {value!r} of a table of weights has no name.",
            way_out="A line is about one tensor, whose name is a string. If several "
            "tensors are one array in the model, give the model an array for "
            "each, or join them first, and load the dict of tensors.",
            kind=TypeError,
        )
    line_paths, layout, sizes = _fields(name, value)
    line_paths = (line_paths,) if isinstance(line_paths, str) else tuple(line_paths)
    for path in line_paths:
        index_names = [step.name for step in _steps(path) if isinstance(step, _Blank)]
        for index_name in {*index_names} - {*_blanks(name)}:
            raise _wrong(
                name, f"the index {index_name!r} of {path!r} is not in its name"
            )
    read = None if layout is None else layouts.parse(layout, sizes, len(line_paths))
    return _Entry(name, line_paths, read)


def _fields(name: str, value: Any) -> tuple[Any, str | None, MappingABC[str, int]]:
    """Returns the path or paths, the layout and the sizes of a line."""
    if isinstance(value, str):
        return value, None, {}
    if isinstance(value, tuple) and 2 <= len(value) <= 3:
        line_paths, layout, sizes = (*value, {})[:3]
        is_list = isinstance(line_paths, list) and len(line_paths) > 1
        are_paths = is_list and all(isinstance(path, str) for path in line_paths)
        if are_paths or isinstance(line_paths, str):
            if isinstance(layout, str) and isinstance(sizes, MappingABC):
                return line_paths, layout, sizes
    raise usage_error(
        f"The line {name!r}: {value!r} of a table of weights is malformed.",
        way_out="Write a path; or (path, layout); or ([path, path], layout) for a "
        "tensor that is made of several arrays; sizes may follow as a dict.",
        kind=TypeError,
    )


@dataclasses.dataclass(frozen=True)
class _Blank:
    """Stands for an index in a path: ``{i}``."""

    name: str


_BLANK = re.compile(r"\{([^{}]*)\}")


@functools.lru_cache(maxsize=4096)
def _blanks(name: str) -> tuple[str, ...]:
    """Returns the names of the indices, such as ``{i}``, in a name of tensors."""
    names, rest = _BLANK.findall(name), _BLANK.sub("", name)
    if "{" in rest or "}" in rest or not all(map(str.isidentifier, names)):
        raise usage_error(
            f"{name!r} is not a name of tensors.",
            way_out="Write an index in braces, with its own name: '{i}'.",
        )
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=4096)
def _steps(path: str) -> tuple[Key | _Blank, ...]:
    """Reads the steps of a path; the empty path has none and is the model."""
    try:
        steps = paths.steps_of(path) if path else ()
        matches = [(_BLANK.fullmatch(step.text), step) for step in steps]
        return tuple(_Blank(x[1]) if x else paths.key_of(step) for x, step in matches)
    except ValueError as error:
        raise usage_error(
            f"The path {path!r} is malformed: {error}.",
            way_out="Write a path as Python does, with '{i}' for an index, such as "
            "'blocks[{i}].mlp.up'.",
        ) from None


def _check_unique(lines: Sequence[_Entry]) -> None:
    line_of: dict[Any, str] = {}
    for line in lines:
        for path in line.paths:
            other = line_of.setdefault(_steps(path), line.name)
            if other is not line.name:
                raise _wrong(line.name, f"{path!r} is in the line {other!r} too")


def _wrong(name: str, reason: str) -> ValueError:
    return ValueError(f"The line {name!r} of the table of weights: {reason}.")


# Reading a model.


class _Along(NamedTuple):
    """Says which layers a stacked axis has: those of an index, from one on by steps."""

    name: str
    first: int = 0
    step: int = 1


class _Spot(NamedTuple):
    """A part of a model that a path leads to.

    Attributes:
        value: The part.
        parent: The object whose attribute it is.
        key: Its key there.
        path: The path by which it was reached.
        indices: The indices on the way, by the names of their places.
        stacked: What is along the first axes of its arrays: layers, or the entry of a
            single one.
    """

    value: Any
    parent: Any = None
    key: Key = None
    path: Path = ()
    indices: MappingABC[str, int] = types.MappingProxyType({})
    stacked: tuple[_Along | int, ...] = ()

    @property
    def index_names(self) -> set[str]:
        """The names of all indices on the way."""
        return {*self.indices, *[x.name for x in self.stacked if isinstance(x, _Along)]}

    def child(self, key: Key, value: Any, **changes: Any) -> _Spot:
        changes["path"] = (*self.path, key)
        return self._replace(value=value, parent=self.value, key=key, **changes)

    @property
    def kind(self) -> str:
        return "None" if self.value is None else f"a {type(self.value).__name__}"


# A tensor, with the indices by which tensors are sorted.
_Ordered = tuple[tuple[int, ...], Tensor]


class _Reader:
    """Reads lines against a model."""

    def __init__(self, model: Any, lines: Sequence[_Entry]) -> None:
        self._root = _Spot(model)
        self._arrays = arrays_of(model)
        # Parts with their own line follow that line.
        line_paths = [path for line in lines for path in line.paths]
        self._named = {id(spot.value) for x in line_paths for spot in self._find(x)}

    def read(self, line: _Entry) -> Iterator[_Ordered]:
        """Yields the tensors of a line, each with its indices."""
        spots_by_path = [self._find(path) for path in line.paths]
        if len({*map(len, spots_by_path)}) > 1:
            raise _wrong(line.name, "its paths lead to different numbers of arrays")
        for spots in zip(*spots_by_path, strict=True):
            if len({(*sorted(x.indices.items()), x.stacked) for x in spots}) > 1:
                raise _wrong(line.name, "its paths lead to layers of different indices")
            spot = spots[0]
            if line.layout is None and not nodes.is_node_leaf(spot.value):
                yield from self._module(line.name, spot)
            else:
                layout = line.layout or torch_layouts.layout_of(spot.parent, spot.key)
                yield from self._tensors(line.name, line.name, spots, layout)

    def _module(self, line: str, root: _Spot) -> Iterator[_Ordered]:
        """Yields a module's tensors, by the names of PyTorch or of its attributes."""
        above = walks.Above()

        def below(spot: _Spot, path: Path) -> list[tuple[Key, _Spot]] | None:
            if above(spot.value, path) is not None:
                return None
            if torch_layouts.tensors_of(spot.value) is not None:
                return []
            children = [spot.child(*child) for child in children_of(spot.value)]
            return [(x.key, x) for x in children if id(x.value) not in self._named]

        for path, spot in walks.walk(root, below):
            name = ".".join(map(str, (line, *path)))
            if nodes.is_node_leaf(spot.value):
                yield from self._tensors(line, name, [spot], None)
            for tensor in torch_layouts.tensors_of(spot.value) or ():
                spots = [_attribute(spot, names) for names in tensor.attributes]
                if not any(id(x.value) in self._named for x in spots):
                    full = f"{name}.{tensor.name}"
                    yield from self._tensors(line, full, spots, tensor.layout)

    def _tensors(
        self, line: str, name: str, spots: Sequence[_Spot], layout: Any
    ) -> Iterator[_Ordered]:
        """Yields the tensors of a name: one, or as many as are stacked."""
        spot, order = spots[0], _blanks(line)
        only_in_name = [x for x in order if x not in spot.index_names]
        stacked = (*spot.stacked, *map(_Along, only_in_name))
        arrays = tuple(self._array(line, each) for each in spots)
        depth = len(stacked)
        shapes = [tuple(array.value.shape) for array in arrays]
        ahead = {shape[:depth] for shape in shapes}
        if len(ahead) > 1 or any(len(shape) < depth for shape in shapes):
            raise _wrong(line, f"arrays of the shapes {shapes} are not stacked alike")
        try:
            solved = layouts.solved(layout, [shape[depth:] for shape in shapes])
        except ValueError as error:
            shown = ", ".join(map(describe, arrays))
            raise _wrong(line, f"{error}; it leads to {shown}") from None
        layers = [
            (axis,) if isinstance(axis, int) else range(size)
            for axis, size in zip(stacked, *ahead, strict=True)
        ]
        for at in itertools.product(*layers):
            indices = {**spot.indices}
            for axis, entry in zip(stacked, at, strict=True):
                if isinstance(axis, _Along):
                    indices[axis.name] = axis.first + axis.step * entry
            full = _BLANK.sub(lambda match: str(indices[match[1]]), name)  # noqa: B023
            key = tuple(indices[axis] for axis in order)
            yield key, Tensor(full.removeprefix("."), arrays, at, solved)

    def _array(self, line: str, spot: _Spot) -> Array:
        is_variable = isinstance(spot.value, Variable)
        key = id(spot.value) if is_variable else (id(spot.parent), spot.key)
        array = self._arrays.get(key)
        if array is None or not hasattr(array.value, "shape"):
            spot_name = paths.dotted(spot.path, "the model")
            raise _wrong(
                line,
                f"{spot_name} is {spot.kind}, which is not a single array; a line with "
                "a layout must lead to arrays, such as 'head.kernel'",
            )
        if jnp.issubdtype(array.value.dtype, jax.dtypes.prng_key):
            raise _wrong(
                line,
                f"{describe(array)} is a random key, which weights files can't hold. "
                "Make it a stream of nnx.Rngs, which is left out, or keep numbers in "
                "the model: jax.random.key_data(key)",
            )
        return array

    def _find(self, path: str) -> list[_Spot]:
        """Finds the parts that a path leads to; skips elements of lists that lack it.

        Nothing is lost by that, since all arrays and all tensors are accounted for.
        """
        spots, nowhere = [self._root], None
        for step in _steps(path):
            reached = []
            for spot in spots:
                children = _spots_at(spot, step, path)
                reached += children
                if not children:
                    nowhere = nowhere or _nowhere(spot, step, path)
            spots = reached
        if nowhere is not None and not spots:
            raise nowhere
        return spots


def _spots_at(spot: _Spot, step: Key | _Blank, path: str) -> list[_Spot]:
    """Returns the parts of a model that a step leads to from one part, if any.

    A place leads to all elements of a list; to the layers of a Stack all at once, and a
    number to a single one.
    """
    children = nodes.children(spot.value)
    if isinstance(spot.value, stacks.Stack) and type(step) is int:
        parts = stacks.numbered(spot.value)
        return [_in_stack(spot, x, step) for x in parts if step in x.numbers]
    if not isinstance(step, _Blank):
        return [
            spot.child(key, value)
            for key, value, _ in children
            if key == step and type(key) is type(step)
        ]
    index_name = step.name
    if index_name in spot.index_names:
        raise ValueError(f"The path {path!r} has the index {index_name!r} twice.")
    if isinstance(spot.value, stacks.Stack):
        return [_in_stack(spot, x, index_name) for x in stacks.numbered(spot.value)]
    return [
        spot.child(key, value, indices={**spot.indices, index_name: key})
        for key, value, is_data in children
        if type(key) is int and is_data is not False
    ]


def _in_stack(spot: _Spot, part: stacks.Numbered, layer: int | str) -> _Spot:
    """Goes from a Stack to a part of it, for one layer or all, as an index."""
    path = (*spot.path, *part.path)
    spot = spot._replace(value=part.value, parent=spot.value, path=path)
    if not part.is_stacked:
        named = {layer: part.numbers.start} if isinstance(layer, str) else {}
        return spot._replace(indices={**spot.indices, **named})
    if isinstance(layer, str):
        along = _Along(layer, part.numbers.start, part.numbers.step)
    else:
        along = part.numbers.index(layer)
    return spot._replace(stacked=(*spot.stacked, along))


def _nowhere(spot: _Spot, step: Key | _Blank, path: str) -> Exception:
    """Makes the error for a step that leads nowhere."""
    if isinstance(step, _Blank):
        return ValueError(
            f"The path {path!r} of the table of weights has an index at "
            f"{paths.dotted(spot.path)}, which is {spot.kind} without elements."
        )
    children = nodes.children(spot.value)
    keys = [str(key) for key, _, is_data in children if is_data is not False]
    spot_name = paths.dotted(spot.path, "the model")
    return usage_error(
        f"The path {path!r} of the table of weights leads nowhere: "
        f"{spot_name} has no {step!r}.",
        [f"it has: {', '.join(keys)}" if keys else f"it is {spot.kind}"],
    )


def _attribute(spot: _Spot, path: str) -> _Spot:
    for name in path.split("."):
        spot = spot.child(name, getattr(spot.value, name))
    return spot


def _check_tensors(tensors: Sequence[Tensor], tied: MappingABC[str, str]) -> None:
    """Raises if two lines lead to one name, or to one place of an array.

    Also unless tied names refer to tensors of the model, and are none themselves.
    """
    names, lines_of = set[str](), dict[Path, dict[tuple[int, ...], str]]()
    for tensor in tensors:
        if tensor.name in names:
            raise _wrong(tensor.name, "several lines lead to this name")
        names.add(tensor.name)
        for array in tensor.arrays:
            lines = lines_of.setdefault(array.path, {tensor.at: tensor.name})
            at, other = next(iter(lines.items()))
            if len(at) == len(tensor.at):  # else one is whole, the other a layer of it
                other = lines.setdefault(tensor.at, tensor.name)
            if other != tensor.name:
                reason = f"{describe(array)} is already in the line {other!r}"
                raise _wrong(tensor.name, reason)
    _check_all_layers(tensors, lines_of)
    for name, other in tied.items():
        if other not in names:
            raise _wrong(
                name, f"it is tied to {other!r}, which no line of the table loads"
            )
        if name in names:
            raise _wrong(
                name,
                f"it is tied to {other!r}, but has its own array in the model. "
                f"Make the model use that of {other!r} in both places, e.g. with "
                "nnx.Embed.attend, or remove the name from tied=",
            )


def _check_all_layers(
    tensors: Sequence[Tensor], lines_of: MappingABC[Path, MappingABC[Any, str]]
) -> None:
    """Raises if lines lead to some layers of an array that stacks them, but not all."""
    arrays = {array.path: array for tensor in tensors for array in tensor.arrays}
    for path, lines in lines_of.items():
        at, name = next(iter(lines.items()))
        layers = itertools.product(*map(range, arrays[path].value.shape[: len(at)]))
        without = [f"[{']['.join(map(str, x))}]" for x in layers if x not in lines]
        if without:
            raise _wrong(
                name,
                f"it is a layer of {describe(arrays[path])}, and no line leads to "
                f"{', '.join(without[:4])} there: all layers of a Stack need one",
            )


# Arrays of a model.

# Never in files of weights: random streams, caches, and values that calls leave.
_TRANSIENT = (RngState, Cache, Intermediate)


def children_of(x: Any) -> list[tuple[Key, Any]]:
    """Lists the direct children of a part that may be in a file of weights."""
    return [
        (key, value)
        for key, value, is_data in nodes.children(x)
        if is_data is not False and not isinstance(value, _TRANSIENT)
        if nodes.kind_of(value) is not nodes.Leaf.STATIC
    ]


def arrays_of(model: Any) -> dict[Any, Array]:
    """Returns all arrays of a model, by the Variable or attribute that holds them.

    A Variable is its own place, however many paths there are; the place of an array
    that is an attribute is its object and key.
    """
    arrays: dict[Any, Array] = {}
    for path, x in selections.parts_of(model):
        if isinstance(x, Variable):
            arrays.setdefault(id(x), Array(path, x, flattening.raw_of(x)))
            continue
        for key, value, is_data in nodes.children(x):
            is_array = nodes.is_node_leaf(value) and not isinstance(value, Variable)
            if is_array and is_data is not False:
                arrays[id(x), key] = Array((*path, key), value, value)
    return arrays


def left_out(model: Any, tensors: Sequence[Tensor]) -> list[Array]:
    """Lists the arrays of a model that a file should have, but no tensor contains."""
    reached = {array.path for tensor in tensors for array in tensor.arrays}
    return [
        array
        for array in arrays_of(model).values()
        if array.path not in reached and not isinstance(array.leaf, _TRANSIENT)
    ]


def check_are_arrays(call: str, arrays: Iterable[Array], way_out: str) -> None:
    """Raises a ValueError that lists the quantized kernels among some arrays."""
    quantized = {
        array.path: f"{paths.dotted(array.path)}: {descriptions.describe(array.leaf)}"
        for array in arrays
        if isinstance(array.leaf, Quantized)
    }
    if quantized:
        problem = f"{call}: kernels of the model are quantized, but files have arrays."
        raise usage_error(
            f"{problem} Nothing has changed.", quantized.values(), way_out
        )


def describe(array: Array) -> str:
    """Describes an array of a model, for messages."""
    return f"{paths.dotted(array.path)}: {descriptions.describe(array.value)}"
