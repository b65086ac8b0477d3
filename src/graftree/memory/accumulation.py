"""Gradients of a batch in parts: memory for one part instead of the whole batch.

A loop computes the parts one after the other, and keeps only the sum of their
gradients. A part has every n-th row of the batch, not a run of rows: so if the batch is
divided among devices, each part is too, and no row moves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftree import _jax, config, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, functional, nodes, traversals
from graftree.core.variables.variables import Variable
from graftree.transforms import recordings
from graftree.transforms.control_flow import loop_bodies, loops
from graftree.transforms.crossing import decorators, signatures
from graftree.transforms.crossing.prefixes import DiffState
from graftree.transforms.derivatives import cotangents, grad


def value_and_grad(
    f: Callable[..., Any],
    micro_batches: int,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    whole: Sequence[int] = (),
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, but takes one part of the batch after the other.

    For a loss that is a mean over the batch, value and gradients are those of the whole
    batch, up to rounding: they are the means over the parts, summed in float32 or
    wider. The function changes its objects (statistics, random streams, metrics) once
    per part.

    Args:
        f: The loss, as for `nnx.value_and_grad`.
        micro_batches: The number of parts, which divides the size of the batch.
        argnums: The arguments to differentiate, as for `nnx.value_and_grad`.
        has_aux: Whether ``f`` returns a pair of the loss and something else.
        whole: The positions of further arguments that each part gets whole; like
            ``argnums``, from the end if negative.

    Returns:
        A function of positional arguments. Call it in `nnx.jit`: outside, each call
        traces and compiles it. Arguments with Variables, and those that are
        differentiated, are for all parts; the arrays in all others are batches, split
        along their first axis. It returns the same as `nnx.value_and_grad`; the second
        output of ``f`` is stacked along a new first axis, with an entry per part.

    Raises:
        ValueError: If ``micro_batches`` is not positive; at a call, if it doesn't
            divide the first axis of an array, if there is no batch, or if ``f`` changes
            the structure of an object in each part, as by ``sow``.
        TypeError: If ``micro_batches`` is not a whole number; at a call, if a number in
            ``argnums`` or ``whole`` is not the position of an argument, or the second
            output of ``f`` is not made of arrays.

    Example:
        >>> def loss_fn(model, batch):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.zeros((8, 2))}
        >>> loss, grads = nnx.memory.value_and_grad(loss_fn, 4)(model, batch)
        >>> jnp.allclose(loss, loss_fn(model, batch))
        Array(True, dtype=bool)
    """
    count = _checked(micro_batches)
    of_part = grad.value_and_grad(f, argnums=argnums, has_aux=has_aux)

    @decorators.wraps(f)
    def run(*args: Any) -> Any:
        kept = _kept(args, argnums, whole)
        batches = {i: x for i, x in enumerate(args) if i not in kept}
        objects = {i: x for i, x in enumerate(args) if _has_objects(x)}
        # Values that aren't traced in a part, such as flags, stay as they are.
        others = {i: args[i] for i in kept if i not in objects}
        parts = _parted(batches, count)

        def call(objects: Any, part: Any) -> Any:
            every = {**objects, **part, **others}
            value, grads = of_part(*[every[i] for i in range(len(args))])
            loss, aux = value if has_aux else (value, None)
            _check_aux(aux, objects)
            return (loss, grads), aux

        (loss, grads), aux = _mean(call, objects, parts, count)
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return run


_CALL = "nnx.memory.value_and_grad"


def _checked(micro_batches: Any) -> int:
    if not hasattr(micro_batches, "__index__"):
        raise TypeError(
            f"{_CALL} expects a whole number of parts, got "
            f"micro_batches={micro_batches!r}."
        )
    if micro_batches < 1:
        raise ValueError(
            f"{_CALL} expects at least one part, got micro_batches={micro_batches}."
        )
    return operator.index(micro_batches)


def _mean(call: Callable[..., Any], objects: Any, parts: Any, count: int) -> Any:
    """The mean of the first output of a function for the parts; the second, stacked."""
    if count == 1:
        means, aux = call(objects, _part(parts, 0))
        return means, jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
    form, is_settled = _foreseen(call, objects, parts)
    kinds, treedef = jax.tree.flatten(form)
    sums, first = [*map(_zeros, kinds)], None
    if not is_settled:
        # It gives the objects the structure that they keep from then on.
        means, first = call(objects, _part(parts, 0))
        sums = _added(sums, means)
        parts = jax.tree.map(lambda x: x[:, 1:], parts)

    def step(carry: Any, part: Any) -> Any:
        objects, sums = carry
        means, aux = call(objects, part)
        return (objects, _added(sums, means)), aux

    carry = loop_bodies.Carry
    loop = loops.scan(step, in_axes=(carry, 1), out_axes=(carry, 0))
    (_, sums), aux = loop((objects, sums), parts)
    if not is_settled:
        aux = jax.tree.map(_with_first, first, aux)
    means = [(s / count).astype(x.dtype) for s, x in zip(sums, kinds, strict=True)]
    return treedef.unflatten(means), aux


def _part(parts: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x[:, number], parts)


def _zeros(kind: Any) -> jax.Array:
    wide = jnp.promote_types(kind.dtype, jnp.float32)
    x = _jax.as_varying(jnp.zeros(kind.shape, wide), _jax.varying(kind))
    # A loop goes on with arrays that are divided as before.
    return jax.sharding.reshard(x, kind.sharding) if any(kind.sharding.spec) else x


