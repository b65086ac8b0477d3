"""Prefixes: axes, shardings, roles or filters for the leaves of objects.

A prefix tree has one value per object, or a `PrefixMapping`: different values for the
leaves of that object, by filters (`DiffState`, `StateAxes`, `StateSharding`) or by
paths (`TreeState`). `prefix` makes prefix trees; `check` checks their values. A
`Prefix` finds the group of each leaf of the arguments or of the output; `Donation`
makes two groups of one.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core import filters, paths
from graftree.core.graph import flattening, nodes
from graftree.core.graph.graphdefs import LEAF, GraphDef
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, states
from graftree.core.text import descriptions
from graftree.core.variables import variables
from graftree.transforms.lifting import argument_errors
from graftree.transforms.lifting.decorators import Chosen
from graftree.transforms.lifting.signatures import Signature


class PrefixMapping(abc.ABC):
    """A prefix that assigns different values to different leaves of one object.

    Example:
        >>> isinstance(nnx.DiffState(0, nnx.Param), nnx.extract.PrefixMapping)
        True
    """

    mode: ClassVar[Propagation] = config.GRAPH_UPDATES

    @abc.abstractmethod
    def map_prefix(self, path: Any, variable: Any) -> Any:
        """Finds the value for the leaf at ``path`` inside the object."""

    def values_of(self) -> tuple[Any, ...]:
        """Lists the values that it assigns."""
        return ()

    def reads_leaves(self) -> bool:
        """Whether a value may depend on more than the path and the class of a leaf."""
        return True

    def refusal(self, argument: str) -> str:
        """Explains that another mode is in force than that of the prefix."""
        return (
            f"`{argument}` cannot contain `{type(self).__name__}` objects without "
            "graph=True and graph_updates=True (there, nnx.prefix makes a prefix)"
        )


@dataclasses.dataclass(frozen=True)
class DiffState(PrefixMapping):
    """Selects the leaves to differentiate in one argument.

    Args:
        argnum: The position of the argument.
        filter: Which leaves of the objects there to differentiate.

    Example:
        >>> bias = nnx.DiffState(0, nnx.PathContains("bias"))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> loss = lambda model: jnp.sum(model(jnp.ones((1, 2))))
        >>> list(nnx.grad(loss, argnums=bias)(model))
        ['bias']
    """

    argnum: int
    filter: Any

    def map_prefix(self, path: Any, variable: Any) -> bool:
        """Whether the leaf is differentiated; one outside of objects is."""
        return not path or filters.to_predicate(self.filter)(path, variable)

    def values_of(self) -> tuple[Any, ...]:
        """Differentiated or not."""
        return (True, False)

    def reads_leaves(self) -> bool:
        """Whether its filter does."""
        return _reads_leaves(filters.to_predicate(self.filter))


def _reads_leaves(predicate: Any) -> bool:
    """Whether a filter may look at more than the path and the class of a Variable."""
    kind = type(predicate)
    if kind in (filters.Any, filters.All):
        return any(map(_reads_leaves, predicate.predicates))
    if kind is filters.Not:
        return _reads_leaves(predicate.predicate)
    if kind is filters.OfType:
        matched_type: Any = predicate.type
        classes = matched_type if isinstance(matched_type, tuple) else (matched_type,)
        # An array may be replaced by one of another class each time.
        return not all([issubclass(x, variables.Variable) for x in classes])
    return kind not in _BY_PATH


_BY_PATH = (
    *(filters.Everything, filters.Nothing),
    *(filters.PathContains, filters.PathIn),
)


_Assigned = states.State | Mapping[Any, Any] | Iterable[Any]


@dataclasses.dataclass(init=False, repr=False, frozen=True)
class _FilterMapping(PrefixMapping):
    """A mapping from filters to prefix values; the first filter that matches counts."""

    _filters: tuple[Any, ...]
    _values: tuple[Any, ...]
    _predicates: tuple[Any, ...] = dataclasses.field(compare=False)

    def __init__(self, mapping: _Assigned) -> None:
        if isinstance(mapping, states.State):
            mapping = flat_states.create_path_filters(mapping)
        pairs = list(mapping.items() if isinstance(mapping, Mapping) else mapping)
        chosen = tuple(filter_ for filter_, _ in pairs)
        predicates = tuple(map(filters.to_predicate, chosen))
        values = tuple(value for _, value in pairs)
        vars(self).update(_filters=chosen, _values=values, _predicates=predicates)

    @property
    def filters(self) -> tuple[Any, ...]:
        """Filters, in order."""
        return self._filters

    def values_of(self) -> tuple[Any, ...]:
        """Prefix values, in the order of the filters."""
        return self._values

    def reads_leaves(self) -> bool:
        """Whether one of its filters does."""
        return any(map(_reads_leaves, self._predicates))

    def map_prefix(self, path: Any, variable: Any) -> Any:
        """Finds the value of the first filter that matches the leaf."""
        for matches, value in zip(self._predicates, self._values, strict=True):
            if matches(path, variable):
                return value
        raise ValueError(
            f"No axis found for the {type(variable).__name__} at "
            f"{paths.to_string(path, '<root>')!r} in {self!r}.\n"
            "Add `...: value` as the last entry to match all that remains."
        )

    def __repr__(self) -> str:
        entries = zip(self._filters, self._values, strict=True)
        body = ", ".join(f"{filter_!r}: {value!r}" for filter_, value in entries)
        return f"{type(self).__name__}({{{body}}})"


class StateAxes(_FilterMapping, Mapping[Any, Any]):
    """Assigns an axis to each leaf of an object, by filters.

    Args:
        filter_axes: A mapping or pairs ``filter -> axis`` (an integer, ``None``, or
            `Carry` in a scan), or a State of axes.

    Example:
        >>> axes = nnx.StateAxes({nnx.Param: 0, ...: None})
        >>> axes[nnx.Param]
        0
    """

    def __init__(self, filter_axes: _Assigned, /) -> None:
        super().__init__(filter_axes)

    @property
    def axes(self) -> tuple[Any, ...]:
        """Axes, in the order of the filters."""
        return self._values

    def __getitem__(self, key: Any) -> Any:
        for filter_, value in zip(self._filters, self._values, strict=True):
            if filter_ == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)


class StateSharding(_FilterMapping):
    """Assigns a sharding to each leaf of an object, by filters.

    Args:
        filter_sharding: A mapping or pairs ``filter -> sharding``, or a State of
            shardings.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> shardings = nnx.StateSharding({nnx.OfType(nnx.Param): P("x"), ...: P()})
        >>> shardings.shardings == (P("x"), P())
        True
    """

    def __init__(self, filter_sharding: _Assigned, /) -> None:
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Shardings, in the order of the filters."""
        return self._values


