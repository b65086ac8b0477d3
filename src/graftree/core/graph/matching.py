"""Which leaf of a state belongs where in a skeleton: matched by path.

In the usual case each state is walked once, guided by the tree of the paths of the
skeleton. If anything doesn't fit, a second, slower look tells what: missing and
unexpected paths, integer keys that came back from a checkpoint as strings, dicts that
are the value of a Variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graftree.core.graph import differences
from graftree.core.graph.graph_states import GraphState
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.states import pure_dicts
from graftree.core.states.flat_states import FlatState
from graftree.core.states.states import State
from graftree.core.variables.variables import MISSING, Variable


def match(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    """The leaves of states in the order of the skeleton.

    Args:
        graphdef: The skeleton.
        state_list: States, mappings, FlatStates, a bare leaf; or one list of leaves.

    Raises:
        ValueError: If leaves are missing or superfluous; names the paths.
        TypeError: If a state is no mapping.
    """
    if any(isinstance(given, list) for given in state_list):
        return _match_list(graphdef, state_list)
    if graphdef.paths() == ((),):
        return _match_root(graphdef, state_list)
    mappings = [_as_mapping(given) for given in state_list]
    found = [MISSING] * graphdef.num_leaves
    if all(_fill(graphdef.tree(), mapping, found) for mapping in mappings):
        if not any(leaf is MISSING for leaf in found):
            return found
    return _match_slowly(graphdef, mappings)


def _fill(
    tree: Mapping[Any, Any], mapping: Mapping[Any, Any], found: list[Any]
) -> bool:
    """Puts the leaves of a mapping in their places; whether all had a free one."""
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
        elif not _fill(place, child if kind is dict else _as_mapping(child), found):
            return False
    return True


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


def _count_error(
    graphdef: GraphDef[Any], count: int, missing: Sequence[Any], extra: Sequence[Any]
) -> ValueError:
    lines = [
        f"Incorrect number of leaves: expected {graphdef.num_leaves}, got {count}."
        if count != graphdef.num_leaves
        else "The paths of the state don't fit the GraphDef."
    ]
    lines += differences.missing_and_unexpected(missing, extra)
    lines.append("Pass the states of the same model, each leaf once.")
    return ValueError("\n".join(lines))


def _match_slowly(
    graphdef: GraphDef[Any], mappings: Sequence[Mapping[Any, Any]]
) -> list[Any]:
    wanted = graphdef.paths()
    found = [_look_up(mappings, path) for path in wanted]
    missing = [
        path
        for (path, definition), leaf in zip(graphdef.leaves(), found, strict=True)
        # Only a Variable may have a dict as its value.
        if leaf is MISSING or (definition is None and isinstance(leaf, (dict, State)))
    ]
    taken = {id(leaf) for leaf in found if is_mapping(leaf)}
    if missing or sum(_count(m, taken) for m in mappings) != len(wanted):
        given = [path for m in mappings for path in _leaf_paths(m, taken)]
        accounted = {_normal(path) for path in wanted}
        extra = [path for path in given if _normal(path) not in accounted]
        raise _count_error(graphdef, len(given), missing, extra)
    return [*map(pure_dicts.unboxed, found)]


def _match_root(graphdef: GraphDef[Any], state_list: Sequence[Any]) -> list[Any]:
    given = [s for s in state_list if not (is_mapping(s) and not len(s))]
    flat = [item for s in given if isinstance(s, FlatState) for item in s]
    leaves = [s for s in given if not isinstance(s, FlatState)]
    leaves += [leaf for path, leaf in flat if not path]
    if len(leaves) != 1 or len(leaves) < len(flat):
        extra = [path for path, _ in flat if path]
        raise _count_error(graphdef, len(leaves) + len(extra), [], extra)
    return leaves


def is_mapping(x: Any) -> bool:
    """Whether ``x`` is a state of some form: paths to leaves."""
    return isinstance(x, (Mapping, FlatState))


def _as_mapping(given: Any) -> Mapping[Any, Any]:
    if isinstance(given, FlatState):
        given = given.to_nested_state()
    if isinstance(given, (State, GraphState)):
        return given.raw_mapping
    if isinstance(given, Mapping):
        return given
    raise TypeError(
        f"Expected a State or another mapping of paths to leaves, got "
        f"{type(given).__name__}."
    )


def _look_up(mappings: Sequence[Mapping[Any, Any]], path: Any) -> Any:
    """The leaf at a path; an empty mapping counts only if there is nothing else."""
    empty = MISSING
    for mapping in mappings:
        found: Any = mapping
        for key in path:
            found = _child(found, key)
        if found is not MISSING and not (is_mapping(found) and not len(found)):
            return found
        empty = found if empty is MISSING else empty
    return empty


def _child(mapping: Any, key: Any) -> Any:
    if type(mapping) is not dict:
        if not is_mapping(mapping):
            return MISSING
        mapping = _as_mapping(mapping)
    found = mapping.get(key, MISSING)
    return mapping.get(_other_spelling(key), MISSING) if found is MISSING else found


def _other_spelling(key: Any) -> Any:
    """Integer keys come back from checkpoints as strings, or strings as integers."""
    if isinstance(key, int):
        return str(key)
    return int(key) if isinstance(key, str) and key.isdecimal() else MISSING


def _count(node: Any, taken: set[int]) -> int:
    """How many leaves a nested mapping has; mappings in ``taken`` are leaves."""
    if not is_mapping(node) or id(node) in taken:
        return 1
    return sum([_count(child, taken) for child in _as_mapping(node).values()])


def _leaf_paths(mapping: Mapping[Any, Any], taken: set[int]) -> list[Any]:
    listed: list[Any] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        if not is_mapping(node) or id(node) in taken:
            listed.append(path)
            return
        for key, child in _as_mapping(node).items():
            walk(child, (*path, key))

    walk(mapping, ())
    return listed


def _normal(path: Any) -> tuple[str, ...]:
    return tuple(map(str, path))
