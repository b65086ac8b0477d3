"""Rows sorted by group, each group with parameters of its own.

The parameters are stacked: their first axis has an entry per group. ``group_sizes``
says how many rows each group has, in order; rows after the last group are in none.
The cost is that of the rows, however many groups there are.

On accelerators ``jax.lax.ragged_dot`` does this for a product. On CPUs it multiplies
all rows with the kernels of all groups, so there, and for functions other than a
product, the rows are cut into blocks of one size (`in_blocks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax
from graftree.nn.support import jax_functions


def ragged_dot(
    rows: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies each row with the kernel of its group; called as JAX's.

    Which of the two ways it takes is the default backend's when it is traced. Rows in
    no group become zeros, on CPUs; elsewhere they may be anything.
    """
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    if jax.default_backend() != "cpu":
        product = jax_functions.current(jax.lax.ragged_dot)
        return product(rows, kernel, group_sizes, **options)
    return _dot_in_blocks(rows, kernel, group_sizes, **options)


# Compiled, as an eager loop is compiled at each call.
@functools.partial(
    jax.jit, static_argnames=("precision", "preferred_element_type"), inline=True
)
def _dot_in_blocks(
    rows: jax.Array, kernel: jax.Array, group_sizes: jax.Array, **options: Any
) -> jax.Array:
    def product(own: jax.Array, block: jax.Array) -> jax.Array:
        dimensions = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(block, own, dimensions, **options)

    return in_blocks(product, kernel, rows, group_sizes)


def in_blocks(
    function: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    rows: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """Applies a function of rows with the parameters of their group.

    A block has rows of one group, so the last of a group is filled up, with one of its
    rows. That is at most half as many rows again as there are, if groups have equally
    many. One loop goes over the blocks. Gradients compute all but products again, so
    that no copy of parameters is kept for them.

    Args:
        function: ``(params, [size, features]) -> [size, ...]``, each row by itself.
        params: A pytree of arrays; the first axis of each has an entry per group.
        rows: ``[rows, features]``, sorted by group.
        group_sizes: ``[groups]``, integers.

    Returns:
        ``[rows, ...]``; zeros for rows in no group.
    """
    count = rows.shape[0]
    varying = frozenset[Any]().union(
        *[_jax.varying(jax.typeof(x)) for x in jax.tree.leaves((params, rows))]
    )
    # Else, in a `shard_map` with check_vma=True, JAX (0.10.2, 0.12.0) casts what all
    # devices share in the branch below. Its gradient is then summed over devices there,
    # in a branch that not all of them take: they wait for ever, or add up gradients of
    # different blocks.
    params, rows = jax.tree.map(lambda x: _jax.as_varying(x, varying), (params, rows))
    groups, sources, targets = _blocks(count, group_sizes)
    blocks = rows[sources]

    @functools.partial(
        jax.checkpoint,
        prevent_cse=False,
        policy=jax.checkpoint_policies.dots_saveable,
    )
    def apply(group: jax.Array, block: jax.Array, is_used: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda x: jnp.take(x, group, axis=0, mode="clip"), params)
        output = jax.eval_shape(function, own, block)

        def unused(own: Any, block: jax.Array) -> jax.Array:
            zeros = jnp.zeros(output.shape, output.dtype)
            return _jax.as_varying(zeros, varying)

        return jax.lax.cond(is_used, function, unused, own, block)

    is_used = targets[:, 0] < count
    outputs = jax.lax.map(lambda block: apply(*block), (groups, blocks, is_used))
    rest = outputs.shape[2:]
    zeros = jnp.zeros((count, *rest), outputs.dtype)
    return zeros.at[targets].set(outputs, mode="drop", unique_indices=True)


def _blocks(
    count: int, group_sizes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts sorted rows into blocks of one group each.

    Returns:
        The group of each block, ``[blocks]``; and for each of its rows the number of a
        row to read, and of the one to write, ``[blocks, size]``. The latter is at least
        ``count`` where nothing is to be written.
    """
    num_groups = len(group_sizes)
    group_sizes = group_sizes.astype(jnp.int32)
    numbers = functools.partial(jnp.arange, dtype=jnp.int32)
    if isinstance(count, int):
        size = max(1, count // (2 * num_groups))
        # Each group has one block, at most, that is not full.
        num_blocks = (count + min(count, num_groups) * (size - 1)) // size
    else:  # the number of rows has a name, in an export
        size = 32
        num_blocks = count // size + num_groups
    ends = jnp.cumsum(group_sizes)
    last_blocks = jnp.cumsum(-(-group_sizes // size))
    block = numbers(num_blocks)
    group = jnp.searchsorted(last_blocks, block, side="right")
    own = jnp.minimum(group, num_groups - 1)
    in_group = block - (last_blocks - -(-group_sizes // size))[own]
    start = (ends - group_sizes)[own] + in_group * size
    rows = start[:, None] + numbers(size)[None]
    is_used = (rows < ends[own][:, None]) & (group < num_groups)[:, None]
    sources = jnp.minimum(rows, jnp.maximum(ends[own] - 1, 0)[:, None])
    unused = count + numbers(num_blocks * size).reshape(num_blocks, size)
    return own, sources, jnp.where(is_used, rows, unused)
