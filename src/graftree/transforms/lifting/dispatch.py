"""Calls at the cost of JAX's own: what is remembered of earlier calls.

Between two steps of a training loop only the values of Variables change. So what a
`caller.Call` learned about its arguments is kept as a `DispatchEntry` for the next call
with the same objects. It is found by the objects in the arguments, and asks a
`ValidityCheck` whether it still holds.

The same objects may have several entries, which differ in static values, as of a model
in training and in evaluation. A validity check holds again when these have their old
values. Entries refer to the objects of the caller weakly, and go with them.

In tree mode JAX sees the contents of an object: its Variables and arrays are leaves,
the rest is in the treedef. So a call with new objects is recognized by the treedefs of
its arguments and by the form of the Variables.

Transforms other than `jit` trace at each call: the function may read anything. But the
work on its arguments outside is remembered as well (`Calls`).

An entry has the signature, the Variables, the groups of leaves. With one, a call reads
the raw values of the Variables, calls the compiled function with them, and writes the
changed values into their Variables. The set of these was decided when the function was
traced, and comes back as static data of the result. If the result contains objects or
a change of structure, `caller.commit` does the rest.

Variables that are arguments by themselves, in a State, a list, or on their own, may be
new ones at each call: an entry is right for them if they are like those that it was
made for (`BareVariables`). Containers of them are read as their first ones were
(`reader`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from graftree import _jax, config, errors
from graftree.config import GRAPH
from graftree.core import ownership, paths, pickling
from graftree.core.graph import flattening, nodes, validity_checks
from graftree.core.graph.graphdefs import LEAF, VariableDef
from graftree.core.graph.nodes import Leaf
from graftree.core.graph.validity_checks import Attribute
from graftree.core.objects import bookkeeping, callables, running
from graftree.core.states import states
from graftree.core.states.states import Containers
from graftree.core.variables import partitioning, variables
from graftree.core.variables.variables import Variable
from graftree.transforms.lifting import argument_trees, caller, decorators, specs
from graftree.transforms.lifting.argument_trees import Arguments
from graftree.transforms.lifting.leaves import Leaves, ResultSpec, join
from graftree.transforms.lifting.programs import compilations
from graftree.transforms.lifting.signatures import Signature

# Stands for the result of a call that has no entry.
MISS: Any = object()

# Makes the caller's side of a call of its arguments.
Prepare = Callable[[tuple[Any, ...], dict[str, Any]], caller.Call]


class DispatchEntry:
    """What is known about calls with certain arguments.

    Of Variables that are arguments by themselves it only knows the form.

    Args:
        call: The call that the entry is made of.
        tree: Its tree; ``None`` if the objects in it were taken apart, too.
        flat: The leaves of the tree: objects, Variables, arrays and other values.
        validity: Checks whether the objects in them are as they were.
        bare: The form of the Variables in them, if there are any.

    Attributes:
        signature: The static part of the arguments.
        validity: See above.
        is_flat: Whether the positional arguments are all of the leaves.
        read: Gives the leaves of other arguments; ``None`` if they may not fit.
    """

    def __init__(
        self,
        call: caller.Call,
        tree: Any,
        flat: Sequence[Any],
        validity: validity_checks.ValidityCheck,
        bare: BareVariables | None,
    ) -> None:
        self._spec, arguments = call.spec, call.arguments
        self.signature, self._traces = arguments.signature, call.spec.traces
        self.validity = validity
        self._types = [*map(type, flat)]
        self._roots = [
            (place, weakref.ref(x))
            for place, x in enumerate(flat)
            if nodes.is_node_module(x)
        ]
        may_read = bool(tree) and call.spec.statics is None
        held = call.spec.held_leaves
        self.is_flat = (
            may_read
            and held is not None
            and argument_trees.are_same((*tree[0], *held), flat)
        )
        self.read = reader(tree, flat) if may_read and not self.is_flat else None
        bare_at = [n for n, x in enumerate(flat) if nodes.kind_of(x) is Leaf.VARIABLE]
        numbers = {id(flat[place]): n for n, place in enumerate(bare_at)}
        self._bare, self._pick_bare = bare, _picker(bare_at)
        # Those of objects, the numbers of bare ones, and None for other leaves.
        self._variables = [
            numbers.get(id(x), x) if isinstance(x, Variable) else None
            for x in arguments.leaves
        ]
        self._attached = [x for x in self._variables if isinstance(x, Variable)]
        self._may_replace = variables.may_replace_all(self._attached, ())
        self._sources = self._numbered_sources(tree, flat, arguments, len(bare_at))
        self._objects = [
            weakref.ref(x) if nodes.is_node_module(x) else numbers.get(id(x), x)
            for x in arguments.objects.values()
        ]
        # Most calls have one group, which takes all of them in order.
        in_order = [*range(len(self._sources))]
        self._groups: list[tuple[Any, Any]] = []
        for _, leaves_spec in call.groups:
            *_, positions = leaves_spec
            positions = in_order if positions is None else positions
            sources = [self._sources[position] for position in positions]
            pick = None if sources == in_order else _picker(sources)
            self._groups.append((pick, leaves_spec))
        self._may_donate_twice = bool(call.spec.inputs.donated) and any(
            map(caller.is_spread, arguments.values())
        )
        # Of the latest result, usually the same one in each step: its static part, and
        # the `_meaning` of that. A call reads it once: another thread may set it.
        self._latest: tuple[Any, ...] = None, None, 0, None, False

    def _numbered_sources(
        self, tree: Any, flat: Sequence[Any], arguments: Arguments, bare: int
    ) -> list[int]:
        """For each leaf its number among the values that a call reads.

        These are the values of Variables, in objects and then bare ones; then all other
        leaves, in order. They come from the arguments, from attributes of objects, or
        stay: the contents of a container are the same as long as the check holds.
        """
        pairs = zip(arguments.leaves, self._variables, strict=True)
        others = [x for x, variable in pairs if variable is None]
        kinds = enumerate(map(nodes.kind_of, flat))
        in_arguments = [n for n, kind in kinds if kind in (Leaf.ARRAY, Leaf.STATIC)]
        places = [_ARGUMENT] * len(others)
        if len(in_arguments) < len(others):
            places = _places(tree, arguments.signature)
        self._attributes = [x for x in places if isinstance(x, Attribute)]
        located = zip(others, places, strict=True)
        self._constants = [x for x, place in located if place is None]
        unread, attributes = iter(in_arguments), itertools.count(len(flat))
        constants = itertools.count(len(flat) + len(self._attributes))
        picked: list[int] = []
        for place in places:
            in_objects = constants if place is None else attributes
            picked.append(next(unread if place is _ARGUMENT else in_objects))
        self._pick_others = _picker(picked)
        count = len(self._attached)
        attached, rest = itertools.count(), itertools.count(count + bare)
        return [
            count + x if type(x) is int else next(rest if x is None else attached)
            for x in self._variables
        ]

    def call(self, transformed: Callable[..., Any], flat: Sequence[Any]) -> Any:
        """Runs a call with these leaves; returns `MISS` if the entry isn't right.

        All steps are here: as a method, each would cost a twentieth of a small model's
        call, without JAX's part.
        """
        if [*map(type, flat)] != self._types:
            return MISS
        for place, weak in self._roots:
            if weak() is not flat[place]:
                return MISS
        boxes: Any = ()
        values: Any = ()
        if self._bare is not None:
            boxes = self._pick_bare(flat)
            values = self._bare.read(boxes)
            if values is None:
                return MISS
        validity = self.validity
        if ownership.versions.latest != validity.checked or validity.has_contents:
            if not validity.holds():
                return MISS
        if self._attributes or self._constants:
            arrays = validity_checks.read_all(self._attributes)
            flat = [*flat, *arrays, *self._constants]
        raw = variables.read_all(self._attached)
        raw += values
        raw += self._pick_others(flat)
        groups = []
        for pick, leaves_spec in self._groups:
            groups.append(Leaves((raw if pick is None else pick(raw), leaves_spec)))
        if self._may_donate_twice and caller.donates_twice(self._spec, groups):
            return MISS
        compiled = compilations.count
        result = transformed(*groups)
        if compilations.count != compiled and self._traces is not None:
            signature, raw, _ = join(groups)  # in the order of the leaves
            errors.fenced(self._traces.called, signature, raw, compiled)
        leaves, returned = result
        latest, targets, count, build, is_linked = self._latest
        if latest is not returned or returned is None:
            if returned is None:  # for a prefix
                leaves, returned = result = result.ungrouped()
            targets, count, build, is_linked = self._meaning(returned)
            self._latest = returned, targets, count, build, is_linked
        if targets is None:
            return caller.commit(self._arguments(raw, boxes), result)
        if boxes and targets:
            targets = [boxes[x] if type(x) is int else x for x in targets]
            # Those of objects were checked when the entry was made.
            if not variables.may_replace_all(targets, ()):
                return caller.commit(self._arguments(raw, boxes), result)
        if targets:
            variables.replace_all(targets, leaves[:count])
            leaves = leaves[count:]
        if is_linked:
            return build(leaves, self._objects_with(boxes))
        return build(leaves)

    def _meaning(self, spec: ResultSpec) -> tuple[Any, int, Any, bool]:
        """What a result writes, with how many leaves, and what makes its output.

        The targets are Variables, and the numbers of bare ones; ``None`` if the result
        does more than give these values and return leaves. At the end, whether the
        function takes the objects of the call, of which some are in the output.
        """
        count, out = len(spec.changed), spec.out
        does_more = spec.metadata or spec.structure or out.has_callables
        if does_more or not self._may_replace:
            return None, count, None, False
        for entry in out.entries:
            is_new = isinstance(entry, VariableDef) and entry.array_refdef is None
            if entry is not LEAF and not is_new:
                return None, count, None, False
        # The definitions of Variables in the output; ``None`` for plain leaves.
        kinds = [leaf_spec.variable for leaf_spec in out.leaf_specs]
        targets = [self._variables[position] for position in spec.changed]
        is_linked = any([x is not None and x.outer_index is not None for x in kinds])
        make = _linked_builder if is_linked else _builder
        return targets, count, make(out.treedef, kinds), is_linked

    def _arguments(
        self, values: Sequence[Any], boxes: Sequence[Variable[Any]]
    ) -> Arguments:
        """Makes the arguments of a call, as `caller.Call` has them."""
        pairs = zip(self._variables, self._sources, strict=True)
        leaves = [
            boxes[x] if type(x) is int else values[n] if x is None else x
            for x, n in pairs
        ]
        objects = enumerate(self._objects_with(boxes))
        return Arguments(self.signature, leaves, flattening.IndexMap(objects))

    def _objects_with(self, boxes: Sequence[Variable[Any]]) -> list[Any]:
        """Lists the objects of a call, by their numbers."""
        return [
            boxes[x] if type(x) is int else x() if isinstance(x, weakref.ref) else x
            for x in self._objects
        ]


def _builder(
    treedef: Any, kinds: Sequence[VariableDef | None]
) -> Callable[[Sequence[Any]], Any]:
    """A function that makes an output of its arrays, or of its leaves."""
    is_leaf = treedef.num_nodes == treedef.num_leaves == 1
    unflatten = operator.itemgetter(0) if is_leaf else states.builder(treedef)
    if not any(kinds):
        return unflatten
    make = _maker(kinds)
    return lambda arrays: unflatten(make(arrays))


def _linked_builder(
    treedef: Any, kinds: Sequence[VariableDef | None]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """`_builder` for an output with objects of the call, which it takes as well."""
    unflatten = _builder(treedef, ())

    def build(arrays: Sequence[Any], objects: Sequence[Any]) -> Any:
        unread = iter(arrays)
        return unflatten(
            [
                next(unread)
                if kind is None
                else flattening.make_variable(kind, next(unread))
                if kind.outer_index is None
                else objects[kind.outer_index]
                for kind in kinds
            ]
        )

    return build


def _maker(
    kinds: Sequence[VariableDef | None],
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that makes Variables of arrays; for ``None``, they stay arrays."""
    if any([kind is not None and kind.metadata.get("ref") for kind in kinds]):
        return lambda arrays: [
            array if kind is None else flattening.make_variable(kind, array)
            for kind, array in zip(kinds, arrays, strict=True)
        ]
    parts: list[tuple[Any, Any]] = [
        (None, None) if kind is None else (kind.type, kind.metadata) for kind in kinds
    ]
    rebuild = variables.rebuild

    def make(arrays: Sequence[Any]) -> list[Any]:
        owner = ownership.current()
        return [
            array if kind is None else rebuild(kind, array, entries, owner)
            for (kind, entries), array in zip(parts, arrays, strict=True)
        ]

    return make


