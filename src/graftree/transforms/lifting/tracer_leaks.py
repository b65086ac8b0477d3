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

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax, _python, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.objects import attributes
from graftree.transforms.lifting import debug_info
from graftree.transforms.lifting.leaves import Leaves

# How deep objects in objects are inspected; deeper ones are not mere containers.
_DEPTH = 3
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType)


class StaticContent(NamedTuple):
    """An object in a static attribute that may change in place.

    Attributes:
        path: Where it is in the arguments.
        content: The list, dict or set that it is, or that has its attributes.
        former: A copy of that.
    """

    path: Path
    content: Any
    former: Any


def contents_in(arguments: Any) -> list[StaticContent]:
    """Notes all objects in static attributes of arguments that may change."""
    # By identity; they stay alive, so that nothing else gets one of these numbers.
    visited: dict[int, Any] = {}
    contents: list[StaticContent] = []
    # Paths, values, and how deep these are inspected; the next one is the last.
    pending = [(*item, _DEPTH) for item in reversed(_statics_in(arguments, visited))]
    while pending:
        path, x, depth = pending.pop()
        is_constant = type(x) in attributes.ATOMS or isinstance(x, _CLOSED)
        if is_constant or id(x) in visited or nodes.is_node_leaf(x):
            continue
        visited[id(x)] = x
        is_container = isinstance(x, (list, dict, set))
        content: Any = x if is_container else getattr(x, "__dict__", None)
        if content is not None:
            former = dict(content) if isinstance(content, dict) else [*content]
            contents.append(StaticContent(path, content, former))
        elif isinstance(x, tuple):
            content = x
        if content and depth:
            is_dict = isinstance(content, dict)
            items = content.items() if is_dict else enumerate(content)
            members = [((*path, key), member, depth - 1) for key, member in items]
            pending += reversed(members)
    return contents


def _statics_in(arguments: Any, visited: dict[int, Any]) -> list[tuple[Path, Any]]:
    """Lists the values of static attributes; fills ``visited`` with the nodes."""
    statics: list[tuple[Path, Any]] = []
    pending: list[tuple[Path, Any]] = [((), arguments)]
    while pending:
        path, x = pending.pop()
        if id(x) in visited:
            continue
        visited[id(x)] = x
        below = []
        for key, value, is_data in nodes.children(x):
            kind = nodes.KINDS.get(type(value)) or nodes.kind_of(value)
            if is_data is False or (is_data is None and kind is nodes.Leaf.STATIC):
                if type(value) not in attributes.ATOMS:
                    statics.append(((*path, key), value))
            elif not isinstance(kind, nodes.Leaf):
                below.append(((*path, key), value))
        pending += reversed(below)
    return statics


def take_out(contents: Sequence[StaticContent], transform: str) -> None:
    """Gives those that got a tracer their content back, and warns of these."""
    paths = []
    for path, content, former in contents:
        is_dict = isinstance(content, dict)
        former_ids = {*map(id, former.values() if is_dict else former)}
        current = content.values() if is_dict else content
        added = jax.tree.leaves([x for x in current if id(x) not in former_ids])
        if any([isinstance(x, _jax.Tracer) for x in added]):
            paths.append(path)
            content.clear()
            restore = content.extend if isinstance(content, list) else content.update
            restore(former)
    if paths:
        _warn(paths, transform)


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
