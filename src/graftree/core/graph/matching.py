"""Which part of a state belongs where in an object, or in a skeleton.

One walk decides it (`states/pairs.py`): `merge` reads its answer for a skeleton, and
`update`, lax or strict, and all code that loads states read it for an object.

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
from collections.abc import Iterator, Mapping, Sequence
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
from graftree.core.states import flat_states, pairs, pure_dicts, states
from graftree.core.text import descriptions
from graftree.core.variables import values
from graftree.core.variables.variables import MISSING, Variable


class StateEntry(NamedTuple):
    """A value of a state, and where it belongs in an object.

    Attributes:
        position: Where the object or container is that it belongs into.
        key: Its key in there, as the object spells it.
        current: The value that is there: a Variable, another value, or `MISSING`.
        value: The state's value, out of its box and with the keys of ``current``.
    """

    position: pairs.Position
    key: Any
    current: Any
    value: Any

    @property
    def path(self) -> Path:
        """Path of the value, as the object spells it."""
        # A Variable that is the whole object has no node around it.
        keys = () if self.position is _NOWHERE else (self.key,)
        return pairs.path_of(self.position, *keys)

    @property
    def node(self) -> Any:
        """Object or container that it belongs into."""
        return self.position[1]

    @property
    def owner(self) -> Pytree | None:
        """Innermost Pytree around it, if there is one."""
        _, node, above = self.position
        while above is not None and not isinstance(node, Pytree):
            _, node, above = above
        return node if isinstance(node, Pytree) else None


# The constructor of a named tuple is a function in Python.
_make_entry = functools.partial(tuple.__new__, StateEntry)
_NOWHERE: pairs.Position = (None, None, None)


@dataclasses.dataclass
class Match:
    """Values of a state, and where they belong in an object.

    Attributes:
        entries: All of them.
        refused: Those that have a mapping for a holder of a leaf: also the path of this
            holder, and what it holds.
        has_boxes: Whether any value came in the box of a checkpoint.
    """

    entries: list[StateEntry]
    refused: list[tuple[StateEntry, Path, Any]] = dataclasses.field(
        default_factory=list
    )
    has_boxes: bool = False

    def out_of_box(self, entry: StateEntry) -> StateEntry:
        """Takes an entry out of its box, if it came in one."""
        _, _, current, value = entry
        if not (is_mapping(value) and len(value)):
            return entry
        if not (isinstance(current, Variable) or _is_array(current)):
            return entry
        value = self._open_boxes(flattening.raw_of(current), value, entry.path, entry)
        return entry._replace(value=value)

    def _open_boxes(
        self, holder: Any, value: Any, path: Path, entry: StateEntry
    ) -> Any:
        """Returns the values that a mapping gives to a holder, out of their boxes."""
        if isinstance(value, states.State):
            value = pure_dicts.to_pure_dict(value)
        inner = pairs.out_of_box(value, holder)
        self.has_boxes |= inner is not value
        if not is_mapping(inner):
            return inner
        if holds_leaf(holder):
            self.refused.append((entry._replace(value=inner), path, holder))
        if not isinstance(holder, Mapping) or not isinstance(inner, Mapping):
            return inner
        opened: dict[Any, Any] = {}
        for key, nested in inner.items():
            held_key = pairs.present_key(key, holder)
            if held_key in holder and isinstance(nested, Mapping):
                nested = self._open_boxes(
                    holder[held_key], nested, (*path, held_key), entry
                )
            opened[held_key] = nested
        is_same = all(opened.get(key, MISSING) is x for key, x in inner.items())
        return inner if is_same else opened


def match(node: Any, state: Any) -> Match:
    """Finds where each value of a state belongs in an object, or in a Variable."""
    if isinstance(node, Variable):
        matched = [StateEntry(_NOWHERE, None, node, state)]
    else:
        level = _children_of(node), mapping_of(state)
        matched = pairs.paired(node, level, _enter, nodes.LEAF_TYPES)
    result, is_leaf = Match([]), nodes.LEAF_TYPES
    result.entries += [
        entry if is_leaf[type(entry.value)] else result.out_of_box(entry)
        for entry in map(_make_entry, matched)
    ]
    return result


def _enter(node: Any, key: Any, child: Any, value: Any) -> pairs.Level | None:
    if isinstance(nodes.kind_of(child), nodes.Leaf) or _is_static(node, key):
        return None
    return _children_of(child), mapping_of(value)


def _is_static(node: Any, key: Any) -> bool:
    """Whether an attribute is static, although its value may be a container."""
    kind = nodes.kind_of(node)
    if kind is nodes.PYTREE:
        # Classes that are not pytrees are not checked, so there the values decide.
        name = attributes.name_of(type(node), key)
        is_checked = attributes.facts_of(type(node)).is_pytree
        return is_checked and bookkeeping.table_of(node).get(name) is False
    if type(node) in (list, tuple, dict) or isinstance(node, states.State):
        return False
    children = {child.key: child for child in nodes.children(node)}
    return key in children and children[key].is_data is False


def _children_of(node: Any) -> Mapping[Any, Any]:
    """Returns what is in a node; of an object also its other attributes."""
    kind: Any = nodes.kind_of(node)
    if kind is nodes.PYTREE:
        if attributes.facts_of(type(node)).naming is attributes.PLAIN:
            return vars(node)
    elif type(node) is dict or isinstance(node, states.State):
        return flat_states.raw_mapping(node)
    return dict(nodes.items(node, kind))


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
    return _IS_MAPPING[type(x)]


_IS_MAPPING = walks.ByType(
    lambda kind: issubclass(kind, (Mapping, flat_states.FlatState))
)


def mapping_of(state: Any) -> Mapping[Any, Any]:
    """Returns the nested mapping that a state, or an object like one, stands for."""
    if type(state) is dict:
        return state
    if isinstance(state, states.State):
        return state.raw_mapping
    if isinstance(state, flat_states.FlatState):
        return state.to_nested_state().raw_mapping
    if isinstance(state, Mapping):
        return flat_states.raw_mapping(state)
    # An object of the same structure, e.g. gradients in the form of a Module.
    skeleton, leaves = flattening.flatten_graph(state)
    return flat_states.nest(zip(skeleton.paths(), leaves, strict=True))


def leaves_of(state: Any, start: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the leaves below a value of a state, those in containers one by one."""

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
    """Puts the leaves of states in the order of a skeleton.

    Raises:
        ValueError: If leaves are missing or unexpected; the message has their paths.
        TypeError: If a state has none of the forms of states.
    """
    are_mappings = all([_IS_MAPPING[type(state)] for state in state_list])
    if graphdef.paths() == ((),) or not are_mappings:
        return _match_otherwise(graphdef, state_list)
    indices, leaves = graphdef.leaf_indices(), [MISSING] * graphdef.num_leaves
    left: list[pairs.Pair] = []
    for state in state_list:
        level = indices, mapping_of(state)
        for pair in pairs.paired(indices, level, _enter_indices, nodes.LEAF_TYPES):
            _, _, index, value = pair
            if type(index) is int and leaves[index] is MISSING:
                leaves[index] = value
            else:
                left.append(pair)
    if left or not all([_IS_COMPLETE[kind] for kind in {*map(type, leaves)}]):
        return _unbox_leaves(graphdef, leaves, left)
    return leaves


