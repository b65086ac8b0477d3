"""``cond`` and ``switch``: the data decide which of several functions runs.

The branches share the operands as values of the trace around them. Each makes objects
of its own from these, and returns the values of all their Variables, so that branches
may write different ones. What is static must come out of every branch alike. JAX would
say so in terms of what is inside here; `_Branches` says it first, in the user's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from graftree.core.graph.graphdefs import ArrayRefDef, GraphDef, NodeDef, VariableDef
from graftree.transforms.crossing import decorators, propagation, traced_once
from graftree.transforms.crossing.alias_reports import Labels
from graftree.transforms.crossing.lifting import Call, Inside, Row
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.propagation import Propagation
from graftree.transforms.crossing.signatures import Skeleton, Skeletons

R = TypeVar("R")


def cond(
    pred: Any,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Calls one of two functions, as a scalar says, with ``jax.lax.cond``.

    The functions may write different Variables of the operands. They are traced again
    only if something that they name from outside may have changed.

    Args:
        pred: Which function: a boolean or a number.
        true_fun: Called if ``pred`` is true, with the operands.
        false_fun: Called otherwise.
        *operands: Any arguments, with objects in them.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The output of the function.

    Raises:
        TypeError: If the outputs of the functions, or what they make of the operands,
            differ in structure, shapes or dtypes.
        ValueError: For aliases that the mode doesn't allow.

    Example:
        >>> count = nnx.Variable(jnp.array(0))
        >>> def up(count): count[...] += 1
        >>> def down(count): count[...] -= 1
        >>> nnx.cond(jnp.array(True), up, down, count)
        >>> int(count[...])
        1
    """
    mode = propagation.resolve(graph, graph_updates)
    return _choose("cond", mode, pred, (true_fun, false_fun), operands)


