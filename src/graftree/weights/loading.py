"""Weights from a file into a model: all of them, or an error.

Names, shapes and dtypes are compared first, from the headers of the file. Then each
device gets its part of each array, read from the file piece by piece, one array at a
time. The model is written last. A divided array is never whole on the host.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths, patterns, walks
from graftree.core.graph import differences, flattening, matching, nodes, updates
from graftree.core.text import descriptions
from graftree.core.variables import partitioning, variables
from graftree.weights import block_scales, layouts, sources, stored_tensors, tables
from graftree.weights.stored_tensors import Source, usage_error
from graftree.weights.tables import Array, Tensor

M = TypeVar("M")


def load(
    path: Any,
    model: M,
    mapping: Any,
    *,
    dtype: Any = None,
    shardings: Any = None,
    missing: Any = None,
) -> M:
    """Fills a model with the weights of a file, in place: all of them, or none.

    Every tensor of the file must have its place in the model, and every array of the
    model its tensors, unless the call says otherwise. Each process reads only the bytes
    that its devices hold. Tensors in MXFP4, or in float8 with scales by block, are
    decoded: to bfloat16 and to float32.

    Args:
        path: A ``.safetensors`` file, an index of several, a folder with either, or an
            ``.npz`` file; or the tensors themselves, as a dict of NumPy arrays, JAX
            arrays or PyTorch tensors by name.
        model: The model; also an abstract one, as made by `nnx.eval_shape`.
        mapping: An `nnx.weights.Mapping`, or a dict of its lines.
        dtype: The dtype of the arrays: one for all floating arrays, a dict of patterns
            of paths and dtypes, or ``"file"`` for those of the file. ``None``: those of
            the model, none of which may be less precise than the file's.
        shardings: Where the arrays go: a sharding for all, or a tree of them like the
            state of the model, as `nnx.get_named_sharding` makes. ``None``: where the
            arrays of the model are, or where an abstract model's annotations put them.
        missing: Which arrays of the model may be missing in the file and keep their
            values: a pattern of paths such as ``"head.**"``, a class, a function of
            path and leaf, or a list of these. Random streams, caches and Intermediates
            are never in a file.

    Returns:
        The model.

    Raises:
        StateMismatchError: If the file lacks tensors, has others, or has other shapes
            or dtypes. It lists all of these, and nothing has changed.
        WeightsError: If the file is damaged.
        ValueError: If the mapping does not fit the model; if tied tensors differ; if a
            pattern of ``dtype`` matches no floating array, or JAX lacks a dtype; if a
            number is too large for its dtype; or if a kernel is quantized.

    Example:
        >>> weights = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
        >>> weights = {name: x.astype(np.float32) for name, x in weights.items()}
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.weights.load(weights, model, {"fc": "up"}).up.kernel.shape
        (2, 3)
    """
    mapping = tables.as_mapping(mapping)
    with sources.open(path) as source:
        chosen = _compare(model, source, mapping, _Dtypes(dtype), missing)
        arrays = _read(chosen, shardings)
    updates.write_at(model, arrays)
    return model


def arrays_from(source: Source, tensors: Sequence[Tensor]) -> dict[Path, Any]:
    """Reads tensors that are known to fit, in the form of the model's arrays."""
    arrays = _by_array(tensors)
    return _read(
        [_Pieces(x, by_index, x.value.dtype, source, {}) for x, by_index in arrays]
    )


class _ArrayTensor(NamedTuple):
    """A tensor that an array is made from, and the position of the array in it."""

    tensor: Tensor
    position: int


# By their index in an array that stacks them.
_ArrayTensors = Mapping[tuple[int, ...], _ArrayTensor]


def _by_array(tensors: Sequence[Tensor]) -> list[tuple[Array, _ArrayTensors]]:
    """Pairs each array with the tensors that it is made from."""
    by_path: dict[Path, tuple[Array, dict[tuple[int, ...], _ArrayTensor]]] = {}
    for tensor in tensors:
        for position, array in enumerate(tensor.arrays):
            by_index = by_path.setdefault(array.path, (array, {}))[1]
            by_index[tensor.at] = _ArrayTensor(tensor, position)
    return [*by_path.values()]


