"""Detects structural changes; caches the GraphDef of an object until there is one.

The second time that an object is flattened in a mode, the result is kept with it: its
skeleton and the places of its leaves, with a `Survey` that tells whether they are still
right. So objects that are flattened once, as inside a trace, pay nothing. Objects in a
container, as in ``split((model, optimizer))``, are one thing that is known by them all.
Of an object whose static attributes take turns, as by ``train()`` and ``eval()``, some
results are kept.

A `Survey` lists all that the skeleton of some objects depends on, and tells later, as
cheaply as it can, whether any of it has changed:

    what                                     how a change is seen
    attributes; metadata of Variables        one comparison with the structure counter;
                                             if that moved, one stamp per object; those
                                             with another stamp are looked at
    attributes that may be set unstamped     they are compared with what they were
    objects of registered types              the same: what the type lists of them
    lists, dicts, ... in data attributes     they are compared with copies
    static values that may be changed        their imprints are compared
    the value of a Variable, an array        not at all: it is not structure

A survey holds Variables and containers, but no object besides their members. So mostly
it keeps no model alive; `Survey.reaches` tells.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from graftree import _jax, config
from graftree.core import imprints, stamps, walks
from graftree.core.graph import flattening, nodes, tree_checks
from graftree.core.graph.appearances import Appearance, Listing, may_be_weak
from graftree.core.graph.flattening import RefMap
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.graph.nodes import Leaf
from graftree.core.objects import bookkeeping, classes
from graftree.core.states import flat_states
from graftree.core.states.states import State
from graftree.core.variables import operators, variables
from graftree.core.variables.variables import Variable


def flatten_node(
    node: Any, graph: bool | None, function: str
) -> tuple[GraphDef[Any], list[Any]]:
    """The skeleton of an object and its leaves, from memory if nothing has changed.

    Messages name ``function`` as the one that was called.
    """
    sharing = config.graph_mode(graph)
    if nodes.kind_of(node) is nodes.PYTREE:
        memos, members = bookkeeping.memos_of(node), []
    else:
        memos, members = _combinations.find(node)
    known = memos.get(sharing)
    for memo in known or ():
        if memo.survey.holds():
            return memo.graphdef, memo.leaves()
    made, refs = stamps.clock.now, RefMap()
    if sharing:
        graphdef, leaves = flattening.flatten_graph(node, refs)
    else:
        graphdef, leaves = flattening.flatten_tree(node, function)
    # `()` says that it was taken apart once.
    memos[sharing] = ()
    if known is not None:
        if not sharing:
            flattening.flatten_graph(node, refs)
        survey = Survey(refs, made)
        if survey.is_complete and not (members and survey.reaches(members)):
            memo = Memo(node, graphdef, list(leaves), survey)
            memos[sharing] = with_newest(memo, known)
    return graphdef, leaves


class _Combinations:
    """What is known of objects that come together, as in ``(model, optimizer)``.

    It is forgotten with the first of them that is gone. Most programs have few.
    """

    LIMIT = 64

    def __init__(self) -> None:
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self._known: dict[Any, tuple[dict[bool, Any], list[weakref.ref[Any]]]] = {}

    def find(self, container: Any) -> tuple[dict[bool, Any], list[Any]]:
        """The memos of a container by mode, and the objects that it consists of.

        New ones if there is anything else in it, and in a trace, whose objects go.
        """
        try:
            found, treedef = tree_checks.flatten(container, nodes.is_node_module)
        except (TypeError, ValueError):  # keys that JAX can't sort, for one
            return {}, []
        is_pure = all(nodes.kind_of(x) is nodes.PYTREE for x in found)
        if not (found and is_pure) or _jax.is_tracing():
            return {}, []
        # Each stands for its object as long as that lives, and has a hash of its own.
        key = treedef, *map(bookkeeping.state_of, found)
        memos, references = self._known.get(key, ({}, []))
        alive = [weak() for weak in references]
        if len(alive) != len(found) or not all(map(operator.is_, alive, found)):
            for oldest in [*self._known][: 1 - self.LIMIT]:
                self._known.pop(oldest, None)
            forget = functools.partial(_forget, self._known, key)
            memos, references = {}, [weakref.ref(x, forget) for x in found]
            self._known[key] = memos, references
        return memos, found


def _forget(known: dict[Any, Any], key: Any, _: Any) -> None:
    known.pop(key, None)


_combinations = _Combinations()


class Memo:
    """The skeleton of an object, and where its leaves are; its survey says if still."""

    __slots__ = ("_arrays", "_leaves", "graphdef", "survey")

    def __init__(
        self, root: Any, graphdef: GraphDef[Any], leaves: list[Any], survey: Survey
    ) -> None:
        self.graphdef = graphdef
        self.survey = survey
        self._leaves = leaves
        self._arrays = []
        for number, (leaf, path) in enumerate(
            zip(leaves, graphdef.paths(), strict=True)
        ):
            if not isinstance(leaf, Variable):
                place = attribute_at(root, path)
                if place is not None:
                    self._arrays.append((number, place))
                    leaves[number] = None

    def leaves(self) -> list[Any]:
        """The leaves, in a new list."""
        leaves = self._leaves.copy()
        for number, place in self._arrays:
            leaves[number] = place.read()
        return leaves


# How many results are kept that differ in static values.
VARIANTS = 8


class Surveyed(Protocol):
    """A result that is right if its survey holds."""

    survey: Survey


S = TypeVar("S", bound=Surveyed)


def with_newest(newest: S, known: Iterable[S]) -> tuple[S, ...]:
    """A new result, and those known before that may be right again."""
    kept = [x for x in known if x.survey.may_hold_again()]
    return (newest, *kept[: VARIANTS - 1])


_stamp_of = operator.attrgetter("stamp")


class Survey:
    """What the skeleton of some objects depended on when it was made.

    Args:
        objects: All Pytrees, Variables and refs in it.
        made: The structure counter, read before the skeleton was made.

    Attributes:
        is_complete: Whether all of it can be watched. Arrays in objects of types that
            were registered as graph nodes can't be. And if another thread changed
            anything meanwhile, it might have been one of these.
        nodes: The objects that are members of containers.
        checked: The structure counter when nothing had changed.
        has_contents: Whether there is more to be seen than stamps.
    """

    __slots__ = (
        "_appearances",
        "_comparisons",
        "_imprints",
        "_mirrored",
        "_mirrors",
        "_stamped",
        "_stamps",
        "_statics",
        "_variable_stamps",
        "_variables",
        "checked",
        "has_contents",
        "is_complete",
        "nodes",
    )

    def __init__(self, objects: Iterable[Any], made: int) -> None:
        self.checked = made
        self._stamped: list[Any] = [classes.changes]
        self._appearances: list[Appearance | None] = [None]
        self._variables: list[Variable[Any]] = []
        self._statics: dict[int, Any] = {}
        self._mirrored: list[dict[Any, Any]] = []
        self._comparisons: list[Callable[[], bool]] = []
        self.nodes: list[Any] = []
        self.is_complete = True
        for obj in objects:
            self._add_object(obj)
        self._imprints = [*map(imprints.imprint, self._statics.values())]
        self._mirrors = [*map(_mirror, self._mirrored)]
        self._stamps = [*map(_stamp_of, self._stamped)]
        self._variable_stamps = [*map(variables.stamp_of, self._variables)]
        self.has_contents = bool(self._mirrored or self._statics or self._comparisons)
        latest = max(*self._stamps, *self._variable_stamps, stamps.clock.now)
        self.is_complete &= latest == made

    def holds(self) -> bool:
        """Whether nothing has changed."""
        now = stamps.clock.now
        if now != self.checked:
            # Not whether they are larger: of two threads that change an object at once,
            # the one with the smaller number may be the last to write it.
            found = [*map(_stamp_of, self._stamped)]
            if found != self._stamps:
                if not self._look_alike(found, Appearance.is_same):
                    return False
                # What came after the stamps were read has a stamp of its own.
                self._stamps = found
            if self._variables_differ():
                return False
            self.checked = now
        if self._mirrored and not self._mirrors_hold():
            return False
        if self._statics:
            now_imprints = [*map(imprints.imprint, self._statics.values())]
            if now_imprints != self._imprints:
                return False
        return not self._comparisons or all(same() for same in self._comparisons)

    def may_hold_again(self) -> bool:
        """Whether nothing has changed but the values of static attributes."""
        found = [*map(_stamp_of, self._stamped)]
        return (
            self._look_alike(found, Appearance.is_same_but_for_statics)
            and not self._variables_differ()
            and self._mirrors_hold()
            and all(same() for same in self._comparisons)
        )

    def reaches(self, objects: Sequence[Any]) -> bool:
        """Whether what the survey holds refers to one of these objects in turn."""
        is_new = walks.Once()

        def below(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
            return [child[:2] for child in nodes.children(x)] if is_new(x) else None

        met = walks.walk(self.nodes, below)
        return any(node is obj for _, node in met for obj in objects)

    def _look_alike(
        self, stamps: Sequence[int], compare: Callable[[Appearance], bool]
    ) -> bool:
        """Whether the objects with other stamps than before are like they were."""
        are_changed = map(operator.ne, stamps, self._stamps)
        changed = itertools.compress(self._appearances, are_changed)
        return all(look is not None and compare(look) for look in changed)

    def _variables_differ(self) -> bool:
        return [*map(variables.stamp_of, self._variables)] != self._variable_stamps

    def _mirrors_hold(self) -> bool:
        # Python compares by identity first. So if a Variable is asked whether it equals
        # something else, it was replaced; in one of the two orders it is asked.
        now, then = self._mirrored, self._mirrors
        before = operators.comparisons.latest
        try:
            is_equal = now == then and then == now
        except Exception:
            return False
        return is_equal and operators.comparisons.latest == before

    # Making it.

    def _add_object(self, obj: Any) -> None:
        kind = nodes.kind_of(obj)
        if kind is nodes.PYTREE:
            self._stamped.append(bookkeeping.state_of(obj))
            is_watched, look = bookkeeping.watch(obj), Appearance(obj)
            self._appearances.append(look)
            if not is_watched:
                self._comparisons.append(look.is_same)
            for _, value, is_data in nodes.children(obj):
                if is_data is False:
                    self._add_static(value)
                else:
                    self._add_content(value)
        elif kind is Leaf.VARIABLE:
            self._variables.append(obj)
            self._add_static(variables.metadata_of(obj))
        elif kind is not Leaf.REF:
            self._add_registered(obj, kind)

    def _add_registered(self, obj: Any, kind: Any) -> None:
        """Adds an object of a registered type."""
        children, metadata = kind.flatten(obj)
        kinds = {nodes.kind_of(child.value) for child in children}
        if Leaf.ARRAY in kinds or not may_be_weak(obj):
            self.is_complete = False
            return
        listing = Listing(obj)
        self._comparisons.append(listing.is_same)
        # Some types make what they list, so that it is never what it was.
        self.is_complete &= listing.is_same()
        self._add_static(metadata)
        for child in children:
            if child.is_data is False:
                self._add_static(child.value)
            else:
                self._add_content(child.value)

    def _add_content(self, x: Any) -> None:
        """Adds what is data, but perhaps no object: containers are looked into."""
        kind = nodes.kind_of(x)
        if kind is Leaf.STATIC:
            self._add_static(x)
        elif not (isinstance(kind, (Leaf, nodes.GraphKind)) or x is None):
            self._add_container(x)

    def _add_container(self, x: Any) -> None:
        if isinstance(x, State):
            x = flat_states.raw_mapping(x)
        if type(x) is dict and _mirror(x) is not None:
            self._mirrored.append(x)
            return
        if isinstance(x, tuple):
            members: Iterable[Any] = x
        else:
            members = _members_of(x)
            self._comparisons.append(_comparison(x))
        for member in members:
            if nodes.is_node_module(member):
                self.nodes.append(member)
            self._add_content(member)

    def _add_static(self, x: Any) -> None:
        if imprints.may_change(x):
            self._statics[id(x)] = x


def _mirror(x: Any) -> Any:
    """A copy of nested dicts of Variables; ``None`` if there is anything else in them.

    Such is the state of an optimizer: many dicts, which Python compares the fastest.
    """
    if type(x) is not dict:
        # `_mirrors_hold` relies on being told of comparisons.
        return x if type(x).__eq__ is Variable.__eq__ else None
    copied = {key: _mirror(value) for key, value in x.items()}
    return None if any(value is None for value in copied.values()) else copied


def _comparison(x: Any) -> Callable[[], bool]:
    """Tells later whether a container has the same members, under the same keys."""
    then = _members_of(x)
    keys = _keys_of(x)

    def same() -> bool:
        now = _members_of(x)
        return (
            len(now) == len(then)
            and all(map(operator.is_, now, then))
            and _keys_of(x) == keys
        )

    return same


def _members_of(x: Any) -> list[Any]:
    if type(x) is list:
        return x.copy()
    if type(x) is dict:
        return [*x.values()]
    return [member for _, member in _jax.flatten_one_level(x)[0]]


def _keys_of(x: Any) -> Any:
    """What a container has besides its members."""
    if type(x) is list:
        return None
    return [*x] if type(x) is dict else _jax.flatten_one_level(x)[1]


class Attribute:
    """Where an object has an array; the array may be replaced by another one.

    Args:
        owner: The object, which is not kept alive.
        name: The name of the attribute.
    """

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def read(self) -> Any:
        """The array that is there now."""
        return vars(self._owner())[self._name]


def attribute_at(root: Any, path: Sequence[Any]) -> Attribute | None:
    """The attribute that a path leads to; ``None`` if its end is in a container."""
    owner = root
    for key in path[:-1]:
        owner = next(child.value for child in nodes.children(owner) if child.key == key)
    if nodes.kind_of(owner) is not nodes.PYTREE:
        return None
    return Attribute(owner, classes.name_of(type(owner), path[-1]))
