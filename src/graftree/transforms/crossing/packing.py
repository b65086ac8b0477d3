"""Arguments and outputs as JAX gets them: a signature and flat groups of leaves.

    Packed      a tree outside: its signature, its leaves, its numbered objects
    Values      a group of leaves on its way in, a pytree node
    Named       a group of leaves on its way out, a pytree node

A transform gives different leaves different axes, shardings or roles by putting them in
different groups.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftree.config import Propagation
from graftree.core import paths
from graftree.core.graph import flattening, nodes
from graftree.core.graph.flattening import Builder, IndexMap, RefMap
from graftree.core.graph.graphdefs import Cell, GraphDef, NodeRef
from graftree.core.objects import callables
from graftree.transforms.crossing import debug_info, refusals
from graftree.transforms.crossing.signatures import ARGS, Labels, Signature, Slot


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A tree outside: its signature, its leaves, and its numbered objects.

    Attributes:
        signature: The static part.
        leaves: Variables, refs, arrays and other values, in order.
        objects: The objects by their number.
        skeleton: The one made from them; that of the signature may be an equal one that
            came first.
        members: The object or container of each row of it, if known.
        tree: The tree, with the callables in it taken apart.
    """

    signature: Signature
    leaves: list[Any]
    objects: IndexMap
    skeleton: GraphDef[Any] | None = None
    members: Sequence[Any] = ()
    tree: Any = None

    def values(self) -> list[Any]:
        """The raw values that JAX gets instead of Variables."""
        return [flattening.raw_of(leaf) for leaf in self.leaves]


def pack(
    tree: Any,
    mode: Propagation,
    transform: str,
    statics: tuple[tuple[Any, Any], ...] = (),
    labels: Labels = ARGS,
    function: Callable[..., Any] | None = None,
) -> Packed:
    """Takes ``(args, kwargs)`` apart; what the functions hold may come third."""
    refs, members = RefMap(), []
    tree, flat, treedef = flatten(tree, mode, transform, of_call=True)
    sharing = mode.sharing or len(tree) > 2
    skeleton, leaves = flattening.flatten_leaves(
        treedef, flat, sharing, refs, RefMap(), members=members
    )
    parameters = debug_info.source_of(function) if function else None
    signature = Signature(skeleton, statics, labels, parameters)
    if not mode.sharing and any(map(is_repeated, signature.entries)):
        refusals.check_inputs(tree[:2], transform, labels)
    objects = IndexMap.from_refmap(refs)
    return Packed(signature, leaves, objects, skeleton, members, tree)


def is_repeated(entry: Cell) -> bool:
    """Whether an entry is an object of an earlier entry."""
    return isinstance(entry, NodeRef)


def take_apart(
    tree: Any,
    mode: Propagation,
    refs: RefMap,
    outer: RefMap,
    transform: str,
    members: list[Any] | None = None,
) -> tuple[GraphDef[Any], list[Any]]:
    """The skeleton and the leaves of a tree of arguments or outputs.

    Fills the numbering ``refs``, and ``members`` with the object or container of each
    row. The skeleton records the numbers in ``outer``, which objects have outside.
    """
    _, flat, treedef = flatten(tree, mode, transform)
    return flattening.flatten_leaves(
        treedef, flat, mode.sharing, refs, outer, members=members
    )


def flatten(
    tree: Any, mode: Propagation, transform: str, of_call: bool = False
) -> tuple[Any, list[Any], Any]:
    """A tree with its callables taken apart; its leaves, and the treedef.

    Objects are leaves with sharing, and in what a function holds, which may be in the
    arguments, too. It is third in the tree of a call.
    """
    arguments, functions, sharing = tree, (), mode.sharing
    if of_call and not sharing:
        arguments, functions = tree[:2], tree[2:]
    flat, treedef = nodes.flatten(arguments, ends_at_objects=sharing)
    if not callables.TYPES.isdisjoint(map(type, flat)):
        arguments = callables.opened_in(arguments)
        tree = (*arguments, *functions) if functions else arguments
        flat, treedef = nodes.flatten(arguments, ends_at_objects=sharing)
    for x in () if sharing else flat:
        if nodes.kind_of(x) is nodes.PYTREE:
            raise nodes.not_a_pytree_error(x, "", transform)
    if functions:
        objects, below = nodes.flatten(functions, ends_at_objects=True)
        parts = [*treedef.children(), *below.children()]
        flat, treedef = [*flat, *objects], jax.tree_util.treedef_tuple(parts)
    return tree, flat, treedef