# The arrays to load.


class _Dtypes:
    """Decides which dtypes arrays get."""

    def __init__(self, dtype: Any) -> None:
        self.is_of_file = isinstance(dtype, str) and dtype == "file"
        rules = dtype if isinstance(dtype, Mapping) else {...: dtype}
        self._rules = [
            (selection, patterns.to_predicate(selection), jnp.dtype(x))
            for selection, x in rules.items()
            if x is not None and not self.is_of_file
        ]
        self._unused = {
            selection for selection, _, _ in self._rules if selection is not ...
        }
        for _, _, wanted in self._rules:
            if jax.dtypes.canonicalize_dtype(wanted) != wanted:
                raise ValueError(
                    f"nnx.weights.load: JAX has no {wanted} without jax_enable_x64."
                )

    def of(self, array: Array, stored: np.dtype) -> tuple[np.dtype, bool]:
        """Returns the dtype of an array, and whether the file's may become that."""
        target = jnp.dtype(array.value.dtype)
        if self.is_of_file:
            known = jnp.dtype(jax.dtypes.canonicalize_dtype(stored))
            return known, known == stored
        if not (_is_floating(stored) and _is_floating(target)):
            return target, bool(np.can_cast(stored, target))
        for selection, predicate, dtype in self._rules:
            if predicate(array.path, array.leaf):
                self._unused.discard(selection)
                return dtype, True
        return target, _is_exact(stored, target)

    def check_used(self, arrays: Sequence[Array]) -> None:
        """Raises if a rule matches no floating array that is loaded."""
        for selection in self._unused:
            call = "nnx.weights.load: dtype"
            loaded_paths = [array.path for array in arrays]
            raise patterns.no_match_error(
                call, selection, loaded_paths, noun="floating array"
            )


def _is_exact(stored: Any, target: Any) -> bool:
    """Whether a floating dtype has all numbers of another one.

    JAX's rules of promotion can't tell for float8, which they don't promote.
    """
    theirs, ours = jnp.finfo(stored), jnp.finfo(target)
    return bool(
        theirs.nmant <= ours.nmant
        and float(theirs.max) <= float(ours.max)
        and float(theirs.smallest_subnormal) >= float(ours.smallest_subnormal)
    )


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _compare(
    model: Any, source: Source, mapping: tables.Mapping, dtypes: _Dtypes, missing: Any
) -> list[_Pieces]:
    """Pairs arrays with tensors to load.

    Raises:
        StateMismatchError: Lists everything that does not fit.
    """
    may_miss = patterns.to_predicate([] if missing is None else missing)
    tensors = mapping.tensors(model)
    expected_names = {tensor.name for tensor in tensors} | {*mapping.tied}
    source = block_scales.decoded(source, expected_names)
    chosen, lacking, misfits = [], [], []
    for array, by_index in _by_array(tensors):
        names = [piece.tensor.name for piece in by_index.values()]
        absent = [name for name in names if name not in source.tensors]
        is_kept = absent == names and may_miss(array.path, array.leaf)
        if not absent:
            dtype, wrong = _fit(array, by_index, source, dtypes)
            chosen.append(_Pieces(array, by_index, dtype, source, mapping.tied))
            misfits += wrong
        elif not is_kept or _is_abstract(array):
            lacking += [(name, array) for name in absent]
    without = [
        array
        for array in tables.left_out(model, tensors)
        if _is_abstract(array) or not may_miss(array.path, array.leaf)
    ]
    extra = [
        n for n in source.tensors if n not in expected_names and not mapping.ignores(n)
    ]
    if lacking or without or extra or misfits:
        raise _error(source, lacking, without, extra, misfits)
    tables.check_are_arrays(
        "nnx.weights.load",
        [pieces.array for pieces in chosen],
        "Load the weights into a new model, and then quantize it; or call "
        "nnx.surgery.dequantize(model) first.",
    )
    dtypes.check_used([pieces.array for pieces in chosen])
    return chosen