# Stands for where a leaf of the arguments is that is in no object.
_ARGUMENT: Any = object()


def _places(tree: Any, signature: Signature) -> list[Any]:
    """Says where each leaf is that is not the value of a Variable.

    It is `_ARGUMENT`, or the attribute that has it; ``None`` if none does.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=nodes.is_node_module)
    argument_paths = {paths.from_jax(path) for path, _ in flat}
    entries = [*map(paths.from_jax, signature.entry_paths)]
    located = [
        entries[leaf.entry] + leaf.path
        for leaf in signature.leaf_specs
        if leaf.variable is None
    ]
    return [
        _ARGUMENT
        if path in argument_paths
        else validity_checks.attribute_at(tree, path)
        for path in located
    ]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the members at these places out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    start = places[0] if places else 0
    return operator.itemgetter(slice(start, start + len(places)))


class BareVariables:
    """Form that Variables as arguments must have for an entry.

    Args:
        boxes: Those of the call that it is made of; their types are compared elsewhere.
        attached: The objects of that call, which have Variables of their own.
        are_written: Whether each call writes all of them.
    """

    def __init__(
        self,
        boxes: Sequence[Variable[Any]],
        attached: Collection[Any],
        are_written: bool,
    ) -> None:
        self._are_written = are_written
        self._metadata = [variables.metadata_of(x).snapshot() for x in boxes]
        # Those live as long as the entry, so that nothing else gets these numbers.
        self._attached = frozenset(map(id, attached))
        has_refs = any([entries["ref"] for entries in self._metadata])
        # A list in their metadata is another one in the next call.
        are_fixed = all([entries.is_fixed for entries in self._metadata])
        self.may_be_kept = are_fixed and not has_refs and self._fit(boxes)

    def read(self, boxes: Sequence[Variable[Any]]) -> list[Any] | None:
        """Their raw values; ``None`` if they are not like the earlier ones."""
        metadata = [x.__nnx_metadata__ for x in boxes]
        if metadata != self._metadata:
            return None
        # Those of the next call are usually the same objects, which is seen at once.
        self._metadata = metadata
        return variables.read_all(boxes) if self._fit(boxes) else None

    def _fit(self, boxes: Sequence[Variable[Any]]) -> bool:
        """Whether each is there once, and can be written if it must be."""
        numbers = {id(x) for x in boxes}
        if len(numbers) != len(boxes) or not self._attached.isdisjoint(numbers):
            return False
        return not self._are_written or variables.may_replace_all(boxes, ())


def reader(
    tree: tuple[Any, ...], leaves: Sequence[Any]
) -> Callable[[Any], list[Any] | None] | None:
    """A reader for trees like this one, which has these leaves in this order.

    It gives the leaves of another one, of any kind, or ``None`` if its containers
    differ.
    """
    try:
        containers = Containers(tree, nodes.is_graph_node, _content_of)
    except ValueError:  # keys that only a State can sort
        return None
    read = containers.leaves
    return read if argument_trees.are_same(read(tree) or (), leaves) else None


def _content_of(x: Any) -> Any:
    """What JAX flattens instead of a callable; else ``None``."""
    whole = callables.opened(x)
    return whole if type(whole) is callables.Opened else None


# The name of the entries for some objects in what is kept for these. There are as many
# as `validity_checks.with_newest` keeps, and none at first: an entry costs more than a
# call without one, and is made when objects come a second time.
_ENTRIES = "entries"


class DispatchCache:
    """Entries of one transformed function.

    Args:
        spec: The transform.
        bound: Arguments in front of all others.
    """

    def __init__(self, spec: specs.TransformSpec, bound: tuple[Any, ...] = ()) -> None:
        self._spec = spec
        self._bound, self._held = bound, spec.held_leaves
        # A filter that reads values may group the leaves in another way each time.
        self._may_keep = not spec.inputs.reads_leaves
        self.clear()
        config.caches.add(self)

    def clear(self) -> None:
        """Forgets all entries."""
        # Reading, adding and removing one is atomic, so threads need no lock.
        self._kept = validity_checks.ObjectGroups()
        # In tree mode, for objects by their structure: not among the others, of which
        # so many new ones may come that these would be forgotten.
        self._structures = validity_checks.ObjectGroups()

    def repeat(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a call like the one before; returns `MISS` if it is another one."""
        latest = self._kept.latest
        if latest is None:
            return MISS
        if _jax.current_trace() is not _jax.no_trace or running.stack.observers:
            return MISS
        args = self._bound + args if self._bound else args
        if latest.is_flat and not kwargs:
            flat = args + self._held if self._held else args
        else:
            read, is_bare = latest.read, self._held == ()
            tree = (args, kwargs) if is_bare else self._spec.tree(args, kwargs)
            flat = read and read(tree)
        return MISS if flat is None else latest.call(transformed, flat)

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare,
    ) -> Any:
        """Runs a call by an entry: one that there is, or one made for it.

        The first call of some objects has none, and makes none.
        """
        version = ownership.versions.latest
        # Objects inside a trace are new ones each time. An observer wants to know the
        # counterparts of these in the trace.
        is_outside = _jax.current_trace() is _jax.no_trace
        may_repeat = self._may_keep and is_outside and not running.stack.observers
        read = self._read(args, kwargs) if may_repeat else None
        if read is None:
            return prepare(args, kwargs).run(transformed)
        key, tree, flat = read
        treedef, statics = key[:2]
        objects = [x for x in flat if nodes.is_node_module(x)]
        kept = self._kept.find(key, objects)
        entries = kept.get(_ENTRIES)
        for entry in entries or ():
            out = entry.call(transformed, flat)
            if out is not MISS:
                self._kept.latest = entry
                return out
        sharing, is_new = self._spec.mode.sharing, bool(objects) and entries is None
        if is_new:
            kept[_ENTRIES] = ()
            if not sharing:
                out = self._by_structure(transformed, tree, statics)
                if out is not MISS:
                    return out
        call = prepare(args, kwargs)
        if sharing and treedef is not None:
            call.read = tree, flat, treedef  # once
        out = MISS
        if not is_new:
            entry = _entry_of(call, tree, flat, version)
            if entry is not None:
                kept[_ENTRIES] = validity_checks.with_newest(entry, entries or ())
                self._kept.latest = entry
                out = entry.call(transformed, flat)
        elif not sharing:
            self._keep_structure(call, version)
        return call.run(transformed) if out is MISS else out

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any, Sequence[Any]] | None:
        """Reads the key of a call, its tree and the leaves of that; objects are leaves.

        ``None`` if it can have no entry.
        """
        spec, statics = self._spec, ()
        args = (*self._bound, *args)
        if spec.statics is not None:
            args, kwargs, statics = decorators.take(
                spec.statics, args, kwargs, spec.name
            )
        tree = spec.tree(args, kwargs)
        flat: Any = (*args, *(self._held or ()))
        treedef: Any = None
        tokens = None if kwargs or self._held is None else _tokens(flat)
        if tokens is None:  # there are containers
            tree, flat, treedef = argument_trees.flatten(tree, GRAPH, spec.name, True)
            tokens = _tokens(flat)
        return None if tokens is None else ((treedef, statics, *tokens), tree, flat)

    # In tree mode, objects that come for the first time: by their structure.

    def _by_structure(
        self, transformed: Callable[..., Any], tree: Any, statics: Any
    ) -> Any:
        """Runs a call by an entry for such objects; returns `MISS` if there is none."""
        spec = self._spec
        _, flat, treedef = argument_trees.flatten(tree, spec.mode, spec.name, True)
        for entry in self._of_structure(treedef, statics).get(_ENTRIES, ()):
            out = entry.call(transformed, flat)
            if out is not MISS:
                return out
        return MISS

    def _keep_structure(self, call: caller.Call, version: int) -> None:
        """Makes an entry for such objects."""
        _, flat, treedef = call.read
        are_leaves = all([nodes.kind_of(x) in _LEAVES for x in flat])
        # Equal objects have lists of their own, which the function may write to.
        if call.arguments.signature.may_change_in_place:
            return
        if are_leaves and argument_trees.are_same(flat, call.arguments.leaves):
            entry = _entry_of(call, None, flat, version)
            if entry is not None:
                self._of_structure(treedef, call.statics)[_ENTRIES] = (entry,)

    def _of_structure(self, treedef: Any, statics: Any) -> dict[Any, Any]:
        try:
            return self._structures.find((treedef, statics), ())
        except TypeError:  # a static value without a hash
            return {}


