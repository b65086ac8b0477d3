"""What differs between two traces of a function, in the words of the user."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from graftree.core import paths
from graftree.core.graph import differences
from graftree.core.graph.differences import ABSENT, Box, MetadataKey, Node, Repeated
from graftree.core.graph.graphdefs import LEAF, Static
from graftree.core.modules.containers import List
from graftree.core.text import short_forms
from graftree.transforms.crossing import traces
from graftree.transforms.crossing.traces import (
    TYPE,
    Aspect,
    Facts,
    OnMesh,
    Path,
    Placed,
    Setting,
)


class Cause(NamedTuple):
    """One difference between a trace and an earlier one.

    Attributes:
        trace: The number of the trace, counted from 1.
        against: The number of the earlier trace, the nearest; it is the same number if
            the trace was compiled again.
        path: Where they differ, as in ``net.blocks[0].rate`` or ``x``.
        what: What differs: "shape", "static attribute", "added", ...
        was: What was there in the earlier trace, in words.
        now: What is there in this one.
    """

    trace: int
    against: int | None
    path: str
    what: str
    was: str
    now: str


def between(trace: int, against: int, before: Facts, after: Facts) -> list[Cause]:
    """What differs between two traces with these facts."""
    return [
        Cause(trace, against, *row)
        for path, was, now in differences.between(before, after)
        for row in _rows(path, was, now, before, after)
    ]


def _rows(
    path: Path, was: Any, now: Any, before: Facts, after: Facts
) -> Iterator[tuple[str, str, str, str]]:
    start, what = _where(path, before, after), _what(path, was, now)
    if path[-1] is TYPE:
        yield from [(start, *words) for words in _aspects(was, now)]
        return
    parts = [("", was, now)]
    if isinstance(was, Static) and isinstance(now, Static):
        parts = _narrowed(was, now)
        if path[-1] == "_length" and _is_list(before.get(path[:-1])):
            start, what = start.removesuffix("._length"), "length"
    for below, old, new in parts:
        words, new_words = _word(path, old, before), _word(path, new, after)
        if words == new_words:
            new_words = "another one, not equal"
        yield start + below, what, words, new_words


def _aspects(was: Any, now: Any) -> list[tuple[str, str, str]]:
    """The aspects in which two types differ; their text, if none of those does."""
    before, after = map(traces.aspects, (was, now))
    found = [
        (what, _word_of_value(before.get(what)), _word_of_value(after.get(what)))
        for what in before | after
        if before.get(what) != after.get(what)
    ]
    return found or [("type", _word_of_value(was), _word_of_value(now))]


def _is_list(fact: Any) -> bool:
    return isinstance(fact, Node) and issubclass(fact.type, List)


def _where(path: Path, *all_facts: Facts) -> str:
    """A path as the user writes it: ``net.blocks[3].rate``, ``batch['x']``."""
    start, *keys = path
    if isinstance(start, Setting):
        name = start.removeprefix("abstract_").removesuffix("_state")
        return name.removesuffix("_context_manager")
    text = str(start)
    for number, key in enumerate(keys, 1):
        if isinstance(key, (Aspect, MetadataKey)):
            break
        above = [facts.get(path[:number]) for facts in all_facts]
        is_item = any(
            isinstance(fact, Node) and issubclass(fact.type, Mapping) for fact in above
        )
        text += f"[{key!r}]" if is_item else paths.key_text(key)
    return text


def _what(path: Path, was: Any, now: Any) -> str:
    """What kind of thing differs at a path."""
    last, pair = path[-1], (was, now)
    if isinstance(last, Setting):
        return "JAX configuration"
    if isinstance(last, Aspect):
        return str(last)
    if isinstance(last, MetadataKey):
        return f"metadata {str(last)!r}"
    if any(isinstance(fact, Repeated) for fact in pair):
        return "sharing"
    is_static = all(isinstance(fact, Static) for fact in pair)
    if len(path) == 1:
        return "static argument" if is_static else "argument"
    if was is ABSENT or now is ABSENT:
        return "added" if was is ABSENT else "removed"
    return "static attribute" if is_static else "type"


# Facts in words.


def _word(path: Path, fact: Any, facts: Facts) -> str:
    if isinstance(path[-1], (Aspect, Setting)):
        return "none" if fact is ABSENT else _word_of_value(fact)
    match fact:
        case _ if fact is ABSENT and len(path) == 1:
            return "not passed"
        case Repeated(path=earlier) if earlier is not None:
            return f"the same as {_where(earlier, facts)}"
        case Node(type=kind) if kind is type(None):
            return "None"
        case Box(is_ref=True):
            return f"{differences.describe(fact)} in a ref"
        case _ if fact is LEAF and (*path, TYPE) in facts:
            aspects = traces.aspects(facts[*path, TYPE])
            return short_forms.describe_form(aspects["dtype"], aspects["shape"])
        case Static() if inspect.isroutine(fact.value):
            return _word_of_function(fact.value)
        case _:
            return _without_address(differences.describe(fact))


def _word_of_value(value: Any) -> str:
    match value:
        case Placed(sharding=sharding, is_committed=is_committed):
            place = _word_of_sharding(sharding)
            return place if is_committed else f"{place}, uncommitted"
        case OnMesh(mesh=mesh, spec=spec):
            return f"{spec} on {_word_of_mesh(mesh)}"
        case _ if isinstance(value, (jax.sharding.AbstractMesh, jax.sharding.Mesh)):
            return "None" if value.empty else _word_of_mesh(value)
        case _ if hasattr(value, "axis_sizes"):  # those that vmap names
            return _word_of_mesh(value.axis_sizes)
        case _:
            return _without_address(str(value))


def _word_of_sharding(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on {_word_of_mesh(sharding.mesh)}"
    devices = sorted(f"{d.platform}:{d.id}" for d in sharding.device_set)
    return ", ".join(devices[:3]) + ("" if len(devices) < 4 else ", ...")


def _word_of_mesh(mesh: Any) -> str:
    axes = getattr(mesh, "shape", mesh)
    kinds = {kind.name for kind in getattr(mesh, "axis_types", None) or ()}
    text = ", ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
    return f"{text} ({', '.join(sorted(kinds))})" if kinds else text


def _word_of_function(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = function.__qualname__.rpartition("<locals>.")[2]
    if code is None:
        return name
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split()))


# Static values.


def _narrowed(was: Static, now: Static) -> Iterator[tuple[str, Static, Static]]:
    """Where two static values differ: the text of a path inside them, and the parts."""
    pairs = [(key, Static(x), Static(y)) for key, x, y in _parts(was.value, now.value)]
    differing = [(key, x, y) for key, x, y in pairs if x != y]
    if not differing:
        yield "", was, now
    for key, x, y in differing:
        for below, old, new in _narrowed(x, y):
            yield key + below, old, new


def _parts(was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """The members of two values of one type that have the same ones, by key."""
    if type(was) is not type(now):
        return []
    if dataclasses.is_dataclass(was) and not isinstance(was, type):
        names = [field.name for field in dataclasses.fields(was) if field.compare]
        return [(f".{name}", getattr(was, name), getattr(now, name)) for name in names]
    if isinstance(was, dict) and was.keys() == now.keys():
        return [(f"[{key!r}]", was[key], now[key]) for key in was]
    if isinstance(was, (tuple, list)) and len(was) == len(now):
        fields = getattr(was, "_fields", None)
        keys = (
            [f".{x}" for x in fields] if fields else [f"[{i}]" for i in range(len(was))]
        )
        return [*zip(keys, was, now, strict=True)]
    return []