def _enter_indices(_: Any, _key: Any, indices: Any, value: Any) -> pairs.Level | None:
    """Enters a dict of leaf indices; an index itself is the end of a path."""
    if type(indices) is not dict:
        return None
    return indices, value if type(value) is dict else mapping_of(value)


# Whether a value is a leaf as it is: there is one, and in no box.
_IS_COMPLETE = walks.ByType(
    lambda kind: kind is not type(MISSING) and not _IS_MAPPING[kind]
)


def _unbox_leaves(
    graphdef: GraphDef[Any], leaves: list[Any], left: Sequence[Any]
) -> list[Any]:
    """Takes leaves out of boxes; raises if any are missing or left over."""
    unexpected: list[Path] = []
    for position, key, index, value in left:
        path = pairs.path_of(position, key)
        if type(index) is not int:
            unexpected += [path for path, _ in leaves_of(value, path)]
        # An empty mapping counts only if there is nothing else.
        elif is_empty(leaves[index]):
            leaves[index] = value
        elif not is_empty(value):
            unexpected.append(path)
    missing = [
        path
        for (path, definition), leaf in zip(graphdef.leaves(), leaves, strict=True)
        # Only a Variable may have a mapping as its value.
        if leaf is MISSING or (definition is None and is_mapping(leaf))
    ]
    if missing or unexpected:
        count = sum(leaf is not MISSING for leaf in leaves) + len(unexpected)
        raise _count_error(graphdef, count, missing, unexpected)
    boxes = [
        leaf
        for (_, definition), leaf in zip(graphdef.leaves(), leaves, strict=True)
        if isinstance(definition, VariableDef) and not isinstance(leaf, Variable)
    ]
    # A checkpoint restored without types has this level below all Variables, or none.
    if boxes and all(type(x) is dict and [*x] == ["value"] for x in boxes):
        box_ids = {id(x) for x in boxes}
        return [x["value"] if id(x) in box_ids else x for x in leaves]
    return [*map(pairs.unboxed, leaves)]


