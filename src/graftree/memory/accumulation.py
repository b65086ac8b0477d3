"""Gradients of a batch by parts: memory for one part instead of the whole.

The parts are computed one after the other in a loop, and only the sum of their
gradients is kept. A part has every n-th row of the batch, not a run of rows: so if the
batch is divided among devices, each part is too, and no row moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.objects.pytrees import Pytree
from graftree.core.variables.variables import Variable
from graftree.transforms import shape_eval
from graftree.transforms.control_flow import rounds, scan
from graftree.transforms.crossing import decorators
from graftree.transforms.crossing.prefixes import DiffState
from graftree.transforms.derivatives import grad


def value_and_grad(
    f: Callable[..., Any],
    micro_batches: int,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    whole: Sequence[int] = (),
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, but of one part of the batch after the other.

    For a loss that is a mean over the batch, value and gradients are those of the whole
    batch, up to rounding: they are the means over the parts, summed in float32 or
    wider. What the function does to its objects (statistics, random streams, metrics)
    it does once per part.

    Args:
        f: The loss, as for `nnx.value_and_grad`.
        micro_batches: The number of parts, which divides the size of the batch.
        argnums: What is differentiated, as for `nnx.value_and_grad`.
        has_aux: Whether ``f`` returns a pair of the loss and something else.
        whole: The positions of further arguments of which each part gets all.

    Returns:
        A function of positional arguments, to be called in `nnx.jit`: outside it is
        traced and compiled at each call. Arguments with Variables, and those that are
        differentiated, are for all parts; the arrays in all others are batches, parted
        along their first axis. It returns what `nnx.value_and_grad` does; the second
        output of ``f`` comes stacked along a new first axis, with an entry per part.

    Raises:
        ValueError: At a call, if ``micro_batches`` doesn't divide the first axis of an
            array, or there is no batch.

    Example:
        >>> def loss_fn(model, batch):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.zeros((8, 2))}
        >>> loss, grads = nnx.memory.value_and_grad(loss_fn, 4)(model, batch)
        >>> jnp.allclose(loss, loss_fn(model, batch))
        Array(True, dtype=bool)
    """
    of_part = grad.value_and_grad(f, argnums=argnums, has_aux=has_aux)

    @decorators.wraps(f)
    def run(*args: Any) -> Any:
        kept = _kept(args, argnums, whole)
        batches = {i: x for i, x in enumerate(args) if i not in kept}
        objects = {i: x for i, x in enumerate(args) if i in kept}
        parts = _parted(batches, micro_batches)

        def call(objects: Any, part: Any) -> Any:
            both = {**objects, **part}
            return of_part(*[both[i] for i in range(len(args))])

        return _mean(call, objects, parts, micro_batches, has_aux)

    return run


def _mean(
    call: Callable[..., Any], objects: Any, parts: Any, count: int, has_aux: bool
) -> Any:
    """The mean of what a function gives for the parts."""

    def flat(objects: Any, part: Any) -> Any:
        value, grads = call(objects, part)
        loss, aux = value if has_aux else (value, None)
        return (loss, grads), aux

    def step(carry: Any, part: Any) -> Any:
        objects, sums = carry
        means, aux = flat(objects, part)
        new = zip(sums, jax.tree.leaves(means), strict=True)
        return (objects, [total + x.astype(total.dtype) for total, x in new]), aux

    carry = rounds.Carry
    loop = scan.scan(step, in_axes=(carry, 1), out_axes=(carry, 0))
    form, _ = shape_eval.eval_shape(flat, objects, jax.tree.map(_first, parts))
    leaves, treedef = jax.tree.flatten(form)
    zeros = [jnp.zeros(x.shape, _wide(x.dtype)) for x in leaves]
    (_, sums), aux = loop((objects, zeros), parts)
    means = [(s / count).astype(x.dtype) for s, x in zip(sums, leaves, strict=True)]
    loss, grads = treedef.unflatten(means)
    return ((loss, aux), grads) if has_aux else (loss, grads)


def _first(parts: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x: x[:, 0], parts)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _kept(args: Sequence[Any], argnums: Any, whole: Sequence[int]) -> set[int]:
    """The positions of the arguments that are not batches."""
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    kept = {*whole, *[getattr(number, "argnum", number) for number in numbers]}
    return kept | {i for i, x in enumerate(args) if _has_objects(x)}


def _has_objects(x: Any) -> bool:
    found = jax.tree.leaves(x, is_leaf=_is_object)
    return any(map(_is_object, found))


def _is_object(x: Any) -> bool:
    return isinstance(x, (Variable, Pytree))


def _parted(batches: dict[int, Any], count: int) -> dict[int, Any]:
    """The batches, with an axis for the parts as their second one."""
    listed = jax.tree.leaves_with_path(batches)
    shapes = {paths.from_jax(path): jnp.shape(x) for path, x in listed}
    wrong = [path for path, shape in shapes.items() if not shape or shape[0] % count]
    if wrong or not shapes:
        where = [f"args{_keys(path)}: shape {shapes[path]}" for path in wrong]
        raise ValueError(
            errors.message(
                f"nnx.memory.value_and_grad can't part the batch into {count} parts.",
                where="\n".join(where) or "no argument has arrays outside of objects",
                way_out="Give each array of the batch a first axis that is a multiple "
                "of micro_batches, and list arguments that are no batches in whole=.",
            )
        )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (len(x) // count, count, *jnp.shape(x)[1:])), batches
    )


def _keys(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
