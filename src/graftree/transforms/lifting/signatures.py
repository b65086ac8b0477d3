"""Static part of the arguments or the output of a call.

    Signature   skeleton of a tree, whose root JAX takes apart
    LeafSpec    one leaf of it: its path, its name, its definition

An *entry* is a field of the root: an object, a Variable, or a plain leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from graftree.core import fingerprints, paths
from graftree.core.graph import differences, graphdefs
from graftree.core.objects import attributes, callables
from graftree.core.text import descriptions
from graftree.transforms.lifting import debug_info


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names of positional arguments in messages.

    Attributes:
        args: All of them; the second one is ``args[1]``.
        named: Those that have names of their own, by position.
        skipped: The number of parameters of the function that come before them.
        output: The name of the output, where JAX has no word for it.
        functions: Those of the functions that may hold objects.
    """

    args: str = "args"
    named: Mapping[int, str] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    output: str = ""
    functions: Sequence[str] = ("fun",)

    def of(self, number: int) -> str:
        """Names one argument."""
        if number == FUNCTIONS:
            return ", ".join(self.functions)
        return self.named.get(number, f"{self.args}[{number}]")


ARGS = Labels()


class LeafSpec(NamedTuple):
    """One leaf of a signature.

    Attributes:
        entry: The number of the entry that it belongs to.
        path: Its path inside the object there; ``()`` for a plain leaf.
        definition: That of a Variable or ref; ``None`` for another leaf.
        signature: The signature that has it.
    """

    entry: int
    path: Any
    definition: graphdefs.VariableDef | graphdefs.ArrayRefDef | None
    signature: Signature

    @property
    def name(self) -> str:
        """Name in the call, as in ``args[0].kernel``."""
        return paths.below(self.signature.labeled[self.entry], self.path)

    @property
    def variable(self) -> graphdefs.VariableDef | None:
        """Definition, if it is a Variable."""
        definition = self.definition
        return definition if isinstance(definition, graphdefs.VariableDef) else None

    @property
    def is_ref(self) -> bool:
        """Whether it is an array ref, or a Variable with one."""
        definition = self.definition
        return getattr(definition, "array_refdef", definition) is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is outside of objects: by itself an argument or output."""
        return self.definition is None and self.path == ()

    @property
    def outer_index(self) -> int | None:
        """Number of the caller's object that it stands for, if there is one."""
        return None if self.definition is None else self.definition.outer_index