def unpack(
    signature: Signature,
    values: Sequence[Any],
    objects: IndexMap,
    *,
    are_raw: bool = True,
) -> tuple[Any, list[Any]]:
    """Rebuilds a tree of arguments as fresh objects of the current trace.

    The values are raw ones, or else also Variables to be used as they are. Fills
    ``objects`` with the objects by number; returns the tree and the leaves of its
    treedef.
    """
    builder = Builder(objects, {}, takes_raw=are_raw)
    roots = builder.members(signature.skeleton, values)
    return jax.tree.unflatten(signature.treedef, roots), roots


def leaves_of(
    signature: Signature, values: Sequence[Any], objects: IndexMap
) -> list[Any]:
    """The leaves of a tree that `unpack` made: Variables and refs, else raw values."""
    return [
        value if slot.definition is None else objects[slot.definition.index]
        for slot, value in zip(signature.slots, values, strict=True)
    ]


def is_same_tree(
    tree: Any, signature: Signature, roots: Sequence[Any], mode: Propagation
) -> bool:
    """Whether a tree, unpacked without sharing, still has its structure and leaves."""
    try:
        _, leaves, treedef = flatten(tree, mode, "", of_call=True)
    except ValueError:  # a cycle; there was none
        return False
    return treedef == signature.treedef and all(map(operator.is_, leaves, roots))


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


# How leaves travel through JAX.


class Which(NamedTuple):
    """Some leaves of a signature.

    Attributes:
        number: That of the signature: JAX compares it first, and in C.
        signature: The signature that all groups of a call share.
        positions: The positions of these leaves; ``None`` for all.
    """

    number: int | None
    signature: Signature
    positions: tuple[int, ...] | None


class Values(tuple[Any, ...]):
    """A pytree node that carries some leaves of a signature.

    It consists of the parts that JAX needs, its children and its static data, so JAX
    takes it apart in C.

    Attributes:
        values: The raw values.
        which: The leaves whose values they are.
    """

    __slots__ = ()

    @staticmethod
    def of(
        values: Sequence[Any], signature: Signature, positions: tuple[int, ...] | None
    ) -> Values:
        """The group of these values."""
        return Values((values, Which(signature.number, signature, positions)))

    @staticmethod
    def picked(
        values: Sequence[Any], signature: Signature, positions: Sequence[int]
    ) -> Values:
        """The group of those at these positions, of the values of all leaves."""
        found = [values[position] for position in positions]
        return Values.of(found, signature, tuple(positions))

    values = property(operator.itemgetter(0))
    which = property(operator.itemgetter(1))

    def by_position(self) -> dict[int, Any]:
        """The values by the number of the leaf."""
        positions = self.which.positions
        if positions is None:
            return dict(enumerate(self.values))
        return dict(zip(positions, self.values, strict=True))

    def called_as(self, source: debug_info.Source) -> Values:
        """The same as arguments of another function, in messages."""
        _, signature, positions = self.which
        signature = dataclasses.replace(signature, parameters=source)
        return Values.of(self.values, signature, positions)

    def slots(self) -> list[tuple[Slot, Any]]:
        """The leaves with their values."""
        slots = self.which.signature.slots
        return [(slots[number], value) for number, value in self.by_position().items()]


def _flatten_values_with_keys(group: Values) -> Any:
    # Runs on errors and once per trace: names in messages, jaxprs and profiles. JAX
    # prints the entries of a path as they are.
    return [(slot.name_in_function, x) for slot, x in group.slots()], group.which


