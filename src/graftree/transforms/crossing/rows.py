"""A transform as a row of a table: what goes in, what comes out, what else it does.

Row         the transform: its prefixes, and what it does with the rest
Prefix      which group each leaf of the arguments or of the output is in
Donation    which leaves are donated: two groups instead of one
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax
from graftree.config import Propagation
from graftree.core import paths
from graftree.core.graph import flattening, tree_checks
from graftree.core.graph.graphdefs import LEAF
from graftree.core.variables import variables
from graftree.core.variables.variables import Variable
from graftree.transforms.crossing import packing, prefixes
from graftree.transforms.crossing.arguments import Chosen
from graftree.transforms.crossing.prefixes import DiffState, PrefixMapping
from graftree.transforms.crossing.signatures import ARGS, Labels, Signature, Signatures
from graftree.transforms.crossing.traces.traces import Traces


class Keywords(enum.Enum):
    """What becomes of keyword arguments."""

    STAY = "stay"
    BECOME_POSITIONAL = "become positional"  # those have a prefix
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Row:
    """What is lifted, and how.

    Attributes:
        name: The public name of the transform.
        mode: What propagates.
        inputs: The prefix of ``(args, kwargs)``, without the static arguments.
        outputs: The prefix of the output.
        statics: Which arguments are static.
        keywords: What becomes of keyword arguments, without graph updates and with.
        axis_metadata: What is told to Variables whose axis the transform takes away
            inside: the ``transform_metadata`` of the public functions.
        maps_axis: Whether it is this transform that maps the axis, not one around it.
        returns_placed: Whether, with graph updates, Variables whose prefix is not
            ``None`` come back also if the function didn't change them.
        returns_captured: Whether, with graph updates, objects of an outer trace may be
            returned, as copies.
        is_detached: Whether nothing reaches the caller's objects, and the output is
            made of new ones.
        labels: What the positional arguments are called in messages.
        signatures: Those of earlier calls, if JAX keeps what it compiled for them.
        traces: Where traces are noted, if they are.
    """

    name: str
    mode: Propagation
    inputs: Prefix
    outputs: Prefix
    statics: Chosen = Chosen()
    keywords: tuple[Keywords, Keywords] = (Keywords.STAY, Keywords.BECOME_POSITIONAL)
    axis_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    maps_axis: bool = True
    returns_placed: bool = False
    returns_captured: bool = False
    is_detached: bool = False
    labels: Labels = ARGS
    signatures: Signatures | None = None
    traces: Traces | None = None

    @staticmethod
    def uniform(name: str, mode: Propagation, **options: Any) -> Row:
        """The row of a transform that treats all leaves alike."""
        both = Prefix(None, "args", name, mode)
        return Row(name, mode, both, both, **options)

    def occurrences(self, tree: Any) -> Iterator[Occurrence]:
        """The Variables in ``(args, kwargs)``, each wherever it occurs."""
        for path, leaf, prefix in self.inputs.occurrences(tree, self.mode.sharing):
            yield path[1:], leaf, prefix  # without the index of args or kwargs

    def may_differ(self, *signatures: Signature | None) -> bool:
        """Whether a Variable could occur twice in these, with different prefixes."""
        distinct = {*self.inputs.distinct, *self.outputs.distinct}
        return (
            self.mode.sharing
            and len(distinct) > 1
            and any([x is not None and x.has_references for x in signatures])
        )

    @property
    def has_prefixes(self) -> bool:
        """Whether JAX is told anything of the groups."""
        values = *self.inputs.values, *self.outputs.values
        return any(value is not None for value in values)

    @property
    def result_prefix(self) -> Any:
        """What JAX is told of a result of `inside.Inside.leave`."""
        if not self.has_prefixes:
            return None
        ins, outs = map(packing.part_of, (self.inputs.values, self.outputs.values))
        return packing.Parts((None, ins, ins, outs))

    @property
    def identity(self) -> Any:
        """The same object outside and inside of a call."""
        return self if self.signatures is None else self.signatures

    @property
    def keyword_rule(self) -> Keywords:
        """What becomes of keyword arguments in its mode."""
        return self.keywords[self.mode.structure]


# A Variable where it occurs, or a ref: its path, itself, its prefix.
Occurrence = tuple[Any, Any, Any]

_NO_CALL: Any = object()


class Prefix:
    """A prefix tree of arguments or outputs, and which group each leaf gets by it.

    Each object counts as one leaf, for which a `PrefixMapping` may assign different
    values to its leaves. With ``keywords``, the tree is that of the positional
    arguments and this that of the keyword arguments. If it ``binds``, a Variable that
    occurs twice needs the same value there.

    Attributes:
        values: What JAX is told of each group.
        donated: The numbers of the groups whose buffers are donated.
        distinct: What must agree where a Variable occurs twice.
        count: How many positional arguments it is for at least.
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
        leaves = prefixes.check(tree, argument, transform, mode)
        self._is_of_call = keywords is not _NO_CALL
        if self._is_of_call and isinstance(tree, list):
            tree = tuple(tree)
        self.tree = (tree, keywords) if self._is_of_call else tree
        self.count = len(tree) if isinstance(tree, tuple) else 0
        values = [keywords] if self._is_of_call else []
        for leaf in leaves:
            values += leaf.values_of() if isinstance(leaf, PrefixMapping) else [leaf]
        distinct = self._distinct(values)
        self._numbers = {value: number for number, value in enumerate(distinct)}
        self._binds = binds
        self.distinct = distinct if binds else ()
        # One value for everything; any other prefix may not fit.
        self._is_uniform = len(distinct) == 1 and _is_value_alone(tree)
        mappings = [leaf for leaf in leaves if isinstance(leaf, PrefixMapping)]
        self._has_mappings = bool(mappings)
        self.reads_leaves = any(leaf.reads_leaves() for leaf in mappings)
        self._donation = donation if donation is not None and donation.chosen else None
        self.values, self.donated = distinct, frozenset()
        if self._donation is not None:
            self.values = tuple(value for value in distinct for _ in range(2))
            self.donated = frozenset(range(1, len(self.values), 2))

    def _distinct(self, values: list[Any]) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(values)) or (None,)
        except TypeError as error:
            raise ValueError(
                f"Prefixes must be hashable, in `{self._argument}` of "
                f"nnx.{self._transform}: {error}."
            ) from error

    def group(self, signature: Signature, leaves: Sequence[Any]) -> list[int]:
        """The number of the group of each leaf of a signature."""
        if self._is_uniform:
            numbers = [0] * len(leaves)
        else:
            values = self._match(signature.treedef, signature)
            numbers = [
                self._numbers[_resolve(values[slot.entry], slot.path, leaf)]
                for slot, leaf in zip(signature.slots, leaves, strict=True)
            ]
        if self._donation is None:
            return numbers
        flags = self._donation.flags(signature, leaves)
        return [2 * number + flag for number, flag in zip(numbers, flags, strict=True)]

    def occurrences(self, tree: Any, sharing: bool) -> Iterator[Occurrence]:
        """The Variables in a tree, each wherever it occurs; none if none is bound."""
        if not self._binds:
            return
        is_leaf = packing.is_entry(sharing)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        values = self._match(treedef)
        for (jax_path, x), value in zip(flat, values, strict=True):
            if is_leaf(x):
                start = paths.from_jax(jax_path)
                graphdef, leaves = flattening.flatten_graph(x)
                for inner, leaf in zip(graphdef.paths(), leaves, strict=True):
                    if tree_checks.is_variable_or_ref(leaf):
                        yield start + inner, leaf, _resolve(value, inner, leaf)

    def _match(self, treedef: Any, signature: Signature | None = None) -> list[Any]:
        """The value for each leaf of a treedef; checks its place if it is known."""
        full = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        try:
            matched = _match(self.tree, full)
        except ValueError:
            # Keywords have one value, which fits whatever they are.
            pair = (self.tree[0], full[0]) if self._is_of_call else (self.tree, full)
            raise ValueError(
                f"`{self._argument}` of nnx.{self._transform} must be a tree prefix of "
                "what it is for; an object counts as one leaf there.\n"
                + _jax.prefix_error(*pair, _is_value, self._argument)
            ) from None
        if signature is not None and self._has_mappings:
            for (value, is_whole), entry in zip(
                matched, signature.entries, strict=True
            ):
                self._check_place(value, is_whole, entry is not LEAF)
        return [value for value, _ in matched]

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
                "Put it in the place of each object, and a plain value in the place of "
                "each array."
            )


