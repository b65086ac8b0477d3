"""How the leaves of an object and those of a state fit each other, for strict loads.

`compare` pairs each leaf of the object with what the state has for it, and lists all
differences by path: leaves that are missing or unexpected, other shapes, other dtypes.
The state may have any form that `matching` knows; a Variable that is shared may be at
any one of its paths.

A Variable that holds a container (a dict, a list) is compared leaf by leaf; it is taken
from the state as a whole, or not at all. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import (
    differences,
    flattening,
    matching,
    nodes,
    watches,
)
from graftree.core.graph.matching import Given, Match
from graftree.core.graph.nodes import Leaf
from graftree.core.states import pure_dicts
from graftree.core.text import short_forms
from graftree.core.variables import values
from graftree.core.variables.variables import MISSING, Variable


class Misfit(NamedTuple):
    """A leaf that is in both, and differs; ``what`` is "shape", "dtype" or "value"."""

    path: Path
    what: str
    expected: str
    given: str


class Pair(NamedTuple):
    """A leaf of an object, and what a state has for it.

    Attributes:
        path: Of the leaf in the object.
        leaf: The Variable, or the value itself.
        given: The leaf of the state, or `MISSING`; a value of the same structure if the
            Variable holds a container.
        differences: Its missing paths, and its misfits.
        place: Where the state has it, and what is to be written there.
    """

    path: Path
    leaf: Any
    given: Any
    differences: tuple[Path | Misfit, ...] = ()
    place: Given | None = None

    @property
    def is_given(self) -> bool:
        """Whether the state has it."""
        return self.given is not MISSING


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of `compare`.

    Attributes:
        pairs: One for each leaf of the object.
        unexpected: The leaves of the state that the object lacks: path and leaf.
    """

    pairs: list[Pair]
    unexpected: list[tuple[Path, Any]]

    def error(self, what: str, way_out: str = "") -> errors.StateMismatchError | None:
        """The error that lists all differences; ``None`` if there is none.

        Args:
            what: The first line.
            way_out: The last lines.
        """
        found = [x for pair in self.pairs for x in pair.differences]
        misfits = [x for x in found if isinstance(x, Misfit)]
        missing: list[Path] = [x for x in found if not isinstance(x, Misfit)]
        unexpected = [path for path, _ in self.unexpected]
        if not found and not unexpected:
            return None
        lines = [what, *differences.missing_and_unexpected(missing, unexpected)]
        lines += _in_words(misfits)
        lines += differences.common_causes(missing, unexpected)
        lines += way_out.splitlines()
        text = "\n".join(lines)
        return errors.StateMismatchError(text, missing, unexpected, misfits)

    def given(self) -> dict[Path, Any]:
        """What the state has for the object, by the paths of the object."""
        return {pair.path: pair.given for pair in self.pairs if pair.is_given}


def _in_words(misfits: Sequence[Misfit]) -> list[str]:
    lines = [
        f"  {x.what}: {paths.to_string(x.path, '<root>')}: {x.expected} in the object, "
        f"{x.given} in the state"
        for x in misfits
    ]
    return differences.bounded(lines)


def compare(node: Any, state: Any) -> Fit:
    """Compares the leaves of an object, concrete or abstract, with those of a state."""
    skeleton, leaves = watches.flatten_node(node, None, "update")
    found = match(node, state)
    listed = dict(zip(skeleton.paths(), leaves, strict=True))
    path_of = {id(leaf): path for path, leaf in listed.items() if _is_tracked(leaf)}
    given_at: dict[Path, Given] = {}
    left: list[tuple[Path, Any]] = []
    # What has the very path of a leaf comes before what has another one of its paths.
    for given in sorted(found.given, key=lambda given: given.path not in listed):
        is_listed = given.path in listed
        path = given.path if is_listed else path_of.get(id(given.held), given.path)
        if path not in listed:
            if not _are_same_static(given.held, given.value):
                left += matching.leaves_of(given.value, path)
        elif not _are_same(given_at.setdefault(path, given).value, given.value):
            left += matching.leaves_of(given.value, given.path)
    pairs = []
    for path, leaf in listed.items():
        place = given_at.get(path)
        pair, others = _paired(path, leaf, MISSING if place is None else place.value)
        if place is not None and pair.is_given:
            pair = pair._replace(place=place._replace(value=pair.given))
        pairs.append(pair)
        left += others
    is_boxed = found.has_boxes or all(path[-1:] == ("value",) for path, _ in left)
    unexpected = [
        (_shown(path, is_boxed), x)
        for path, x in left
        if flattening.raw_of(x) is not None
    ]
    return Fit(pairs, unexpected)


