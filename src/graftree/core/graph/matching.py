"""Which part of a state belongs where in an object, or in a skeleton.

`match` is the one place that decides it: `merge` reads its answer for a skeleton, and
`update`, lax or strict, and whatever loads states read it for an object. It alone knows
what checkpoints do to states:

    object                    state
    layers/0/kernel           layers/'0'/kernel          integer keys as strings
    kernel                    kernel/value               a level below each Variable
    nothing                   layers/_pytree__state      ``None``, which is not a leaf

Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graftree.core import walks
from graftree.core.graph import differences, flattening, graph_states, nodes
from graftree.core.graph.graphdefs import GraphDef, VariableDef
from graftree.core.graph.nodes import Leaf, TreeKind
from graftree.core.objects import bookkeeping, classes
from graftree.core.objects.attributes import Naming
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, pure_dicts, states
from graftree.core.states.states import State
from graftree.core.variables import values
from graftree.core.variables.variables import MISSING, Variable

Path = tuple[Any, ...]


class Given(NamedTuple):
    """What a state gives to a place.

    Attributes:
        path: Of the place, as the object spells it.
        held: What is there: a Variable, another value, or in a skeleton the number of a
            leaf; `MISSING` if there is nothing.
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
    """Where the parts of a state belong.

    Attributes:
        given: The parts, with their places.
        refused: Those that have a mapping for what holds a leaf, which comes second.
        has_boxes: Whether something came in the box of a checkpoint.
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
        """What a mapping gives to what holds a value: what is in its boxes."""
        if isinstance(value, State):
            value = pure_dicts.to_pure_dict(value)
        inner = _unboxed(value, held)
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
        is_same = opened.keys() == inner.keys() and all(
            opened[key] is inner[key] for key in opened
        )
        return inner if is_same else opened


# Gives the own key for a key of a state, the child or `MISSING`, and is that a leaf?
Look = Callable[[Any], tuple[Any, Any, bool]]


def match(root: Any, state: Mapping[Any, Any], look_in: Callable[[Any], Look]) -> Match:
    """Finds the places for the parts of a nested mapping.

    Args:
        root: An object, or the tree of a skeleton.
        state: The mapping.
        look_in: Finds what is in a node of it.
    """
    found = Match()

    def below(visit: Any, path: Path) -> list[tuple[Any, Any]]:
        node, owner, given = visit
        owner = node if isinstance(node, Pytree) else owner
        look, listed = look_in(node), []
        for key, value in given.items():
            key, child, is_leaf = look(key)
            if value is None and pure_dicts.is_bookkeeping(key, value):
                if is_leaf or node is owner:
                    continue
            if is_leaf or _is_leaf(value):
                found.add(_make_given(((*path, key), child, value, node, owner)))
            else:
                listed.append((key, (child, owner, mapping_of(value))))
        return listed

    for _ in walks.walk((root, None, state), below):
        pass
    return found


# The constructor of a named tuple is a function in Python.
_make_given: Callable[[tuple[Any, ...]], Given]
_make_given = functools.partial(tuple.__new__, Given)


def in_object(node: Any) -> Look:
    """Finds what is in an object or a container."""
    kind: Any = nodes.kind_of(node)
    if kind is nodes.PYTREE:
        facts = classes.facts_of(type(node))
        # Classes that are not pytrees are not checked, so there the values decide.
        statuses = bookkeeping.table_of(node) if facts.is_pytree else {}
        # Its children are not listed: most of them are not meant.
        return functools.partial(_look, vars(node), statuses, facts.naming, type(node))
    if type(node) is dict or isinstance(node, State):
        return _in_mapping(
            flat_states.raw_mapping(node), lambda _, child: _is_leaf(child)
        )
    children, _ = kind.flatten(node)
    statuses = {child.key: child.is_data for child in children}
    return _in_mapping(
        {child.key: child.value for child in children},
        lambda key, child: statuses[key] is False or _is_leaf(child),
    )


def _look(
    entries: Mapping[str, Any],
    statuses: Mapping[str, bool],
    naming: Naming,
    kind: type,
    key: Any,
) -> tuple[Any, Any, bool]:
    name = naming.name_of(kind, key)
    child = entries.get(name, MISSING)
    if child is MISSING:
        return key, child, True
    is_leaf = statuses.get(name) is False or _is_leaf(child)
    return naming.key_of(name), child, is_leaf


def _in_tree(tree: Mapping[Any, Any]) -> Look:
    """Finds what is in a part of the tree of a skeleton."""
    return _in_mapping(tree, lambda _, child: type(child) is int)


def _in_mapping(
    children: Mapping[Any, Any], is_leaf: Callable[[Any, Any], bool]
) -> Look:
    def look(key: Any) -> tuple[Any, Any, bool]:
        own = pure_dicts.own_key(key, children)
        child = children.get(own, MISSING)
        return own, child, child is MISSING or is_leaf(own, child)

    return look


def _is_leaf(x: Any) -> bool:
    return isinstance(nodes.kind_of(x), Leaf)


def _is_array(x: Any) -> bool:
    return nodes.kind_of(x) in (Leaf.ARRAY, Leaf.REF)


def holds_array(raw: Any) -> bool:
    """Whether a raw value is an array, or stands for one."""
    return _is_array(raw) or values.is_stand_in(raw)


def holds_leaf(raw: Any) -> bool:
    """Whether a raw value is an array, a number or a string."""
    return holds_array(raw) or isinstance(raw, (bool, int, float, complex, str))


def _unboxed(value: Mapping[Any, Any], held: Any) -> Any:
    """What is in the box of a checkpoint; a mapping that is the value itself stays."""
    if len(value) != 1 or "value" not in value:
        return value
    inner = value["value"]
    if held is None:
        return inner if inner is None else pure_dicts.unboxed(value)
    if isinstance(held, Mapping) and (
        "value" in held or not isinstance(inner, Mapping)
    ):
        return value
    return inner


# The forms of states.


def is_mapping(x: Any) -> bool:
    """Whether ``x`` is a state of some form: paths to leaves."""
    # Asking an abstract class takes longer than all the rest.
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
    if isinstance(given, (State, graph_states.GraphState)):
        return given.raw_mapping
    if isinstance(given, Mapping):
        return given
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
        if is_mapping(raw) or not isinstance(nodes.kind_of(raw), TreeKind):
            return [*mapping_of(raw).items()]
        return [child[:2] for child in nodes.children(raw)]

    for path, x in walks.walk(state, below, start):
        if is_leaf(flattening.raw_of(x)):
            yield path, x


def is_leaf(x: Any) -> bool:
    """Whether a value in a state has no parts; so has ``None``."""
    return x is None or values.is_stand_in(x) or _is_leaf(x)


# For a skeleton.


def match_leaves(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """The leaves of states in the order of a skeleton.

    Raises:
        ValueError: If leaves are missing or unexpected; the message has their paths.
        TypeError: If a state has none of the forms of states.
    """
    if any(isinstance(given, list) for given in state_list):
        return _match_list(graphdef, state_list)
    if graphdef.paths() == ((),):
        return _match_root(graphdef, state_list)
    mappings = [*map(_checked, state_list)]
    found = [MISSING] * graphdef.num_leaves
    if all(_fill(graphdef.places(), mapping, found) for mapping in mappings):
        if not any(leaf is MISSING for leaf in found):
            return found
    return _match_slowly(graphdef, mappings)


def _checked(given: Any) -> Mapping[Any, Any]:
    if not is_mapping(given):
        raise TypeError(
            f"Expected a State or another mapping of paths to leaves, got "
            f"{type(given).__name__}."
        )
    return mapping_of(given)


def _fill(
    tree: Mapping[Any, Any], mapping: Mapping[Any, Any], found: list[Any]
) -> bool:
    """`match` for the usual case: puts leaves in their places; whether all had one."""
    for key, child in mapping.items():
        place = tree.get(key)
        kind = type(child)
        if type(place) is int:
            # Asking for the abstract class takes longer than all the rest.
            is_leaf = issubclass(kind, Variable) or not issubclass(kind, Mapping)
            if not is_leaf or found[place] is not MISSING:
                return False
            found[place] = child
        elif place is None or not (kind is dict or issubclass(kind, Mapping)):
            return False
        elif not _fill(place, child if kind is dict else _checked(child), found):
            return False
    return True


def _match_slowly(
    graphdef: GraphDef[Any], mappings: Sequence[Mapping[Any, Any]]
) -> list[Any]:
    definitions = [definition for _, definition in graphdef.leaves()]
    found: list[Any] = [MISSING] * len(definitions)
    unexpected: list[Path] = []
    for mapping in mappings:
        for path, number, value, *_ in match(
            graphdef.places(), mapping, _in_tree
        ).given:
            if type(number) is not int:
                unexpected += [path for path, _ in leaves_of(value, path)]
            # An empty mapping counts only if there is nothing else.
            elif found[number] is MISSING or _is_empty(found[number]):
                found[number] = value
            elif not _is_empty(value):
                unexpected.append(path)
    missing = [
        path
        for path, definition, leaf in zip(
            graphdef.paths(), definitions, found, strict=True
        )
        # Only a Variable may have a mapping as its value.
        if leaf is MISSING or (definition is None and is_mapping(leaf))
    ]
    if missing or unexpected:
        count = sum(leaf is not MISSING for leaf in found) + len(unexpected)
        raise _count_error(graphdef, count, missing, unexpected)
    boxes = [
        leaf
        for definition, leaf in zip(definitions, found, strict=True)
        if isinstance(definition, VariableDef) and not isinstance(leaf, Variable)
    ]
    # A checkpoint restored without types has this level below all Variables, or none.
    if boxes and all(type(x) is dict and [*x] == ["value"] for x in boxes):
        taken = {id(x) for x in boxes}
        return [x["value"] if id(x) in taken else x for x in found]
    return [*map(pure_dicts.unboxed, found)]


def _is_empty(x: Any) -> bool:
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
    given = [s for s in state_list if not _is_empty(s)]
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
