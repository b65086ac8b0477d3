"""Derivatives in the form of their arguments or outputs, for all transforms with any.

JAX differentiates functions of flat lists of leaves. For the user, a derivative has the
form of an argument or of the output. Without graph updates objects stand for objects of
the same types; with them, the State of an object stands for it, and if an object occurs
twice, the first State has all of it.

    tree, arguments       leaves in, derivatives in the form of a signature out
    leaves                the inverse
    Argnums               which arguments are differentiated, or not
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import jax

from graftree import errors
from graftree.config import Propagation
from graftree.core.graph import differences, flattening, nodes
from graftree.core.graph.flattening import Builder, IndexMap
from graftree.core.graph.graphdefs import LEAF, ArrayRefDef, VariableDef
from graftree.core.objects import callables, running
from graftree.core.objects.pytrees import Pytree
from graftree.core.pickling import Rebuilt
from graftree.core.states import states
from graftree.core.variables.variables import Variable
from graftree.transforms.lifting import prefixes, specs
from graftree.transforms.lifting.argument_trees import is_repeated
from graftree.transforms.lifting.prefixes import DiffState, Prefix
from graftree.transforms.lifting.signatures import Signature


class DerivativeOptions(TypedDict, total=False):
    """Keyword arguments of `vjp`, less ``has_aux``; `grad` has more."""

    reduce_axes: Sequence[Any]
    graph: bool | None
    graph_updates: bool | None


class FormError(TypeError, ValueError):
    """A derivative does not match its argument or output.

    Both TypeError and ValueError, because JAX raises either.
    """


# Leaves in, derivatives out.


def tree(
    signature: Signature, derivatives: Mapping[int, Any], mode: Propagation
) -> Any:
    """Puts derivatives, by position of the leaf, into the form of a whole signature.

    Leaves without a derivative are left out of States, and are ``None`` elsewhere.
    """
    result = jax.tree.unflatten(signature.treedef, _roots(signature, derivatives, mode))
    return callables.closed(result) if signature.has_callables else result


def arguments(
    signature: Signature,
    derivatives: Mapping[int, Any],
    mode: Propagation,
    argnums: Iterable[int] | None = None,
) -> tuple[Any, ...]:
    """Puts derivatives into the form of some positional arguments, or of all."""
    roots, trees = _roots(signature, derivatives, mode), []
    treedefs = signature.treedef.children()[0].children()
    for argument in range(len(treedefs)) if argnums is None else argnums:
        start, stop = signature.entries_of(argument)
        trees.append(jax.tree.unflatten(treedefs[argument], roots[start:stop]))
    # Derivatives of a method are in a method of the derivative of its object.
    return tuple(callables.closed(trees) if signature.has_callables else trees)


def _roots(
    signature: Signature, derivatives: Mapping[int, Any], mode: Propagation
) -> list[Any]:
    """Makes the derivative for each object or plain leaf of a signature."""
    values = [
        derivatives.get(position) for position in range(len(signature.leaf_specs))
    ]
    for position, leaf_spec in enumerate(signature.leaf_specs):
        definition = leaf_spec.variable
        # The builder needs the ref of a Variable, so there must be a Variable.
        if definition and (
            position in derivatives or definition.array_refdef is not None
        ):
            values[position] = flattening.make_variable(definition, values[position])
    if not mode.structure:
        # All are built: an object may refer to one of an earlier argument.
        builder = Builder(IndexMap(), {}, recreate_variables=False)
        return builder.members(signature.skeleton, values)
    flat_states: list[list[tuple[Any, Any]]] = [[] for _ in signature.entries]
    for position, leaf_spec in enumerate(signature.leaf_specs):
        if position in derivatives:
            flat_states[leaf_spec.entry].append((leaf_spec.path, values[position]))
    return [
        None if entry is LEAF and not flat_state else _state(flat_state)
        for entry, flat_state in zip(signature.entries, flat_states, strict=True)
    ]


def _state(flat_state: Sequence[tuple[Any, Any]]) -> Any:
    if flat_state and flat_state[0][0] == ():
        return flat_state[0][1]  # a Variable by itself is its own State
    return states.from_flat_state(flat_state)


# Derivatives in, leaves out.


def leaves(
    signature: Signature,
    derivative: Any,
    mode: Propagation,
    name: str,
    positions: Iterable[int],
) -> list[Any]:
    """Lists the derivatives of some leaves of a signature, from a tree of the user.

    ``None`` may stand for an object, and is then the derivative of each of its leaves.
    """
    if signature.has_callables:
        derivative = callables.opened_in(derivative)
    try:
        roots = signature.treedef.flatten_up_to(derivative)
    except ValueError as error:
        raise FormError(f"Wrong structure of {name}: {error}") from None
    paths = signature.skeleton.paths()
    leaf_paths = [paths[position] for position in positions]
    expected = {path for path in leaf_paths if roots[path[0]] is not None}
    leaves_by_path: dict[Any, Any] = {}
    earlier_ids: set[int] = set()
    tops = [*signature.skeleton.tops()]
    for entry, (top, root) in enumerate(zip(tops, roots, strict=True)):
        root_leaves = [
            ((entry, *path), x) for path, x in _leaves_of(top, root, mode, name)
        ]
        # A value that an earlier object shares with this one counts only there.
        leaves_by_path |= {
            p: x for p, x in root_leaves if p in expected or id(x) not in earlier_ids
        }
        earlier_ids |= {id(x) for _, x in root_leaves}
    if leaves_by_path.keys() != expected:
        unexpected = [path for path in leaves_by_path if path not in expected]
        lines = differences.missing_and_unexpected(
            [
                path[1:]
                for path in leaf_paths
                if path in expected and path not in leaves_by_path
            ],
            [path[1:] for path in unexpected],
        )
        if any(is_repeated(tops[path[0]]) for path in unexpected):
            lines.append("An object that occurs twice has one: pass it twice, too.")
        raise FormError("\n".join([f"Wrong leaves in {name}:", *lines]))
    return [flattening.raw_of(leaves_by_path.get(path)) for path in leaf_paths]


def _leaves_of(
    top: Any, x: Any, mode: Propagation, name: str
) -> Iterable[tuple[Any, Any]]:
    """Lists the leaves, with paths, of the derivative for an object or plain leaf."""
    if x is None:
        return ()
    if top is LEAF:
        return [((), x)]
    if mode.structure and isinstance(x, states.State):
        return states.to_flat_state(x)
    is_variable = isinstance(top, (VariableDef, ArrayRefDef))
    if is_variable and (isinstance(x, Variable) or not mode.structure):
        return [((), x)]
    if not mode.structure:
        if nodes.is_graph_node(x):
            graphdef, values = flattening.flatten_graph(x)
            return zip(graphdef.paths(), values, strict=True)
        if is_repeated(top):
            return [((), x)]
    node_type = getattr(top, "type", None)
    expected = (
        node_type.__name__ if node_type and not mode.structure else "State or Variable"
    )
    raise FormError(f"Expected {expected}, got {type(x).__name__}, in {name}.")


# Arguments, and the output.


def refuse_axes(reduce_axes: Sequence[Any]) -> None:
    """Refuses an option that JAX doesn't have any more."""
    if reduce_axes:
        raise NotImplementedError("reduce_axes is not supported; leave it empty.")