def match(node: Any, state: Any) -> Match:
    """Where the parts of a state belong in an object, or in a Variable."""
    if not isinstance(node, Variable):
        return matching.match(node, matching.mapping_of(state), matching.in_object)
    found = Match()
    found.add(Given((), node, state))
    return found


def _is_tracked(x: Any) -> bool:
    return nodes.kind_of(x) in (Leaf.VARIABLE, Leaf.REF)


def _shown(path: Path, is_boxed: bool) -> Path:
    """The path of an unexpected leaf, as the object would spell it."""
    if is_boxed and len(path) > 1 and path[-1] == "value":
        path = path[:-1]
    return pure_dicts.restored_path(path)


def _paired(path: Path, leaf: Any, given: Any) -> tuple[Pair, list[tuple[Path, Any]]]:
    """A leaf and what it gets, and what is left of that."""
    parts, treedef = _parts_of(flattening.raw_of(leaf))
    offered: dict[Any, tuple[Path, Any]] = {}
    if given is not MISSING:
        listed = matching.leaves_of(flattening.raw_of(given))
        offered = {paths.spelled(below): (below, x) for below, x in listed}
    found = [offered.pop(paths.spelled(below), None) for below, _ in parts]
    left = [((*path, *below), x) for below, x in offered.values()]
    got = [None if x is None else x[1] for x in found]
    # ``None`` is not a leaf: checkpoints have it, or have nothing there.
    lacking = [
        below
        for (below, held), x in zip(parts, got, strict=True)
        if x is None and held is not None
    ]
    if len(lacking) == len(parts) or not any(found):
        return Pair(path, leaf, MISSING, (path,) if lacking else ()), left
    misfits = [
        _misfit((*path, *below), held, x)
        for (below, held), x in zip(parts, got, strict=True)
        if below not in lacking
    ]
    differing = (
        *[(*path, *below) for below in lacking],
        *[x for x in misfits if x is not None],
    )
    return Pair(path, leaf, _joined(parts, got, treedef, given), differing), left


def _joined(
    parts: Sequence[tuple[Path, Any]], got: Sequence[Any], treedef: Any, given: Any
) -> Any:
    """What a leaf gets as a whole: a Variable if it is one in the state."""
    joined = [_converted(held, x) for (_, held), x in zip(parts, got, strict=True)]
    whole = joined[0] if treedef is None else treedef.unflatten(joined)
    if not isinstance(given, Variable):
        return whole
    own, own_treedef = _parts_of(given.get_raw_value())
    if own_treedef != treedef or any(
        a is not b for (_, a), b in zip(own, got, strict=True)
    ):
        return whole
    is_same = all(a is b for a, b in zip(joined, got, strict=True))
    return given if is_same else given.copy(whole)


