"""Derivatives in the form of their arguments or outputs, for all transforms with any.

JAX differentiates functions of flat lists of leaves. For the user, a derivative has the
form of an argument or of the output. Without graph updates objects stand for objects of
the same types; with them, the State of an object stands for it, and if an object occurs
twice, the first State has all of it.

    tree, arguments       leaves in, derivatives in the form of a signature out
    leaves                the inverse
    Argnums               the arguments that are differentiated, or not
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
from graftree.transforms.lifting.arguments import is_repeated
from graftree.transforms.lifting.prefixes import DiffState, Prefix
from graftree.transforms.lifting.signatures import Signature


class DerivativeOptions(TypedDict, total=False):
    """The keyword arguments of `vjp`, less ``has_aux``; `grad` has more."""

    reduce_axes: Sequence[Any]
    graph: bool | None
    graph_updates: bool | None


class FormError(TypeError, ValueError):
    """A derivative does not match its argument or output.

    Both TypeError and ValueError, because JAX raises either.
    """


# Leaves in, derivatives out.


def tree(signature: Signature, given: Mapping[int, Any], mode: Propagation) -> Any:
    """Derivatives, given by the number of the leaf, in the form of a whole signature.

    States lack the others, and ``None`` is in their place elsewhere.
    """
    found = jax.tree.unflatten(signature.treedef, _roots(signature, given, mode))
    return callables.closed(found) if signature.has_callables else found


def arguments(
    signature: Signature,
    given: Mapping[int, Any],
    mode: Propagation,
    argnums: Iterable[int] | None = None,
) -> tuple[Any, ...]:
    """Derivatives in the form of some positional arguments, or of all."""
    roots, found = _roots(signature, given, mode), []
    treedefs = signature.treedef.children()[0].children()
    for number in range(len(treedefs)) if argnums is None else argnums:
        start, stop = signature.span(number).entries
        found.append(jax.tree.unflatten(treedefs[number], roots[start:stop]))
    # Derivatives of a method are in a method of the derivative of its object.
    return tuple(callables.closed(found) if signature.has_callables else found)


def _roots(
    signature: Signature, given: Mapping[int, Any], mode: Propagation
) -> list[Any]:
    """The derivative for each object or plain leaf of a signature."""
    values = [given.get(number) for number in range(len(signature.leaf_specs))]
    for number, leaf_spec in enumerate(signature.leaf_specs):
        definition = leaf_spec.variable
        # The builder needs the ref of a Variable, so there must be a Variable.
        if definition and (number in given or definition.array_refdef is not None):
            values[number] = flattening.make_variable(definition, values[number])
    if not mode.structure:
        # All are built: an object may refer to one of an earlier argument.
        builder = Builder(IndexMap(), {}, recreate_variables=False)
        return builder.members(signature.skeleton, values)
    found: list[list[tuple[Any, Any]]] = [[] for _ in signature.entries]
    for number, leaf_spec in enumerate(signature.leaf_specs):
        if number in given:
            found[leaf_spec.entry].append((leaf_spec.path, values[number]))
    return [
        None if entry is LEAF and not listed else _state(listed)
        for entry, listed in zip(signature.entries, found, strict=True)
    ]


def _state(found: Sequence[tuple[Any, Any]]) -> Any:
    if found and found[0][0] == ():
        return found[0][1]  # a Variable by itself is its own State
    return states.from_flat_state(found)


# Derivatives in, leaves out.


def leaves(
    signature: Signature,
    given: Any,
    mode: Propagation,
    what: str,
    wanted: Iterable[int],
) -> list[Any]:
    """The derivatives of some leaves of a signature, from a tree of the user.

    ``None`` may stand for an object, and is then the derivative of each of its leaves.
    """
    if signature.has_callables:
        given = callables.opened_in(given)
    try:
        roots = signature.treedef.flatten_up_to(given)
    except ValueError as error:
        raise FormError(f"Wrong structure of {what}: {error}") from None
    paths = signature.skeleton.paths()
    chosen = [paths[number] for number in wanted]
    expected = {path for path in chosen if roots[path[0]] is not None}
    found: dict[Any, Any] = {}
    seen: set[int] = set()
    tops = [*signature.skeleton.tops()]
    for number, top in enumerate(tops):
        listed = _leaves_of(top, roots[number], mode, what)
        listed = [((number, *path), x) for path, x in listed]
        # A value that an earlier object shares with this one counts only there.
        found |= {p: x for p, x in listed if p in expected or id(x) not in seen}
        seen |= {id(x) for _, x in listed}
    if found.keys() != expected:
        unexpected = [path for path in found if path not in expected]
        lines = differences.missing_and_unexpected(
            [path[1:] for path in chosen if path in expected and path not in found],
            [path[1:] for path in unexpected],
        )
        if any(is_repeated(tops[path[0]]) for path in unexpected):
            lines.append("An object that occurs twice has one: pass it twice, too.")
        raise FormError("\n".join([f"Wrong leaves in {what}:", *lines]))
    return [flattening.raw_of(found.get(path)) for path in chosen]


def _leaves_of(
    top: Any, x: Any, mode: Propagation, what: str
) -> Iterable[tuple[Any, Any]]:
    """The leaves, with their paths, of the derivative for an object or plain leaf."""
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
            graphdef, found = flattening.flatten_graph(x)
            return zip(graphdef.paths(), found, strict=True)
        if is_repeated(top):
            return [((), x)]
    kind = getattr(top, "type", None)
    expected = kind.__name__ if kind and not mode.structure else "State or Variable"
    raise FormError(f"Expected {expected}, got {type(x).__name__}, in {what}.")


# Arguments, and the output.


def refuse_axes(reduce_axes: Sequence[Any]) -> None:
    """Refuses an option that JAX doesn't have any more."""
    if reduce_axes:
        raise NotImplementedError("reduce_axes is not supported; leave it empty.")