def _added(sums: Sequence[jax.Array], means: Any) -> list[jax.Array]:
    pairs = zip(sums, jax.tree.leaves(means), strict=True)
    return [total + x.astype(total.dtype) for total, x in pairs]


def _with_first(x: Any, rest: Any) -> jax.Array:
    return jnp.concatenate([jnp.asarray(x)[None], rest])


# The changes that a part makes to the objects.


def _foreseen(call: Callable[..., Any], objects: Any, parts: Any) -> tuple[Any, bool]:
    """The types of the means, and whether a part leaves all structures as they are.

    Raises:
        ValueError: If later parts change structures too.
    """
    changes: list[Any] = []
    form: Any = None

    def watched(objects: Any, part: Any) -> None:
        nonlocal form
        structure = _structure(objects)
        for _ in range(2):
            means, _ = call(objects, part)
            form = jax.tree.map(jax.typeof, means)
            before, structure = structure, _structure(objects)
            kinds, identities = map(differences.between, before, structure)
            changes.append(kinds or identities)
            if not changes[-1]:
                break

    recordings.eval_shape(watched, objects, jax.eval_shape(lambda: _part(parts, 0)))
    if changes[-1]:
        raise _growth_error(changes[-1])
    return form, len(changes) == 1


_Structure = tuple[dict[Path, Any], dict[Path, Any]]


def _structure(objects: Mapping[int, Any]) -> _Structure:
    """Facts that a loop must find again after a step: structure, places, objects."""
    facts: dict[Path, Any] = {}
    found: dict[Path, Any] = {}
    for number, x in objects.items():
        root = (f"args[{number}]",)
        if config.propagation(None, None).structure:
            facts |= differences.facts(
                functional.graphdef(x), differences.below(root), identity=False
            )
        for path, part in _objects_in(x):
            found[*root, *path] = differences.Exactly(part)
            if isinstance(part, Variable):
                held = jax.tree.structure(part.get_raw_value())
                facts[*root, *path, "value"] = differences.Form(held)
    return facts, found


def _growth_error(found: Sequence[Any]) -> ValueError:
    lines = differences.in_words(found, "before a part", "after it", signatures.name_of)
    return ValueError(
        errors.message(
            f"{_CALL}: each part of the batch changes the structure of an argument, "
            "so they can't be computed in a loop.",
            where="\n".join(lines),
            way_out="Count in a Variable; make Variables once, and write to them; and "
            "return what is sown as the second output (has_aux=True), by "
            "nnx.pop(model, nnx.Intermediate).",
        )
    )


def _check_aux(aux: Any, objects: Any) -> None:
    """Raises unless the second outputs of the parts can be stacked."""
    given = {id(x) for _, x in _objects_in(objects)}
    listed = jax.tree_util.tree_leaves_with_path(aux, is_leaf=nodes.is_graph_node)
    wrong = []
    for path, x in listed:
        place = f"aux{paths.keystr(path)}: a {type(x).__name__}"
        if not (nodes.is_graph_node(x) or _is_array(x)):
            wrong.append(place)
        elif any(id(part) in given for _, part in _objects_in(x)):
            wrong.append(f"{place} with parts of an argument")
    if wrong:
        raise TypeError(
            errors.message(
                f"{_CALL}: the second output of the function has an entry per part of "
                "the batch, and is stacked.",
                where="\n".join(wrong),
                way_out="Return arrays. What the function writes to its arguments is "
                "kept without being returned.",
            )
        )


def _objects_in(x: Any) -> list[tuple[Path, Any]]:
    found = traversals.iter_graph(x, graph=True)
    return [(path, part) for path, part in found if nodes.is_graph_node(part)]


def _is_array(x: Any) -> bool:
    return _jax.is_data_type(type(x)) or isinstance(x, bool | int | float | complex)


# The kinds of arguments.


def _kept(args: Sequence[Any], argnums: Any, whole: Sequence[int]) -> set[int]:
    """The positions of the arguments that are not batches."""
    name, count = _CALL.removeprefix("nnx."), len(args)
    kept = {*grad.chosen(name, argnums).positions(count)}
    kept |= {cotangents.position(i, count, "whole", name) for i in whole}
    return kept | {i for i, x in enumerate(args) if _has_objects(x)}


def _has_objects(x: Any) -> bool:
    found = jax.tree.leaves(x, is_leaf=nodes.is_graph_node)
    return any(map(nodes.is_graph_node, found))


def _parted(batches: dict[int, Any], count: int) -> dict[int, Any]:
    """The batches, with an axis for the parts as their second one."""
    listed = jax.tree.leaves_with_path(batches)
    wrong = [
        f"args{paths.keystr(path)}: {_described(x)}"
        for path, x in listed
        if not (_is_array(x) and jnp.shape(x)) or len(x) % count
    ]
    if wrong or not listed:
        raise ValueError(
            errors.message(
                f"{_CALL} can't part the batch into {count} parts.",
                where="\n".join(wrong) or "no argument has arrays outside of objects",
                way_out="Give each array of the batch a first axis that is a multiple "
                "of micro_batches, and list arguments that are not batches in whole=.",
            )
        )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (len(x) // count, count, *jnp.shape(x)[1:])), batches
    )


def _described(x: Any) -> str:
    return f"shape {jnp.shape(x)}" if _is_array(x) else f"a {type(x).__name__}"
