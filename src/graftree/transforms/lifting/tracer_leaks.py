"""Keeps tracers out of static attributes, and refs out of calls that take none.

The new objects inside a transform share their static values with the caller's. So a
list in a static attribute is the caller's own list, and a value that a traced function
appends to it would stay there after the trace. Lists, dicts, sets and plain objects are
noted before the function runs; afterwards those that hold a new tracer get their
content back, even if the function raised. It is not an error: a program may have used
them to store values that it needs only while it is traced.

Where a transform of JAX takes no array refs, their content crosses instead, or they are
refused.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from graftree import _jax, _python, errors
from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import nodes
from graftree.core.objects import attributes
from graftree.transforms.lifting import debug_info
from graftree.transforms.lifting.leaves import Leaves

# How deep objects in objects are inspected; deeper ones are not mere containers.
_DEPTH = 3
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType)


# The path of an object that may change, the object, and its contents.
Note = tuple[Any, Any, Any]


def note(arguments: Any) -> list[Note]:
    """All values in static attributes of arguments that may change."""
    noted: list[Note] = []
    is_new = walks.Once()
    statics: list[tuple[Path, Any]] = []

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        if not is_new(x):
            return None
        children = []
        for key, value, is_data in nodes.children(x):
            kind = nodes.KINDS.get(type(value)) or nodes.kind_of(value)
            if is_data is False or (is_data is None and kind is nodes.Leaf.STATIC):
                if type(value) not in attributes.ATOMS:
                    statics.append(((*path, key), value))
            elif not isinstance(kind, nodes.Leaf):
                children.append((key, value))
        return children

    collections.deque(walks.walk(arguments, below), maxlen=0)

    def content(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        is_known = type(x) in attributes.ATOMS or isinstance(x, _CLOSED)
        if is_known or nodes.is_node_leaf(x) or not is_new(x):
            return None
        members = _content(x)
        if members is None and isinstance(x, tuple):
            members = x
        if members is None or len(path) > deepest:
            return []
        return [*(members.items() if isinstance(members, dict) else enumerate(members))]

    for start, static in statics:
        deepest = len(start) - 1 + _DEPTH
        for path, x in walks.walk(static, content, start):
            if _content(x) is not None:
                noted.append((path, x, _items(x)))
    return noted


@contextlib.contextmanager
def guarded(noted: Sequence[Note], transform: str) -> Iterator[None]:
    """Keeps tracers out of the noted objects."""
    try:
        yield
    finally:
        leaks = [note for note in noted if _has_new_tracer(*note[1:])]
        for _, holder, items in leaks:
            _restore(holder, items)
        if leaks:
            _warn([path for path, *_ in leaks], transform)


def _warn(paths: list[Any], transform: str) -> None:
    _python.warn_user(
        errors.message(
            f"nnx.{transform}: a traced value was put into a static attribute, where "
            "it would outlive the trace. It was taken out again.",
            where="\n".join(map(_describe, paths)),
            way_out="Return the value, or keep it in a Variable: nnx.Variable(...), "
            "or Module.sow under nnx.capture.",
        ),
        errors.LostUpdateWarning,
    )


def _describe(path: Any) -> str:
    kind, key, *rest = path
    argument = f"args[{key}]" if kind == 0 else f"argument {key!r}"
    return f"{argument}, at {paths.to_string(tuple(rest))}"


def _content(x: Any) -> Any:
    """Finds the list, dict or set that an object is, or that holds its attributes."""
    return x if isinstance(x, (list, dict, set)) else getattr(x, "__dict__", None)


def _items(holder: Any) -> Any:
    content = _content(holder)
    return dict(content) if isinstance(content, dict) else [*content]


def _has_new_tracer(holder: Any, items: Any) -> bool:
    current = _items(holder)
    if isinstance(current, dict):
        current, items = [*current.values()], [*items.values()]
    known_ids = {*map(id, items)}
    leaves = jax.tree.leaves([x for x in current if id(x) not in known_ids])
    return any([isinstance(x, _jax.Tracer) for x in leaves])


def _restore(holder: Any, items: Any) -> None:
    content = _content(holder)
    content.clear()
    content.extend(items) if isinstance(content, list) else content.update(items)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _RefPlace:
    """Stands for a ref in a pytree, by its number."""

    number: int


def by_content(
    function: Callable[..., Any],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A JAX transform of a function whose arguments may have refs."""

    def run(contents: list[Any], *arguments_without_refs: Any) -> tuple[Any, list[Any]]:
        refs = [*map(_jax.new_ref, contents)]

        def fill(x: Any) -> Any:
            return refs[x.number] if isinstance(x, _RefPlace) else x

        filled = jax.tree.map(
            fill, arguments_without_refs, is_leaf=lambda x: isinstance(x, _RefPlace)
        )
        out = function(*filled)
        return out, [ref[...] for ref in refs]

    transformed = transform(debug_info.named_after(function, run, ["refs"]))

    def outer(*arguments: Any) -> Any:
        # One ref at two places is one ref inside, too.
        refs = {id(x): x for x in jax.tree.leaves(arguments) if _jax.is_ref(x)}
        stand_ins = {key: _RefPlace(number) for number, key in enumerate(refs)}
        arguments_without_refs = jax.tree.map(
            lambda x: stand_ins.get(id(x), x), arguments
        )
        out, contents = transformed(
            [ref[...] for ref in refs.values()], *arguments_without_refs
        )
        for ref, content in zip(refs.values(), contents, strict=True):
            if _jax.is_differentiated(content) and not _jax.is_differentiated(ref):
                # The function cut it off, or JAX would have refused its write.
                content = jax.lax.stop_gradient(content)
            ref[...] = content
        return out

    return outer


