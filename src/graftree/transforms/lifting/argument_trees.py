"""Trees of arguments and outputs: taken apart into a signature and leaves, and back."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftree.config import Propagation
from graftree.core.graph import flattening, nodes
from graftree.core.graph.flattening import Builder, IndexMap, RefMap
from graftree.core.graph.graphdefs import Field, GraphDef, NodeRef
from graftree.core.objects import callables
from graftree.transforms.lifting import argument_errors, debug_info
from graftree.transforms.lifting.signatures import ARGS, Labels, Signature


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """Arguments of a call: their signature, their leaves, their numbered objects.

    Attributes:
        signature: The static part.
        leaves: Variables, refs, arrays and other values, in order.
        objects: The objects by their number.
        skeleton: The one made from them; that of the signature may be an equal one that
            came first.
        members: The object or container of each node spec of it, if known.
    """

    signature: Signature
    leaves: list[Any]
    objects: IndexMap
    skeleton: GraphDef[Any] | None = None
    members: Sequence[Any] = ()

    @staticmethod
    def of(
        tree: Any,
        flat: Sequence[Any],
        treedef: Any,
        mode: Propagation,
        transform: str,
        statics: tuple[tuple[Any, Any], ...] = (),
        labels: Labels = ARGS,
        function: Callable[..., Any] | None = None,
    ) -> Arguments:
        """Makes them of a tree that `flatten` took apart."""
        refs, members = RefMap(), []
        sharing = mode.sharing or len(tree) > 2
        skeleton, leaves = flattening.flatten_leaves(
            treedef, flat, sharing, refs, RefMap(), members=members
        )
        parameters = debug_info.parameters_of(function) if function else None
        signature = Signature(skeleton, statics, labels, parameters)
        if not mode.sharing and any(map(is_repeated, signature.entries)):
            argument_errors.check_inputs(tree[:2], transform, labels)
        objects = IndexMap.from_refmap(refs)
        return Arguments(signature, leaves, objects, skeleton, members)

    def values(self) -> list[Any]:
        """Reads the raw values that JAX gets instead of Variables."""
        return [*map(flattening.raw_of, self.leaves)]


def is_repeated(entry: Field) -> bool:
    """Whether an entry is an object of an earlier entry."""
    return isinstance(entry, NodeRef)


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
    kinds = {*map(type, flat)}
    if not callables.TYPES.isdisjoint(kinds):
        arguments = callables.opened_in(arguments)
        tree = (*arguments, *functions) if functions else arguments
        flat, treedef = nodes.flatten(arguments, ends_at_objects=sharing)
        kinds = {*map(type, flat)}
    if not sharing and any([nodes.KINDS[x] is nodes.PYTREE for x in kinds]):
        obj = next(x for x in flat if nodes.kind_of(x) is nodes.PYTREE)
        raise nodes.not_a_pytree_error(obj, "", transform)
    if functions:
        objects, treedef_of_functions = nodes.flatten(functions, ends_at_objects=True)
        treedefs = [*treedef.children(), *treedef_of_functions.children()]
        flat, treedef = [*flat, *objects], jax.tree_util.treedef_tuple(treedefs)
    return tree, flat, treedef


def take_apart(
    tree: Any,
    mode: Propagation,
    refs: RefMap,
    outer: RefMap,
    transform: str,
) -> tuple[GraphDef[Any], list[Any]]:
    """Takes an output, or a part of the arguments, apart: into skeleton and leaves.

    Fills the numbering ``refs``. The skeleton records the numbers in ``outer``, which
    objects have outside.
    """
    _, flat, treedef = flatten(tree, mode, transform)
    return flattening.flatten_leaves(treedef, flat, mode.sharing, refs, outer)


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
    """Lists the leaves that `unpack` made: Variables and refs, else raw values."""
    return [
        value if leaf_spec.definition is None else objects[leaf_spec.definition.index]
        for leaf_spec, value in zip(signature.leaf_specs, values, strict=True)
    ]


def is_same_tree(
    tree: Any, signature: Signature, roots: Sequence[Any], mode: Propagation
) -> bool:
    """Whether a tree, unpacked without sharing, still has its structure and leaves."""
    try:
        _, leaves, treedef = flatten(tree, mode, "", of_call=True)
    except ValueError:  # a cycle; there was none
        return False
    return treedef == signature.treedef and are_same(leaves, roots)


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
