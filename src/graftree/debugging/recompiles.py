"""Explains why functions are traced again: `explain_recompile`, `at_most_traces`.

A function made by `nnx.jit` records what each of its traces depended on. A trace is
compared with the earlier one that differs from it least.

The facts of a trace are a mapping, so that `differences.between` finds the differences
between two traces, or between two placements:

    ("net", "blocks", 3, "rate")         Static(0.1)           of `differences.facts`
    ("net", "kernel", "tag")             Static("x")           metadata, the same
    ("x",), ("x", TYPE)                  LEAF, float32[8,16]   JAX's type of a leaf
    (Setting("jax_enable_x64"),)         False                 the configuration of JAX

If a static attribute causes a trace for each value, the user is warned at once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax, errors
from graftree.core import fingerprints, hooks, paths
from graftree.core.graph import differences, flattening
from graftree.core.graph.differences import ABSENT, Box, MetadataKey, Node, SharedNode
from graftree.core.graph.graphdefs import LEAF, GraphDef, Path, Static
from graftree.core.modules.containers import List
from graftree.core.text import descriptions
from graftree.debugging import traces
from graftree.transforms.compiled.jit import JitWrapped
from graftree.transforms.lifting import argument_trees, decorators, signatures

# How much of a table is printed: the latest traces, some rows of each.
_MOST_TRACES, _MOST_ROWS = 6, 5


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """Result of `explain_recompile`, which prints as a table.

    Attributes:
        name: The name of the function.
        traces: How often it was traced.
        recompiles: How often an earlier trace was compiled again, for other placements
            of arrays.
        rows: All differences, trace by trace; see `Cause`.

    Example:
        >>> double = nnx.jit(lambda x: 2 * x)
        >>> doubled = [double(x) for x in (jnp.ones(2), jnp.ones(3))]
        >>> report = nnx.debugging.explain_recompile(double)
        >>> report.traces, [(row.path, row.was, row.now) for row in report.rows]
        (2, [('x', '(2,)', '(3,)')])
    """

    name: str
    traces: int
    recompiles: int
    rows: tuple[Cause, ...]

    def table(self, remark: str = "") -> str:
        """Draws the table, with a remark in the title."""
        times = _times(self.traces)
        title = f"{self.name} was {f'traced {times}' if self.traces else 'not traced'}"
        if self.recompiles:
            title += f" and compiled again {_times(self.recompiles)}"
        title += remark
        if not self.rows:
            return f"{title}."
        return "\n".join([f"{title}, because of:", *_table(self.rows)])

    __repr__ = table


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def explain_recompile(f: Callable[..., Any]) -> Explanation:
    """Explains why a compiled function was traced again.

    JAX traces and compiles a function again when something that the compiled program
    depends on is new: another shape or dtype, another static attribute or argument,
    another structure of a model, another configuration of JAX. Each trace is compared
    with the nearest earlier one, and each difference is listed with its path.

    You need not switch anything on first. The latest 16 traces of a function are kept,
    as long as JAX keeps their compiled programs.

    Args:
        f: The result of `nnx.jit` or `nnx.jit_partial`, or of `nnx.cached_partial` or
            ``functools.partial`` of such a function; also a bound method decorated with
            `nnx.jit`.

    Returns:
        An object that prints as a table, and has the attributes ``traces``, the number
        of traces, and ``rows``, one `Cause` for each difference: ``trace``,
        ``against``, ``path``, ``what``, ``was``, ``now``.

    Raises:
        TypeError: If ``f`` was not made by `nnx.jit`.

    Example:
        >>> @nnx.jit
        ... def step(net, x):
        ...     return net(x)
        >>> net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> y = step(net, jnp.ones((4, 2)))
        >>> y = step(net, jnp.ones((5, 2)))
        >>> nnx.debugging.explain_recompile(step)
        step was traced twice, because of:
          trace  against  path  what   was     now
          2      1        x     shape  (4, 2)  (5, 2)
    """
    return _explain(_jitted(f, "explain_recompile"))


@contextlib.contextmanager
def at_most_traces(f: Callable[..., Any], n: int) -> Iterator[None]:
    """Fails if a compiled function is traced more than ``n`` times in a block.

    For tests: a training loop should trace its step once.

    Args:
        f: As for `explain_recompile`.
        n: How many traces are fine; 0 if the function must not be traced at all.

    Raises:
        AssertionError: At the end of the block, if there were more traces; lists the
            differences. A block that raises fails with its own exception.
        TypeError: If ``f`` was not made by `nnx.jit`.

    Example:
        >>> double = nnx.jit(lambda x: 2 * x)
        >>> try:
        ...     with nnx.debugging.at_most_traces(double, 1):
        ...         for x in 1, 2, 3.0:
        ...             y = double(x)
        ... except AssertionError as error:
        ...     print(error)
        <lambda> was traced twice in a block that allows 1, because of:
          trace  against  path  what   was    now
          2      1        x     dtype  int32  float32
    """
    jitted = _jitted(f, "at_most_traces")
    start = jitted.traces.count
    yield
    count = jitted.traces.count - start
    if count > n:
        remark = f" in a block that allows {n}"
        raise AssertionError(_explain(jitted, after=start).table(remark))


def _jitted(f: Any, function: str) -> JitWrapped[..., Any]:
    """Takes the result of `nnx.jit` out of wrappers that bind arguments to it."""
    inner = f
    while not isinstance(inner, JitWrapped):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            text = type(f).__name__
            text = f"{f.__name__} ({text})" if hasattr(f, "__name__") else text
            raise TypeError(
                errors.message(
                    f"nnx.debugging.{function} expects a function made by nnx.jit, got "
                    f"{text}.",
                    way_out="Only these functions record why they are traced: pass the "
                    "one that is decorated with @nnx.jit.\nFor functions made by "
                    "jax.jit, use JAX's own log: "
                    'jax.config.update("jax_explain_cache_misses", True).',
                )
            )
    return inner


def _explain(jitted: JitWrapped[..., Any], after: int = 0) -> Explanation:
    """Explains the traces with higher numbers than ``after``."""
    earlier: list[tuple[int, Facts]] = []
    rows: list[Cause] = []
    recompiles = 0
    for trace in [*jitted.traces.latest]:
        number, facts = trace.number, of_trace(trace)
        if facts is None:
            rows += [Cause(number, None, "", _GONE, "", "")] * (number > max(after, 1))
            continue
        if number > max(after, 1):
            rows += _nearest(number, earlier, facts)
        earlier.append((number, facts))
        if number > after:
            compiled = of_placements(trace)
            recompiles += len(compiled[1:])
            for count in range(1, len(compiled)):
                others = [(number, facts) for facts in compiled[:count]]
                rows += _nearest(number, others, compiled[count])
    name = decorators.name_of(jitted)
    return Explanation(name, jitted.traces.count - after, recompiles, tuple(rows))


def _nearest(
    number: int, earlier: Sequence[tuple[int, Facts]], facts: Facts
) -> list[Cause]:
    """Lists the differences from the nearest earlier facts; in a tie, the latest."""
    if not earlier:
        return [Cause(number, None, "", _DROPPED, "", "")]
    candidates = []
    for against, old_facts in reversed(earlier):
        causes = [
            Cause(number, against, *row)
            for path, old, new in differences.between(old_facts, facts)
            for row in _rows(path, old, new, old_facts, facts)
        ]
        causes = causes or [
            Cause(number, against, _path_text(path, facts), _kind(path, x, x), *words)
            for path, x in _not_inspectable(facts)
            for words in [(type(x.value).__name__, "can't be inspected")]
        ]
        remark = _SAME if _are_equal(old_facts, facts) else _OTHER
        candidates.append(causes or [Cause(number, against, "", remark, "", "")])
    return min(candidates, key=lambda causes: (len(_alike(causes)), len(causes)))


def _are_equal(old_facts: Facts, facts: Facts) -> bool:
    try:
        return old_facts == facts
    except Exception:  # of the comparison of a static value
        return False


def _not_inspectable(facts: Facts) -> list[tuple[Path, Static]]:
    """Lists the static values that can't be inspected, by path."""
    return [
        (path, fact)
        for path, fact in facts.items()
        if isinstance(fact, Static) and not fingerprints.is_seen(fact[0])
    ]