def check(tree: Any, argument: str, transform: str, mode: Propagation) -> list[Any]:
    """Lists the leaves of a prefix tree."""
    # Trees may have a prefix of their own form, with objects.
    kinds = (PrefixMapping, variables.Variable, *([Pytree] if mode.sharing else []))
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or isinstance(x, kinds)
    )
    for path, leaf in flat:
        kind, path = type(leaf).__name__, argument + paths.keystr(path)
        if isinstance(leaf, variables.Variable):
            raise ValueError(
                f"Variables prefixes are not supported: found a {kind} at {path} of "
                f"nnx.{transform}. Give one prefix for the whole Variable."
            )
        if mode.sharing and isinstance(leaf, Pytree):
            raise node_error(leaf, path, transform)
        if isinstance(leaf, PrefixMapping) and leaf.mode != mode:
            raise ValueError(
                f"{leaf.refusal(argument)}: found one at {path} of nnx.{transform}."
            )
    return [leaf for _, leaf in flat]


def node_error(node: Any, path: str, transform: str) -> ValueError:
    """Makes the error for an object where a prefix should be."""
    when = " when graph=True"
    ways_out = "Give one prefix for the whole object, or make one with nnx.prefix."
    if path.startswith("argnums"):
        when = ""
        ways_out = "Give the number of an argument, or nnx.DiffState(number, filter)."
    return ValueError(
        f"Graph nodes are not allowed as prefixes{when}: found a "
        f"{type(node).__name__} at {path} of nnx.{transform}. {ways_out}"
    )


Value = Callable[[Any, Any], Any]


