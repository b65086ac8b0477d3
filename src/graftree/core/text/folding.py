"""Which values would read the same: what the compact form may fold into one.

Two values are equal here if they have the same structure: types, attribute names (also
hidden ones), shapes, dtypes and static values. The numbers in arrays don't count. What
always holds:

- what is referred to from outside of a value too is equal to itself alone: siblings
  that share it are equal, those that have copies of it are not;
- no ``==`` of a foreign class is trusted: its instances equal themselves alone.

A value is compared by its *tokens*: what it is made of, in preorder.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax, _python
from graftree.core.text import writing

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic)
_COMPARABLE = (
    *(type, enum.Enum, np.dtype, range),
    *(jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh),
)


class Siblings:
    """Compares the values of one text.

    Args:
        root: The object that is written.
    """

    def __init__(self, root: Any) -> None:
        self._alive: list[Any] = []
        self._references = self._count(root)

    def tokens(self, x: Any) -> tuple[Any, ...]:
        """What ``x`` is made of: equal tokens mean equal values."""
        external = self.external(x)
        local: dict[int, int] = {}
        found: list[Any] = []
        pending = [x]
        while pending:
            part = pending.pop()
            if _has_identity(part):
                if id(part) in external:
                    found.append(("outside", id(part)))
                    continue
                if id(part) in local:
                    found.append(("again", local[id(part)]))
                    continue
                local[id(part)] = len(local)
            label, children = self._parts(part)
            found.append((label, len(children)))
            pending += reversed(children)
        return tuple(found)

    def external(self, x: Any) -> set[int]:
        """The ids of what is in ``x`` and referred to from outside of it."""
        inside = self._count(x)
        return {key for key, count in inside.items() if count < self._references[key]}

    def _count(self, root: Any) -> collections.Counter[int]:
        """How often each object is referred to; of each, the parts are counted once."""
        counts: collections.Counter[int] = collections.Counter()
        pending = [root]
        while pending:
            x = pending.pop()
            if _has_identity(x):
                counts[id(x)] += 1
                if counts[id(x)] > 1:
                    continue
            pending += self._parts(x)[1]
        return counts

    def _parts(self, x: Any) -> tuple[Any, list[Any]]:
        label, children = parts(x)
        # Some are made when asked for; no other object may take their id.
        self._alive += children
        return label, children


def is_object(x: Any) -> bool:
    """Whether ``x`` is an object of a model: a node, Variable or ref."""
    return writing.is_variable(x) or writing.is_node(x) or _jax.is_ref(x)


def _has_identity(x: Any) -> bool:
    if isinstance(x, (*_ATOMS, *_COMPARABLE, tuple)):
        return False
    return not is_array(x) or _jax.is_ref(x)


def parts(x: Any) -> tuple[Any, list[Any]]:
    """A value as a label, which is safe to compare, and its parts."""
    cls = type(x)
    if isinstance(x, _ATOMS):
        # As text: NaN equals itself then, and 1, 1.0 and True differ.
        return (cls, repr(x)), []
    if isinstance(x, _COMPARABLE):
        return (cls, x), []
    if is_array(x):
        return ("array", array_kind(x), str(x.shape), str(x.dtype)), []
    if writing.is_variable(x):
        metadata = x.get_metadata()
        return (cls, *metadata), [x.get_raw_value(), *metadata.values()]
    if writing.is_node(x):
        items = attributes(x)
        return (cls, *items), [*items.values()]
    return _container_parts(x) or _function_parts(x) or ((cls, id(x)), [])


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of a node, without its bookkeeping."""
    entries = list(vars(node).items())  # another thread may be writing
    return {k: v for k, v in entries if not k.startswith("_pytree__")}


def _container_parts(x: Any) -> tuple[Any, list[Any]] | None:
    cls = type(x)
    if hasattr(cls, "__nnx_repr__"):
        if hasattr(cls, "raw_mapping"):  # a State, whose items are made when read
            return cls, [x.raw_mapping]
        frame, items = writing.described(x)
        keys = [str(attribute.key) for attribute in items]
        return (cls, str(frame.type), *keys), [item.value for item in items]
    if isinstance(x, Mapping):
        return cls, [*x.keys(), *x.values()]
    if isinstance(x, (list, tuple)):
        return cls, [*x]
    if dataclasses.is_dataclass(x):
        fields = [field.name for field in dataclasses.fields(x)]
        return (cls, *fields), [getattr(x, name, None) for name in fields]
    if _jax.is_pytree_type(cls):
        # It may hold more than its children, so it equals itself alone.
        entries, _ = _jax.flatten_one_level(x)
        return (cls, id(x)), [child for _, child in entries]
    return None


