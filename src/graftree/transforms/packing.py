"""Arguments and outputs as JAX gets them: a skeleton and flat groups of leaves.

    Skeleton    what is static: containers, GraphDefs with one numbering
    Packed      a tree outside: its skeleton, its leaves, its numbered objects
    Values      a group of leaves on its way in, a pytree node
    Changes     a group of changed leaves on its way out, a pytree node

A transform gives different leaves different axes, shardings or roles by putting them in
different groups.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core import aliases, flattening, nodes, pytrees
from graftree.core.flattening import Builder, IndexMap, RefMap
from graftree.core.skeletons import ArrayRefDef, GraphDef, NodeRef, VariableDef
from graftree.transforms import aliasing
from graftree.transforms.aliasing import Labels
from graftree.transforms.propagation import Propagation


class Span(NamedTuple):
    """Where an argument is in a skeleton, as (start, stop)."""

    entries: tuple[int, int]
    leaves: tuple[int, int]


class Skeleton:
    """The static part of a tree of arguments or outputs.

    Attributes:
        treedef: JAX's, with objects and other leaves as leaves.
        entries: For each leaf of the treedef the GraphDef of the object there, or
            ``None`` for a plain leaf. The GraphDefs share one numbering.
        statics: Static arguments, as pairs of a position or name and a value.
        labels: What the positional arguments are called; not compared.
    """

    __slots__ = (
        "__weakref__",
        "_definitions",
        "_hash",
        "_names",
        "entries",
        "labels",
        "statics",
        "treedef",
    )

    def __init__(
        self,
        treedef: Any,
        entries: tuple[GraphDef[Any] | None, ...],
        statics: tuple[tuple[Any, Any], ...] = (),
        labels: Labels = aliasing.ARGS,
    ) -> None:
        self.treedef = treedef
        self.entries = entries
        self.statics = statics
        self.labels = labels
        self._hash: int | None = None
        self._definitions: list[VariableDef | ArrayRefDef | None] | None = None
        self._names: list[str] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Skeleton)
            and (self._hash == other._hash or None in (self._hash, other._hash))
            and self.treedef == other.treedef
            and self.entries == other.entries
            and self.statics == other.statics
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.treedef, self.entries, self.statics))
        return self._hash

    def seal(self) -> int | None:
        """Remembers the hash, and returns it; ``None`` if there is none.

        JAX compares skeletons, and hashes none. A static value may be changed in place
        later; by its hash the skeleton then equals none that is made of it anew.
        """
        try:
            return hash(self)
        except TypeError:
            return None

    def definitions(self) -> list[VariableDef | ArrayRefDef | None]:
        """For each leaf its definition: of a Variable or ref, or ``None``; cached."""
        if self._definitions is None:
            listed: list[VariableDef | ArrayRefDef | None] = []
            for entry in self.entries:
                listed += [None] if entry is None else [d for _, d in entry.leaves()]
            self._definitions = listed
        return self._definitions

    def has_references(self) -> bool:
        """Whether an object in it is met again, or is one that exists outside."""
        return any(
            isinstance(node, NodeRef) or node.outer_index is not None
            for entry in self.entries
            if entry is not None
            for node in entry.nodes
        )

    def inner_paths(self) -> list[Any]:
        """The path of each leaf inside its object; ``()`` for plain leaves."""
        listed: list[Any] = []
        for entry in self.entries:
            listed += [()] if entry is None else entry.paths()
        return listed

    def span(self, argument: int | None) -> Span:
        """Which entries and leaves are those of a positional argument.

        Args:
            argument: Its number; ``None`` for no argument.
        """
        if argument is None:
            return Span((0, 0), (0, 0))
        treedefs = self.treedef.children()[0].children()
        start = sum(treedef.num_leaves for treedef in treedefs[:argument])
        stop = start + treedefs[argument].num_leaves
        counts = [1 if e is None else e.num_leaves for e in self.entries]
        return Span((start, stop), (sum(counts[:start]), sum(counts[:stop])))

    def names(self) -> list[str]:
        """The paths of the leaves of ``(args, kwargs)``: ``args[0].kernel``; cached."""
        if self._names is None:
            self._names = self._list_names()
        return self._names

    def _list_names(self) -> list[str]:
        places = jax.tree.unflatten(self.treedef, range(len(self.entries)))
        flat, _ = jax.tree_util.tree_flatten_with_path(places)
        named: list[str] = []
        for (path, _), entry in zip(flat, self.entries, strict=True):
            start = self._start(path)
            paths = [()] if entry is None else entry.paths()
            named += [start + "".join(map(_key_text, path)) for path in paths]
        return named

    def _start(self, path: Any) -> str:
        if path[:1] == (_KWARGS,) or len(path) < 2:
            return "kwargs" + jax.tree_util.keystr(path[1:])
        return self.labels.of(path[1].idx) + jax.tree_util.keystr(path[2:])


_KWARGS = jax.tree_util.SequenceKey(1)


def _key_text(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A tree outside: its skeleton, its leaves, and its numbered objects.

    Attributes:
        skeleton: The static part.
        leaves: Variables, refs, arrays and other values, in order.
        objects: The objects by their number.
    """

    skeleton: Skeleton
    leaves: list[Any]
    objects: IndexMap

    def values(self) -> list[Any]:
        """What JAX gets: raw values in the place of Variables."""
        return [flattening.raw_of(leaf) for leaf in self.leaves]