NO_GRADIENT = "cannot differentiate with respect to a Ref-typed argument"


def refuse(groups: Iterable[Leaves], transform: str, reason: str) -> None:
    """Refuses arguments with refs."""
    for name in _refs(groups):
        raise TypeError(
            f"nnx.{transform} {reason}: {name}.\n"
            "Pass a copy that has arrays, made by nnx.to_arrays."
        )


# JAX's words: on writes, on `cond` and `switch`, on `scan` in two versions.
_COMPLAINTS = ("array reference", "vmap-of-cond", "over a Ref", "__jax_array__()")


def hint(error: Exception, groups: Iterable[Leaves], axes: Iterable[Any]) -> None:
    """Adds paths and the way out to JAX's error about refs in a mapped function."""
    if any(words in str(error) for words in _COMPLAINTS):
        pairs = zip(groups, axes, strict=True)
        names = _refs([group for group, axis in pairs if axis is None])
        if "unbatched array reference" in str(error) and names:
            raise _broadcast_error(names) from error
        error.add_note(
            "A mapped function can write to an array ref only if the ref is mapped, "
            "too;\nit can't use refs in `cond` or `switch`, nor scan those that are "
            "mapped.\nPass a copy that has arrays, made by nnx.to_arrays."
        )


def _broadcast_error(names: Sequence[str]) -> ValueError:
    return ValueError(
        errors.message(
            "A function mapped by nnx.vmap wrote to an array ref that is not mapped: "
            "each of its calls would write a different value.",
            where="refs with the axis None: " + ", ".join(names),
            way_out="Give the object an axis, or pass a copy that has arrays, made by "
            "nnx.to_arrays;\nrandom streams can be split: rngs.split(n).",
        )
    )


def _refs(groups: Iterable[Leaves]) -> list[str]:
    """Names the refs in groups."""
    with_refs = [group for group in groups if any(map(_jax.is_ref, group.values))]
    return [
        leaf_spec.name
        for group in with_refs
        for leaf_spec, x in group.pairs()
        if _jax.is_ref(x)
    ]