def _parts_of(raw: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """The leaves in a value, with their paths in it, and its structure if any."""
    if matching.is_leaf(raw):
        return [((), raw)], None
    flat, treedef = jax.tree_util.tree_flatten_with_path(raw)
    return [(paths.from_jax(path), value) for path, value in flat], treedef


def _are_same(x: Any, y: Any) -> bool:
    """Whether one of two values may be left out: their leaves are equal arrays."""
    if x is y:
        return True
    listed = [dict(matching.leaves_of(flattening.raw_of(value))) for value in (x, y)]
    return listed[0].keys() == listed[1].keys() and all(
        _are_same_arrays(listed[0][path], listed[1][path]) for path in listed[0]
    )


def _are_same_arrays(x: Any, y: Any) -> bool:
    if x is y:
        return True
    pair = [a for a in (x, y) if isinstance(a, np.ndarray) or values.is_array(a)]
    if len(pair) < 2 or not _are_equal(*[a.dtype for a in pair]):
        return False
    if any(isinstance(a, _jax.Tracer) or _is_key(a.dtype) for a in pair):
        return False
    is_near = all(getattr(a, "is_fully_addressable", True) for a in pair)
    return is_near and np.array_equal(x, y)


def _are_same_static(found: Any, given: Any) -> bool:
    """Whether a state lists a static value, as those made in tree mode do."""
    if nodes.kind_of(found) is not Leaf.STATIC or type(found) is not type(given):
        return False
    return found is not MISSING and found == given


# Shapes and dtypes.

_SCALARS = (bool, int, float, complex)
_KINDS = {
    bool: jnp.bool_,
    int: jnp.integer,
    float: jnp.floating,
    complex: jnp.complexfloating,
}


def _misfit(path: Path, held: Any, given: Any) -> Misfit | None:
    """How what an object holds differs from what a state has for it, if it does."""
    if isinstance(held, (jax.sharding.PartitionSpec, jax.sharding.Sharding)):
        return None
    shape, dtype = _form_of(held)
    other_shape, other_dtype = _form_of(given)
    if isinstance(given, jax.ShapeDtypeStruct) and type(held) is not type(given):
        what = "value"
    elif shape is None or other_shape is None:
        what = "" if shape is other_shape and dtype is other_dtype else "value"
    elif shape != other_shape and _is_key(dtype) is _is_key(other_dtype):
        what = "shape"
    else:
        what = "" if _are_equal(dtype, other_dtype) else "dtype"
    if not what:
        return None
    # That both are abstract, as when a file is compared, is not news.
    alike = isinstance(held, jax.ShapeDtypeStruct) is isinstance(
        given, jax.ShapeDtypeStruct
    )
    return Misfit(path, what, describe(held, alike), describe(given, alike))


def _form_of(x: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Shape and dtype; of a Python scalar the type, of anything else no shape."""
    if type(x) in _SCALARS:
        return (), type(x)
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return shape, dtype
    return None, type(x)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _are_equal(dtype: Any, other: Any) -> bool:
    """Whether dtypes are equal; a Python scalar has any width of its kind."""
    if isinstance(dtype, type) or isinstance(other, type):
        if dtype in _KINDS and other in _KINDS:
            return dtype is other
        scalar, real = (dtype, other) if dtype in _KINDS else (other, dtype)
        return jnp.issubdtype(real, _KINDS[scalar])
    return dtype == other


def _converted(held: Any, given: Any) -> Any:
    """A Python scalar as an array, where the object holds one."""
    if type(given) in _SCALARS and not _jax.is_ref(held):
        dtype = getattr(held, "dtype", None)
        if dtype is not None:
            to_array = np.asarray if isinstance(held, np.ndarray) else jnp.asarray
            return to_array(given, dtype) if _are_equal(dtype, type(given)) else given
    return given


def describe(x: Any, is_plain: bool = False) -> str:
    """A leaf in words, such as ``float32[2,3]``; plain if also for an abstract one."""
    shape, dtype = _form_of(x)
    if x is None:
        return "None"
    if shape is None:
        return f"a {dtype.__name__}"
    if type(x) in _SCALARS:
        return f"a Python {dtype.__name__}"
    text = short_forms.describe_form(dtype, shape)
    is_plain = is_plain or not isinstance(x, jax.ShapeDtypeStruct)
    return text if is_plain else f"only {text}, abstract"
