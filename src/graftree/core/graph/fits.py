"""How the leaves of an object and those of a state fit each other.

`compare` is the one place that decides it, for whatever loads strictly. It returns a
`Fit`, which pairs each leaf of the object with what the state has for it, and lists all
differences by path: leaves that are missing or unexpected, other shapes, other dtypes.

The state may have any form that `nnx.update` takes, with what checkpoints do to it:

    object                    state
    layers/0/kernel           layers/'0'/kernel          integer keys as strings
    kernel                    kernel/value               a level below each Variable
    head/kernel, shared       head/kernel                any one of its paths
    nothing                   layers/_pytree__state      ``None``, which is no leaf

A Variable that holds a container (a dict, a list) is compared leaf by leaf; it is taken
from the state as a whole, or not at all. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, freshness, graph_states, nodes
from graftree.core.graph.nodes import Leaf, TreeKind
from graftree.core.states import flat_states, nested, pure_dicts
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
    """

    path: Path
    leaf: Any
    given: Any
    differences: tuple[Path | Misfit, ...] = ()

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
    skeleton, leaves = freshness.flatten_node(node, None, "update")
    places = [*map(_Place, skeleton.paths(), leaves)]
    offer = _Offer(state)
    for place in places:
        place.look_for(offer)
    offer.rename(_finder(node, places))
    for place in places:
        place.look_for(offer)
    return Fit([place.pair(offer) for place in places], offer.unexpected())


class _Place:
    """A leaf of an object: what it holds, and which leaves of a state it gets."""

    def __init__(self, path: Path, leaf: Any) -> None:
        self.path = path
        self.leaf = leaf
        self.parts, self.treedef = _parts_of(flattening.raw_of(leaf))
        self.found: list[int | None] = [None] * len(self.parts)

    def look_for(self, offer: _Offer) -> None:
        """Takes what it lacks from what a state has left."""
        for i, (below, _) in enumerate(self.parts):
            if self.found[i] is None:
                self.found[i] = offer.take(self.path, below)

    def pair(self, offer: _Offer) -> Pair:
        """What it got, and how that differs from what it holds."""
        given = [None if i is None else offer.leaves[i].value for i in self.found]
        parts = [*zip(self.parts, given, strict=True)]
        # ``None`` is no leaf: checkpoints have it, or have nothing there.
        lacking = [part[0] for part, value in parts if _is_lacking(part[1], value)]
        if len(lacking) == len(parts) or all(i is None for i in self.found):
            return Pair(self.path, self.leaf, MISSING, (self.path,) if lacking else ())
        found = [(*self.path, *below) for below in lacking]
        misfits = [
            _misfit((*self.path, *below), held, value)
            for (below, held), value in parts
            if below not in lacking
        ]
        listed = (*found, *[x for x in misfits if x is not None])
        return Pair(self.path, self.leaf, self._joined(parts, offer), listed)

    def _joined(self, parts: Sequence[Any], offer: _Offer) -> Any:
        """The leaf of the state: a Variable if it is one there."""
        joined = [_converted(held, value) for (_, held), value in parts]
        whole = joined[0] if self.treedef is None else self.treedef.unflatten(joined)
        first = next(i for i in self.found if i is not None)
        variable = offer.leaves[first].variable
        if variable is None:
            return whole
        raw = variable.get_raw_value()
        values_before = [value for _, value in parts]
        own, treedef = _parts_of(raw)
        if treedef != self.treedef or any(
            a is not b for (_, a), b in zip(own, values_before, strict=True)
        ):
            return whole
        is_same = all(a is b for a, b in zip(joined, values_before, strict=True))
        return variable if is_same else variable.copy(whole)