def prefix(
    node: Any,
    filter_map: Mapping[Any, Any] | Callable[[Any, Any], Any],
    /,
    *,
    graph: bool | None = None,
) -> Any:
    """Makes a prefix of axes, shardings or specs for objects, by filters.

    Use it for ``in_axes``, ``out_axes``, ``in_shardings``, ``in_specs`` and so on
    without graph updates. With them, use `StateAxes` and `StateSharding`.

    Args:
        node: An object or a pytree of them; ``jax.ShapeDtypeStruct`` may stand for
            arrays. For several arguments of a call, give a tuple of all of them.
        filter_map: A mapping from filters to values, where the first match counts; or a
            function of path and leaf that returns the value. Paths start at ``node``.
        graph: Whether the prefix is for graph mode or for tree mode; ``None`` takes the
            mode in force.

    Returns:
        ``node`` with a value instead of each Variable and each other leaf; in graph
        mode with a `TreeState` instead of each object.

    Raises:
        ValueError: If no filter matches a leaf; in tree mode, if a Variable occurs
            twice; in graph mode, if a Variable gets different values in its places.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> by_name = {nnx.PathContains("bias"): None, ...: 0}
        >>> axes = nnx.prefix(model, by_name, graph=False)
        >>> axes.kernel, axes.bias
        (0, None)
    """
    value = _by_filters(filter_map) if isinstance(filter_map, Mapping) else filter_map
    make = _graph_prefix if config.graph_mode(graph) else _tree_prefix
    return make(node, value)


class TreeState(PrefixMapping):
    """Prefix of one object, by the paths of its leaves; made by `prefix`.

    It is a pytree of the values.

    Args:
        graphdef: The skeleton of the object.
        values: The values of its leaves, in order.

    Attributes:
        graphdef: As given.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> axes = nnx.prefix(model, {nnx.Param: 0}, graph=True)
        >>> isinstance(axes, nnx.extract.TreeState), jax.tree.leaves(axes)
        (True, [0, 0])
    """

    mode = config.GRAPH

    def __init__(self, graphdef: GraphDef[Any], values: Iterable[Any]) -> None:
        self.graphdef = graphdef
        self._values = dict(zip(graphdef.paths(), values, strict=True))

    @property
    def state(self) -> states.State[Any, Any]:
        """Values by path, as a new State."""
        return states.from_flat_state(self._values.items())

    def map_prefix(self, path: Any, variable: Any) -> Any:
        """Finds the value for the leaf at ``path``.

        Raises:
            ValueError: If there was none when the prefix was made.
        """
        if path not in self._values:
            raise ValueError(
                f"There is no prefix for the {type(variable).__name__} at {path!r}: "
                "nnx.prefix was given an object without it."
            )
        return self._values[path]

    def values_of(self) -> tuple[Any, ...]:
        """Prefix values."""
        return tuple(self._values.values())

    def reads_leaves(self) -> bool:
        """No: it goes by their paths."""
        return False

    def refusal(self, argument: str) -> str:
        """Explains that another mode is in force."""
        return (
            "`TreeState` objects are only allowed as prefixes "
            "when graph=True and graph_updates=False"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeState) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"TreeState({self._values!r})"


jax.tree_util.register_pytree_node(
    TreeState, lambda tree: (tree.values_of(), tree.graphdef), TreeState
)


def _by_filters(filter_map: Mapping[Any, Any]) -> Value:
    predicates = [(filters.to_predicate(f), value) for f, value in filter_map.items()]

    def value_of(path: Any, leaf: Any) -> Any:
        for matches, value in predicates:
            if matches(path, leaf):
                return value
        raise ValueError(
            f"No filter matched leaf at path {path!r} with value "
            f"{descriptions.safe_repr(leaf)}. "
            f"Filters: {list(filter_map)}.\n"
            "Add `...` as the last one to match the rest."
        )

    return value_of


def _tree_prefix(node: Any, value_of: Value) -> Any:
    flat, treedef = nodes.flatten_with_paths(node, "prefix")
    nodes.check_tree(flat, "prefix")
    return treedef.unflatten(
        [value_of(paths.from_jax(path), leaf) for path, leaf in flat]
    )


def _graph_prefix(node: Any, value_of: Value) -> Any:
    occurrences: list[tuple[Any, Any, Any]] = []

    def of_object(path: Any, x: Any) -> TreeState:
        graphdef, leaves = flattening.flatten_graph(x)
        located = [path + end for end in graphdef.paths()]
        values = [*map(value_of, located, leaves)]
        occurrences.extend(zip(located, leaves, values, strict=True))
        return TreeState(graphdef, values)

    is_leaf = nodes.is_graph_node
    flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_leaf)
    located = [(paths.from_jax(path), x) for path, x in flat]
    values = treedef.unflatten(
        [of_object(path, x) if is_leaf(x) else value_of(path, x) for path, x in located]
    )
    argument_errors.check_consistent(
        "prefix", [x for x in occurrences if nodes.is_variable_or_ref(x[1])]
    )
    return values


# The group that each leaf gets by a prefix.

# A Variable where it occurs, or a ref: its path, itself, its prefix.
Occurrence = tuple[Any, Any, Any]

_NO_CALL: Any = object()


