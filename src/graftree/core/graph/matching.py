"""The places in an object, or in a skeleton, for the parts of a state.

Only `match` decides them: `merge` reads its answer for a skeleton, and `update`, lax or
strict, and all code that loads states read it for an object. Only it knows how
checkpoints change states:

    object                    state
    layers/0/kernel           layers/'0'/kernel          integer keys as strings
    kernel                    kernel/value               a level below each Variable
    nothing                   layers/_pytree__state      ``None``, which is not a leaf

`compare` finds how far an object and a state fit each other, for strict loads. It pairs
each leaf of the object with the state's value for it, and lists all differences by
path: leaves that are missing or unexpected, other shapes, other dtypes. A Variable that
is shared may be at any one of its paths.

A Variable that holds a container (a dict, a list) is compared leaf by leaf; it is taken
from the state as a whole, or not at all. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.core import paths, walks
from graftree.core.graph import differences, flattening, nodes
from graftree.core.graph.graphdefs import GraphDef, Path, VariableDef
from graftree.core.objects import attributes, bookkeeping
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, pure_dicts, states
from graftree.core.text import descriptions
from graftree.core.variables import values
from graftree.core.variables.variables import MISSING, Variable


class Given(NamedTuple):
    """The part of a state for one place.

    Attributes:
        path: Of the place, as the object spells it.
        held: The present value: a Variable, another value, or in a skeleton the number
            of a leaf; `MISSING` if there is nothing.
        value: The part of the state, out of its box and with the keys of ``held``.
        node: The object or container that the place is in.
        owner: The object around it, if there is one.
    """

    path: Path
    held: Any
    value: Any
    node: Any = None
    owner: Pytree | None = None


@dataclasses.dataclass
class Match:
    """The places of the parts of a state.

    Attributes:
        given: The parts, with their places.
        refused: Those that have a mapping for a holder of a leaf, and this holder.
        has_boxes: Whether any value came in the box of a checkpoint.
    """

    given: list[Given] = dataclasses.field(default_factory=list)
    refused: list[tuple[Given, Any]] = dataclasses.field(default_factory=list)
    has_boxes: bool = False

    def add(self, given: Given) -> None:
        """Adds a part, out of its box."""
        held, value = given.held, given.value
        if is_mapping(value) and len(value):
            if isinstance(held, Variable) or _is_array(held):
                value = self._opened(flattening.raw_of(held), value, given.path, given)
                given = given._replace(value=value)
        self.given.append(given)

    def _opened(self, held: Any, value: Any, path: Path, given: Given) -> Any:
        """The values that a mapping gives to a holder: the contents of its boxes."""
        if isinstance(value, states.State):
            value = pure_dicts.to_pure_dict(value)
        inner = pure_dicts.out_of_box(value, held)
        self.has_boxes |= inner is not value
        if not is_mapping(inner):
            return inner
        if holds_leaf(held):
            self.refused.append((given._replace(path=path, value=inner), held))
        if not isinstance(held, Mapping) or not isinstance(inner, Mapping):
            return inner
        opened: dict[Any, Any] = {}
        for key, below in inner.items():
            own = pure_dicts.own_key(key, held)
            if own in held and isinstance(below, Mapping):
                below = self._opened(held[own], below, (*path, own), given)
            opened[own] = below
        is_same = all(opened.get(key, MISSING) is x for key, x in inner.items())
        return inner if is_same else opened


class _Lookup(NamedTuple):
    """What is in a node, to be found by the keys of a state.

    Attributes:
        entries: Its children, and for an object also its other attributes.
        name_of: The name of a child in ``entries``, by its key; ``None``: the key.
        key_of: The key of a child in paths, by its name; ``None``: the name.
        statuses: False for names of static values.
    """

    entries: Mapping[Any, Any]
    name_of: Callable[[Any], Any] | None = None
    key_of: Callable[[Any], Any] | None = None
    statuses: Mapping[Any, Any] = MappingProxyType({})


def _find_places(
    root: Any, state: Mapping[Any, Any], look_in: Callable[[Any], _Lookup]
) -> Match:
    """Finds the places for the parts of a nested mapping.

    Args:
        root: An object, or the tree of a skeleton.
        state: The mapping.
        look_in: Finds the contents of a node of it.
    """
    found, kinds = Match(), nodes.KINDS

    def below(visit: Any, path: Path) -> list[tuple[Any, Any]]:
        node, owner, given = visit
        owner = node if isinstance(node, Pytree) else owner
        (entries, name_of, key_of, statuses), listed = look_in(node), []
        for key, value in given.items():
            name = key if name_of is None else name_of(key)
            child = entries.get(name, MISSING)
            if child is not MISSING:
                key = name if key_of is None else key_of(name)
            kind = kinds.get(type(child)) or nodes.kind_of(child)
            is_leaf = isinstance(kind, nodes.Leaf) or statuses.get(name) is False
            if value is None and pure_dicts.is_bookkeeping(key, value):
                if is_leaf or node is owner:
                    continue
            kind = kinds.get(type(value)) or nodes.kind_of(value)
            if is_leaf or isinstance(kind, nodes.Leaf):
                part = _make_given(((*path, key), child, value, node, owner))
                if kind is nodes.Leaf.VARIABLE:  # in no box
                    found.given.append(part)
                else:
                    found.add(part)
            else:
                listed.append((key, (child, owner, mapping_of(value))))
        return listed

    for _ in walks.walk((root, None, state), below):
        pass
    return found


# The constructor of a named tuple is a function in Python.
_make_given = functools.partial(tuple.__new__, Given)


def _in_object(node: Any) -> _Lookup:
    kind: Any = nodes.kind_of(node)
    if kind is nodes.PYTREE:
        facts, entries = attributes.facts_of(type(node)), vars(node)
        # Classes that are not pytrees are not checked, so there the values decide.
        statuses = bookkeeping.table_of(node) if facts.is_pytree else {}
        naming = facts.naming
        if naming is attributes.PLAIN:
            return _Lookup(entries, statuses=statuses)
        name_of = functools.partial(naming.name_of, type(node))
        return _Lookup(entries, name_of, naming.key_of, statuses)
    if type(node) is dict or isinstance(node, states.State):
        return _in_mapping(flat_states.raw_mapping(node))
    children, _ = kind.flatten(node)
    statuses = {child.key: child.is_data for child in children}
    return _in_mapping({child.key: child.value for child in children}, statuses)


def _in_mapping(
    children: Mapping[Any, Any], statuses: Mapping[Any, Any] = MappingProxyType({})
) -> _Lookup:
    own_key = functools.partial(pure_dicts.own_key, state=children)
    return _Lookup(children, own_key, statuses=statuses)


def _is_array(x: Any) -> bool:
    return nodes.kind_of(x) in (nodes.Leaf.ARRAY, nodes.Leaf.REF)


def holds_array(raw: Any) -> bool:
    """Whether a raw value is an array, or stands for one."""
    return _is_array(raw) or values.is_stand_in(raw)


def holds_leaf(raw: Any) -> bool:
    """Whether a raw value is an array, a number or a string."""
    return holds_array(raw) or isinstance(raw, (bool, int, float, complex, str))


# The forms of states.


def is_mapping(x: Any) -> bool:
    """Whether ``x`` is a state of some form: paths to leaves."""
    # A check against an abstract class takes longer than all the rest.
    known = _mappings.get(type(x))
    if known is None:
        kinds = (Mapping, flat_states.FlatState)
        known = _mappings[type(x)] = isinstance(x, kinds)
    return known


_mappings: dict[type, bool] = {}


def mapping_of(given: Any) -> Mapping[Any, Any]:
    """The nested mapping that a state stands for, or an object like a state."""
    if type(given) is dict:
        return given
    if isinstance(given, flat_states.FlatState):
        given = given.to_nested_state()
    if isinstance(given, Mapping):
        return flat_states.raw_mapping(given)
    # An object of the same structure, e.g. gradients in the form of a Module.
    skeleton, leaves = flattening.flatten_graph(given)
    found = zip(skeleton.paths(), leaves, strict=True)
    return states.from_flat_state(found).raw_mapping


def leaves_of(state: Any, start: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a part of a state, those in containers one by one."""

    def below(x: Any, _: Path) -> list[tuple[Any, Any]]:
        raw = flattening.raw_of(x)
        if is_leaf(raw):
            return []
        if is_mapping(raw) or not isinstance(nodes.kind_of(raw), nodes.TreeKind):
            return [*mapping_of(raw).items()]
        return [child[:2] for child in nodes.children(raw)]

    for path, x in walks.walk(state, below, start):
        if is_leaf(flattening.raw_of(x)):
            yield path, x