def is_entry(sharing: bool) -> Callable[[Any], bool]:
    """Tells what pack takes apart itself; trees leave objects to JAX."""
    return nodes.is_graph_node if sharing else aliases.is_variable_or_ref


def pack(
    tree: Any,
    propagation: Propagation,
    transform: str,
    statics: tuple[tuple[Any, Any], ...] = (),
    labels: Labels = aliasing.ARGS,
) -> Packed:
    """Takes a tree of arguments apart.

    Args:
        tree: ``(args, kwargs)``, or another pytree with objects in it.
        propagation: Trees refuse aliases here.
        transform: The public name to give in error messages.
        statics: Static arguments to keep with the skeleton.
        labels: What the positional arguments are called in messages.

    Raises:
        ValueError: In tree mode, if a Variable or ref occurs twice.
    """
    refs = RefMap()
    treedef, entries, leaves = take_apart(tree, propagation, refs, RefMap(), transform)
    if not propagation.sharing and any(map(is_repeated, entries)):
        aliasing.check_inputs(tree, transform, labels)
    skeleton = Skeleton(treedef, tuple(entries), statics, labels)
    return Packed(skeleton, leaves, IndexMap.from_refmap(refs))


def is_repeated(entry: GraphDef[Any] | None) -> bool:
    """Whether an entry refers to an object of an earlier entry."""
    return entry is not None and entry.num_leaves == 0 and len(entry.nodes) == 1


def take_apart(
    tree: Any, propagation: Propagation, refs: RefMap, outer: RefMap, transform: str
) -> tuple[Any, list[GraphDef[Any] | None], list[Any]]:
    """The treedef, the entries and the leaves of a tree; see `Skeleton`.

    Args:
        tree: Any pytree with objects in it.
        propagation: Whether objects are entered with sharing, or left to JAX.
        refs: The numbering; it is filled.
        outer: Numbers that objects have outside, recorded in the GraphDefs.
        transform: The public name to give in error messages.
    """
    is_leaf = is_entry(propagation.sharing)
    if propagation.sharing:
        flat, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    else:
        flat, treedef = aliases.flatten(tree)
    entries: list[GraphDef[Any] | None] = []
    leaves: list[Any] = []
    for x in flat:
        if is_leaf(x):
            graphdef, found = flattening.flatten_graph(x, refs, outer)
            entries.append(graphdef)
            leaves += found
        else:
            if isinstance(x, pytrees.Pytree):
                raise aliases.not_a_pytree_error(x, "", transform)
            entries.append(None)
            leaves.append(x)
    return treedef, entries, leaves


def unpack(
    skeleton: Skeleton, values: Sequence[Any], objects: IndexMap
) -> tuple[Any, list[Any]]:
    """Rebuilds a tree of arguments as fresh objects of the current trace.

    Args:
        skeleton: The static part.
        values: The raw values of all leaves, or Variables to be used as they are.
        objects: Filled with the objects by number.

    Returns:
        The tree, and the leaves of its treedef.
    """
    builder = Builder(objects, {})
    roots = build_entries(builder, skeleton.entries, values)
    builder.commit()
    return jax.tree.unflatten(skeleton.treedef, roots), roots


def build_entries(
    builder: Builder, entries: Sequence[GraphDef[Any] | None], leaves: Sequence[Any]
) -> list[Any]:
    """The objects and plain leaves that these entries describe."""
    roots: list[Any] = []
    position = 0
    for entry in entries:
        if entry is None:
            roots.append(leaves[position])
            position += 1
        else:
            end = position + entry.num_leaves
            roots.append(builder.build(entry, leaves[position:end]))
            position = end
    return roots


def is_same_tree(tree: Any, skeleton: Skeleton, roots: Sequence[Any]) -> bool:
    """Whether a tree, unpacked without sharing, still has its structure and leaves."""
    try:
        leaves, treedef = aliases.flatten(tree)
    except ValueError:  # a cycle; there was none
        return False
    return treedef == skeleton.treedef and all(map(operator.is_, leaves, roots))


# How leaves travel through JAX.


class Values:
    """A pytree node that carries some leaves of a skeleton.

    Attributes:
        values: The raw values.
        skeleton: What all groups of a call are leaves of.
        positions: Which leaves these are; ``None`` for all.
    """

    __slots__ = ("positions", "skeleton", "values")

    def __init__(
        self,
        values: Sequence[Any],
        skeleton: Skeleton,
        positions: tuple[int, ...] | None,
    ) -> None:
        self.values = values
        self.skeleton = skeleton
        self.positions = positions

    def by_position(self) -> dict[int, Any]:
        """The values by the number of the leaf."""
        if self.positions is None:
            return dict(enumerate(self.values))
        return dict(zip(self.positions, self.values, strict=True))


