"""``grad`` and ``value_and_grad`` over objects.

The leaves are parted into those that are differentiated and the rest; JAX
differentiates a function of the two groups. Gradients come back in the form of the
arguments: of the same types, or (with graph updates) as the State of each object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from graftree.core import filters, flattening, nodes, paths, states
from graftree.core.flattening import IndexMap
from graftree.core.skeletons import ArrayRefDef, GraphDef, VariableDef
from graftree.core.variables import Param, Variable
from graftree.transforms import aliasing, boundary, decorators, packing, propagation
from graftree.transforms.boundary import Crossing
from graftree.transforms.decorators import MISSING
from graftree.transforms.packing import Packed, Skeleton, Values
from graftree.transforms.prefixes import DiffState
from graftree.transforms.propagation import Propagation


def value_and_grad(
    f: Any = MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A function that gives the value and the gradient of ``f``.

    Args:
        f: A function that returns a real scalar, or with ``has_aux`` a pair of it and
            anything else. Its arguments may contain objects.
        argnums: Which positional arguments to differentiate, and what of them: an
            integer, a `DiffState`, or a sequence of these. With graph updates, an
            integer means the `Param` Variables of objects.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: Not supported any more; leave it empty.
        graph: Whether shared references are kept (graph mode) or refused (tree mode);
            ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects. Without,
            all leaves of an argument are differentiated, and gradients have the types
            of the arguments.

    Returns:
        A function with the arguments of ``f`` that returns ``(value, gradients)``, or
        a decorator if ``f`` is not given. What ``f`` writes to Variables is kept.

    Raises:
        NotImplementedError: If ``reduce_axes`` is given.
        ValueError: If ``f`` is a method bound to a Module, an argument is repeated in
            ``argnums``, or a `DiffState` is used without graph updates.

    Example:
        >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> loss = lambda model, x: jnp.sum(3 * model(x))
        >>> value, grads = nnx.value_and_grad(loss)(model, jnp.ones((1, 1)))
        >>> grads["kernel"][...]
        Array([[3.]], dtype=float32)
    """
    if reduce_axes:
        raise NotImplementedError("reduce_axes is not supported; leave it empty.")
    mode = propagation.resolve(graph, graph_updates)
    options = {"holomorphic": holomorphic, "allow_int": allow_int}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        decorators.check_not_bound(function, "value_and_grad")
        targets = _targets(argnums, mode)
        return _differentiated(
            function,
            targets,
            has_aux,
            mode,
            options,
            not isinstance(argnums, (int, DiffState)),
        )

    return decorate if f is MISSING else decorate(f)