@dataclasses.dataclass(repr=False, eq=False)
class Signature:
    """Static part of a tree of arguments or outputs.

    Attributes:
        skeleton: Of the tree.
        statics: Static arguments, as pairs of a position or name and a value.
        labels: The names of the positional arguments; not compared.
        parameters: Those of the function, which have other names for them.
        number: Its own, once it is known to be `Interned`. JAX compares it first.
        has_no_contents: Whether its static values are known to have no content that
            could change (see `tracer_leaks.contents_in`).
    """

    skeleton: graphdefs.GraphDef[Any]
    statics: tuple[tuple[Any, Any], ...] = ()
    labels: Labels = dataclasses.field(default=ARGS, compare=False)
    parameters: debug_info.Parameters | None = None
    number: int | None = dataclasses.field(default=None, init=False, compare=False)
    has_no_contents: bool = dataclasses.field(default=False, init=False, compare=False)

    def __hash__(self) -> int:
        try:
            return hash((self.skeleton, self.statics, self.parameters))
        except Exception:  # a static value without a hash, or with one that fails
            return hash(self.treedef)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature):
            return NotImplemented
        if self.number is not None and other.number is not None:
            return self.number == other.number
        if self.skeleton != other.skeleton or self.parameters != other.parameters:
            return False
        try:
            return self.statics == other.statics
        except Exception:  # of the comparison of a static argument
            return [position for position, _ in self.statics] == [
                position for position, _ in other.statics
            ] and all(
                fingerprints.are_same(one, another)
                for (_, one), (_, another) in zip(
                    self.statics, other.statics, strict=True
                )
            )

    @property
    def treedef(self) -> Any:
        """JAX's, with objects and other leaves as leaves."""
        return self.skeleton.specs[0].metadata.treedef

    @property
    def entries(self) -> tuple[graphdefs.Field, ...]:
        """Fields at the leaves of the treedef."""
        return self.skeleton.specs[0].fields

    @functools.cached_property
    def has_callables(self) -> bool:
        """Whether a callable in it was taken apart."""
        pending = [self.treedef]
        for treedef in pending:
            kind, _ = treedef.node_data() or (None, None)
            if kind in (callables.Opened, callables.Constant):
                return True
            if kind is None or not issubclass(kind, attributes.DataObject):
                pending += treedef.children()
        return False

    @functools.cached_property
    def may_change_in_place(self) -> bool:
        """Whether it has static values of kinds that can be changed in place.

        Then an equal signature must not stand for it: the function gets the values that
        are in it, and a write to one of them would reach another object.
        """
        values: list[Any] = [static.value for _, static in self.statics]
        treedefs: list[Any] = []
        for spec in self.skeleton.specs:
            metadata = spec.metadata
            if isinstance(metadata, graphdefs.Tree):
                treedefs.append(metadata.treedef)
            elif isinstance(metadata, tuple):  # JAX's treedef of a container is first
                treedefs += [x for x in metadata if isinstance(x, type(self.treedef))]
            elif not isinstance(metadata, type):
                values.append(metadata)
            for field in spec.fields:
                if isinstance(field, graphdefs.Static):
                    values.append(field.value)
                elif isinstance(field, graphdefs.VariableDef):
                    values.append(field.metadata)
        for treedef in treedefs:
            treedefs += treedef.children()
            kind, data = treedef.node_data() or (type(None), ((), ((), ())))
            if issubclass(kind, attributes.DataObject):
                _, (_, members), *_ = data
                values += members
            elif kind not in _CONTAINERS:
                values.append(data)
        distinct = {id(x): x for x in values}  # many layers share them
        return any(map(fingerprints.may_change, distinct.values()))

    @functools.cached_property
    def entry_paths(self) -> list[Any]:
        """JAX's paths of the entries."""
        try:
            tree = jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))
        except Exception:  # of a user's class that accepts only arrays
            return [*_paths_without_objects(self.treedef, ())]
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

    @functools.cached_property
    def leaf_specs(self) -> tuple[LeafSpec, ...]:
        """Its leaves, in order."""
        return tuple(
            [
                LeafSpec(path[0], path[1:], definition, self)
                for path, definition in self.skeleton.leaves()
            ]
        )

    def facts(self, root: str | None = None, identity: bool = True) -> dict[Any, Any]:
        """Its facts, for `differences`, by paths that `name_of` prints."""
        facts: dict[Any, Any] = {}
        if not jax.tree_util.treedef_is_leaf(self.treedef):
            facts[root or "arguments",] = differences.TreeForm(self.treedef)
        names = self.entry_names(root)

        def located(path: Any) -> Any:
            return (names[path[0]], *path[1:]) if path else None

        return facts | differences.facts(self.skeleton, located, identity=identity)

    def entry_names(self, root: str | None = None) -> list[str]:
        """Names its entries."""
        if root is None:
            return self.labeled
        return [root + paths.keystr(path) for path in self.entry_paths]

    # Names are made when needed, usually in messages.

    @functools.cached_property
    def labeled(self) -> list[str]:
        """Names of the entries in our messages, as in ``args[0]``."""
        return [
            str(self.labels.functions[path[1].idx]) + paths.keystr(path[2:])
            if path[:1] == (_FUNCTIONS,)
            else "kwargs" + paths.keystr(path[1:])
            if path[:1] == (_KWARGS,) or len(path) < 2
            else self.labels.of(path[1].idx) + paths.keystr(path[2:])
            for path in self.entry_paths
        ]

    @functools.cached_property
    def names_in_function(self) -> list[str]:
        """Names of the leaves in the function, as in ``net.kernel`` or ``rest[0]``.

        JAX uses them, too.
        """
        entries = self.labeled if self.parameters is None else list[str]()
        if self.parameters is not None:
            positions = self.positions()
            for index, (kind, argument, *rest) in enumerate(self.entry_paths):
                if kind == _FUNCTIONS:
                    entries.append(self.labeled[index])
                    continue
                position = argument.key if kind == _KWARGS else positions[argument.idx]
                name = self.name_of_argument(position)
                entries.append(name + paths.keystr(tuple(rest)))
        return [paths.below(entries[x.entry], x.path) for x in self.leaf_specs]

    def positions(self) -> list[int | str]:
        """Lists positions and keywords of the arguments, without the static ones."""
        args, kwargs, *_ = self.treedef.children()
        # Static arguments are not in the treedef, but have positions.
        statics, count = dict(self.statics), len(args.children())
        free = [i for i in range(count + len(statics)) if i not in statics]
        return [*free[:count], *kwargs.node_data()[1]]

    def name_of_argument(self, position: int | str) -> str:
        """Finds the name of a positional or keyword argument in the function."""
        if isinstance(position, int):
            position += self.labels.skipped
        return (self.parameters or debug_info.Parameters()).name_of(position)

    def __repr__(self) -> str:
        # JAX prints it where it explains its cache misses.
        if self.parameters is None:
            return f"<signature of {len(self.entries)} objects and leaves>"
        args, kwargs, *_ = self.treedef.children()
        treedefs, start = [*args.children(), *kwargs.children()], 0
        texts: dict[Any, str] = {}
        for position, treedef in zip(self.positions(), treedefs, strict=True):
            stop = start + treedef.num_leaves
            argument = self.skeleton.part(treedef, start, stop)
            texts[position], start = f": {_type_text(argument)}", stop
        for position, static in self.statics:
            texts[position] = f"={descriptions.safe_repr(static.value)}"
        arguments = [
            self.name_of_argument(position) + texts[position]
            for position in sorted(texts, key=lambda x: (isinstance(x, str), x))
        ]
        return _shortened(f"<call with {', '.join(arguments)}>")

    @functools.cached_property
    def has_references(self) -> bool:
        """Whether an object in it is met again, or is one that exists outside."""
        return any(
            [
                type(x) is graphdefs.NodeRef
                or getattr(x, "outer_index", None) is not None
                for _, x in self.skeleton.located_fields()
            ]
        )

    def numbers(self, entry: int) -> Iterator[int]:
        """Lists the numbers of the objects that are new in an entry or one after it."""
        for path, spec in self.skeleton.located_fields():
            if path and path[0] >= entry and not isinstance(spec, graphdefs.NodeRef):
                index = getattr(spec, "index", None)
                if index is not None:
                    yield index

    def entries_of(self, argument: int | None) -> tuple[int, int]:
        """Finds where a positional argument, or `FUNCTIONS`, starts and stops."""
        if argument is None:
            return 0, 0
        if argument == FUNCTIONS:
            stop = self.treedef.num_leaves
            return stop - self._treedef_of(argument).num_leaves, stop
        treedefs = self.treedef.children()[0].children()
        start = sum([treedef.num_leaves for treedef in treedefs[:argument]])
        return start, start + treedefs[argument].num_leaves

    def leaves_of(self, argument: int | None) -> tuple[int, int]:
        """Finds its leaves: the positions of the first, and after the last."""
        if argument is None:
            return 0, 0
        starts = self.skeleton.starts()
        start, stop = self.entries_of(argument)
        return starts[start][1], starts[stop][1]

    def of_argument(self, number: int) -> Signature:
        """Takes out the part that is one positional argument."""
        treedef = self._treedef_of(number)
        return Signature(self.skeleton.part(treedef, *self.entries_of(number)))

    def of_arguments(self) -> Signature:
        """Leaves out what the functions hold."""
        args, kwargs, *functions = self.treedef.children()
        if not functions:
            return self
        treedef = jax.tree_util.treedef_tuple([args, kwargs])
        return Signature(self.skeleton.part(treedef, 0, treedef.num_leaves))

    def _treedef_of(self, argument: int) -> Any:
        args, _, *functions = self.treedef.children()
        return functions[0] if argument == FUNCTIONS else args.children()[argument]


