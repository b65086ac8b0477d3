"""Weights from a file into a model: all of them, or an error.

Names, shapes and dtypes are compared first, from the headers of the file; then each
device gets its part of each array, read from the file piece by piece, one array at a
time; and the model is written last.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.graph import updates
from graftree.core.graph.fits import Misfit
from graftree.core.text import short_forms
from graftree.core.text.short_forms import describe_shape
from graftree.weights import placing, slices, sources, tables
from graftree.weights.layouts import Index
from graftree.weights.stored_tensors import Source
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

    Every tensor of the file has its place in the model, and every array of the model
    its tensors, or the call says otherwise. Each process reads only the bytes that its
    devices hold.

    Args:
        path: A ``.safetensors`` file, an index of several, a folder with either, or an
            ``.npz`` file; or the tensors themselves, as a dict of NumPy arrays, JAX
            arrays or PyTorch tensors by name.
        model: The model; also an abstract one, as made by `nnx.eval_shape`.
        mapping: An `nnx.weights.Mapping`, or a dict of its lines.
        dtype: The dtype of the arrays: one for all that are floating, a dict of
            patterns of paths and dtypes, or ``"file"`` for those of the file. ``None``:
            those of the model, of which none may be less precise than the file's.
        shardings: Where the arrays go: a sharding for all, or a tree of them like the
            state of the model, as `nnx.get_named_sharding` makes. ``None``: where the
            arrays of the model are; those of an abstract model where they are annotated
            to be.
        missing: Which arrays of the model may be missing in the file and stay what they
            are: a pattern of paths such as ``"head.**"``, a class, a function of path
            and leaf, or a list of these. Random streams, caches and Intermediates are
            never in a file.

    Returns:
        The model.

    Raises:
        StateMismatchError: If the file lacks tensors, has others, or has other shapes
            or dtypes. It lists them all, and nothing has changed.
        WeightsError: If the file is damaged.
        ValueError: If the mapping does not fit the model; if tied tensors differ; if a
            pattern of ``dtype`` matches no floating array, or JAX lacks a dtype.

    Example:
        >>> weights = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
        >>> weights = {name: x.astype(np.float32) for name, x in weights.items()}
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.weights.load(weights, model, {"fc": "up"}).up.kernel.shape
        (2, 3)
    """
    mapping = tables.as_mapping(mapping)
    tensors = mapping.tensors(model)
    with sources.open(path) as source:
        chosen = _compare(model, source, mapping, tensors, _Dtypes(dtype), missing)
        places = placing.Places(shardings, [array for array, _, _ in chosen])
        arrays = {
            array.path: places.put(array, to, _Reader(parts, to, source, mapping))
            for array, parts, to in chosen
        }
    updates.write_at(model, arrays)
    return model


def arrays_from(source: Source, tensors: Sequence[Tensor]) -> dict[Path, Any]:
    """Reads tensors that are known to fit, as the arrays that they are in the model."""
    arrays = _by_array(tensors)
    places = placing.Places(None, [array for array, _ in arrays])
    found = {}
    for array, parts in arrays:
        dtype = array.value.dtype
        read = _Reader(parts, dtype, source, tables.Mapping({}))
        found[array.path] = places.put(array, dtype, read)
    return found


class _Part(NamedTuple):
    """A tensor that an array is made of, and which of its arrays this one is."""

    tensor: Tensor
    part: int


def _by_array(tensors: Sequence[Tensor]) -> list[tuple[Array, dict[Any, _Part]]]:
    """The arrays, each with its tensors by their place in it."""
    found: dict[Path, tuple[Array, dict[Any, _Part]]] = {}
    for tensor in tensors:
        for part, array in enumerate(tensor.arrays):
            parts = found.setdefault(array.path, (array, {}))[1]
            parts[tensor.at] = _Part(tensor, part)
    return [*found.values()]


class _Reader(placing.Reader):
    """Reads an array from the tensors that it is made of."""

    def __init__(
        self,
        parts: Mapping[Any, _Part],
        dtype: Any,
        source: Source,
        mapping: tables.Mapping,
    ) -> None:
        self._parts = parts
        self._dtype = dtype
        self._source = source
        self._mapping = mapping
        self._depth = len(next(iter(parts)))

    def read(self, index: Index) -> np.ndarray:
        """Reads a piece."""
        if not self._depth:
            return self._read(self._parts[()], index)
        outer, inner = index[: self._depth], index[self._depth :]
        whole = None
        for at in itertools.product(*[range(p.start, p.stop) for p in outer]):
            part = self._read(self._parts[at], inner)
            if whole is None:
                whole = _layers_like(part, [p.stop - p.start for p in outer])
            whole[tuple(i - p.start for i, p in zip(at, outer, strict=True))] = part
        if whole is None:
            return np.empty([p.stop - p.start for p in index], self._dtype)
        return whole

    def _read(self, part: _Part, index: Index) -> np.ndarray:
        found = _piece(part, index, self._source, self._mapping)
        return found.astype(self._dtype, copy=False)

    def run_bytes(self, index: Index) -> int:
        """How many bytes of a piece follow each other in the file."""
        tensor, part = next(iter(self._parts.values()))
        solved = tensor.solved
        view = solved.view_index(part, index[self._depth :])
        bounds = slices.bounds_of(solved.view_shape, view)
        return slices.runs(bounds, self._source.tensors[tensor.name].dtype.itemsize)[0]