def _fit(
    array: Array, array_tensors: _ArrayTensors, source: Source, dtypes: _Dtypes
) -> tuple[Any, list[matching.Misfit]]:
    """Returns the dtype of an array, and the misfits."""
    wrong, wanted = list[matching.Misfit](), None
    misfit = functools.partial(matching.Misfit, array.path)
    for tensor, _ in array_tensors.values():
        stored, shape = source.tensors[tensor.name], tensor.solved.file_shape
        if stored.shape != shape:
            expected = f"{tensor.name} {descriptions.describe_shape(shape)}"
            actual = descriptions.describe_shape(stored.shape)
            wrong.append(misfit("shape", expected, actual))
        dtype, is_allowed = dtypes.of(array, stored.dtype)
        wanted = dtype if wanted is None else wanted
        if not is_allowed or dtype != wanted:
            wrong.append(misfit("dtype", str(wanted), str(stored.dtype)))
    return wanted, wrong


def _is_abstract(array: Array) -> bool:
    return isinstance(array.value, jax.ShapeDtypeStruct)


def _error(
    source: Source,
    lacking: Sequence[tuple[str, Array]],
    without: Sequence[Array],
    extra: Sequence[str],
    misfits: Sequence[matching.Misfit],
) -> errors.StateMismatchError:
    """Makes the error that lists all misfits."""
    lists = {
        "missing in the file": [f"{n}, for {tables.describe(x)}" for n, x in lacking],
        "not in the table": [*map(tables.describe, without)],
        "unexpected in the file": [
            f"{name}: {descriptions.describe(source.tensors[name])}" for name in extra
        ],
        "that don't fit": [
            f"{paths.dotted(m.path)}: expected {m.what} {m.expected}, got {m.given}"
            for m in misfits
        ],
    }
    lines = list[str]()
    for title, entries in lists.items():
        if entries:
            shown = differences.bounded([f"  {line}" for line in entries], most=12)
            lines += [f"{len(entries)} {title}:", *shown]
    are_floating = [
        _is_floating(m.expected) and _is_floating(m.given)
        for m in misfits
        if m.what == "dtype"
    ]
    ways, absent = [], [*[x for _, x in lacking], *without]
    if not all(map(_is_abstract, absent)):
        ways.append("Use missing= for arrays of the model that may keep their values.")
    elif absent:
        ways.append(
            "An abstract array has no value to keep. To keep some with missing=, load "
            "into a model that has values, as nnx.sharding.init makes it."
        )
    if extra:
        ways.append("Use ignore= of the Mapping to leave out tensors.")
    if any(are_floating):
        ways.append("Use dtype= to convert the arrays.")
    if not all(are_floating):
        ways.append(
            "dtype= converts only floating-point numbers. Leave the others out with "
            "ignore=, or convert them first, and load the dict of tensors."
        )
    ways += _prefix_hint([name for name, _ in lacking], extra)
    return errors.StateMismatchError(
        errors.message(
            f"nnx.weights.load: {source.name} does not fit the model. "
            "Nothing has changed.",
            where="\n".join(lines),
            way_out="\n".join(ways),
        ),
        [array.path for array in absent],
        [(name,) for name in extra],
        misfits,
    )