class Prefix:
    """A prefix tree of arguments or outputs, and the group that each leaf gets by it.

    Each object counts as one leaf, for which a `PrefixMapping` may assign different
    values to its leaves. With ``keywords``, the tree is that of the positional
    arguments and this that of the keyword arguments. If it ``binds``, a Variable that
    occurs twice needs the same value there.

    Attributes:
        values: JAX's value for each group.
        donated: The numbers of the groups whose buffers are donated.
        distinct: The values that must agree where a Variable occurs twice.
        count: The least number of positional arguments that it is for.
        reads_leaves: Whether a filter in it looks at the leaves, at more than their
            paths and classes.
    """

    def __init__(
        self,
        tree: Any,
        argument: str,
        transform: str,
        mode: Propagation,
        *,
        keywords: Any = _NO_CALL,
        donation: Donation | None = None,
        binds: bool = True,
    ) -> None:
        self._argument, self._transform = argument, transform
        leaves = check(tree, argument, transform, mode)
        self._is_of_call = keywords is not _NO_CALL
        if self._is_of_call and isinstance(tree, list):
            tree = tuple(tree)
        self.tree: Any = (tree, keywords) if self._is_of_call else tree
        self.count = len(tree) if isinstance(tree, tuple) else 0
        values = [keywords] if self._is_of_call else []
        for leaf in leaves:
            values += leaf.values_of() if isinstance(leaf, PrefixMapping) else [leaf]
        self._binds = binds
        # One value for everything; any other prefix may not fit.
        mappings = [leaf for leaf in leaves if isinstance(leaf, PrefixMapping)]
        is_alone = jax.tree_util.all_leaves([tree], is_leaf=_is_value)
        self._is_alone = is_alone and not mappings
        self._has_mappings = bool(mappings)
        self.reads_leaves = any([leaf.reads_leaves() for leaf in mappings])
        self._donation = donation if donation is not None and donation.chosen else None
        self._take(self._distinct(values))

    def _take(self, distinct: tuple[Any, ...]) -> None:
        """Sets the distinct values."""
        self._numbers = {value: number for number, value in enumerate(distinct)}
        self._is_uniform = len(distinct) == 1 and self._is_alone
        self.distinct = distinct if self._binds else ()
        self.values, self.donated = distinct, frozenset[int]()
        if self._donation is not None:
            self.values = tuple(value for value in distinct for _ in range(2))
            self.donated = frozenset(range(1, len(self.values), 2))

    def holding(self, value: Any) -> Prefix:
        """Adds this value for what the functions hold."""
        if not self._is_of_call:
            return self
        extended = copy.copy(self)
        extended.tree = (*self.tree, value)
        extended._take(self._distinct([*self._numbers, value]))
        return extended

    def _distinct(self, values: list[Any]) -> tuple[Any, ...]:
        # An axis of NumPy's is one, here and for JAX.
        values = [int(x) if isinstance(x, np.integer) else x for x in values]
        try:
            return tuple(dict.fromkeys(values)) or (None,)
        except TypeError as error:
            raise ValueError(
                f"Prefixes must be hashable, in `{self._argument}` of "
                f"nnx.{self._transform}: {error}."
            ) from error

    def group(self, signature: Signature, leaves: Sequence[Any]) -> list[int]:
        """Finds the number of the group of each leaf of a signature."""
        if self._is_uniform:
            numbers = [0] * len(leaves)
        else:
            values = self._match(signature.treedef, signature)
            numbers = [
                self._numbers[_resolve(values[leaf_spec.entry], leaf_spec.path, leaf)]
                for leaf_spec, leaf in zip(signature.leaf_specs, leaves, strict=True)
            ]
        if self._donation is None:
            return numbers
        flags = self._donation.flags(signature, leaves)
        return [2 * number + flag for number, flag in zip(numbers, flags, strict=True)]

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[Occurrence]:
        """Lists the Variables in a tree, each wherever it occurs; none if unbound."""
        if not self._binds:
            return
        is_leaf = nodes.is_graph_node if sharing else nodes.is_variable_or_ref
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        values = self._match(treedef)
        for (jax_path, x), value in zip(flat, values, strict=True):
            if is_leaf(x):
                start = paths.from_jax(jax_path)
                graphdef, leaves = flattening.flatten_graph(x)
                for inner, leaf in zip(graphdef.paths(), leaves, strict=True):
                    if nodes.is_variable_or_ref(leaf):
                        yield start + inner, leaf, _resolve(value, inner, leaf)

    def _match(self, treedef: Any, signature: Signature | None = None) -> list[Any]:
        """Finds the value for each leaf of a treedef; checks that it may be there."""
        values, structure = jax.tree.flatten(self.tree, is_leaf=_is_value)
        try:
            # The value is right there, or that of a container.
            matched = [
                (value, subtree.node_data() is None)
                for value, subtree in zip(
                    values, _subtrees(structure, treedef), strict=True
                )
                for _ in range(subtree.num_leaves)
            ]
        except ValueError as error:
            raise ValueError(
                f"`{self._argument}` of nnx.{self._transform} must be a tree prefix of "
                "what it applies to, where an object counts as one leaf.\n"
                + self._misfit(treedef, error)
            ) from None
        if signature is not None and self._has_mappings:
            for (value, is_whole), entry in zip(
                matched, signature.entries, strict=True
            ):
                self._check_place(value, is_whole, entry is not LEAF)
        return [value for value, _ in matched]

    def _misfit(self, treedef: Any, error: ValueError) -> str:
        """Says where the prefix does not fit."""
        try:
            full = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        except Exception:  # of a user's class that accepts only arrays
            return str(error)
        # Keywords have one value, which fits all of them.
        pair = (self.tree[0], full[0]) if self._is_of_call else (self.tree, full)
        return _jax.prefix_error(*pair, _is_value, self._argument)

    def _check_place(self, value: Any, is_whole: bool, is_object: bool) -> None:
        """Filters and paths start at an object, so they need one.

        A DiffState is for a whole argument, and filters each object in it.
        """
        if not isinstance(value, PrefixMapping) or isinstance(value, DiffState):
            return
        if not (is_whole and is_object):
            raise ValueError(
                f"A `{type(value).__name__}` must be the prefix of one object, but "
                f"`{self._argument}` of nnx.{self._transform} has one for "
                f"{'an array' if is_whole else 'a container'}: {value!r}\n"
                "Give each object such a prefix, and each array a plain value."
            )


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, PrefixMapping)