def _layers_like(part: np.ndarray, outer: Sequence[int]) -> np.ndarray:
    """An array for layers like this one, whose axes lie in memory as here.

    So copying one into it goes through both in order.
    """
    order = sorted(range(part.ndim), key=lambda axis: -abs(part.strides[axis]))
    made = np.empty([*outer, *[part.shape[axis] for axis in order]], part.dtype)
    back = [len(outer) + order.index(axis) for axis in range(part.ndim)]
    return made.transpose([*range(len(outer)), *back])


def _piece(
    part: _Part, index: Index, source: Source, mapping: tables.Mapping
) -> np.ndarray:
    """A piece of one tensor, in the axes of the array."""
    tensor = part.tensor
    solved = tensor.solved

    def of_name(name: str) -> np.ndarray:
        def get(view: Index) -> np.ndarray:
            return source.read(name, view, solved.view_shape)

        return solved.read(part.part, index, get)

    found = of_name(tensor.name)
    for again, name in mapping.tied.items():
        if name == tensor.name and again in source.tensors:
            is_alike = source.tensors[again] == source.tensors[name]
            if not is_alike or of_name(again).tobytes() != found.tobytes():
                raise ValueError(
                    errors.message(
                        f"{again!r} and {name!r} are tied in the table of weights, "
                        f"and differ in {source.name}.",
                        way_out="Give each an entry of its own. Nothing has changed.",
                    )
                )
    return found


class _Dtypes:
    """Which dtype each array gets."""

    def __init__(self, dtype: Any) -> None:
        self.is_of_file = isinstance(dtype, str) and dtype == "file"
        rules = dtype if isinstance(dtype, Mapping) else {...: dtype}
        self._rules = [
            (where, patterns.to_predicate(where), jnp.dtype(x))
            for where, x in rules.items()
            if x is not None and not self.is_of_file
        ]
        self._unused = {where for where, _, _ in self._rules if where is not ...}
        for _, _, wanted in self._rules:
            if jax.dtypes.canonicalize_dtype(wanted) != wanted:
                raise ValueError(
                    f"nnx.weights.load: JAX has no {wanted} without jax_enable_x64."
                )

    def of(self, array: Array, given: np.dtype) -> tuple[np.dtype, bool]:
        """The dtype of an array, and whether what the file has may become that."""
        held = jnp.dtype(array.value.dtype)
        if self.is_of_file:
            return given, jax.dtypes.canonicalize_dtype(given) == given
        if not (_is_floating(given) and _is_floating(held)):
            return held, bool(np.can_cast(given, held))
        for where, predicate, dtype in self._rules:
            if predicate(array.path, array.leaf):
                self._unused.discard(where)
                return dtype, True
        return held, _is_exact(given, held)

    def check_used(self, arrays: Sequence[Array]) -> None:
        """Raises if a rule is for no floating array that is loaded."""
        for where in self._unused:
            call = "nnx.weights.load: dtype"
            known = [array.path for array in arrays]
            raise patterns.no_match_error(call, where, known, what="floating array")


def _is_exact(given: Any, held: Any) -> bool:
    """Whether a floating dtype has all numbers of another one.

    JAX's rules of promotion don't say so of float8, which they promote to nothing.
    """
    theirs, ours = jnp.finfo(given), jnp.finfo(held)
    return bool(
        theirs.nmant <= ours.nmant
        and float(theirs.max) <= float(ours.max)
        and float(theirs.smallest_subnormal) >= float(ours.smallest_subnormal)
    )


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _compare(
    model: Any,
    source: Source,
    mapping: tables.Mapping,
    tensors: Sequence[Tensor],
    dtypes: _Dtypes,
    missing: Any,
) -> list[tuple[Array, dict[Any, _Part], np.dtype]]:
    """What is loaded: arrays, what they are made of, their dtypes.

    Raises:
        StateMismatchError: With all that does not fit.
    """
    may_miss = (
        (lambda path, leaf: False)
        if missing is None
        else patterns.to_predicate(missing)
    )
    taken, lacking, misfits = [], [], []
    reached = set[Path]()
    for array, parts in _by_array(tensors):
        reached.add(array.path)
        absent = [
            p.tensor.name for p in parts.values() if p.tensor.name not in source.tensors
        ]
        is_kept = len(absent) == len(parts) and may_miss(array.path, array.leaf)
        if not absent:
            wanted, wrong = _fit(array, parts, source, dtypes)
            taken.append((array, parts, wanted))
            misfits += wrong
        elif not is_kept or _is_abstract(array):
            lacking += [(name, array) for name in absent]
    without = [
        array
        for array in tables.arrays_of(model).values()
        if array.path not in reached
        and not tables.is_transient(array.leaf)
        and (_is_abstract(array) or not may_miss(array.path, array.leaf))
    ]
    known = {tensor.name for tensor in tensors} | {*mapping.tied}
    extra = [n for n in source.tensors if n not in known and not mapping.ignores(n)]
    if lacking or without or extra or misfits:
        raise _error(source, lacking, without, extra, misfits)
    dtypes.check_used([array for array, _, _ in taken])
    return taken