# The table.

_HEADER = ("trace", "against", "path", "what", "was", "now")
# Texts in place of a row, by the kind of difference.
_GONE, _DROPPED, _SAME, _OTHER = "gone", "unknown", "nothing", "other"
_REMARKS = {
    _GONE: "no longer known: JAX has dropped this trace",
    _DROPPED: "JAX had dropped all earlier traces, e.g. after jax.clear_caches()",
    # A list is the same object in both, so its earlier contents are unknown.
    _SAME: "no known difference: JAX had dropped earlier traces, e.g. after "
    "jax.clear_caches(), or a list or dict in a static attribute was changed in place",
    _OTHER: "details of the structure that have no path",
}


def _table(rows: Sequence[Cause]) -> list[str]:
    numbers = list(dict.fromkeys(row.trace for row in rows))
    lines: list[tuple[str, ...]] = [_HEADER]
    for number in numbers[-_MOST_TRACES:]:
        groups = _alike([row for row in rows if row.trace == number])
        lines += [_cells(group) for group in groups[:_MOST_ROWS]]
        if len(groups) > _MOST_ROWS:
            rest = f"... and {len(groups) - _MOST_ROWS} more"
            lines.append((str(number), "", rest))
    if len(numbers) > _MOST_TRACES:
        lines.append(
            (f"... and those of {len(numbers) - _MOST_TRACES} earlier traces",)
        )
    return descriptions.aligned(lines, indent="  ")