def is_leaf(x: Any) -> bool:
    """Whether a value in a state has no parts; so has ``None``."""
    return x is None or values.is_stand_in(x) or not nodes.is_node(x)


# For a skeleton.


def match_leaves(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """The leaves of states in the order of a skeleton.

    Raises:
        ValueError: If leaves are missing or unexpected; the message has their paths.
        TypeError: If a state has none of the forms of states.
    """
    if any([isinstance(given, list) for given in state_list]):
        return _match_list(graphdef, state_list)
    if graphdef.paths() == ((),):
        return _match_root(graphdef, state_list)
    for given in state_list:
        if not is_mapping(given):
            raise TypeError(
                f"Expected a State or another mapping of paths to leaves, got "
                f"{type(given).__name__}."
            )
    mappings = [*map(mapping_of, state_list)]
    found = [MISSING] * graphdef.num_leaves
    are_filled = [_fill(graphdef.places(), mapping, found) for mapping in mappings]
    if all(are_filled) and not any([leaf is MISSING for leaf in found]):
        return found
    return _match_slowly(graphdef, mappings)


def _fill(
    tree: Mapping[Any, Any], mapping: Mapping[Any, Any], found: list[Any]
) -> bool:
    """`match` for the usual case: puts leaves in their places; whether all had one."""
    for key, child in mapping.items():
        place = tree.get(key)
        kind = type(child)
        if type(place) is int:
            # A check against the abstract class takes longer than all the rest.
            is_leaf = issubclass(kind, Variable) or not issubclass(kind, Mapping)
            if not is_leaf or found[place] is not MISSING:
                return False
            found[place] = child
        elif place is None or not (kind is dict or issubclass(kind, Mapping)):
            return False
        elif not _fill(place, child if kind is dict else mapping_of(child), found):
            return False
    return True


def _match_slowly(
    graphdef: GraphDef[Any], mappings: Sequence[Mapping[Any, Any]]
) -> list[Any]:
    found: list[Any] = [MISSING] * graphdef.num_leaves
    unexpected: list[Path] = []
    for mapping in mappings:
        places = _find_places(graphdef.places(), mapping, _in_mapping)
        for path, number, value, *_ in places.given:
            if type(number) is not int:
                unexpected += [path for path, _ in leaves_of(value, path)]
            # An empty mapping counts only if there is nothing else.
            elif found[number] is MISSING or is_empty(found[number]):
                found[number] = value
            elif not is_empty(value):
                unexpected.append(path)
    missing = [
        path
        for (path, definition), leaf in zip(graphdef.leaves(), found, strict=True)
        # Only a Variable may have a mapping as its value.
        if leaf is MISSING or (definition is None and is_mapping(leaf))
    ]
    if missing or unexpected:
        count = sum(leaf is not MISSING for leaf in found) + len(unexpected)
        raise _count_error(graphdef, count, missing, unexpected)
    boxes = [
        leaf
        for (_, definition), leaf in zip(graphdef.leaves(), found, strict=True)
        if isinstance(definition, VariableDef) and not isinstance(leaf, Variable)
    ]
    # A checkpoint restored without types has this level below all Variables, or none.
    if boxes and all(type(x) is dict and [*x] == ["value"] for x in boxes):
        taken = {id(x) for x in boxes}
        return [x["value"] if id(x) in taken else x for x in found]
    return [*map(pure_dicts.unboxed, found)]


def is_empty(x: Any) -> bool:
    """Whether ``x`` is a state without leaves."""
    return is_mapping(x) and not len(x)


def _match_list(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    if len(state_list) > 1:
        raise ValueError(
            f"Only one state can be passed as a list of leaves, got {len(state_list)} "
            "states."
        )
    (leaves,) = state_list
    if len(leaves) != graphdef.num_leaves:
        raise _count_error(graphdef, len(leaves), [], [])
    return leaves


def _match_root(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    given = [s for s in state_list if not is_empty(s)]
    flat = [item for s in given if isinstance(s, flat_states.FlatState) for item in s]
    leaves = [s for s in given if not isinstance(s, flat_states.FlatState)]
    leaves += [leaf for path, leaf in flat if not path]
    if len(leaves) != 1 or len(leaves) < len(flat):
        extra = [path for path, _ in flat if path]
        raise _count_error(graphdef, len(leaves) + len(extra), [], extra)
    return leaves


def _count_error(
    graphdef: GraphDef[Any], count: int, missing: Sequence[Any], extra: Sequence[Any]
) -> ValueError:
    lines = [
        f"Incorrect number of leaves: expected {graphdef.num_leaves}, got {count}."
        if count != graphdef.num_leaves
        else "The paths of the state do not match those of the GraphDef."
    ]
    lines += differences.missing_and_unexpected(missing, extra)
    lines += differences.common_causes(missing, extra)
    lines.append("Pass the states of the same model, each leaf once.")
    return ValueError("\n".join(lines))


class Misfit(NamedTuple):
    """A leaf that is in both, and differs; ``what`` is "shape", "dtype" or "value"."""

    path: Path
    what: str
    expected: str
    given: str


class Pair(NamedTuple):
    """A leaf of an object, and the state's value for it.

    Attributes:
        path: Of the leaf in the object.
        leaf: The Variable, or the value itself.
        given: The leaf of the state, or `MISSING`; a value of the same structure if the
            Variable holds a container.
        differences: Its missing paths, and its misfits.
        place: Where the state has it, and the value to be written there.
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


def _in_words(misfits: Sequence[Misfit]) -> list[str]:
    lines = [
        f"  {x.what}: {paths.to_string(x.path, '<root>')}: {x.expected} in the object, "
        f"{x.given} in the state"
        for x in misfits
    ]
    return differences.bounded(lines)


def compare(node: Any, state: Any) -> Fit:
    """Compares the leaves of an object, concrete or abstract, with those of a state."""
    skeleton, leaves = flattening.flatten(node, None, "update")
    found = match(node, state)
    listed = dict(zip(skeleton.paths(), leaves, strict=True))
    tracked = [x for x in listed.items() if nodes.is_variable_or_ref(x[1])]
    path_of = {id(leaf): path for path, leaf in tracked}
    given_at: dict[Path, Given] = {}
    left: list[tuple[Path, Any]] = []
    # A value at the path of a leaf comes before one at another of its paths.
    for given in sorted(found.given, key=lambda given: given.path not in listed):
        is_listed = given.path in listed
        path = given.path if is_listed else path_of.get(id(given.held), given.path)
        if path not in listed:
            if not _are_same_static(given.held, given.value):
                left += leaves_of(given.value, path)
        elif not _are_same(given_at.setdefault(path, given).value, given.value):
            left += leaves_of(given.value, given.path)
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
    """The places in an object, or in a Variable, for the parts of a state."""
    if not isinstance(node, Variable):
        return _find_places(node, mapping_of(state), _in_object)
    found = Match()
    found.add(Given((), node, state))
    return found


def _shown(path: Path, is_boxed: bool) -> Path:
    """The path of an unexpected leaf, as the object would spell it."""
    if is_boxed and len(path) > 1 and path[-1] == "value":
        path = path[:-1]
    return pure_dicts.restored_path(path)


def _paired(path: Path, leaf: Any, given: Any) -> tuple[Pair, list[tuple[Path, Any]]]:
    """A leaf and its value, and the rest of that value."""
    parts, treedef = _parts_of(flattening.raw_of(leaf))
    offered: dict[Any, tuple[Path, Any]] = {}
    if given is not MISSING:
        listed = leaves_of(flattening.raw_of(given))
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
    """The whole value that a leaf gets: a Variable if it is one in the state."""
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
    if is_leaf(raw):
        return [((), raw)], None
    flat, treedef = jax.tree_util.tree_flatten_with_path(raw)
    return [(paths.from_jax(path), value) for path, value in flat], treedef


def _are_same(x: Any, y: Any) -> bool:
    """Whether one of two values may be left out: their leaves are equal arrays."""
    if x is y:
        return True
    listed = [dict(leaves_of(flattening.raw_of(value))) for value in (x, y)]
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
    is_static = nodes.kind_of(found) is nodes.Leaf.STATIC and found is not MISSING
    return is_static and type(found) is type(given) and found == given


# Shapes and dtypes.

_KINDS = {
    bool: jnp.bool_,
    int: jnp.integer,
    float: jnp.floating,
    complex: jnp.complexfloating,
}


def _misfit(path: Path, held: Any, given: Any) -> Misfit | None:
    """The misfit of an object's value and a state's value for it, if there is one."""
    if isinstance(held, (jax.sharding.PartitionSpec, jax.sharding.Sharding)):
        return None
    shape, dtype = descriptions.form_of(held)
    other_shape, other_dtype = descriptions.form_of(given)
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
    # If both are abstract, as when a file is compared, that is not worth a word.
    alike = isinstance(held, jax.ShapeDtypeStruct) is isinstance(
        given, jax.ShapeDtypeStruct
    )
    return Misfit(
        path,
        what,
        descriptions.describe_leaf(held, alike),
        descriptions.describe_leaf(given, alike),
    )


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
    if type(given) in descriptions.SCALARS and not _jax.is_ref(held):
        dtype = getattr(held, "dtype", None)
        if dtype is not None:
            to_array = np.asarray if isinstance(held, np.ndarray) else jnp.asarray
            return to_array(given, dtype) if _are_equal(dtype, type(given)) else given
    return given