def _parts_of(raw: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """The leaves in a value, with their paths in it, and its structure if any."""
    if _is_leaf(raw):
        return [((), raw)], None
    flat, treedef = jax.tree_util.tree_flatten_with_path(raw)
    return [(paths.from_jax(path), value) for path, value in flat], treedef


def _is_leaf(value: Any) -> bool:
    is_known = value is None or values.is_stand_in(value)
    return is_known or isinstance(nodes.kind_of(value), Leaf)


def _is_lacking(held: Any, given: Any) -> bool:
    return given is None and held is not None


# What a state has.


class _Offered(NamedTuple):
    """A leaf of a state; ``variable`` is the one that holds it there."""

    path: Path
    value: Any
    variable: Variable[Any] | None


class _Offer:
    """The leaves of a state, and which of them have been taken."""

    def __init__(self, state: Any) -> None:
        self.leaves = [*_leaves_of(state)]
        self._left = dict.fromkeys(range(len(self.leaves)))
        self._exact = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        self._spelled: dict[tuple[str, ...], int] = {}
        for i, leaf in enumerate(self.leaves):
            self._spelled.setdefault(paths.spelled(leaf.path), i)
        self._is_boxed = all(leaf.path[-1:] == ("value",) for leaf in self.leaves)
        self._values: dict[Path, Any] = {}

    def take(self, path: Path, below: Path) -> int | None:
        """The number of the leaf at a path, if it is there."""
        whole = (*path, *below)
        boxed = (*path, "value", *below)
        for number, is_boxed in (
            (self._exact.get(whole), False),
            (self._spelled.get(paths.spelled(whole)), False),
            (self._spelled.get(paths.spelled(boxed)), True),
        ):
            if number is not None and number in self._left:
                del self._left[number]
                self._is_boxed |= is_boxed
                self._values[whole] = self.leaves[number].value
                return number
        return None

    def rename(self, find: Callable[[Path], tuple[Path, Any]]) -> None:
        """Gives what is left the paths that the object lists it under."""
        for number in [*self._left]:
            leaf = self.leaves[number]
            path, found = find(leaf.path)
            taken = self._values.get(path, MISSING)
            if _are_same(taken, leaf.value) or _are_same_static(found, leaf.value):
                del self._left[number]
            elif path != leaf.path:
                self._spelled[paths.spelled(path)] = number

    def unexpected(self) -> list[tuple[Path, Any]]:
        """What has not been taken, with paths as the object would spell them."""
        left = [self.leaves[i] for i in self._left]
        return [
            (self._shown(x.path), x.value if x.variable is None else x.variable)
            for x in left
            if x.value is not None
        ]

    def _shown(self, path: Path) -> Path:
        if self._is_boxed and len(path) > 1 and path[-1] == "value":
            path = path[:-1]
        return pure_dicts.restored_path(path)


def _leaves_of(state: Any) -> Iterator[_Offered]:
    """The leaves of a state of any form, those in containers one by one."""
    # What remains to be listed. No recursion, whose depth Python limits.
    pending: list[Iterator[_Offered]] = [iter([_Offered((), state, None)])]
    while pending:
        for path, value, variable in pending[-1]:
            if isinstance(value, Variable):
                path, value, variable = path, value.get_raw_value(), value
            if isinstance(value, (Mapping, flat_states.FlatState)):
                below = _items_of(value)
            elif _is_leaf(value):
                yield _Offered(path, value, variable)
                continue
            else:
                below = _items_in(value)
            pending.append(iter([_Offered((*path, *k), x, variable) for k, x in below]))
            break
        else:
            pending.pop()


def _items_of(state: Any) -> list[tuple[Path, Any]]:
    if isinstance(state, flat_states.FlatState):
        return [*state]
    mapping = nested.raw_mapping(graph_states.state_of(state))
    return [((key,), value) for key, value in mapping.items()]


def _items_in(node: Any) -> list[tuple[Path, Any]]:
    """The leaves of a graph node, or the children of a container."""
    if isinstance(nodes.kind_of(node), TreeKind):
        return [((child.key,), child.value) for child in nodes.children(node)]
    skeleton, leaves = flattening.flatten_graph(node)
    return [*zip(skeleton.paths(), leaves, strict=True)]


# Other paths of shared objects.


def _finder(node: Any, places: Sequence[_Place]) -> Callable[[Path], tuple[Path, Any]]:
    """A function that finds what is at a path of an object, and where it is listed."""
    listed = {id(place.leaf): place.path for place in places}
    known: dict[int, dict[str, Any]] = {}

    def children(x: Any) -> dict[str, Any]:
        if id(x) not in known:
            known[id(x)] = {str(c.key): c.value for c in nodes.children(x)}
        return known[id(x)]

    def find(path: Path) -> tuple[Path, Any]:
        found, rest = node, path
        while rest and not _is_leaf(found):
            found, rest = children(found).get(str(rest[0]), MISSING), rest[1:]
        is_tracked = nodes.kind_of(found) in (Leaf.VARIABLE, Leaf.REF)
        if is_tracked and id(found) in listed:
            return (*listed[id(found)], *rest), found
        return path, found

    return find


def _are_same(x: Any, y: Any) -> bool:
    """Whether one of two leaves may be left out: they are equal arrays."""
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
    # That both are abstract, as when a file is compared, is no news.
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
    text = f"{dtype}[{','.join(map(str, shape))}]"
    is_plain = is_plain or not isinstance(x, jax.ShapeDtypeStruct)
    return text if is_plain else f"only {text}, abstract"