def _alike(rows: Sequence[Cause]) -> list[list[Cause]]:
    """Groups rows that differ only in where in the model something is."""
    groups: dict[Any, list[Cause]] = {}
    for row in rows:
        key = (row.path.rpartition(".")[2], *row[3:])
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def _cells(group: Sequence[Cause]) -> tuple[str, ...]:
    trace, against, path, kind, *values = group[0]
    start = str(trace), "-" if against is None else str(against)
    if kind in _REMARKS:
        return (*start, _REMARKS[kind])
    more = f" (+{len(group) - 1} alike)" if len(group) > 1 else ""
    return (*start, path + more, kind, *map(_shortened, values))


def _shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# The differences between two traces, in the words of the user.


class Cause(NamedTuple):
    """One difference between a trace and an earlier one.

    Attributes:
        trace: The number of the trace, counted from 1.
        against: The number of the nearest earlier trace; the same number if the trace
            was compiled again.
        path: Where they differ, as in ``net.blocks[0].rate`` or ``x``.
        what: The kind of difference: "shape", "static attribute", "added", ...
        was: The value there in the earlier trace, in words.
        now: The value there in this one.
    """

    trace: int
    against: int | None
    path: str
    what: str
    was: str
    now: str


def _rows(
    path: Path, old: Any, new: Any, old_facts: Facts, new_facts: Facts
) -> Iterator[tuple[str, str, str, str]]:
    start, kind = _path_text(path, old_facts, new_facts), _kind(path, old, new)
    if path[-1] is TYPE:
        yield from [(start, *words) for words in _aspects(old, new)]
        return
    pairs = [("", old, new)]
    if isinstance(old, Static) and isinstance(new, Static):
        pairs = _narrowed(old, new)
        owner = getattr(old_facts.get(path[:-1]), "type", object)
        if path[-1] == "_length" and issubclass(owner, List):
            start, kind = start.removesuffix("._length"), "length"
    for subpath, old_part, new_part in pairs:
        words = _word(path, old_part, old_facts)
        new_words = _word(path, new_part, new_facts)
        if words == new_words:
            new_words = "a different one, not equal"
        yield start + subpath, kind, words, new_words


def _aspects(old: Any, new: Any) -> list[tuple[str, str, str]]:
    """Lists the aspects in which two types differ; if there are none, their texts."""
    olds, news = map(aspects, (old, new))
    differing = [
        (aspect, _word_of_value(olds.get(aspect)), _word_of_value(news.get(aspect)))
        for aspect in olds | news
        if olds.get(aspect) != news.get(aspect)
    ]
    return differing or [("type", _word_of_value(old), _word_of_value(new))]


def _path_text(path: Path, *all_facts: Facts) -> str:
    """Writes a path as the user does: ``net.blocks[3].rate``, ``batch['x']``."""
    start, *keys = path
    if isinstance(start, Setting):
        name = start.removeprefix("abstract_").removesuffix("_state")
        return name.removesuffix("_context_manager")
    text = str(start)
    for length, key in enumerate(keys, 1):
        if isinstance(key, (Aspect, MetadataKey)):
            break
        owners = [facts.get(path[:length]) for facts in all_facts]
        is_item = any(
            isinstance(fact, Node) and issubclass(fact.type, Mapping) for fact in owners
        )
        text += f"[{key!r}]" if is_item else paths.key_text(key)
    return text


def _kind(path: Path, old: Any, new: Any) -> str:
    """Names the kind of difference at a path."""
    last, pair = path[-1], (old, new)
    if isinstance(last, Setting):
        return "JAX configuration"
    if isinstance(last, Aspect):
        return str(last)
    if isinstance(last, MetadataKey):
        return f"metadata {str(last)!r}"
    if any(isinstance(fact, SharedNode) for fact in pair):
        return "sharing"
    is_static = all(isinstance(fact, Static) for fact in pair)
    if len(path) == 1:
        return "static argument" if is_static else "argument"
    if old is ABSENT or new is ABSENT:
        return "added" if old is ABSENT else "removed"
    return "static attribute" if is_static else "type"