def _function_parts(x: Any) -> tuple[Any, list[Any]] | None:
    if isinstance(x, functools.partial):
        return "partial", [x.func, x.args, x.keywords]
    if isinstance(x, types.FunctionType):
        # The same lines that captured equal values, such as an initializer of a layer.
        captured = _python.contents_of(x)
        return id(x.__code__), [*captured, x.__defaults__, x.__kwdefaults__]
    if isinstance(x, types.MethodType):
        return id(x.__func__), [x.__self__]
    return None


# Arrays, which are known by shape and dtype.


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array, a ref, or stands for an array."""
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return isinstance(x, kinds) or _jax.is_ref(x)


def array_kind(x: Any) -> str:
    """A word for what is special about an array; empty for those of JAX."""
    if _jax.is_ref(x):
        return "ref"
    if isinstance(x, np.ndarray):
        return "numpy"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract"
    is_deleted = not isinstance(x, _jax.Tracer) and x.is_deleted()
    return "deleted" if is_deleted else ""


# Entries of a container or object, given as (key, value); a sequence has empty keys.

_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
# Names are listed if they take no more characters.
_LONGEST_NAMES = 40
# A sequence with more runs than this may be one that alternates.
_MANY_RUNS = 8


def groups(siblings: Siblings, entries: list[tuple[str, Any]]) -> list[list[int]]:
    """Groups the indices of the entries that would read the same.

    These are neighbours; in a long sequence they need not be.
    """
    if len(entries) < 2:
        return [[index] for index in range(len(entries))]
    tokens = [_tokens(siblings, value) for _, value in entries]
    runs: list[list[int]] = []
    for index in range(len(entries)):
        is_equal = index and tokens[index] and tokens[index] == tokens[index - 1]
        if is_equal and _may_extend(entries, runs[-1]):
            runs[-1].append(index)
        else:
            runs.append([index])
    if len(runs) <= _MANY_RUNS or any(key for key, _ in entries):
        return runs
    regrouped: dict[Any, list[int]] = {}
    for run in runs:
        regrouped.setdefault(tokens[run[0]] or run[0], []).extend(run)
    return list(regrouped.values())


def _tokens(siblings: Siblings, value: Any) -> tuple[Any, ...] | None:
    """The tokens of a value that may be folded: one that is worth a line."""
    is_known = is_array(value) or hasattr(type(value), "__nnx_repr__")
    if is_known or callable(value) or isinstance(value, (Mapping, list, tuple)):
        return siblings.tokens(value)
    return None


def _is_numbered(keys: Sequence[str]) -> bool:
    """Whether the second key follows on the first, as ``layer_1`` on ``layer_0``."""
    first, last = map(_NUMBERED.fullmatch, keys)
    if first is None or last is None or (first[1], first[3]) != (last[1], last[3]):
        return False
    return int(last[2]) == int(first[2]) + 1


def _may_extend(entries: list[tuple[str, Any]], run: list[int]) -> bool:
    """Whether the next key may join a run: numbered keys, or few short ones."""
    (before, _), (key, value) = entries[run[-1]], entries[run[-1] + 1]
    if not key or _is_numbered((before, key)):
        return True
    is_object = hasattr(type(value), "__nnx_repr__") and not writing.is_variable(value)
    if not (is_object or isinstance(value, Mapping)):
        return False  # it takes no more room than the key
    return len(", ".join(entries[i][0] for i in [*run, run[-1] + 1])) <= _LONGEST_NAMES


def places(indices: list[int], keys: list[str]) -> str:
    """Where the entries of a group are: their keys, or in a sequence their indices."""
    if keys[0]:
        is_row = len(keys) > 2 and all(map(_is_numbered, itertools.pairwise(keys)))
        return f"{keys[0]} to {keys[-1]}" if is_row else ", ".join(keys)
    steps = {later - index for index, later in itertools.pairwise(indices)}
    if len(indices) > 3 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]}, {indices[1]}, ..., {indices[-1]}"
    found: list[list[int]] = []
    for index in indices:
        if found and index == found[-1][-1] + 1:
            found[-1].append(index)
        else:
            found.append([index])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found
    )