def pair(out: Any) -> tuple[Any, Any]:
    """The differentiated part of an output with ``has_aux``, and the rest."""
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
            f"If the first is the loss: nnx.{transform}(f, has_aux=True), which "
            "returns the others beside the gradient."
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


def position(number: int, count: int, argument: str, transform: str) -> int:
    """The position that a number means among so many arguments, from the start.

    Raises:
        TypeError: If there are fewer arguments.
    """
    if not -count <= number < count:
        least = number + 1 if number >= 0 else -number
        raise TypeError(
            f"{argument}={number} of nnx.{transform} requires at least {least} "
            f"positional arguments, but got only {count}."
        )
    return number % count


class Argnums(Rebuilt):
    """The positional arguments that ``argnums`` or ``nondiff_argnums`` name.

    Args:
        given: Their numbers, and DiffStates; or a single one.
        argument: The name of this argument.
        transform: The public name of the transform.
        mode: The changes that propagate.
        named: The prefix of those that are given by number.
        others: The prefix of all other arguments.

    Attributes:
        mode: The changes that propagate.
        is_single: Whether it is a single one.
        numbers: Their numbers, as given.
        spec: Gives the spec of a call with so many positional arguments.
    """

    def __init__(
        self,
        given: Any,
        argument: str,
        transform: str,
        mode: Propagation,
        named: Any,
        others: Any,
    ) -> None:
        if isinstance(given, Pytree):
            # Before it is taken for a sequence; it is not a prefix in any mode.
            raise prefixes.node_error(given, argument, transform)
        self._argument, self._transform, self.mode = argument, transform, mode
        self._others = others
        self.is_single = isinstance(given, DiffState) or hasattr(given, "__index__")
        listed: Any = [given] if self.is_single else given
        prefixes.check(tuple(listed), argument, transform, mode)
        self._prefixes = [x if isinstance(x, DiffState) else named for x in listed]
        self.numbers = self._distinct(
            [x.argnum if isinstance(x, DiffState) else int(x) for x in listed]
        )
        self.spec = functools.cache(self._spec)

    def _distinct(self, numbers: list[int]) -> tuple[int, ...]:
        for number in numbers:
            if numbers.count(number) > 1:
                raise ValueError(
                    f"argnum {number} is repeated in {self._argument} of "
                    f"nnx.{self._transform}."
                )
        return tuple(numbers)

    def positions(self, count: int) -> tuple[int, ...]:
        """Their positions among so many arguments, counted from the start."""
        argument, name = self._argument, self._transform
        return self._distinct(
            [position(number, count, argument, name) for number in self.numbers]
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
