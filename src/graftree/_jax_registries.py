"""JAX's registries of pytrees, where its documentation does not describe them.

A type is in four of them. By three, JAX and the functions of `jax.tree` flatten it; by
the fourth, a call of a function made by `jax.jit` finds the program compiled for such
arguments. Exported functions have names for types in registries of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from graftree import _jax_names


def _checked(registries: Any, dispatch: Any, registry: Any) -> tuple[Any, ...]:
    if dispatch not in registries:
        raise _jax_names.ChangedError
    return registries, dispatch, registry, type(registry[list])


@_jax_names.by(
    "jax._src.tree_util:_all_registries",
    "jax._src.tree_util:dispatch_registry",
    "jax._src.tree_util:_registry",
    prepare=_checked,
)
def register_pytree(
    registries: Any,
    dispatch: Any,
    entries: Any,
    make_entry: Any,
    kind: type,
    with_keys: Callable[[Any], Any],
    unflatten: Callable[[Any, Any], Any],
    flatten: Callable[[Any], Any],
    at_once: Callable[[Any], Any],
) -> None:
    """Registers a pytree; ``at_once`` flattens it where `jax.jit` finds its program."""
    entry = make_entry(flatten, unflatten)
    for registry in registries:
        way = at_once if registry is dispatch else flatten
        registry.register_node(kind, way, unflatten, with_keys)
    entries[kind] = entry


@register_pytree.otherwise
def _(kind: type, with_keys: Any, unflatten: Any, flatten: Any, _: Any) -> None:
    jax.tree_util.register_pytree_with_keys(kind, with_keys, unflatten, flatten)


@_jax_names.by("jax._src.export._export:serialization_registry")
def write_nodes(
    entries: Any, kind: type, name: str, write: Callable[[Any], bytes]
) -> None:
    """Sets how exported functions name a pytree type and write its static data."""
    entries[kind] = name, write


@_jax_names.by("jax._src.export._export:serialization_registry")
def forget_nodes(entries: Any, prefix: str) -> None:
    """Removes the entries of types whose names begin with the prefix."""
    for kind in [
        kind for kind, (name, _) in entries.items() if name.startswith(prefix)
    ]:
        del entries[kind]


@_jax_names.by("jax._src.export._export:deserialization_registry")
def read_nodes(
    entries: Any,
    name: str,
    read: Callable[[bytes], Any],
    rebuild: Callable[[Any, Any], Any],
) -> None:
    """Sets how nodes of a name are read: static data, then with their children."""
    entries[name] = object, read, rebuild