def grad(
    f: Any = MISSING,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A function that gives the gradient of ``f``; see `value_and_grad`.

    Args:
        f: See `value_and_grad`; so are the other arguments.
        argnums: Which arguments to differentiate, and what of them.
        has_aux: Whether ``f`` returns a pair.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        reduce_axes: Not supported any more; leave it empty.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function that returns the gradients, or with ``has_aux`` a pair of them and
        the second output of ``f``.

    Raises:
        NotImplementedError: If ``reduce_axes`` is given.
        ValueError: See `value_and_grad`.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> grads = nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(model, jnp.ones((1, 2)))
        >>> jax.tree.map(jnp.shape, grads)
        State({
          'bias': Param(
            value=(3,)
          ),
          'kernel': Param(
            value=(2, 3)
          )
        })
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        decorators.check_not_bound(function, "grad")
        both = value_and_grad(
            function,
            argnums=argnums,
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
            reduce_axes=reduce_axes,
            graph=graph,
            graph_updates=graph_updates,
        )

        @decorators.wraps(function)
        def gradients(*args: Any, **kwargs: Any) -> Any:
            value, grads = both(*args, **kwargs)
            return (grads, value[1]) if has_aux else grads

        return gradients

    return decorate if f is MISSING else decorate(f)


def _targets(argnums: Any, mode: Propagation) -> dict[int, Any]:
    """The filter for each differentiated argument; ``None`` where all leaves count."""
    given = [argnums] if isinstance(argnums, (int, DiffState)) else list(argnums)
    targets: dict[int, Any] = {}
    for target in given:
        if isinstance(target, DiffState):
            if not mode.structure:
                raise ValueError(
                    "`argnums` cannot contain `DiffState` objects without graph "
                    "updates: pass graph=True, graph_updates=True, or split the model "
                    "and differentiate one of the States."
                )
            number, chosen = target.argnum, filters.to_predicate(target.filter)
        else:
            number, chosen = (
                int(target),
                filters.OfType(Param) if mode.structure else None,
            )
        if number in targets:
            raise ValueError(f"argnum {number} is repeated in argnums.")
        targets[number] = chosen
    return targets


def _differentiated(
    f: Callable[..., Any],
    targets: dict[int, Any],
    has_aux: bool,
    mode: Propagation,
    options: dict[str, Any],
    returns_tuple: bool,
) -> Callable[..., Any]:
    inner = jax.value_and_grad(_interior(f, has_aux, mode), has_aux=True, **options)

    @decorators.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if mode.structure:
            args, kwargs = decorators.to_positions(f, args, kwargs), {}
        packed = packing.pack((args, kwargs), mode, "grad")
        selection = _Selection(packed, args, targets)
        rest, chosen = packing.part(packed, selection.roles, 2)
        (value, returned), gradients = inner(chosen, rest)
        aux = boundary.commit(packed, *returned)
        found = selection.assemble(gradients, mode)
        return ((value, aux) if has_aux else value), (
            found if returns_tuple else found[0]
        )

    return differentiated


def _interior(
    f: Callable[..., Any], has_aux: bool, mode: Propagation
) -> Callable[..., Any]:
    def traced(chosen: Values, rest: Values) -> Any:
        skeleton, values = packing.join([chosen, rest])
        crossing = Crossing(skeleton, values, mode, "grad", returns_captured=True)
        args, kwargs = crossing.tree
        out = f(*args, **kwargs)
        value, aux = _two(out) if has_aux else (out, None)
        found = crossing.collect(aux)
        value = value.get_value() if isinstance(value, Variable) else value
        return value, (
            found.returned,
            found.changed,
            found.structure.values(),
            found.out.values(),
        )

    return traced


def _two(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            "With has_aux=True the function must return a pair (value, aux), got "
            f"{type(out).__name__}."
        )
    return out


class _Selection:
    """Which leaves of a call are differentiated, and how gradients are put together."""

    def __init__(
        self, packed: Packed, args: tuple[Any, ...], targets: dict[int, Any]
    ) -> None:
        self.packed = packed
        self.argnums = [_positive(number, len(args)) for number in targets]
        chosen = dict(zip(self.argnums, targets.values(), strict=True))
        self.spans = _spans(packed.skeleton)
        if packing.has_sharing(packed.skeleton):
            aliasing.check_consistent("grad", _occurrences(args, chosen))
        self.roles = self._roles(chosen)

    def _roles(self, chosen: dict[int, Any]) -> list[int]:
        """1 for each leaf that is differentiated, 0 for the others."""
        roles: list[int] = []
        for number, (_, entries) in enumerate(self.spans):
            for entry in entries:
                if entry is None or _is_bare(entry):
                    count = 1 if entry is None else entry.num_leaves
                    roles += [int(number in chosen)] * count
                    continue
                start = len(roles)
                for i, path in enumerate(entry.paths()):
                    leaf = self.packed.leaves[start + i]
                    roles.append(int(_is_chosen(chosen, number, path, leaf)))
        return roles + [0] * (len(self.packed.leaves) - len(roles))

    def assemble(self, gradients: Values, mode: Propagation) -> tuple[Any, ...]:
        """The gradient of each differentiated argument, in the order of ``argnums``."""
        values: list[Any] = [None] * len(self.packed.leaves)
        for position, value in zip(
            gradients.positions or (), gradients.values, strict=True
        ):
            values[position] = value
        builder = flattening.Builder(IndexMap(), {})
        found: dict[int, Any] = {}
        position = 0
        for number, (treedef, entries) in enumerate(self.spans):
            built = []
            for entry in entries:
                count = 1 if entry is None else entry.num_leaves
                part = slice(position, position + count)
                position += count
                if number not in self.argnums:
                    continue
                if entry is None:
                    built.append(values[part][0])
                elif mode.structure:
                    built.append(_as_state(entry, values[part], self.roles[part]))
                else:
                    built.append(builder.build(entry, values[part]))
            if number in self.argnums:
                found[number] = jax.tree.unflatten(treedef, built)
        builder.commit()
        return tuple(found[number] for number in self.argnums)


def _positive(number: int, count: int) -> int:
    if not -count <= number < count:
        raise ValueError(
            f"argnums contains {number}, but there are {count} positional arguments."
        )
    return number % count


def _spans(skeleton: Skeleton) -> list[tuple[Any, list[GraphDef[Any] | None]]]:
    """The treedef and the entries of each positional argument."""
    entries = iter(skeleton.entries)
    treedefs = skeleton.treedef.children()[0].children()
    return [
        (treedef, [next(entries) for _ in range(treedef.num_leaves)])
        for treedef in treedefs
    ]


def _occurrences(args: Any, chosen: dict[int, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Each Variable in the arguments, and whether it is differentiated there."""
    flat, _ = jax.tree_util.tree_flatten_with_path(args, is_leaf=nodes.is_graph_node)
    for jax_path, x in flat:
        if nodes.is_graph_node(x):
            start = paths.from_jax(jax_path)
            for inner, leaf in packing.leaves_of(x):
                yield start + inner, leaf, _is_chosen(chosen, start[0], inner, leaf)


def _is_bare(entry: GraphDef[Any]) -> bool:
    """Whether the object is a Variable or ref itself, for which filters don't count."""
    return isinstance(entry.nodes[0], (VariableDef, ArrayRefDef))


def _is_chosen(chosen: dict[int, Any], number: int, path: Any, leaf: Any) -> bool:
    if number not in chosen:
        return False
    predicate = chosen[number]
    return predicate is None or path == () or predicate(path, leaf)


def _as_state(
    entry: GraphDef[Any], gradients: Sequence[Any], roles: Sequence[int]
) -> Any:
    """The State of one object: its differentiated leaves hold gradients."""
    pairs = []
    for (path, definition), value, role in zip(
        entry.leaves(), gradients, roles, strict=True
    ):
        if role:
            if isinstance(definition, VariableDef):
                value = flattening.make_variable(definition, value)
            pairs.append((path, value))
    if len(pairs) == 1 and pairs[0][0] == ():
        return pairs[0][1]
    return states.from_flat_state(pairs)