def _flatten_values(group: Values) -> Any:
    return group.values, (group.skeleton, group.positions)


def _flatten_values_with_keys(group: Values) -> Any:
    # Runs on errors and once per trace: names in messages, jaxprs and profiles.
    names = group.skeleton.names()
    if group.positions is not None:
        names = [names[position] for position in group.positions]
    keys = map(jax.tree_util.GetAttrKey, names)
    return list(zip(keys, group.values, strict=True)), (group.skeleton, group.positions)


def _unflatten_values(aux: Any, values: Any) -> Values:
    return Values(values, *aux)


jax.tree_util.register_pytree_with_keys(
    Values, _flatten_values_with_keys, _unflatten_values, _flatten_values
)


class Changes:
    """A pytree node that carries new values of Variables out, under their names.

    The names are in quotes, as in ``args[0]['kernel']``, where JAX reports about them.

    Attributes:
        values: The raw values.
        names: From `Skeleton.names`.
    """

    __slots__ = ("names", "values")

    def __init__(self, values: Sequence[Any], names: Sequence[str]) -> None:
        self.values = values
        self.names = tuple(names)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


class _Key(str):
    """A path entry that JAX prints as it is."""


def _flatten_changes_with_keys(group: Changes) -> Any:
    keys = [_Key(re.sub(r"\.(\w+)", r"['\1']", name)) for name in group.names]
    return list(zip(keys, group.values, strict=True)), group.names


jax.tree_util.register_pytree_with_keys(
    Changes,
    _flatten_changes_with_keys,
    lambda names, values: Changes(values, names),
    lambda group: (group.values, group.names),
)


def join(groups: Sequence[Values]) -> tuple[Skeleton, list[Any]]:
    """The skeleton of the groups of a call, and all its values in order."""
    skeleton = groups[0].skeleton
    if groups[0].positions is None:
        return skeleton, list(groups[0].values)
    values: list[Any] = [None] * len(skeleton.definitions())
    for group in groups:
        for position, value in zip(group.positions or (), group.values, strict=True):
            values[position] = value
    return skeleton, values


def part(
    values: Sequence[Any], skeleton: Skeleton, assignment: Sequence[int], count: int
) -> list[Values]:
    """The values of a call in ``count`` groups.

    Args:
        values: The raw values of all leaves.
        skeleton: What they are leaves of.
        assignment: For each leaf the number of its group.
        count: How many groups there are; they may be empty.
    """
    if count == 1:
        return [Values(values, skeleton, None)]
    positions: list[list[int]] = [[] for _ in range(count)]
    for position, group in enumerate(assignment):
        positions[group].append(position)
    return [
        Values([values[i] for i in listed], skeleton, tuple(listed))
        for listed in positions
    ]


def roles(groups: Sequence[Values], count: int) -> list[int]:
    """For each of ``count`` leaves the number of its group."""
    numbers = [0] * count
    for number, group in enumerate(groups):
        for position in group.positions or ():
            numbers[position] = number
    return numbers


def leaves_of(x: Any) -> list[tuple[Any, Any]]:
    """The Variables and refs of one object, with their paths, each once."""
    graphdef, leaves = flattening.flatten_graph(x)
    return [
        (path, leaf)
        for path, leaf in zip(graphdef.paths(), leaves, strict=True)
        if aliases.is_variable_or_ref(leaf)
    ]


class Matched(NamedTuple):
    """A value of a prefix tree, and what of a skeleton it is for.

    Attributes:
        value: The value.
        entries: The entries; see `Skeleton`.
        is_whole: Whether it is right at an entry; else at a container of them.
    """

    value: Any
    entries: list[GraphDef[Any] | None]
    is_whole: bool


def match(
    prefix: Any, skeleton: Skeleton, is_leaf: Callable[[Any], bool]
) -> list[Matched]:
    """The values of a prefix tree, each with the entries of the skeleton it is for.

    Args:
        prefix: A pytree prefix of the packed tree; each object counts as one leaf.
        skeleton: Of the packed tree.
        is_leaf: What is a value of the prefix tree, besides the leaves of JAX.

    Raises:
        ValueError: If the structures don't fit.
    """
    full = jax.tree.unflatten(skeleton.treedef, range(len(skeleton.entries)))
    found: list[Matched] = []

    def add(value: Any, subtree: Any) -> None:
        entries = [skeleton.entries[number] for number in jax.tree.leaves(subtree)]
        found.append(Matched(value, entries, isinstance(subtree, int)))

    jax.tree.map(add, prefix, full, is_leaf=is_leaf)
    return found


def spread(prefix: Any, skeleton: Skeleton) -> list[Any]:
    """The value of a prefix tree for each leaf of a skeleton.

    Raises:
        ValueError: If the structures don't fit.
    """
    return [
        matched.value
        for matched in match(prefix, skeleton, lambda x: x is None)
        for entry in matched.entries
        for _ in range(1 if entry is None else entry.num_leaves)
    ]
