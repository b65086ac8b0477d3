"""``cond`` and ``switch``: the data decide which of several functions runs.

The branches share the operands as values of the enclosing trace. Each rebuilds its own
objects from these, and returns the values of all their Variables, so that branches may
write different ones. Static parts must be equal after every branch. JAX would report a
difference in terms of our internals; `_Branches` reports it first, in the user's terms.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from graftree import _jax, config
from graftree.core.graph import differences, graphdefs
from graftree.transforms.lifting import caller, debug_info, programs, signatures
from graftree.transforms.lifting.leaves import Leaves, Result, join
from graftree.transforms.lifting.specs import Keywords, TransformSpec
from graftree.transforms.lifting.traced import TracedCall

R = TypeVar("R")


def cond(
    pred: Any,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Calls one of two functions, chosen by a scalar, with ``jax.lax.cond``.

    The functions may write different Variables of the operands. Outside a compiled
    function they are traced on each call, and see captured values as they are then.

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
        TypeError: If the outputs of the functions, or the operands after them, differ
            in structure, shapes or dtypes.
        ValueError: For aliases that the mode doesn't allow.

    Example:
        >>> count = nnx.Variable(jnp.array(0))
        >>> def up(count): count[...] += 1
        >>> def down(count): count[...] -= 1
        >>> nnx.cond(jnp.array(True), up, down, count)
        >>> int(count[...])
        1
    """
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    with _jax.hidden_frames:
        return _choose("cond", "pred", pred, branches, operands, graph, graph_updates)