def pair(out: Any) -> tuple[Any, Any]:
    """Splits an output with ``has_aux`` into the differentiated part and the rest."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(
            "With has_aux=True the function must return a pair (output, aux), got "
            f"{type(out).__name__}."
        )
    return out[0], out[1]


def refuse_several(transform: str, out: Any) -> None:
    """Refuses None and containers, of which JAX says only what they are."""
    if out is not None and not isinstance(out, (tuple, list, dict)):
        return
    way_out = "Return the loss."
    if isinstance(out, (tuple, list)) and out:
        way_out = (
            f"If the first is the loss, use nnx.{transform}(f, has_aux=True), which "
            "returns the others alongside the gradient."
        )
    raise TypeError(
        errors.message(
            "Gradient only defined for scalar-output functions, but the function of "
            f"nnx.{transform} returned {_article_of(out)}.",
            where=running.describe(out),
            way_out=way_out,
        )
    )


def _article_of(out: Any) -> str:
    return "None" if out is None else f"a {type(out).__name__}"


def position(argnum: int, count: int, argument: str, transform: str) -> int:
    """Returns the position, from the start, that ``argnum`` means among ``count`` ones.

    Raises:
        TypeError: If there are fewer arguments.
    """
    if not -count <= argnum < count:
        least = argnum + 1 if argnum >= 0 else -argnum
        raise TypeError(
            f"{argument}={argnum} of nnx.{transform} requires at least {least} "
            f"positional arguments, but got only {count}."
        )
    return argnum % count


class Argnums(Rebuilt):
    """What ``argnums`` or ``nondiff_argnums`` says about the positional arguments.

    Args:
        argnums: Integers and DiffStates; or a single one.
        argument: Which of the two it is.
        transform: The public name of the transform.
        mode: The changes that propagate.
        named: The prefix of arguments that integers name.
        others: The prefix of all other arguments.

    Attributes:
        mode: The changes that propagate.
        is_single: Whether it is a single one.
        argnums: The integers, those of DiffStates too.
        spec: Returns the spec of a call with so many positional arguments.
    """

    def __init__(
        self,
        argnums: Any,
        argument: str,
        transform: str,
        mode: Propagation,
        named: Any,
        others: Any,
    ) -> None:
        if isinstance(argnums, Pytree):
            # Before it is taken for a sequence; it is not a prefix in any mode.
            raise prefixes.node_error(argnums, argument, transform)
        self._argument, self._transform, self.mode = argument, transform, mode
        self._others = others
        self.is_single = isinstance(argnums, DiffState) or hasattr(argnums, "__index__")
        entries: Any = [argnums] if self.is_single else argnums
        prefixes.check(tuple(entries), argument, transform, mode)
        self._prefixes = [x if isinstance(x, DiffState) else named for x in entries]
        self.argnums = self._distinct(
            [x.argnum if isinstance(x, DiffState) else int(x) for x in entries]
        )
        self.spec = functools.cache(self._spec)

    def _distinct(self, argnums: list[int]) -> tuple[int, ...]:
        for argnum in argnums:
            if argnums.count(argnum) > 1:
                raise ValueError(
                    f"argnum {argnum} is repeated in {self._argument} of "
                    f"nnx.{self._transform}."
                )
        return tuple(argnums)

    def positions(self, count: int) -> tuple[int, ...]:
        """Returns the positions, from the start, among ``count`` arguments."""
        argument, name = self._argument, self._transform
        return self._distinct(
            [position(argnum, count, argument, name) for argnum in self.argnums]
        )

    def _spec(self, count: int) -> specs.TransformSpec:
        chosen = dict(zip(self.positions(count), self._prefixes, strict=True))
        prefix = tuple([chosen.get(i, self._others) for i in range(count)])
        name, mode = self._transform, self.mode
        inputs = Prefix(prefix, self._argument, name, mode, keywords=self._others)
        # Any Variable of the arguments may be in the output.
        outputs = Prefix(None, "out", name, mode, binds=False)
        return specs.TransformSpec(
            name, mode, inputs, outputs, returns_captured=True, held=False
        )
