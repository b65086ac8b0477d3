"""Which values would read the same: what the compact form folds into one.

Two values are equal here if they have the same structure: types, attribute names (also
hidden ones), shapes, dtypes and static values. The numbers in arrays don't count. What
always holds:

- what is referred to from outside of a value too is equal to itself alone: siblings
  that share it are equal, those that have copies of it are not;
- no ``==`` of a foreign class is trusted: its instances equal only themselves.

A value is compared by its *tokens*: what it is made of, in preorder. Skeletons won't do
for this. They tell apart two functions with the same code, as the key of a compiled
function must; but each layer may make its initializer anew, and then all read the same.
And they ask foreign classes, and compare what is shared by its place only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from graftree import _jax, _python
from graftree.core import imprints
from graftree.core.text import descriptions
from graftree.core.text.descriptions import Attr

_ATOMS = {bool, int, float, complex, str, bytes, type(None)}
# Names are listed if they take no more characters.
_LONGEST_NAMES = 40
# A sequence with more runs than this may be one that alternates.
_MANY_RUNS = 8
# Of a mapping or sequence with more entries than this, the middle is left out.
_MOST_ENTRIES = 40
_FIRST, _LAST = 20, 5


class Fold(NamedTuple):
    """Entries of an object or container that read the same.

    Attributes:
        place: Where they are: keys, or in a sequence indices, if some are folded.
        entry: The first of them.
        size: How many they are.
        shared: The ids of what all of them refer to, with others.
    """

    place: str
    entry: Attr
    size: int = 1
    shared: Set[int] = frozenset()


def parts(x: Any) -> tuple[Any, Sequence[Any]]:
    """A value as a label, which is safe to compare, and what is in it.

    The label tells how many these are. They are a list if the value has an identity.
    """
    kind: Any = type(x)
    if kind in _ATOMS:
        return (kind, repr(x)), ()  # as text: NaN equals itself then
    if descriptions.is_array(x):
        return descriptions.array_form(x), [] if _jax.is_ref(x) else ()
    if descriptions.is_variable(x):
        named = {"": x.get_raw_value(), **x.get_metadata()}
    elif descriptions.is_node(x):
        entries = list(vars(x).items())  # another thread may be writing
        named = {k: v for k, v in entries if not k.startswith("_pytree__")}
    elif isinstance(x, types.FunctionType):
        # The same lines that captured equal values, such as an initializer of a layer.
        captured = [*_python.contents_of(x), x.__defaults__, x.__kwdefaults__]
        kind, named = id(x.__code__), dict(enumerate(captured))
    elif isinstance(x, (list, tuple)):
        return (kind, len(x)), x
    elif dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        named = {field.name: getattr(x, field.name, None) for field in fields}
    else:
        return _parts_by_text(x)
    return (kind, *named), [*named.values()]


def _parts_by_text(x: Any) -> tuple[Any, Sequence[Any]]:
    """The parts of a value of which nothing is known but what it shows."""
    frame, entries = descriptions.contents(x)
    if frame is not None:
        is_ours = isinstance(x, (Mapping, functools.partial))
        is_whole = is_ours or descriptions.describes_itself(x)
        # A foreign class may hold more than it shows.
        names = [str(entry.key) for entry in entries] if is_whole else [id(x)]
        return (type(x), frame.type, *names), [entry.value for entry in entries]
    # And it may say of different values that they are equal, also within a treedef.
    is_foreign = imprints.may_change(x) or isinstance(x, jax.tree_util.PyTreeDef)
    if is_foreign or not isinstance(x, Hashable):
        return (type(x), id(x)), ()
    return (imprints.imprint(x), x), ()


class Siblings:
    """Compares the values of one text.

    Args:
        root: The object that is written.
    """

    def __init__(self, root: Any) -> None:
        # The label and the parts of each value, by its id; with them, it is kept alive.
        self._parts: dict[int, tuple[Any, Any, Sequence[Any]]] = {}
        self._references = self._count(root)

    def tokens(self, x: Any) -> tuple[Any, ...]:
        """What ``x`` is made of: equal tokens mean equal values."""
        return tuple(token for _, token in self._list(x, self.external(x)))

    def external(self, x: Any) -> Set[int]:
        """The ids of what is in ``x`` and referred to from outside of it."""
        counts = self._count(x).items()
        return {key for key, count in counts if count < self._references[key]}

    def _count(self, root: Any) -> collections.Counter[int]:
        """How often each object is referred to."""
        return collections.Counter(key for key, _ in self._list(root) if key)

    def _list(
        self, root: Any, external: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Any]]:
        """What a value is made of: ids of what can be shared, or 0, and tokens."""
        numbers: dict[int, int] = {}
        pending = [root]
        while pending:
            x = pending.pop()
            known = self._parts.get(id(x))
            if known is None:
                known = self._parts[id(x)] = x, *parts(x)
            _, label, below = known
            key = id(x) if isinstance(below, list) else 0
            if key in external or key in numbers:
                yield key, numbers.get(key, key)
                continue
            if key:
                numbers[key] = -len(numbers)  # no id
            yield key, label
            pending += reversed(below)

    def groups(self, entries: Sequence[Attr], *, may_omit: bool) -> list[Fold]:
        """Groups the entries that read the same; of many, omits those in the middle."""
        keys = [str(entry.key) for entry in entries]
        runs = self._runs(entries, keys)
        is_folded = len(runs) < len(entries)
        groups: list[Fold] = []
        for run in runs:
            entry, place = entries[run[0]], _place(run, keys, is_folded)
            shared = self.external(entry.value) if len(run) > 1 else frozenset[int]()
            groups.append(Fold(place, entry, len(run), shared))
        if may_omit and len(groups) > _MOST_ENTRIES:
            count = sum(map(len, runs[_FIRST:-_LAST]))
            omitted = Attr("", f"... {count:,} more ...", use_raw_value=True)
            groups[_FIRST:-_LAST] = [Fold("", omitted)]
        return groups

    def _runs(self, entries: Sequence[Attr], keys: list[str]) -> list[list[int]]:
        """The indices of what reads the same: neighbours, or in a long sequence all."""
        values = [entry.value for entry in entries]
        tokens = [
            self.tokens(x) if _takes_a_line(x) else i for i, x in enumerate(values)
        ]
        runs: list[list[int]] = []
        for i, token in enumerate(tokens):
            is_equal = runs and token == tokens[i - 1]
            if is_equal and _may_join(values[i], keys, runs[-1]):
                runs[-1].append(i)
            else:
                runs.append([i])
        if len(runs) <= _MANY_RUNS or any(keys):
            return runs
        regrouped: dict[Any, list[int]] = {}
        for run in runs:
            regrouped.setdefault(tokens[run[0]], []).extend(run)
        return [*regrouped.values()]


def _takes_a_line(x: Any) -> bool:
    """Whether a value may be folded."""
    is_container = isinstance(x, (Mapping, list, tuple))
    return is_container or descriptions.is_object(x) or callable(x)


def _may_join(value: Any, keys: list[str], run: list[int]) -> bool:
    """Whether the next key may join those of a run: numbered, or few and short."""
    last, key = keys[run[-1]], keys[run[-1] + 1]
    if not key or _is_next(last, key):
        return True
    names = ", ".join(keys[run[0] : run[-1] + 2])
    if descriptions.is_variable(value) or len(names) > _LONGEST_NAMES:
        return False  # it takes no more room than its key
    return isinstance(value, Mapping) or descriptions.describes_itself(value)


def _is_next(key: str, following: str) -> bool:
    """Whether a key follows on another, as ``layer_1`` on ``layer_0``."""

    def next_number(found: re.Match[str]) -> str:
        return str(int(found[0]) + 1).zfill(len(found[0]))

    return following != key and following == re.sub(r"\d+(?=\D*$)", next_number, key)


def _place(run: list[int], keys: list[str], is_folded: bool) -> str:
    """Where the entries of a run are: their keys, or in a sequence their indices."""
    names = [keys[i] for i in run]
    if names[0]:
        is_row = len(run) > 2 and all(map(_is_next, names, names[1:]))
        return f"{names[0]} to {names[-1]}" if is_row else ", ".join(names)
    if not is_folded:
        return ""
    steps = {later - i for i, later in itertools.pairwise(run)}
    if len(run) > 3 and len(steps) == 1 and steps != {1}:
        return f"({run[0]}, {run[1]}, ..., {run[-1]}) "
    known = set(run)
    firsts = [i for i in run if i - 1 not in known]
    lasts = [i for i in run if i + 1 not in known]
    ends = zip(firsts, lasts, strict=True)
    return f"({', '.join(f'{i}-{j}' if i < j else f'{i}' for i, j in ends)}) "


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of the constructors of a class and its bases, by parameter.

    A parameter is that of the first class which has it.
    """
    found: dict[str, Any] = {}
    for base in cls.__mro__[:-1]:
        # It may have no constructor, or none in Python.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            constructor = inspect.signature(vars(base)["__init__"])
            for name, parameter in constructor.parameters.items():
                found.setdefault(name, parameter.default)
    return found


def is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether an attribute has the default of the parameter of its name."""
    default = defaults.get(name)
    # A constructor that takes one axis or several keeps a tuple.
    axes = (default,) if type(default) is int else default
    return name in defaults and (_equal(value, default) or _equal(value, axes))


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, as far as is known without reading arrays."""
    if a is b or descriptions.is_array(a):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        a, b = dict(a), dict(b)  # a constructor may keep another kind of mapping
    (label, below), (other_label, others) = parts(a), parts(b)
    return label == other_label and all(map(_equal, below, others))