def switch(
    index: Any,
    branches: Sequence[Callable[..., R]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Calls one of many functions, by its index, with ``jax.lax.switch``.

    Args:
        index: Which function, an integer; one that is too small means the first,
            one that is too large the last.
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
    if not branches:
        raise ValueError("Empty branch sequence: nnx.switch needs a function.")
    named = {f"branches[{i}]": f for i, f in enumerate(branches)}
    with _jax.hidden_frames:
        return _choose("switch", "index", index, named, operands, graph, graph_updates)


def _choose(
    name: str,
    argument: str,
    index: Any,
    branches: dict[str, Callable[..., Any]],
    operands: tuple[Any, ...],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    """Calls the branch that ``index`` chooses, by JAX's function ``name``."""
    spec = TransformSpec.uniform(
        name,
        config.propagation(graph, graph_updates),
        labels=signatures.Labels("operands", output="out", functions=[*branches]),
        keywords=(Keywords.STAY, Keywords.STAY),
        returns_captured=True,
        signatures=_signatures,
    ).holding(*branches.values())

    def select(index: Any, *groups: Leaves) -> Any:
        return _Branches(spec, groups).choose(index, branches)

    functions = [*branches.values()]
    run = functools.partial(
        programs.run, functions[-1], select, name=name, leading=(argument,)
    )
    call = caller.Call(functions[0], spec, operands, {})
    (group,) = call.groups
    return call.commit(_without_unwritten(run(index, group), group.values))


_signatures = graphdefs.Interned()


def branch_of(f: Callable[..., Any], graph: bool) -> Callable[..., Any]:
    """Wraps a function; the wrapper is the same for the same function and mode."""
    try:
        wrappers_by_graph = _branches.setdefault(f, {})
    except TypeError:  # it takes no weak references
        return lambda *operands: f(*operands)
    if graph not in wrappers_by_graph:
        # The wrapper lives as long as the function, so it must not keep that alive.
        get: Any = weakref.ref(f)
        wrappers_by_graph[graph] = lambda *operands: get()(*operands)
    return wrappers_by_graph[graph]


_branches: weakref.WeakKeyDictionary[Any, dict[bool, Callable[..., Any]]]
_branches = weakref.WeakKeyDictionary()


class _Branches:
    """Traces the branches of one call, and compares what they return."""

    def __init__(self, spec: TransformSpec, groups: Sequence[Leaves]) -> None:
        self.spec = spec
        self.leaves, self.treedef = jax.tree.flatten(groups)
        self.written: set[int] = set()
        self.keeps_structure = True
        # Without the values, which would outlive the trace of their branch.
        self.first: tuple[str, Any] | None = None

    def choose(self, index: Any, functions: dict[str, Callable[..., Any]]) -> Any:
        """Runs JAX's conditional, and returns the chosen branch's result."""
        # JAX traces a function once, even if several branches share it.
        wrappers: dict[int, Callable[[], Any]] = {}
        branches = [
            wrappers.setdefault(id(f), self._wrap(name, f, position))
            for position, (name, f) in enumerate(functions.items())
        ]
        if self.spec.name == "cond":
            result: Any = jax.lax.cond(index, *branches)
        else:
            result = jax.lax.switch(index, branches)
        unwritten = sorted({*result.spec.changed} - self.written)
        return result.with_spec(
            kept=tuple(unwritten), keeps_structure=self.keeps_structure
        )

    def _wrap(self, name: str, f: Any, position: int) -> Callable[[], Any]:
        def branch() -> Any:
            # Containers are new for each branch: it may write into them.
            groups = jax.tree.unflatten(self.treedef, self.leaves)
            call = TracedCall(self.spec, *join(groups))
            leaf_specs = enumerate(call.signature.leaf_specs)
            in_objects = frozenset(
                i for i, leaf_spec in leaf_specs if not leaf_spec.is_plain
            )
            result = call.collect(call.run(f, position), forced=in_objects)
            returned = result.spec
            self.written |= set(returned.changed) - set(returned.kept)
            self.keeps_structure &= returned.keeps_structure
            result = result.with_spec(kept=(), keeps_structure=False)
            self._compare(name, result, call.signature)
            return result

        return debug_info.named_after(f, branch)

    def _compare(self, name: str, result: Any, operands: signatures.Signature) -> None:
        result = jax.tree.map(lambda _: 0, result)
        if self.first is None:
            self.first = name, result
            return
        first_name, first = self.first
        if jax.tree.structure(first) == jax.tree.structure(result):
            return
        lines = differences.in_words(
            differences.between(_facts(first, operands), _facts(result, operands)),
            f"in {first_name}",
            f"in {name}",
            signatures.name_of,
        )
        lines = lines or ["which operands are where"]
        bullets = "\n".join(f"  - {line}" for line in lines)
        raise TypeError(
            f"The branches of nnx.{self.spec.name} must return the same structure "
            "and change the structure of the operands in the same way, but "
            f"{first_name} and {name} differ:\n{bullets}"
        )


def _facts(result: Result, operands: signatures.Signature) -> dict[Any, Any]:
    """Lists the facts of a result about the operands and the output."""
    returned, (changes, _, out) = result.spec, result.parts()
    facts = (returned.structure or operands).facts(identity=False)
    names = operands.entry_names()
    for position, metadata in returned.metadata:
        leaf_spec = operands.leaf_specs[position]
        facts |= differences.metadata(
            (names[leaf_spec.entry], *leaf_spec.path), metadata
        )
    for position, value in zip(returned.changed, changes, strict=True):
        facts[operands.leaf_specs[position].name, "value"] = _form(value)
    facts |= returned.out.facts("out")
    names = returned.out.entry_names("out")
    new = [
        leaf_spec
        for leaf_spec in returned.out.leaf_specs
        if leaf_spec.outer_index is None
    ]
    for leaf_spec, value in zip(new, out, strict=True):
        if leaf_spec.variable:
            facts[(names[leaf_spec.entry], *leaf_spec.path, "value")] = _form(value)
    return facts


def _form(value: Any) -> differences.TreeForm:
    return differences.TreeForm(jax.tree.structure(value))


def _without_unwritten(result: Result, values: Sequence[Any]) -> Result:
    """Drops the arrays of Variables that no branch writes.

    Their values are unchanged; to write them would undo another thread's writes.
    """
    written = [
        index
        for index, position in enumerate(result.spec.changed)
        if position not in result.spec.kept
        or not all(isinstance(x, jax.Array) for x in jax.tree.leaves(values[position]))
    ]
    return result.with_changes(written)