def switch(
    index: Any,
    branches: Sequence[Callable[..., R]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Calls one of many functions, by its number, with ``jax.lax.switch``.

    Args:
        index: Which function, an integer; too small a number means the first, too large
            a one the last.
        branches: The functions; see `cond`.
        *operands: Any arguments, with objects in them.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        The output of the function.

    Raises:
        TypeError: See `cond`.
        ValueError: If there are no branches, or for aliases that the mode doesn't
            allow.

    Example:
        >>> scale = nnx.Variable(jnp.array(2.0))
        >>> branches = [lambda v: v * 1, lambda v: v * 10, lambda v: v * 100]
        >>> float(nnx.switch(1, branches, scale))
        20.0
    """
    mode = propagation.resolve(graph, graph_updates)
    return _choose("switch", mode, index, tuple(branches), operands)


_JAX: dict[str, Callable[..., Any]] = {
    "cond": lambda pred, branches: jax.lax.cond(pred, *branches),
    "switch": jax.lax.switch,
}


def _choose(
    name: str,
    mode: Propagation,
    index: Any,
    functions: tuple[Callable[..., Any], ...],
    operands: tuple[Any, ...],
) -> Any:
    if not functions:
        raise ValueError(f"Empty branch sequence: nnx.{name} needs a function.")
    call = Call(functions[0], _row(name, mode), operands, {})
    select = _selections.get(functions, call.packed.skeleton, mode, name)
    return call.commit(select(index, *call.groups))


def _row(name: str, mode: Propagation) -> Row:
    return Row.uniform(
        name,
        mode,
        labels=Labels("operands"),
        keeps_keywords=True,
        returns_captured=True,
        skeletons=_skeletons,
    )


_skeletons = Skeletons()


def _selection(*given: Any) -> Callable[..., Any]:
    *getters, mode, name = given

    def select(index: Any, *groups: Values) -> Any:
        functions = [getter() for getter in getters]
        return _Branches(_row(name, mode), functions, groups).choose(index)

    return select


_selections = traced_once.PerFunction(_selection)


def branch_of(f: Callable[..., Any], graph: bool) -> Callable[..., Any]:
    """What is remembered of a function; the same for the same function and mode."""
    nothing = Skeleton(jax.tree.structure(()), ())
    return _selections.get((f,), nothing, propagation.resolve(graph, False), "cond")


class _Branches:
    """The branches of one call while they are traced.

    Args:
        row: The transform.
        functions: One for each branch.
        groups: The operands.
    """

    def __init__(
        self,
        row: Row,
        functions: Sequence[Callable[..., Any]],
        groups: Sequence[Values],
    ) -> None:
        self.row = row
        self.functions = functions
        self.leaves, self.treedef = jax.tree.flatten(groups)
        self.written: set[int] = set()
        self.keeps_structure = True
        # Without the values, which would outlive the trace of their branch.
        self.first: tuple[str, Any] | None = None

    def choose(self, index: Any) -> Any:
        """The result of the branch with this number."""
        # JAX traces a function once, also if it is that of several branches.
        wrappers: dict[int, Callable[[], Any]] = {}
        for number, f in enumerate(self.functions):
            wrappers.setdefault(id(f), self._wrap(number, f))
        branches = [wrappers[id(f)] for f in self.functions]
        result = _JAX[self.row.name](index, branches)
        kept = set(result[0].returned.changed) - self.written
        return _with_kept(result, kept, self.keeps_structure)

    def _wrap(self, number: int, f: Callable[..., Any]) -> Callable[[], Any]:
        def branch() -> Any:
            # Containers are new for each branch: it may write into them.
            groups = jax.tree.unflatten(self.treedef, self.leaves)
            inside = Inside(self.row, groups)
            result = inside.leave(inside.run(f), _all_in_objects(inside.skeleton))
            returned = result[0].returned
            self.written |= set(returned.changed) - set(returned.kept)
            self.keeps_structure &= returned.keeps_structure
            result = _with_kept(result, set(), False)
            self._compare(self._name_of(number), result, inside.skeleton)
            return result

        return decorators.named_after(f, branch)

    def _name_of(self, number: int) -> str:
        if self.row.name == "cond":
            return ("true_fun", "false_fun")[number]
        return f"branches[{number}]"

    def _compare(self, name: str, result: Any, operands: Skeleton) -> None:
        result = jax.tree.map(lambda _: 0, result)
        if self.first is None:
            self.first = name, result
            return
        first_name, first = self.first
        lines = _differences((first_name, name), (first, result), operands.names())
        if lines:
            listed = "\n".join(f"  - {line}" for line in lines[:_MAX_LINES])
            raise TypeError(
                f"The branches of nnx.{self.row.name} must return the same structure "
                "and do the same to that of the operands, but "
                f"{first_name} and {name} differ:\n{listed}"
            )


def _all_in_objects(skeleton: Skeleton) -> frozenset[int]:
    """The positions of all leaves that belong to objects."""
    pairs = zip(skeleton.definitions(), skeleton.inner_paths(), strict=True)
    return frozenset(
        i for i, (definition, path) in enumerate(pairs) if definition or path
    )


def _with_kept(result: Any, kept: set[int], keeps_structure: bool) -> Any:
    """The result with another note of what came back without a change."""
    places, *groups = result
    returned = dataclasses.replace(
        places.returned, kept=tuple(sorted(kept)), keeps_structure=keeps_structure
    )
    return dataclasses.replace(places, returned=returned), *groups


_MAX_LINES = 8


def _differences(
    names: tuple[str, str], results: tuple[Any, Any], operands: list[str]
) -> list[str]:
    """How two results of `Inside.leave` differ in structure, in words."""
    first, second = (result[0].returned for result in results)
    if jax.tree.structure(results[0]) == jax.tree.structure(results[1]):
        return []
    metadata = [dict(first.metadata), dict(second.metadata)]
    lines = [
        f"the metadata of {operands[position]}"
        for position in sorted({*metadata[0], *metadata[1]})
        if metadata[0].get(position) != metadata[1].get(position)
    ]
    lines += [
        f"the structure of the value of {operands[position]}"
        for position, one, other in _changed_by_both(results)
        if jax.tree.structure(one) != jax.tree.structure(other)
    ]
    if first.structure != second.structure and first.metadata == second.metadata:
        lines.append("which attributes of the operands they add, remove or replace")
    if first.out != second.out:
        lines += _output_differences(names, first.out, second.out)
    elif not lines:
        lines.append("the structure of the value of a Variable in the output")
    return lines


def _changes(result: Any) -> Iterator[tuple[int, Any]]:
    """The positions and values of the Variables in a result of `Inside.leave`."""
    places, (changes,), *_ = result
    return zip(places.returned.changed, changes, strict=True)


def _changed_by_both(results: tuple[Any, Any]) -> list[tuple[int, Any, Any]]:
    """The positions of Variables that both results have, and the two values."""
    one, other = (dict(_changes(result)) for result in results)
    return [(i, one[i], other[i]) for i in sorted(one.keys() & other)]


def _output_differences(
    names: tuple[str, str], first: Skeleton, second: Skeleton
) -> list[str]:
    kinds = [_kinds(first), _kinds(second)]
    lines = [
        f"out{path}: {kinds[0].get(path, 'nothing')} in {names[0]}, "
        f"{kinds[1].get(path, 'nothing')} in {names[1]}"
        for path in {**kinds[0], **kinds[1]}
        if kinds[0].get(path) != kinds[1].get(path)
    ]
    return lines or [
        "the attributes or metadata of objects in the output, or which are operands"
        if first.treedef == second.treedef
        else "the types of containers in the output"
    ]


def _kinds(out: Skeleton) -> dict[str, str]:
    """What is where in an output."""
    places = jax.tree.unflatten(out.treedef, range(len(out.entries)))
    flat, _ = jax.tree_util.tree_flatten_with_path(places)
    return {
        jax.tree_util.keystr(path): _kind(entry)
        for (path, _), entry in zip(flat, out.entries, strict=True)
    }


def _kind(entry: GraphDef[Any] | None) -> str:
    if entry is None:
        return "an array"
    root = entry.nodes[0]
    if isinstance(root, (NodeDef, VariableDef)):
        return root.type.__name__
    return "a ref" if isinstance(root, ArrayRefDef) else "a known object"