# Facts in words.


def _word(path: Path, fact: Any, facts: Facts) -> str:
    if isinstance(path[-1], (Aspect, Setting)):
        return "none" if fact is ABSENT else _word_of_value(fact)
    match fact:
        case _ if fact is ABSENT and len(path) == 1:
            return "not passed"
        case SharedNode(path=earlier) if earlier is not None:
            return f"the same as {_path_text(earlier, facts)}"
        case Node(type=node_type) if node_type is type(None):
            return "None"
        case Box(is_ref=True):
            return f"{differences.describe(fact)} in a ref"
        case _ if fact is LEAF and (*path, TYPE) in facts:
            array = aspects(facts[*path, TYPE])
            return descriptions.describe_form(array["dtype"], array["shape"])
        case Static() if not isinstance(fact.value, type) and (
            name := descriptions.callable_and_place(fact.value)
        ):
            return name
        case _:
            return _without_address(differences.describe(fact))


def _word_of_value(value: Any) -> str:
    match value:
        case traces.Placement(sharding=sharding, is_committed=is_committed):
            text = _word_of_sharding(sharding)
            return text if is_committed else f"{text}, uncommitted"
        case jax.sharding.NamedSharding():
            return _word_of_sharding(value)
        case _ if isinstance(value, (jax.sharding.AbstractMesh, jax.sharding.Mesh)):
            return "None" if value.empty else _word_of_mesh(value)
        case _ if hasattr(value, "axis_sizes"):  # those that vmap names
            return _word_of_mesh(value.axis_sizes)
        case _:
            return _without_address(descriptions.safe_repr(value, str))


def _word_of_sharding(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on {_word_of_mesh(sharding.mesh)}"
    devices = sorted(f"{d.platform}:{d.id}" for d in sharding.device_set)
    return ", ".join(devices[:3]) + ("" if len(devices) < 4 else ", ...")


def _word_of_mesh(mesh: Any) -> str:
    axes = getattr(mesh, "shape", mesh)
    axis_types = {
        axis_type.name for axis_type in getattr(mesh, "axis_types", None) or ()
    }
    text = ", ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
    return f"{text} ({', '.join(sorted(axis_types))})" if axis_types else text


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split()))


# Static values.


def _narrowed(old: Static, new: Static) -> Iterator[tuple[str, Static, Static]]:
    """Finds where two static values differ: the text of a path, and both parts."""
    olds, news = _members(old.value), _members(new.value)
    is_alike = type(old.value) is type(new.value) and olds.keys() == news.keys()
    pairs = [(key, Static(x), Static(news[key])) for key, x in olds.items() if is_alike]
    differing = [(key, x, y) for key, x, y in pairs if x != y]
    if not differing:
        yield "", old, new
    for key, x, y in differing:
        for subpath, old_part, new_part in _narrowed(x, y):
            yield key + subpath, old_part, new_part


def _members(x: Any) -> dict[str, Any]:
    """Lists the members of a value by the texts of their keys, if there are any."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x) if field.compare]
        return {f".{name}": getattr(x, name) for name in names}
    if isinstance(x, tuple) and (names := getattr(x, "_fields", None)):
        return {f".{name}": member for name, member in zip(names, x, strict=False)}
    if isinstance(x, (dict, tuple, list)):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return {f"[{key!r}]": member for key, member in items}
    return {}


Facts = dict[Path, Any]


class Aspect(str):
    """Last key of a path to a further fact about an argument or leaf."""


class Setting(str):
    """Only key of a path to a part of JAX's configuration or context."""


# The way an argument was passed; JAX's name for the abstract value of an array.
PASSED, TYPE = Aspect("passed"), Aspect("type")


def of_trace(trace: traces.Trace) -> Facts | None:
    """Lists all that a trace of a function depended on; ``None`` if it isn't kept."""
    signature = trace.signature()
    if signature is None:
        return None
    settings = _jax.settings_in(trace.context)
    facts = _of_arguments(signature, trace.types)
    return facts | {(Setting(key),): x for key, x in settings.items()}


def of_placements(trace: traces.Trace) -> list[Facts]:
    """Lists the placements of each compilation of a trace, if there are several."""
    signature, placements = trace.signature(), [*trace.placements]
    if signature is None or len(placements) < 2:
        return []
    return [
        _of_arguments(
            signature,
            [x._replace(fact=at) for x, at in zip(trace.types, placed, strict=True)],
        )
        for placed in placements
    ]


