"""Copies of objects that keep the sharing inside: `clone`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from graftree import _jax
from graftree.core.graph import flattening, memos
from graftree.core.graph.flattening import RefMap
from graftree.core.variables import values
from graftree.core.variables import variables as variables_module
from graftree.core.variables.variables import Variable

N = TypeVar("N")


def clone(
    node: N,
    variables: bool = True,
    *,
    arrays: bool = False,
    graph: bool | None = None,
) -> N:
    """A copy of an object with the same sharing inside.

    Args:
        node: Any object, container, Variable or array.
        variables: Whether to copy the Variables too; without, they are shared.
        arrays: Whether to copy the arrays too, into buffers of their own. Without, the
            copy shares them.
        graph: Whether to keep shared references; ``None`` takes the default.

    Returns:
        The copy.

    Raises:
        ValueError: If ``arrays`` is set without ``variables``; in tree mode also for
            shared references.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> copied = nnx.clone(model)
        >>> copied.kernel is model.kernel, copied.kernel[...] is model.kernel[...]
        (False, True)
    """
    if arrays and not variables:
        raise ValueError(
            "If arrays is True, variables should be also True: a copied array needs a "
            "Variable of its own."
        )
    graphdef, leaves = memos.flatten_node(node, graph, "clone")
    if variables:
        leaves = list(map(_copier(arrays), leaves))
    return flattening.unflatten_node(graphdef, leaves)


def _copier(arrays: bool) -> Callable[[Any], Any]:
    """Copies leaves one by one; those with the same ref have the same one after."""
    refs = RefMap()

    def copy_value(x: Any) -> Any:
        if _jax.is_ref(x):
            if x not in refs:
                refs[x] = jax.new_ref(copy_value(x[...]))
            return refs[x]
        return _jax.copy_array(x) if arrays and isinstance(x, jax.Array) else x

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Variable):
            return copy_value(leaf)
        raw = leaf.get_raw_value()
        if arrays or _jax.is_ref(raw):
            copied = jax.tree.map(copy_value, raw)
        else:
            copied = values.copy_containers(raw)
        return variables_module.rebuild(
            type(leaf), copied, variables_module.metadata_of(leaf)
        )

    return copy_leaf