_LEAVES = (Leaf.VARIABLE, Leaf.ARRAY, Leaf.STATIC)


def _entry_of(
    call: caller.Call, tree: Any, flat: Sequence[Any], version: int
) -> DispatchEntry | None:
    """An entry for a call; ``None`` if none would be right."""
    own, sharing = call.arguments, call.spec.mode.sharing
    roots = [*filter(nodes.is_node_module, flat)]
    boxes = [x for x in flat if nodes.kind_of(x) is Leaf.VARIABLE]
    if boxes or not sharing or own.skeleton is None:
        validity = validity_checks.ValidityCheck.over(roots, version)
    else:
        validity = validity_checks.ValidityCheck(
            own.skeleton, own.members, own.objects, version
        )
    if not validity.is_complete or validity.reaches(roots):
        return None
    are_written = bool(call.spec.inputs.donated)
    bare = BareVariables(boxes, validity.variables, are_written) if boxes else None
    if bare is not None and not bare.may_be_kept:
        return None
    try:
        return DispatchEntry(call, tree, flat, validity, bare)
    except (LookupError, StopIteration):
        return None  # Another thread has changed an object since it was taken apart.


def _tokens(flat: Sequence[Any]) -> list[Any] | None:
    """Makes tokens of these leaves for a key; ``None`` if some leaf has none."""
    tokens: list[Any] = []
    for x in flat:
        kind = nodes.kind_of(x)
        if kind is nodes.PYTREE:
            # An object that lives as long as the root does, with a hash of its own.
            tokens.append(bookkeeping.state_of(x))
        elif isinstance(kind, nodes.GraphKind) and validity_checks.may_be_weak(x):
            tokens.append(id(x))  # it may have no hash; that it is alive is seen
        elif kind is Leaf.ARRAY:
            tokens.append(None)
        elif kind is Leaf.STATIC and type(x) not in callables.TYPES:
            tokens.append(None)
        elif kind is Leaf.VARIABLE:
            tokens.append(type(x))
        else:
            return None  # a ref on its own, or a type without versions
    return tokens


