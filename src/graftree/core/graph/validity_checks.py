"""Checks at low cost whether objects are still as they were.

A `ValidityCheck` knows the node specs of a skeleton and their objects, and checks later
whether each object still matches its spec:

    what                                     how a change is seen
    attributes; metadata of Variables        one comparison with the latest version of
                                             any object; if that moved, one version per
                                             object; those with another version are
                                             compared with their specs, since they may
                                             be as before
    attributes that may be set unseen        compared with their specs at each call
    objects of registered types              the same: the members that the type lists
    lists, dicts, ... in data attributes     they are compared with copies
    static values that may be changed        their fingerprints are compared
    the value of a Variable, an array        not at all: it is not structure

A check holds Variables and containers, but no objects other than their members. So it
usually keeps no model alive; `ValidityCheck.reaches` checks that.

Code that keeps a result about objects keeps a validity check with it: `kept.py`, and
the entries of `transforms/lifting/dispatch.py`. The rest of this file is what both
need: results of objects that come together, several results of one object, and arrays
that may be replaced.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graftree import _jax
from graftree.core import fingerprints, ownership
from graftree.core.graph import flattening, graphdefs, nodes
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.graphdefs import LEAF, NODE, GraphDef, Static
from graftree.core.objects import attributes, bookkeeping, callables
from graftree.core.states import flat_states, states
from graftree.core.variables import operators, variables
from graftree.core.variables.variables import MISSING, Variable

_version_of = operator.attrgetter("version")


class ValidityCheck:
    """Checks whether objects still match the node specs of their skeleton.

    Args:
        skeleton: The skeleton of the objects.
        members: For each node spec its object or container; ``None`` if JAX took it
            apart.
        objects: The objects by the numbers in the skeleton.
        version: The latest version of any object, read before the skeleton was made.

    Attributes:
        is_complete: Whether every change can be noticed. Those of arrays in objects of
            types that were registered as graph nodes can't be, nor those that another
            thread makes while this check is made.
        has_versions: Whether all objects have versions. Comparing others with their
            node specs takes longer than flattening them with JAX.
        nodes: The objects that are members of containers.
        variables: The Variables in them.
        checked: The latest version when nothing had changed.
        has_contents: Whether there is more to compare than versions.
    """

    def __init__(
        self,
        skeleton: GraphDef[Any],
        members: Sequence[Any],
        objects: Mapping[int, Any],
        version: int,
    ) -> None:
        self.checked = version
        self._specs: tuple[Any, ...] = skeleton.specs
        # Containers, and graph nodes as weak references, by node spec; all objects by
        # number.
        self._members = [*members]
        self._numbered = dict(objects)
        self._versioned: list[Any] = [attributes.changes]
        self._versioned_indices = [0]  # of their node specs
        self._states: dict[int, tuple[Any, type]] = {}
        self._data: dict[tuple[int, Any], Any] = {}  # not arrays
        self.variables = [x for x in self._numbered.values() if isinstance(x, Variable)]
        self._mirrored: list[dict[Any, Any]] = []
        self._unseen: list[int] = []  # node specs without a version
        self._comparisons: list[Callable[[], bool]] = []
        self.nodes: list[Any] = []
        self.is_complete = True
        fields = [field for spec in self._specs for field in spec.fields]
        statics = [field[1] for field in fields if type(field) is Static]
        changing = [x for x in statics if type(x) not in fingerprints.PLAIN]
        candidates = [*map(variables.metadata_of, self.variables), *changing]
        self._statics = {id(x): x for x in candidates if fingerprints.may_change(x)}
        self._add_nodes(objects)
        self.has_versions = not self._unseen
        is_as_was = fingerprints.unchanged(self._statics.values())
        self._statics_are_as_were = is_as_was or bool  # which is false
        self.is_complete &= is_as_was is not None
        self._mirrors = [*map(_mirror, self._mirrored)]
        self._versions = [*map(_version_of, self._versioned)]
        self._variable_versions = [*map(variables.version_of, self.variables)]
        self._comparisons += [
            functools.partial(self._is_as_was, index) for index in self._unseen
        ]
        self.has_contents = bool(self._mirrored or self._statics or self._comparisons)
        # Some types make their members when they list them, so these are always new.
        self.is_complete &= all(map(self._is_as_was, self._unseen))
        latest = max(
            *self._versions, *self._variable_versions, ownership.versions.latest
        )
        self.is_complete &= latest == version

    @staticmethod
    def over(objects: Sequence[Any], version: int) -> ValidityCheck:
        """Makes a validity check over some objects."""
        refs, members = RefMap(), []
        skeleton, _ = flattening.flatten_leaves(
            None, objects, True, refs, RefMap(), members=members
        )
        return ValidityCheck(skeleton, members, IndexMap.from_refmap(refs), version)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        latest = ownership.versions.latest
        if latest != self.checked:
            # Not whether they are larger: of two threads that change an object at once,
            # the one with the smaller number may be the last to write it.
            versions = [*map(_version_of, self._versioned)]
            if versions != self._versions:
                if not self._look_alike(versions):
                    return False
                # A change made after the versions were read has a version of its own.
                self._versions = versions
            if self._variables_differ():
                return False
            self.checked = latest
        if self._mirrored and not self._mirrors_hold():
            return False
        if self._statics and not self._statics_are_as_were():
            return False
        return not self._comparisons or all(same() for same in self._comparisons)

    def may_hold_again(self) -> bool:
        """Whether nothing has changed but the values of static attributes."""
        versions = [*map(_version_of, self._versioned)]
        return (
            self._look_alike(versions, with_statics=False)
            and not self._variables_differ()
            and self._mirrors_hold()
            and all(same() for same in self._comparisons)
        )

    def reaches(self, objects: Sequence[Any]) -> bool:
        """Whether values that the check holds refer back to one of these objects."""
        if not self.nodes:  # as most
            return False
        return not {*map(id, objects)}.isdisjoint(map(id, nodes.all_in(self.nodes)))

    def _look_alike(
        self, versions: Sequence[int], *, with_statics: bool = True
    ) -> bool:
        """Whether the objects with other versions than before are as they were."""
        are_changed = map(operator.ne, versions, self._versions)
        changed = itertools.compress(self._versioned_indices, are_changed)
        return all(self._is_as_was(index, with_statics) for index in changed)

    def _is_as_was(self, index: int, with_statics: bool = True) -> bool:
        """Whether an object matches its node spec and is made of the same objects."""
        spec, obj = self._specs[index], _alive(self._members[index])
        if obj is None or type(obj) is not spec.type or not self._has_its_dict(index):
            return False
        kind: Any = nodes.kind_of(obj)
        children, metadata = kind.flatten(obj)
        if kind is nodes.PYTREE:
            is_same = metadata == spec.metadata
        else:  # any value, and 3 equals 3.0
            is_same = fingerprints.is_same(metadata, spec.metadata)
        if not is_same or len(children) != len(spec.fields):
            return False
        child_index = index + 1
        for (key, value, is_data), former_key, field in zip(
            children, spec.keys, spec.fields, strict=True
        ):
            if key != former_key:
                return False
            if field is NODE:
                # A missing value is `None`, too.
                is_same = value is _alive(self._members[child_index]) and (
                    value is not None or self._specs[child_index].type is type(None)
                )
                child_index += self._specs[child_index].num_nodes
            elif field is LEAF:
                former_value = self._data.get((index, key), MISSING)
                is_array = nodes.kind_of(value) is nodes.Leaf.ARRAY
                is_same = is_array or not _differs(value, former_value)
            elif type(field) is Static:
                is_static = (
                    is_data is False or nodes.kind_of(value) is nodes.Leaf.STATIC
                )
                value = callables.as_static(value, obj)
                is_same = is_static and not (with_statics and _differs(value, field[1]))
            else:
                is_same = value is _alive(self._numbered.get(field.index))
            if not is_same:
                return False
        return True

    def _has_its_dict(self, index: int) -> bool:
        """Whether a Pytree has its bookkeeping; else it may be changed unseen."""
        if index not in self._states:
            return True
        state, kind = self._states[index]
        entries = vars(_alive(self._members[index]))
        return type(entries) is kind and entries.get(bookkeeping.STATE) is state

    def _variables_differ(self) -> bool:
        return [*map(variables.version_of, self.variables)] != self._variable_versions

    def _mirrors_hold(self) -> bool:
        # Python compares by identity first. So if a Variable is compared with another
        # value, it was replaced; in one of the two orders its method is called.
        current, former = self._mirrored, self._mirrors
        comparison_count = operators.comparisons.latest
        try:
            is_equal = current == former and former == current
        except Exception:
            return False
        return is_equal and operators.comparisons.latest == comparison_count

    # Making it.

    def _add_nodes(self, objects: Mapping[int, Any]) -> None:
        skipped = 0
        for index, spec in enumerate(self._specs):
            member = self._members[index]
            if index >= skipped:
                if spec.index is not None:
                    self._add_object(index, member)
                elif member is not None and self._add_container(index, member, objects):
                    skipped = index + spec.num_nodes
            if spec.index is not None:
                weak = _WeakMember(member) if may_be_weak(member) else None
                self._members[index] = self._numbered[spec.index] = weak

    def _add_object(self, index: int, obj: Any) -> None:
        spec = self._specs[index]
        if nodes.kind_of(obj) is nodes.PYTREE:
            state = bookkeeping.state_of(obj)
            self._versioned.append(state)
            self._versioned_indices.append(index)
            if not bookkeeping.version_writes(obj):
                self._unseen.append(index)
            self._states[index] = state, type(vars(obj))
            for key, value, _ in nodes.children(obj) if LEAF in spec.fields else ():
                if nodes.kind_of(value) is nodes.Leaf.STATIC:
                    self._data[index, key] = value
        else:
            # Such objects have no versions, and their members are read only from them.
            self._unseen.append(index)
            self.is_complete &= LEAF not in spec.fields and may_be_weak(obj)
            if fingerprints.may_change(spec.metadata):
                self._statics[id(spec.metadata)] = spec.metadata

    def _add_container(self, index: int, x: Any, objects: Mapping[int, Any]) -> bool:
        """Adds a container; returns whether that covers all values below it, too."""
        is_state = isinstance(x, (states.State, states.Level))
        content = flat_states.raw_mapping(x) if is_state else x
        if type(content) is dict and _mirror(content) is not None:
            self._mirrored.append(content)
            return True
        if not (isinstance(x, tuple) or x is None):
            self._comparisons.append(_comparison(content))
        child_index = index + 1
        for field in self._specs[index].fields:
            if field is NODE:
                if self._specs[child_index].index is not None:
                    self.nodes.append(self._members[child_index])
                child_index += self._specs[child_index].num_nodes
            elif type(field) is graphdefs.NodeRef:
                self.nodes.append(objects[field.index])
        return False


def _differs(value: Any, former: Any) -> bool:
    """Whether a value is another one than it was."""
    if value is former:
        return False
    if type(value) is callables.OwnMethod:
        return value != former
    # Comparing values of other types would run the user's code.
    is_atom = type(value) is type(former) and type(value) in attributes.ATOMS
    return not (is_atom and Static(value) == Static(former))


class _WeakMember(weakref.ref[Any]):
    """Stands for a graph node. No attribute holds one of these."""

    __slots__ = ()


def may_be_weak(node: Any) -> bool:
    """Tells whether an object can have weak references: not if it only has slots."""
    return type(node).__weakrefoffset__ != 0


def _alive(x: Any) -> Any:
    return x() if type(x) is _WeakMember else x


def _mirror(x: Any) -> Any:
    """Copies nested dicts of Variables; ``None`` if there is anything else in them.

    The state of an optimizer is like this: many dicts, which Python compares fastest.
    """
    if type(x) is not dict:
        # `_mirrors_hold` relies on noticing comparisons.
        return x if type(x).__eq__ is Variable.__eq__ else None
    copied = {key: _mirror(value) for key, value in x.items()}
    return None if any(value is None for value in copied.values()) else copied


def _comparison(x: Any) -> Callable[[], bool]:
    """Checks later whether a container has the same members under the same keys."""
    former, former_keys = _content_of(x)

    def same() -> bool:
        current, current_keys = _content_of(x)
        is_same = len(current) == len(former) and all(
            map(operator.is_, current, former)
        )
        return is_same and current_keys == former_keys

    return same


def _content_of(x: Any) -> tuple[list[Any], Any]:
    """Returns the members of a container, and its other data."""
    if type(x) is list:
        return x.copy(), None
    if type(x) is dict:
        return [*x.values()], [*x]
    items, treedef = _jax.flatten_one_level(x)
    # A treedef compares static data by `==`, for which 3 is 3.0.
    static = fingerprints.fingerprint(treedef.node_data())
    return [member for _, member in items], (static, treedef)


class Attribute(NamedTuple):
    """Location of an array in an object, where another one may replace it.

    Attributes:
        owner: The object, which is not kept alive.
        name: The name of the attribute.
    """

    owner: weakref.ref[Any]
    name: str


def read_all(attributes: Iterable[Attribute]) -> list[Any]:
    """The arrays that are there now."""
    return [vars(owner())[name] for owner, name in attributes]


def attribute_at(root: Any, path: Sequence[Any]) -> Attribute | None:
    """Finds the attribute that a path leads to; ``None`` if it ends in a container."""
    owner = root
    for key in path[:-1]:
        owner = next(child.value for child in nodes.children(owner) if child.key == key)
    if nodes.kind_of(owner) is not nodes.PYTREE:
        return None
    return Attribute(weakref.ref(owner), attributes.name_of(type(owner), path[-1]))


# What else code needs that keeps results.


class ObjectGroups:
    """Results of objects that come together, as in ``(model, optimizer)``.

    They are forgotten with the first object that is gone. Most programs have few.

    Attributes:
        latest: The entry used last; forgotten when anything is.
    """

    LIMIT = 64

    def __init__(self) -> None:
        # Reading, adding and removing an entry are atomic, so threads need no lock.
        self._entries: dict[Any, tuple[dict[Any, Any], list[weakref.ref[Any]]]] = {}
        self.latest: Any = None

    def find(self, key: Any, objects: Sequence[Any]) -> dict[Any, Any]:
        """Returns the results of some objects, by a key.

        The key has for each object a value that stands for it as long as it lives.
        """
        results, references = self._entries.get(key, ({}, None))
        if references is not None:
            alive = [weak() for weak in references]
            if all(map(operator.is_, alive, objects)):
                return results
        for oldest in [*self._entries][: 1 - self.LIMIT]:
            self._forget(oldest)
        # This may be gone before its objects are.
        forget = functools.partial(_forget, weakref.WeakMethod(self._forget), key)
        results = {}
        self._entries[key] = results, [weakref.ref(x, forget) for x in objects]
        return results

    def clear(self) -> None:
        """Forgets all of them."""
        self._entries.clear()
        self.latest = None

    def _forget(self, key: Any) -> None:
        self._entries.pop(key, None)
        self.latest = None


def _forget(method: weakref.WeakMethod[Any], key: Any, _: Any) -> None:
    forget = method()
    if forget is not None:
        forget(key)


# How many results are kept that differ in static values.
VARIANTS = 8


def with_newest(newest: Any, earlier: Iterable[Any]) -> tuple[Any, ...]:
    """Adds a new result to earlier ones that may be right again.

    Each has a ``validity``.
    """
    valid = [x for x in earlier if x.validity.may_hold_again()]
    return (newest, *valid[: VARIANTS - 1])