def _of_arguments(
    signature: signatures.Signature, array_facts: Sequence[traces.ArrayFact]
) -> Facts:
    """Lists the facts about arguments and the arrays in their leaves."""
    marks = [np.asarray(position) for position in range(len(signature.leaf_specs))]
    tree, _ = argument_trees.unpack(signature, marks, flattening.IndexMap())
    args, kwargs, *third = tree
    name, keys_of_arguments = signature.name_of_argument, signature.positions()
    starts = [*map(name, keys_of_arguments), *signature.labels.functions]
    functions = third[0] if third else ()

    def located(path: Path) -> Path | None:
        return (starts[path[0]], *path[1:]) if path else None

    facts: Facts = {(name(key),): value for key, value in signature.statics}
    for key in (*dict(signature.statics), *keys_of_arguments):
        how = "by position" if isinstance(key, int) else "by keyword"
        facts[name(key), PASSED] = how
    # In one walk, since arguments may share objects.
    graphdef, leaves = flattening.flatten_graph((*args, *kwargs.values(), *functions))
    for path, fact in differences.facts(graphdef, located).items():
        facts[path] = fact
        if isinstance(fact, Node) and fact.type is GraphDef:
            treedef, _ = fact.metadata
            skeleton = treedef.unflatten(())
            facts |= differences.facts(skeleton, differences.below(path))
    by_value = collections.defaultdict[int, list[Any]](list)
    for value, subpath, x in array_facts:
        by_value[value].append((subpath, x))
    for (argument, *keys), leaf in zip(graphdef.paths(), leaves, strict=True):
        # If the value is a container, there is a fact about each array in it.
        for subpath, x in by_value[int(flattening.raw_of(leaf))]:
            start = (starts[argument], *keys, *subpath)
            if subpath:
                facts[start] = LEAF
            facts[*start, TYPE] = x
    return facts


def aspects(x: Any) -> dict[str, Any]:
    """Lists what JAX compares in the type or placement of an array or ref."""
    if isinstance(x, traces.Placement):
        return {"sharding": x}
    aval = getattr(x, "inner_aval", x)
    attributes = {word: getattr(aval, name, None) for name, word in _ASPECTS.items()}
    return {**attributes, "sharding": _sharding_in(aval)}


_ASPECTS = {
    "shape": "shape",
    "dtype": "dtype",
    "weak_type": "weak type",
    "memory_space": "memory space",
    "vma": "manual axes",
}


def _sharding_in(aval: Any) -> Any:
    """Finds the sharding that is part of a type, over the axes of a mesh."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    entries = [*sharding.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


# A warning.

_logger = logging.getLogger("graftree")


def _warn_of_values(
    latest: Sequence[traces.Trace], function: Callable[..., Any]
) -> bool:
    """Warns of the attribute, if the latest traces differ only in one."""
    # Listing facts takes as long as tracing some layers.
    facts = [x for x in map(of_trace, latest) if x is not None]
    changes = [differences.between(x, y) for x, y in itertools.pairwise(facts)]
    distinct = {change.path for changed in changes for change in changed}
    if not distinct and facts and (statics := _not_inspectable(facts[-1])):
        path, fact = statics[0]
        _logger.warning(
            "%s is traced and compiled at every call, because the static attribute %s "
            "can't be inspected: every %s counts as changed. If its objects don't "
            "change, define __hash__ in the class; or make their contents visible to "
            "pickle.",
            decorators.name_of(function),
            signatures.name_of(path),
            type(fact.value).__name__,
        )
        return True
    # Values that are not equal to themselves differ without a difference to show.
    if len(distinct) != 1 or [*map(len, changes)] != [1] * (len(latest) - 1):
        return False
    (path,) = distinct
    values = [changes[0][0].old, *[changed[0].new for changed in changes]]
    # A static argument is static on purpose.
    if len(path) < 2 or not all(isinstance(value, Static) for value in values):
        return False
    _logger.warning(
        "%s is traced and compiled for each value of the static attribute %s, most "
        "recently %s. If it changes as the program runs, make it a Variable, whose "
        "value is not part of the program; if it is a new object each "
        "time, such as an optimizer or a lambda, create it once. "
        "nnx.debugging.explain_recompile has the details.",
        decorators.name_of(function),
        signatures.name_of(path),
        ", ".join([_SHORT.repr(value.value) for value in values]),
    )
    return True


# Functions within an optimizer have long names.
_SHORT = reprlib.Repr()
_SHORT.maxother = 60

hooks.record_of_traces.fill(functools.partial(traces.Traces, _warn_of_values))