class Calls(pickling.Rebuilt):
    """Calls of one function in one transform that traces it each time.

    Args:
        f: The function.
        spec: Its transform.

    Attributes:
        spec: As given.
    """

    def __init__(self, f: Callable[..., Any], spec: specs.TransformSpec) -> None:
        self.spec = spec
        self._prepare = functools.partial(caller.Call, f, spec)
        self._cache = DispatchCache(spec)
        # Many are called once, and never again: on the line that makes them.
        self._is_called = False
        # Values that an entry writes have no axis to be named.
        self._may_keep = partitioning.PARTITION_NAME not in spec.axis_metadata
        keyword_rule = spec.keywords[spec.mode.structure]
        self._keeps_positions = keyword_rule is not specs.Keywords.BECOME_POSITIONAL

    def run(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a call; ``transformed`` takes the groups of leaves."""
        try:
            if config.caches.are_used and self._is_called:
                return self._by_cache(transformed, args, kwargs)
            self._is_called = True
            return self._prepare(args, kwargs).run(transformed)
        except Exception as error:
            if caller.is_of_donation(error):  # of `pmap`
                self._prepare(args, kwargs).explain(error)
            raise

    def _by_cache(
        self,
        transformed: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        spec = self.spec
        # Keywords and defaults may become positions.
        is_complete = self._keeps_positions or len(args) >= spec.inputs.count
        if not (self._may_keep and is_complete) or kwargs:
            return self._prepare(args, kwargs).run(transformed)
        running.note_arguments(spec, args, kwargs, spec.functions)
        out = self._cache.repeat(transformed, args, kwargs)
        if out is not MISS:
            return out
        return self._cache.run(transformed, args, kwargs, self._prepare)