def _type_text(argument: graphdefs.GraphDef[Any]) -> str:
    """Describes the type of an argument, and how many leaves it has."""
    kind, _ = argument.specs[0].metadata.treedef.node_data() or (None, None)
    if kind is None:  # the argument is an object or leaf
        (top,) = argument.tops()
        if top is graphdefs.LEAF:
            return "array"
        kind = getattr(top, "type", None)
    if kind is None:
        return "known object"
    return f"{kind.__name__} of {argument.num_leaves} leaves"


def _shortened(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 4]}...>"


def name_of(path: Any) -> str:
    """A path of `Signature.facts` as Python prints it: ``args[0].kernel``."""
    start, *keys = path
    if keys and isinstance(keys[-1], differences.MetadataKey):
        return f"{name_of(path[:-1])}, metadata {keys[-1]!r}"
    return paths.below(start, tuple(keys))


# What JAX keeps of these are their keys.
_CONTAINERS = frozenset(
    {type(None), dict, collections.OrderedDict, collections.defaultdict}
)

_KWARGS, _FUNCTIONS = jax.tree_util.SequenceKey(1), jax.tree_util.SequenceKey(2)

# Stands for what the functions hold where an argument has its number.
FUNCTIONS = -1


def _paths_without_objects(treedef: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """JAX's paths of the leaves, with numbers for the children of users' classes."""
    if treedef.node_data() is None:
        yield path
        return
    kind, data = treedef.node_data()
    for index, child in enumerate(treedef.children()):
        if kind in (tuple, list):
            key = jax.tree_util.SequenceKey(index)
        elif kind is dict:
            key = jax.tree_util.DictKey(data[index])
        else:
            key = jax.tree_util.FlattenedIndexKey(index)
        yield from _paths_without_objects(child, (*path, key))