def _resolve(value: Any, path: Any, leaf: Any) -> Any:
    return value.map_prefix(path, leaf) if isinstance(value, PrefixMapping) else value


@dataclasses.dataclass(frozen=True)
class Donation:
    """Chooses the leaves of a call that are donated.

    Attributes:
        chosen: The donated arguments.
        keeps_arrays: Whether arrays in attributes are kept, as with graph updates.
    """

    chosen: Chosen
    keeps_arrays: bool

    def flags(self, signature: Signature, leaves: Sequence[Any]) -> list[bool]:
        """For each leaf, whether it is donated."""
        donated = self._entries(signature)
        return [
            donated[leaf_spec.entry] and self._can_donate(leaf, leaf_spec.path)
            for leaf_spec, leaf in zip(signature.leaf_specs, leaves, strict=True)
        ]

    def _entries(self, signature: Signature) -> list[bool]:
        """For each entry, whether its argument is donated."""
        args, kwargs, *functions = signature.treedef.children()
        statics = [
            position for position, _ in signature.statics if isinstance(position, int)
        ]
        total = len(args.children()) + len(statics)
        donated = {*self.chosen.positions(total), *self.chosen.argnames}
        treedefs = [*args.children(), *kwargs.children()]
        flags = [
            position in donated
            for position, treedef in zip(signature.positions(), treedefs, strict=True)
            for _ in range(treedef.num_leaves)
        ]
        # What a function holds is not given away.
        return flags + [False] * sum([treedef.num_leaves for treedef in functions])

    def _can_donate(self, leaf: Any, path: Any) -> bool:
        # A Variable gets a new buffer afterwards, if it may be written. An array
        # attribute doesn't: with graph updates it is kept. A ref keeps its own.
        if _jax.is_ref(flattening.raw_of(leaf)):
            return False
        if isinstance(leaf, variables.Variable):
            # A trace around the call may go on with the old buffer, or fail later.
            return not _jax.is_tracing() and variables.is_owned(leaf)
        return path == () or not self.keeps_arrays


def _subtrees(prefix: Any, treedef: Any) -> Iterator[Any]:
    """The treedefs at the leaves of a prefix; makes no objects of users' classes."""
    if prefix.node_data() is None:
        yield treedef
        return
    children, subtrees = prefix.children(), treedef.children()
    if prefix.node_data() != treedef.node_data() or len(children) != len(subtrees):
        raise ValueError(f"{prefix} is not a prefix of {treedef}")
    for child, subtree in zip(children, subtrees, strict=True):
        yield from _subtrees(child, subtree)
