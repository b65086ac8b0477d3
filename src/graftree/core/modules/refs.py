"""Conversions of whole objects: Variables with array refs, and without.

A ``jax.Ref`` is an array that plain JAX transforms write in place. A Variable with
``ref=True`` holds one, so that ``jax.jit(step)(model)`` changes the model and returns
nothing. JAX does not let refs be returned, differentiated, or passed twice. For that,
convert the model: `to_arrays` before ``jax.grad``, `to_refs` after a model was made.

All functions here return a new object and leave their argument unchanged. The two share
everything that needs no conversion, including Variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from graftree import _jax, errors
from graftree.core import filters, paths
from graftree.core.graph import flattening, traversals
from graftree.core.variables.variables import Variable, metadata_of

N = TypeVar("N")


class _HijaxMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Variable) and instance.hijax


class HijaxVariable(metaclass=_HijaxMeta):
    """Class of which every Variable with ``hijax=True`` is an instance.

    Example:
        >>> count = nnx.Variable(jnp.array(0), hijax=True)
        >>> isinstance(count, nnx.variablelib.HijaxVariable)
        True
    """


def with_vars(
    node: N,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Any = ...,
    allow_duplicates: bool = False,
) -> N:
    """Converts the Variables of an object to another representation.

    Args:
        node: Any object, container, State or Variable; it is not changed.
        hijax: Their new ``hijax``; ``None`` keeps the old one.
        ref: Whether to store their values in array refs; ``None`` keeps them as stored.
            Variables without a value, such as what a mask of Optax leaves out, stay.
        mutable: ``False`` makes them read-only, ``True`` undoes this, ``None`` does
            neither.
        only: A filter for the Variables to convert.
        allow_duplicates: Whether Variables that occur more than once may be converted;
            they stay shared.

    Returns:
        A new object. It shares the Variables that need no conversion with ``node``.

    Raises:
        ValueError: If a Variable to convert occurs more than once.

    Example:
        >>> model = nnx.with_vars(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), ref=True)
        >>> @jax.jit
        ... def reset(model):
        ...     model.bias[...] += 1
        >>> reset(model)
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    arguments = {"hijax": hijax, "ref": ref, "mutable": mutable}
    flags = {name: value for name, value in arguments.items() if value is not None}

    def differs(leaf: Any) -> bool:
        return isinstance(leaf, Variable) and any(
            metadata_of(leaf).get(name, True) != value
            for name, value in flags_of(leaf).items()
        )

    def flags_of(leaf: Any) -> dict[str, bool]:
        is_skipped = ref and _is_empty(leaf)
        return {k: v for k, v in flags.items() if not (is_skipped and k == "ref")}

    return _convert(
        node, differs, lambda leaf: leaf.copy(**flags_of(leaf)), only, allow_duplicates
    )


def to_refs(node: N, /, only: Any = ...) -> N:
    """Stores the Variables and arrays of an object in array refs.

    Args:
        node: Any object, container, State, Variable or array; it is not changed.
        only: A filter for the Variables and arrays to convert.

    Returns:
        A new object. It shares with ``node`` the values that are already in refs.

    Raises:
        ValueError: If a Variable or array to convert occurs more than once.
        TypeError: If a Variable to convert does not hold an array.

    Example:
        >>> model = nnx.to_refs(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> model.kernel.has_ref
        True
    """

    def is_array(leaf: Any) -> bool:
        is_kind = isinstance(leaf, (Variable, jax.Array))
        return is_kind and not (_is_in_ref(leaf) or _is_empty(leaf))

    return _convert(node, is_array, _as_ref, only, allow_duplicates=False)


def to_arrays(node: N, /, *, only: Any = ..., allow_duplicates: bool = False) -> N:
    """Replaces the array refs in an object by the arrays that they hold now.

    Args:
        node: Any object, container, State, Variable or ref; it is not changed.
        only: A filter for the Variables and refs to convert.
        allow_duplicates: Whether a Variable or ref that occurs more than once may be
            converted; a Variable stays shared.

    Returns:
        A new object. It shares with ``node`` the values that are not in refs.

    Raises:
        ValueError: If a Variable or ref to convert occurs more than once.

    Example:
        >>> params = nnx.to_refs(nnx.State({"w": nnx.Param(jnp.array(3.0))}))
        >>> grads = jax.grad(lambda params: params.w[...] ** 2)(nnx.to_arrays(params))
        >>> float(grads.w[...])
        6.0
    """
    return _convert(node, _is_in_ref, _as_array, only, allow_duplicates)


def _is_in_ref(leaf: Any) -> bool:
    return leaf.has_ref if isinstance(leaf, Variable) else _jax.is_ref(leaf)


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, Variable) and not jax.tree.leaves(leaf.get_raw_value())


def _as_ref(leaf: Any) -> Any:
    return leaf.copy(ref=True) if isinstance(leaf, Variable) else jax.new_ref(leaf)


def _as_array(leaf: Any) -> Any:
    return leaf.copy(ref=False) if isinstance(leaf, Variable) else leaf[...]


def _convert(
    node: Any,
    needs_change: Callable[[Any], bool],
    change: Callable[[Any], Any],
    only: Any,
    allow_duplicates: bool,
) -> Any:
    """Copies an object; the leaves that ``only`` picks are changed if needed."""
    matches = filters.to_predicate(only)

    def is_picked(path: Any, leaf: Any) -> bool:
        return needs_change(leaf) and matches(path, leaf)

    if not allow_duplicates:
        _refuse_duplicates(traversals.find_duplicates(node, only=is_picked))
    graphdef, leaves = flattening.flatten_graph(node)
    changed = [
        change(leaf) if is_picked(path, leaf) else leaf
        for path, leaf in zip(graphdef.paths(), leaves, strict=True)
    ]
    return flattening.unflatten(graphdef, changed)


def _refuse_duplicates(groups: list[list[Any]]) -> None:
    if not groups:
        return
    blocks = [
        "\n".join(paths.to_string(path, "<root>") for path in group) for group in groups
    ]
    raise ValueError(
        errors.message(
            "Found duplicate at paths:",
            where="\n---\n".join(["", *blocks, ""]).strip("\n"),
            way_out="Remove the duplicates, leave them out with `only`, or keep them\n"
            "shared: nnx.with_vars(..., allow_duplicates=True).",
        )
    )


# Their names in earlier releases.
as_ref_vars = functools.partial(with_vars, ref=True)
as_array_vars = functools.partial(with_vars, ref=False)
as_hijax_vars = to_hijax = functools.partial(with_vars, hijax=True)
as_pytree_vars = to_lojax = functools.partial(with_vars, hijax=False)
as_mutable_vars = functools.partial(with_vars, mutable=True)
as_immutable_vars = functools.partial(with_vars, mutable=False)