def _is_value(x: Any) -> bool:
    return x is None or isinstance(x, PrefixMapping)


def _is_value_alone(tree: Any) -> bool:
    return not isinstance(tree, PrefixMapping) and jax.tree_util.all_leaves(
        [tree], is_leaf=_is_value
    )


def _resolve(value: Any, path: Any, leaf: Any) -> Any:
    return value.map_prefix(path, leaf) if isinstance(value, PrefixMapping) else value


class _Matched(NamedTuple):
    """What a prefix tree has for a leaf; whether right there, or for a container."""

    value: Any
    is_whole: bool


def _match(prefix: Any, full: Any) -> list[_Matched]:
    """The value of a prefix tree for each leaf of a tree of numbers."""
    found: list[_Matched] = []

    def add(value: Any, subtree: Any) -> None:
        matched = _Matched(value, isinstance(subtree, int))
        found.extend([matched] * len(jax.tree.leaves(subtree)))

    jax.tree.map(add, prefix, full, is_leaf=_is_value)
    return found


@dataclasses.dataclass(frozen=True)
class Donation:
    """Which leaves of a call are donated.

    Attributes:
        chosen: Which arguments.
        statics: Which are static; a signature has them apart.
        keeps_arrays: Whether arrays in attributes are kept, as with graph updates.
    """

    chosen: Chosen
    statics: Chosen
    keeps_arrays: bool

    def flags(self, signature: Signature, leaves: Sequence[Any]) -> list[bool]:
        """For each leaf whether it is."""
        donated = self._entries(signature)
        return [
            donated[slot.entry] and self._can_donate(leaf, slot.path)
            for slot, leaf in zip(signature.slots, leaves, strict=True)
        ]

    def _entries(self, signature: Signature) -> list[bool]:
        """For each entry whether its argument is."""
        args, kwargs = signature.treedef.children()
        by_position = [i for i, _ in signature.statics if isinstance(i, int)]
        total = len(args.children()) + len(by_position)
        taken = self.statics.positions(total)
        donated = self.chosen.positions(total)
        flags = [i in donated for i in range(total) if i not in taken]
        flags += [name in self.chosen.argnames for name in kwargs.node_data()[1]]
        treedefs = [*args.children(), *kwargs.children()]
        return [
            flag
            for flag, treedef in zip(flags, treedefs, strict=True)
            for _ in range(treedef.num_leaves)
        ]

    def _can_donate(self, leaf: Any, path: Any) -> bool:
        # A Variable gets a new buffer afterwards, if it may be written. An array
        # attribute doesn't: with graph updates it is kept. A ref keeps its own.
        if _jax.is_ref(flattening.raw_of(leaf)):
            return False
        if isinstance(leaf, Variable):
            return variables.is_owned(leaf)
        return path == () or not self.keeps_arrays
