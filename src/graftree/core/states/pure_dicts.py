"""States as plain nested dicts of values, the form in which checkpoints keep them.

The functions take any nested mapping of leaves: a State, a dict, a GraphState.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from graftree import _jax, errors
from graftree.annotations import Key, Path
from graftree.core import walks
from graftree.core.states import flat_states, pairs
from graftree.core.variables import operators, variables
from graftree.core.variables.variables import MISSING, Variable, is_variable


def to_pure_dict(
    state: Mapping, extract_fn: Callable[[Any], Any] | None = None
) -> dict[Key, Any]:
    """Turns a state into nested dicts without Variables.

    Args:
        state: A State or another nested mapping.
        extract_fn: Turns a leaf into a value; by default a Variable gives its value,
            and other leaves stay.

    Returns:
        New nested dicts, sorted by key, without empty ones.

    Raises:
        TypeError: If ``state`` is not a mapping.

    Example:
        >>> nnx.to_pure_dict(nnx.State({"a": {"b": nnx.Param(1)}}))
        {'a': {'b': 1}}
    """
    extract = operators.unwrap if extract_fn is None else extract_fn
    return flat_states.nest(
        [(path, extract(leaf)) for path, leaf in flat_states.sorted_leaves(state)]
    )


def replace_by_pure_dict(
    state: Mapping,
    pure_dict: Mapping,
    replace_fn: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Replaces leaves of a state by those of a nested dict, in place.

    Variables are not written: new ones replace them in the state, so an object that
    shares them does not change.

    Args:
        state: The state to change. Types and shapes of values may change, and leaves
            that ``pure_dict`` lacks stay; `nnx.checkpoints.load_state` allows neither.
        pure_dict: Nested dicts of new values. Integer keys may be strings, and a value
            may be in the box ``{"value": x}`` of a checkpoint restored without types.
        replace_fn: A function of old leaf and new value that returns the new leaf; by
            default ``old.replace(new)`` if that method exists, otherwise the new value.

    Raises:
        ValueError: If ``pure_dict`` has a path that ``state`` lacks; then nothing is
            changed.

    Example:
        >>> state = nnx.State({"layers": {0: nnx.Param(1)}})
        >>> nnx.replace_by_pure_dict(state, {"layers": {"0": 2}})
        >>> state["layers"][0].get_value()
        2
    """
    replace = _replaced if replace_fn is None else replace_fn
    target, pure = map(flat_states.raw_mapping, (state, pure_dict))
    changes = []
    for position, key, old, new in pairs.paired(
        target, (target, pure), _enter, _IS_LEAF
    ):
        if isinstance(new, Mapping) and not flat_states.leaves(new):
            continue
        if old is MISSING or isinstance(old, Mapping):
            raise _unknown(pairs.path_of(position, key))
        raw = old.get_raw_value() if isinstance(old, Variable) else old
        inner = pairs.out_of_box(new, raw) if isinstance(new, Mapping) else new
        if isinstance(inner, Mapping) and not isinstance(raw, Mapping):
            raise _unknown(pairs.path_of(position, key, next(iter(new))))
        changes.append((position[1], key, replace(old, inner)))
    for mapping, key, leaf in changes:
        mapping[key] = leaf


def _replaced(old: Any, new: Any) -> Any:
    # Strings have a method of that name which does something else.
    if isinstance(old, str) or not hasattr(old, "replace"):
        return new
    return old.replace(new)


def _enter(_: Any, _key: Any, old: Any, new: Any) -> pairs.Level | None:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return None
    return flat_states.raw_mapping(old), flat_states.raw_mapping(new)


# So also looked at: ``None``, which may be no value.
_IS_LEAF = walks.ByType(lambda kind: not issubclass(kind, (Mapping, type(None))))


def _unknown(path: Path) -> ValueError:
    return ValueError(
        errors.message(
            f"key in pure_dict not available in state: {path}",
            way_out="Rename or remove the entry, or make the state from the same "
            "model as the dict.",
        )
    )


def restore_int_paths(pure_dict: Mapping) -> dict[Key, Any]:
    """Turns keys that are integers written as strings into integers.

    Args:
        pure_dict: Nested dicts, e.g. from a checkpoint format with string keys only.

    Returns:
        New nested dicts, without empty ones.

    Raises:
        TypeError: If ``pure_dict`` is not a mapping.
        ValueError: If two paths become the same.

    Example:
        >>> nnx.restore_int_paths({"layers": {"0": 1, "1": 2}})
        {'layers': {0: 1, 1: 2}}
    """
    original_paths: dict[Path, Path] = {}
    items = []
    for path, leaf in flat_states.leaves(flat_states.raw_mapping(pure_dict)):
        restored = restored_path(path)
        if original_paths.setdefault(restored, path) != path:
            raise ValueError(
                errors.message(
                    "restore_int_paths: two paths become the same.",
                    where=f"{original_paths[restored]} and {path} become {restored}",
                    way_out="Remove or rename one of them.",
                )
            )
        items.append((restored, leaf))
    return flat_states.nest(items)


def restored_path(path: Path) -> Path:
    """Converts keys of a path that are integers written as strings."""
    return tuple(map(pairs.restored_key, path))


def as_pure(tree: Any) -> Any:
    """Replaces each Variable by its raw value, and each ref by its array.

    Args:
        tree: Any pytree: a State, an object, a Variable.

    Returns:
        The same structure with plain values.

    Example:
        >>> pure = nnx.as_pure(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
        >>> pure["bias"]
        Array([0., 0., 0.], dtype=float32)
    """
    return jax.tree.map(_pure, tree, is_leaf=is_variable)


def _pure(x: Any) -> Any:
    if isinstance(x, Variable):
        raw, leaf_of = x.get_raw_value(), variables.leaf_functions.get(type(x))
        raw = raw if leaf_of is None else leaf_of(raw)
        return raw if isinstance(raw, jax.Array) else as_pure(raw)
    return x[...] if _jax.is_ref(x) else x