jax.tree_util.register_pytree_with_keys(
    Values,
    _flatten_values_with_keys,
    lambda which, values: Values((values, which)),
    tuple,
)


# Results of a trace. JAX prints the path of each leaf, after the word "result".


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of leaves of a signature, made when needed.

    Attributes:
        signature: That of the arguments, or of the output.
        positions: The positions of these leaves.
        root: The name of the output; ``None`` for new values of arguments.
    """

    signature: Signature
    positions: tuple[int, ...]
    root: str | None = None

    def slots(self) -> list[Slot]:
        """The leaves."""
        slots = self.signature.slots
        return [slots[position] for position in self.positions]

    def listed(self) -> list[str]:
        """The names, as in ``[0].kernel`` of an output."""
        if self.root is None:
            # In quotes, as programs expect of JAX's errors about States.
            names = [slot.name_in_function for slot in self.slots()]
            return [f"(new {re.sub(_ATTRIBUTE, _QUOTED, name)})" for name in names]
        roots = self.signature.entry_names(self.root)
        return [paths.below(roots[slot.entry], slot.path) for slot in self.slots()]


_ATTRIBUTE, _QUOTED = r"\.(\w+)", r"['\1']"


class Named(list[Any]):
    """A pytree node with some values that leave a trace, under their names.

    Attributes:
        names: Their names.
    """

    __slots__ = ("names",)
    names: Names

    @staticmethod
    def of(names: Names, values: Iterable[Any]) -> Named:
        """The values with their names."""
        made = Named(values)
        made.names = names
        return made


jax.tree_util.register_pytree_with_keys(
    Named,
    lambda group: (
        [*zip(group.names.listed(), group, strict=True)],
        group.names,
    ),
    Named.of,
    lambda group: (group, group.names),
)


class Parts(tuple[Any, ...]):
    """A pytree node like a tuple, which JAX does not show in paths."""

    __slots__ = ()


jax.tree_util.register_pytree_with_keys(
    Parts,
    lambda parts: ([("", part) for part in parts], Parts),
    tuple.__new__,  # of the class, which is the static data: in C, for cached calls
    lambda parts: (parts, Parts),
)


class Whole(tuple[Any, ...]):
    """A result of `inside.Inside.leave` without groups, as one pytree node.

    Four nodes would cost a call as much more as finding its plan does.
    """

    __slots__ = ()


def _flatten_whole(result: Whole) -> Any:
    returned, changed, structure, out = result
    start = len(changed)
    static = returned, start, start + len(structure)
    return (*changed, *structure, *out), static


def _flatten_whole_with_keys(result: Whole) -> Any:
    leaves, static = _flatten_whole(result)
    names = [name for part in result[0].names for name in part.listed()]
    return [*zip(names, leaves, strict=True)], static


def _whole_again(static: Any, leaves: Any) -> Whole:
    returned, start, end = static
    if not end:
        return Whole((returned, (), (), leaves))
    return Whole((returned, leaves[:start], leaves[start:end], leaves[end:]))


jax.tree_util.register_pytree_with_keys(
    Whole, _flatten_whole_with_keys, _whole_again, _flatten_whole
)


def part_of(groups: Sequence[Any]) -> Any:
    """A part of a result, made of groups; a single one stands for itself."""
    return groups[0] if len(groups) == 1 else Parts(groups)


def groups_of(part: Any) -> Sequence[Any]:
    """The groups of a part of a result."""
    return part if type(part) is Parts else (part,)


def join(groups: Sequence[Values]) -> tuple[Signature, list[Any], list[int]]:
    """The signature of the groups of a call; of each leaf its value and its group."""
    signature = groups[0].which.signature
    if groups[0].which.positions is None:
        values = list(groups[0].values)
        return signature, values, [0] * len(values)
    values = [None] * len(signature.slots)
    numbers = [0] * len(values)
    for number, group in enumerate(groups):
        for position, value in group.by_position().items():
            values[position] = value
            numbers[position] = number
    return signature, values, numbers