def _prefix_hint(lacking: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Gives advice if the names in the file, or those in the table, have a prefix."""
    for these, others, advice in (
        (lacking, extra, "in front of the names in the table"),
        (extra, lacking, "removed from the names in the table"),
    ):
        for name in others:
            prefix = name.removesuffix(these[0]) if these else name
            if prefix not in ("", name) and prefix.endswith("."):
                fitting = len({prefix + each for each in these} & {*others})
                if 2 * fitting > len(these):
                    return [f"{fitting} of them fit with {prefix!r} {advice}."]
    return []


# Reading.


class _Pieces(NamedTuple):
    """An array that is read piece by piece from its tensors."""

    array: Array
    tensors: _ArrayTensors
    dtype: Any
    source: Source
    tied: Mapping[str, str]

    @property
    def _depth(self) -> int:
        """Number of its axes that stack tensors."""
        return len(next(iter(self.tensors)))

    def read(self, index: layouts.Index) -> np.ndarray:
        """Reads a piece; it may be a view, with its axes in another order in memory."""
        outer, inner = index[: self._depth], index[self._depth :]
        if not outer:
            return self._read_from(self.tensors[()], index)
        stacked = None
        for at in itertools.product(*[range(p.start, p.stop) for p in outer]):
            layer = self._read_from(self.tensors[at], inner)
            if stacked is None:
                stacked = _layers_like(layer, [p.stop - p.start for p in outer])
            stacked[tuple(i - p.start for i, p in zip(at, outer, strict=True))] = layer
        if stacked is None:
            return np.empty([p.stop - p.start for p in index], self.dtype)
        return stacked

    def run_bytes(self, index: layouts.Index) -> int:
        """Returns how many bytes of a piece follow each other in the file."""
        tensor, position = next(iter(self.tensors.values()))
        view = tensor.solved.view_index(position, index[self._depth :])
        bounds = stored_tensors.bounds_of(tensor.solved.view_shape, view)
        itemsize = self.source.tensors[tensor.name].dtype.itemsize
        return stored_tensors.runs(bounds, itemsize)[0]

    def _read_from(
        self, array_tensor: _ArrayTensor, index: layouts.Index
    ) -> np.ndarray:
        """Reads a piece of one tensor, in the axes of the array."""
        (name, _, _, solved), position = array_tensor
        stored = self.source.tensors

        def read(name: str) -> np.ndarray:
            def get(view: layouts.Index) -> np.ndarray:
                return self.source.read(name, view, solved.view_shape)

            return solved.read(position, index, get)

        array = read(name)
        for again in [x for x, other in self.tied.items() if other == name]:
            is_same = again not in stored or (
                stored[again] == stored[name]
                and read(again).tobytes() == array.tobytes()
            )
            if not is_same:
                raise usage_error(
                    f"{again!r} and {name!r} are tied in the table of weights, and "
                    f"differ in {self.source.name}.",
                    way_out="Give each its own entry. Nothing has changed.",
                )
        return self._cast(array, name)

    def _cast(self, array: np.ndarray, name: str) -> np.ndarray:
        """Brings a piece of a tensor to the dtype of the array.

        Raises:
            ValueError: If a number is too large for it.
        """
        with np.errstate(over="ignore"):
            result = array.astype(self.dtype, copy=False)
        if not _has_less_range(self.dtype, array.dtype):
            return result
        lost = np.count_nonzero(np.isfinite(array) & ~np.isfinite(result))
        if lost:
            raise usage_error(
                f"nnx.weights.load: {lost} numbers of {name!r} in {self.source.name} "
                f"are too large for {self.dtype}, whose largest is "
                f"{float(jnp.finfo(self.dtype).max):g}. Nothing has changed.",
                [paths.dotted(self.array.path)],
                "Load them in a wider dtype, such as dtype=jnp.bfloat16; a dict of "
                "patterns gives some arrays another one.",
            )
        return result


def _has_less_range(dtype: Any, other: Any) -> bool:
    """Whether both are floating, and the largest numbers of the other are too large."""
    if dtype == other or not (_is_floating(dtype) and _is_floating(other)):
        return False
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(other).maxexp)


def _layers_like(layer: np.ndarray, outer: Sequence[int]) -> np.ndarray:
    """Makes an array for layers like this one, whose axes lie in memory as here.

    So copying a layer into it goes through both in order.
    """
    order = sorted(range(layer.ndim), key=lambda axis: -abs(layer.strides[axis]))
    layers = np.empty([*outer, *[layer.shape[axis] for axis in order]], layer.dtype)
    back = [len(outer) + order.index(axis) for axis in range(layer.ndim)]
    return layers.transpose([*range(len(outer)), *back])


# Placing.


def _read(chosen: Sequence[_Pieces], shardings: Any = None) -> dict[Path, Any]:
    """Reads arrays, each to where it belongs.

    Raises:
        ValueError: If ``shardings`` lacks one of the arrays, or an abstract array is
            annotated and there is no mesh.
    """
    arrays = [pieces.array for pieces in chosen]
    if shardings is None:
        targets = {array.path: _target(array) for array in arrays}
    elif isinstance(shardings, Sharding):
        targets = dict.fromkeys([array.path for array in arrays], shardings)
    else:
        targets = _by_path(shardings)
    lacking = [array.path for array in arrays if array.path not in targets]
    if lacking:
        raise usage_error(
            "shardings= of nnx.weights.load lacks arrays of the model.",
            examples=map(paths.dotted, lacking),
            way_out="Pass nnx.get_named_sharding(nnx.state(model), mesh), or one "
            "sharding for all.",
        )
    return {x.array.path: _put(x, targets[x.array.path]) for x in chosen}


def _by_path(tree: Any) -> dict[Path, Sharding]:
    """Finds the shardings in a tree like the state of a model, or in an object."""

    def below(x: Any, _: Path) -> list[tuple[Any, Any]]:
        return [child[:2] for child in nodes.children(flattening.raw_of(x))]

    leaves = [(path, flattening.raw_of(x)) for path, x in walks.walk(tree, below)]
    return {path: x for path, x in leaves if isinstance(x, Sharding)}


def _target(array: Array) -> Sharding | None:
    """Returns the sharding that an array has or is to get; ``None`` for anywhere."""
    value = array.value
    if isinstance(value, jax.Array) and not isinstance(value, _jax.Tracer):
        return value.sharding if value.committed else None
    if not isinstance(value, jax.ShapeDtypeStruct):
        return None
    is_variable = isinstance(array.leaf, variables.Variable)
    metadata = variables.metadata_of(array.leaf) if is_variable else {}
    value = partitioning.place_abstract(value, metadata)
    if value.sharding is None and metadata.get("out_sharding"):
        raise usage_error(
            "nnx.weights.load: an abstract array is annotated with a sharding, but "
            "no mesh is set.",
            examples=[f"{paths.dotted(array.path)}: {metadata['out_sharding']}"],
            way_out="Load within jax.set_mesh(mesh), or pass shardings=.",
        )
    return partitioning.on_concrete_mesh(value.sharding, array.path, "nnx.weights.load")


def _put(pieces: _Pieces, target: Sharding | None) -> Any:
    """Makes an array; reads a piece that several devices have only once."""
    value = pieces.array.value
    shape = tuple(value.shape)
    is_of_numpy = isinstance(value, (np.ndarray, np.generic))
    if is_of_numpy or target is None:
        array = pieces.read(tuple(slice(0, size) for size in shape))
        return array if is_of_numpy else jax.device_put(array)
    holders: dict[_Piece, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None
        along = zip(index, shape, strict=True)
        piece = tuple(x.indices(size)[:2] for x, size in along)
        holders.setdefault(piece, []).append(device)
    arrays = []
    for piece, x in _each([*holders], pieces):
        # JAX transposes, which would take NumPy ten times as long.
        arrays += [jax.device_put(x, device) for device in holders[piece]]
    return jax.make_array_from_single_device_arrays(
        shape, target, arrays, dtype=pieces.dtype
    )


# The start and stop of a piece, along each axis.
_Piece = tuple[tuple[int, int], ...]

# Shorter runs of bytes are not worth a call of the system each.
_SHORT = 2**16


def _each(
    wanted: Sequence[_Piece], pieces: _Pieces
) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Reads each piece; all at once if they are short runs that fill a block."""
    box = tuple(
        (min(start for start, _ in along), max(stop for _, stop in along))
        for along in zip(*wanted, strict=True)
    )
    is_whole = _volume(box) == sum(map(_volume, wanted))
    if len(wanted) < 2 or not is_whole or pieces.run_bytes(_index(wanted[0])) >= _SHORT:
        for piece in wanted:
            yield piece, pieces.read(_index(piece))
        return
    block = pieces.read(_index(box))
    for piece in wanted:
        along = zip(piece, box, strict=True)
        array = block[
            tuple(slice(a - first, b - first) for (a, b), (first, _) in along)
        ]
        # JAX may keep a buffer that it need not transpose; a view would keep the whole.
        yield piece, array.copy() if array.flags.c_contiguous else array


def _index(piece: _Piece) -> layouts.Index:
    return tuple(slice(*along) for along in piece)


def _volume(piece: _Piece) -> int:
    return math.prod(stop - start for start, stop in piece)