def is_empty(x: Any) -> bool:
    """Whether ``x`` is a state without leaves."""
    return is_mapping(x) and not len(x)


def _match_otherwise(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """Does as `match_leaves` for a list of leaves, and an object that is a leaf."""
    lists = [state for state in state_list if isinstance(state, list)]
    if not lists and graphdef.paths() == ((),):
        return _match_root(graphdef, state_list)
    if not lists:
        kind = next(type(state) for state in state_list if not is_mapping(state))
        raise TypeError(
            f"Expected a State or another mapping of paths to leaves, got "
            f"{kind.__name__}."
        )
    if len(state_list) > 1:
        raise ValueError(
            f"Only one state can be passed as a list of leaves, got {len(state_list)} "
            "states."
        )
    (leaves,) = lists
    if len(leaves) != graphdef.num_leaves:
        raise _count_error(graphdef, len(leaves), [], [])
    return leaves


def _match_root(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    non_empty = [s for s in state_list if not is_empty(s)]
    flat = [
        item for s in non_empty if isinstance(s, flat_states.FlatState) for item in s
    ]
    leaves = [s for s in non_empty if not isinstance(s, flat_states.FlatState)]
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
        path: The path of the leaf in the object.
        leaf: The Variable, or the value itself.
        value: The state's value for it, or `MISSING`; if the Variable holds a
            container, a value of the same structure.
        differences: Its missing paths, and its misfits.
        entry: Where the state has it, and the value to be written there.
    """

    path: Path
    leaf: Any
    value: Any
    differences: tuple[Path | Misfit, ...] = ()
    entry: StateEntry | None = None

    @property
    def has_value(self) -> bool:
        """Whether the state has it."""
        return self.value is not MISSING


@dataclasses.dataclass(frozen=True)
class Fit:
    """Comparison of an object with a state, as `compare` returns it.

    Attributes:
        pairs: One for each leaf of the object.
        unexpected: The leaves of the state that the object lacks: path and leaf.
    """

    pairs: list[Pair]
    unexpected: list[tuple[Path, Any]]

    def error(
        self, headline: str, way_out: str = ""
    ) -> errors.StateMismatchError | None:
        """Builds the error that lists all differences; ``None`` if there is none.

        Args:
            headline: The first line.
            way_out: The last lines.
        """
        mismatches = [x for pair in self.pairs for x in pair.differences]
        misfits = [x for x in mismatches if isinstance(x, Misfit)]
        missing: list[Path] = [x for x in mismatches if not isinstance(x, Misfit)]
        unexpected = [path for path, _ in self.unexpected]
        if not mismatches and not unexpected:
            return None
        lines = [headline, *differences.missing_and_unexpected(missing, unexpected)]
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
    matched = match(node, state)
    leaf_at = dict(zip(skeleton.paths(), leaves, strict=True))
    tracked = [x for x in leaf_at.items() if nodes.is_variable_or_ref(x[1])]
    path_of = {id(leaf): path for path, leaf in tracked}
    entry_at: dict[Path, StateEntry] = {}
    left: list[tuple[Path, Any]] = []
    located = [(entry.path, entry) for entry in matched.entries]
    # A value at the path of a leaf comes before one at another of its paths.
    for path, entry in sorted(located, key=lambda pair: pair[0] not in leaf_at):
        own_path = path if path in leaf_at else path_of.get(id(entry.current), path)
        if own_path not in leaf_at:
            if not _are_same_static(entry.current, entry.value):
                left += leaves_of(entry.value, path)
        elif not _are_same(entry_at.setdefault(own_path, entry).value, entry.value):
            left += leaves_of(entry.value, path)
    fitting = []
    for path, leaf in leaf_at.items():
        entry = entry_at.get(path)
        pair, others = _pair_with_value(
            path, leaf, MISSING if entry is None else entry.value
        )
        if entry is not None and pair.has_value:
            pair = pair._replace(entry=entry._replace(value=pair.value))
        fitting.append(pair)
        left += others
    is_boxed = matched.has_boxes or all(path[-1:] == ("value",) for path, _ in left)
    unexpected = [
        (_shown(path, is_boxed), x)
        for path, x in left
        if flattening.raw_of(x) is not None
    ]
    return Fit(fitting, unexpected)


def _shown(path: Path, is_boxed: bool) -> Path:
    """Spells the path of an unexpected leaf as the object would."""
    if is_boxed and len(path) > 1 and path[-1] == "value":
        path = path[:-1]
    return pure_dicts.restored_path(path)


def _pair_with_value(
    path: Path, leaf: Any, value: Any
) -> tuple[Pair, list[tuple[Path, Any]]]:
    """Pairs a leaf with its value, and returns also the rest of that value."""
    parts, treedef = _parts_of(flattening.raw_of(leaf))
    offered: dict[Any, tuple[Path, Any]] = {}
    if value is not MISSING:
        value_leaves = leaves_of(flattening.raw_of(value))
        offered = {paths.spelled(subpath): (subpath, x) for subpath, x in value_leaves}
    matches = [offered.pop(paths.spelled(subpath), None) for subpath, _ in parts]
    left = [((*path, *subpath), x) for subpath, x in offered.values()]
    got = [None if x is None else x[1] for x in matches]
    # ``None`` is not a leaf: checkpoints have it, or have nothing there.
    lacking = [
        subpath
        for (subpath, current), x in zip(parts, got, strict=True)
        if x is None and current is not None
    ]
    if len(lacking) == len(parts) or not any(matches):
        return Pair(path, leaf, MISSING, (path,) if lacking else ()), left
    misfits = [
        _misfit((*path, *subpath), current, x)
        for (subpath, current), x in zip(parts, got, strict=True)
        if subpath not in lacking
    ]
    differing = (
        *[(*path, *subpath) for subpath in lacking],
        *[x for x in misfits if x is not None],
    )
    return Pair(path, leaf, _joined(parts, got, treedef, value), differing), left


def _joined(
    parts: Sequence[tuple[Path, Any]], got: Sequence[Any], treedef: Any, value: Any
) -> Any:
    """Joins the value that a leaf gets: a Variable if it is one in the state."""
    joined = [
        _converted(current, x) for (_, current), x in zip(parts, got, strict=True)
    ]
    result = joined[0] if treedef is None else treedef.unflatten(joined)
    if not isinstance(value, Variable):
        return result
    value_parts, value_treedef = _parts_of(value.get_raw_value())
    if value_treedef != treedef or any(
        a is not b for (_, a), b in zip(value_parts, got, strict=True)
    ):
        return result
    is_same = all(a is b for a, b in zip(joined, got, strict=True))
    return value if is_same else value.copy(result)


def _parts_of(raw: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """Returns the leaves in a value, with their paths, and its structure if any."""
    if is_leaf(raw):
        return [((), raw)], None
    flat, treedef = jax.tree_util.tree_flatten_with_path(raw)
    return [(paths.from_jax(path), value) for path, value in flat], treedef


def _are_same(x: Any, y: Any) -> bool:
    """Whether one of two values may be left out: their leaves are equal arrays."""
    if x is y:
        return True
    leaves = [dict(leaves_of(flattening.raw_of(value))) for value in (x, y)]
    return leaves[0].keys() == leaves[1].keys() and all(
        _are_same_arrays(leaves[0][path], leaves[1][path]) for path in leaves[0]
    )


def _are_same_arrays(x: Any, y: Any) -> bool:
    if x is y:
        return True
    pair = [a for a in (x, y) if isinstance(a, np.ndarray) or values.is_array(a)]
    if len(pair) < 2 or not _are_equal(*[a.dtype for a in pair]):
        return False
    if any(isinstance(a, _jax.Tracer) or _is_key(a.dtype) for a in pair):
        return False
    is_addressable = all(getattr(a, "is_fully_addressable", True) for a in pair)
    return is_addressable and np.array_equal(x, y)


def _are_same_static(current: Any, value: Any) -> bool:
    """Whether a state lists a static value, as those made in tree mode do."""
    is_static = nodes.kind_of(current) is nodes.Leaf.STATIC and current is not MISSING
    # A stored array is none, even if an abstract one of its shape is there.
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    return (
        is_static and not is_array and type(current) is type(value) and current == value
    )


# Shapes and dtypes.

_KINDS = {
    bool: jnp.bool_,
    int: jnp.integer,
    float: jnp.floating,
    complex: jnp.complexfloating,
}


def _misfit(path: Path, current: Any, value: Any) -> Misfit | None:
    """Returns how an object's value and the state's value for it differ, if they do."""
    if isinstance(current, (jax.sharding.PartitionSpec, jax.sharding.Sharding)):
        return None
    shape, dtype = descriptions.form_of(current)
    other_shape, other_dtype = descriptions.form_of(value)
    if isinstance(value, jax.ShapeDtypeStruct) and type(current) is not type(value):
        aspect = "value"
    elif shape is None or other_shape is None:
        aspect = "" if shape is other_shape and dtype is other_dtype else "value"
    elif shape != other_shape and _is_key(dtype) is _is_key(other_dtype):
        aspect = "shape"
    else:
        aspect = "" if _are_equal(dtype, other_dtype) else "dtype"
    if not aspect:
        return None
    # If both are abstract, as when a file is compared, that is not worth a word.
    alike = isinstance(current, jax.ShapeDtypeStruct) is isinstance(
        value, jax.ShapeDtypeStruct
    )
    return Misfit(
        path,
        aspect,
        descriptions.describe_leaf(current, alike),
        descriptions.describe_leaf(value, alike),
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


def _converted(current: Any, value: Any) -> Any:
    """Converts a Python scalar to an array, where the object holds one."""
    if type(value) in descriptions.SCALARS and not _jax.is_ref(current):
        dtype = getattr(current, "dtype", None)
        if dtype is not None:
            to_array = np.asarray if isinstance(current, np.ndarray) else jnp.asarray
            return to_array(value, dtype) if _are_equal(dtype, type(value)) else value
    return value
