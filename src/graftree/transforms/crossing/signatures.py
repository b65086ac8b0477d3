"""The static part of the arguments or the output of a call."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, NamedTuple

import jax

from graftree.core.graph.graphdefs import ArrayRefDef, GraphDef, NodeRef, VariableDef
from graftree.core.pickling import Rebuilt
from graftree.transforms.crossing import alias_reports
from graftree.transforms.crossing.alias_reports import Labels


class Span(NamedTuple):
    """Where an argument is in a skeleton, as (start, stop)."""

    entries: tuple[int, int]
    leaves: tuple[int, int]


class Skeleton:
    """The static part of a tree of arguments or outputs.

    Attributes:
        treedef: JAX's, with objects and other leaves as leaves.
        entries: For each leaf of the treedef the GraphDef of the object there, or
            ``None`` for a plain leaf. The GraphDefs share one numbering.
        statics: Static arguments, as pairs of a position or name and a value.
        labels: What the positional arguments are called; not compared.
        number: Its own, once it is known to `Skeletons`. JAX compares it first.
    """

    __slots__ = (
        "__weakref__",
        "_definitions",
        "_names",
        "entries",
        "labels",
        "number",
        "statics",
        "treedef",
    )

    def __init__(
        self,
        treedef: Any,
        entries: tuple[GraphDef[Any] | None, ...],
        statics: tuple[tuple[Any, Any], ...] = (),
        labels: Labels = alias_reports.ARGS,
    ) -> None:
        self.treedef = treedef
        self.entries = entries
        self.statics = statics
        self.labels = labels
        self.number: int | None = None
        self._definitions: list[VariableDef | ArrayRefDef | None] | None = None
        self._names: list[str] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Skeleton)
            and self.treedef == other.treedef
            and self.entries == other.entries
            and self.statics == other.statics
        )

    def __hash__(self) -> int:
        try:
            return hash((self.treedef, self.entries, self.statics))
        except TypeError:  # a static value without a hash
            return hash(self.treedef)

    def definitions(self) -> list[VariableDef | ArrayRefDef | None]:
        """For each leaf its definition: of a Variable or ref, or ``None``; cached."""
        if self._definitions is None:
            listed: list[VariableDef | ArrayRefDef | None] = []
            for entry in self.entries:
                listed += [None] if entry is None else [d for _, d in entry.leaves()]
            self._definitions = listed
        return self._definitions

    def has_references(self) -> bool:
        """Whether an object in it is met again, or is one that exists outside."""
        return any(
            isinstance(node, NodeRef) or node.outer_index is not None
            for entry in self.entries
            if entry is not None
            for node in entry.nodes
        )

    def inner_paths(self) -> list[Any]:
        """The path of each leaf inside its object; ``()`` for plain leaves."""
        listed: list[Any] = []
        for entry in self.entries:
            listed += [()] if entry is None else entry.paths()
        return listed

    def span(self, argument: int | None) -> Span:
        """Which entries and leaves are those of a positional argument.

        Args:
            argument: Its number; ``None`` for no argument.
        """
        if argument is None:
            return Span((0, 0), (0, 0))
        treedefs = self.treedef.children()[0].children()
        start = sum(treedef.num_leaves for treedef in treedefs[:argument])
        stop = start + treedefs[argument].num_leaves
        counts = [1 if e is None else e.num_leaves for e in self.entries]
        return Span((start, stop), (sum(counts[:start]), sum(counts[:stop])))

    def names(self) -> list[str]:
        """The paths of the leaves of ``(args, kwargs)``: ``args[0].kernel``; cached."""
        if self._names is None:
            self._names = self._list_names()
        return self._names

    def _list_names(self) -> list[str]:
        places = jax.tree.unflatten(self.treedef, range(len(self.entries)))
        flat, _ = jax.tree_util.tree_flatten_with_path(places)
        named: list[str] = []
        for (path, _), entry in zip(flat, self.entries, strict=True):
            start = self._start(path)
            paths = [()] if entry is None else entry.paths()
            named += [start + "".join(map(_key_text, path)) for path in paths]
        return named

    def _start(self, path: Any) -> str:
        if path[:1] == (_KWARGS,) or len(path) < 2:
            return "kwargs" + jax.tree_util.keystr(path[1:])
        return self.labels.of(path[1].idx) + jax.tree_util.keystr(path[2:])


class Skeletons(Rebuilt):
    """The skeletons that a compiled function was called with.

    JAX hashes no static data of pytree nodes; it compares with what it compiled for,
    inside its cache in C++. If a comparison runs code in Python, another thread may
    take its turn and change that cache meanwhile: then the process dies
    (tests/stress/static_data.py). So equal skeletons are made the same one, with a
    number that no other one has in front: numbers decide, and are compared in C.

    Nor is a static value that was changed in place since, of which the hash is a new
    one, taken for what it was.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Skeleton, weakref.ref[Skeleton]]
        self._known = weakref.WeakKeyDictionary()
        # Else two threads could both come first. User code compares static values.
        self._lock = threading.RLock()

    def intern(self, skeleton: Skeleton) -> Skeleton:
        """The skeleton that equals this one and came first."""
        with self._lock:
            weak = self._known.get(skeleton)
            known = None if weak is None else weak()
            if known is None:
                self._known[skeleton] = weakref.ref(skeleton)
                skeleton.number = next(_numbers)
                known = skeleton
            return known


_numbers = itertools.count()
_KWARGS = jax.tree_util.SequenceKey(1)


def _key_text(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