def _fit(
    array: Array, parts: Mapping[Any, _Part], source: Source, dtypes: _Dtypes
) -> tuple[Any, list[Misfit]]:
    """The dtype of an array, and what does not fit."""
    wrong = []
    wanted: Any = None
    for part in parts.values():
        tensor = part.tensor
        stored = source.tensors[tensor.name]
        if stored.shape != tensor.solved.file_shape:
            wrong.append(
                Misfit(
                    array.path,
                    "shape",
                    f"{tensor.name} {describe_shape(tensor.solved.file_shape)}",
                    describe_shape(stored.shape),
                )
            )
        dtype, is_allowed = dtypes.of(array, stored.dtype)
        if not is_allowed or (wanted is not None and dtype != wanted):
            wrong.append(
                Misfit(array.path, "dtype", f"{wanted or dtype}", f"{stored.dtype}")
            )
        wanted = dtype if wanted is None else wanted
    return wanted, wrong


def _is_abstract(array: Array) -> bool:
    return isinstance(array.value, jax.ShapeDtypeStruct)


_MOST = 12


def _error(
    source: Source,
    lacking: Sequence[tuple[str, Array]],
    without: Sequence[Array],
    extra: Sequence[str],
    misfits: Sequence[Misfit],
) -> errors.StateMismatchError:
    """The error that lists all that does not fit."""
    lines = _listed(
        "missing in the file", [f"{n}, for {tables.describe(x)}" for n, x in lacking]
    )
    lines += _listed("not in the table", [tables.describe(array) for array in without])
    lines += _listed(
        "unexpected in the file",
        [f"{n}: {short_forms.describe(source.tensors[n])}" for n in extra],
    )
    lines += _listed(
        "that don't fit",
        [
            f"{paths.dotted(m.path)}: expected {m.what} {m.expected}, got {m.given}"
            for m in misfits
        ],
    )
    ways = []
    if lacking or without:
        ways.append("missing= says which arrays of the model may stay what they are.")
    if extra:
        ways.append("ignore= of the Mapping says which tensors are left out.")
    dtypes = [(m.expected, m.given) for m in misfits if m.what == "dtype"]
    if any(all(map(_is_floating, pair)) for pair in dtypes):
        ways.append("dtype= says to which dtype the arrays are converted.")
    if not all(all(map(_is_floating, pair)) for pair in dtypes):
        ways.append(
            "dtype= is for floating numbers alone. ignore= the others, or convert them "
            "first, and load the dict of tensors."
        )
    ways += _prefix_hint([name for name, _ in lacking], extra)
    return errors.StateMismatchError(
        errors.message(
            f"nnx.weights.load: {source.name} does not fit the model. "
            "Nothing has changed.",
            where="\n".join(lines),
            way_out="\n".join(ways),
        ),
        [array.path for _, array in lacking] + [array.path for array in without],
        [(name,) for name in extra],
        misfits,
    )


def _prefix_hint(lacking: Sequence[str], extra: Sequence[str]) -> list[str]:
    """What to do if the names in the file, or those in the table, have a prefix."""
    for these, others, advice in (
        (lacking, extra, "in front of the names of the table"),
        (extra, lacking, "taken off the names of the table"),
    ):
        for name in others:
            prefix = name.removesuffix(these[0]) if these else name
            if prefix not in ("", name) and prefix.endswith("."):
                fitting = len({prefix + each for each in these} & {*others})
                if 2 * fitting > len(these):
                    return [f"{fitting} of them fit with {prefix!r} {advice}."]
    return []


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    shown = [f"{len(lines)} {title}:", *[f"  {line}" for line in lines[:_MOST]]]
    rest = len(lines) - _MOST
    return [*shown, f"  and {rest} more"] if rest > 0 else shown
