"""Gradients of a batch in parts: memory for one part instead of the whole batch.

A loop computes the parts one after the other, and keeps only sums: of the losses, of
what they count, and of the gradients. A mean is a sum with a count of one for each
part. A part has every n-th row of the batch, not a run of rows: so if the batch is
divided among devices, each part is too, and no row moves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import _jax, config, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import (
    differences,
    flattening,
    functional,
    nodes,
    traversals,
)
from graftree.core.variables.variables import Variable
from graftree.transforms import recordings
from graftree.transforms.control_flow import loop_bodies, loops
from graftree.transforms.derivatives import cotangents, grad
from graftree.transforms.lifting import decorators, signatures
from graftree.transforms.lifting.prefixes import DiffState


def value_and_grad(
    f: Callable[..., Any],
    micro_batches: int,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    has_count: bool = False,
    whole: Sequence[int] = (),
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, in parts; with padding, return ``(sum, count)``.

    All parts of the batch have the same number of rows. So for a loss that is a mean
    over rows, value and gradients are those of the whole batch, up to rounding. For a
    mean over elements that a mask selects, such as ``losses.mean(where=is_token)``,
    they are not: the elements of a part in which few count would weigh too much. Return
    ``losses.sum(where=is_token), is_token.sum()`` and pass ``has_count=True``: then the
    value is the sum over the whole batch divided by its count. If rows depend on each
    other, as in a contrastive loss or through `BatchNorm`, each part is a batch of its
    own.

    Sums over the parts are in float32 or wider. The function changes its objects
    (statistics, random streams, metrics) once per part.

    Args:
        f: The loss, as for `nnx.value_and_grad`.
        micro_batches: The number of parts, which divides the size of the batch.
        argnums: The arguments to differentiate, as for `nnx.value_and_grad`.
        has_aux: Whether ``f`` returns a pair of the loss and something else.
        has_count: Whether the loss is a pair of scalars, ``(sum, count)``: the sum of
            the losses that count, best in float32, and their number or the sum of their
            weights. The count may depend on the batch, but not on what is
            differentiated. In `nnx.shard_map`, sum both over the devices.
        whole: The positions of further arguments that each part gets whole; like
            ``argnums``, from the end if negative.

    Returns:
        A function of positional arguments. Call it in `nnx.jit`: outside, each call
        traces and compiles it. Arguments with Variables, and those that are
        differentiated, are for all parts; the arrays in all others are batches, split
        along their first axis. It returns the same as `nnx.value_and_grad` of the mean;
        the second output of ``f`` is stacked along a new first axis, with an entry per
        part. If the count of the whole batch is zero, the loss is nan, and the
        gradients are those of the sum: zero, if nothing counts.

    Raises:
        ValueError: If ``micro_batches`` is not positive; at a call, if it doesn't
            divide the first axis of an array, if there is no batch, if ``f`` changes
            the structure of an object in each part, as by ``sow``, or if the count
            depends on what is differentiated, or is that of a single device.
        TypeError: If ``micro_batches`` is not a whole number; at a call, if a number in
            ``argnums`` or ``whole`` is not the position of an argument, if ``f`` does
            not return the pairs that the options promise, or if its second output is
            not made of arrays.

    Example:
        >>> def loss_fn(model, tokens):
        ...     is_token = tokens != 0  # the rest is padding
        ...     losses = model(tokens)[..., 0] ** 2
        ...     return losses.sum(where=is_token), is_token.sum()
        >>> model = nnx.Embed(10, 1, rngs=nnx.Rngs(0))
        >>> batch = jnp.array([[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]])
        >>> grad_fn = nnx.memory.value_and_grad(loss_fn, 2, has_count=True)
        >>> loss, grads = grad_fn(model, batch)
        >>> jnp.allclose(loss, jnp.mean(model.embedding[1:7] ** 2))
        Array(True, dtype=bool)
    """
    num_parts = _checked(micro_batches)
    read = functools.partial(_read, has_aux=has_aux, has_count=has_count)
    of_part = grad.read_value_and_grad(f, read, argnums)
    check = functools.partial(read, is_check=True)
    of_checked = grad.read_value_and_grad(f, check, argnums)

    @decorators.wraps(f)
    def run(*args: Any) -> Any:
        kept = _kept(args, argnums, whole)
        batches = {i: x for i, x in enumerate(args) if i not in kept}
        objects = {i: x for i, x in enumerate(args) if _has_objects(x)}
        # Values that aren't traced in a part, such as flags, stay as they are.
        others = {i: args[i] for i in kept if i not in objects}
        parts = _parted(batches, num_parts)

        def call(gradient: Callable[..., Any], objects: Any, part: Any) -> Any:
            every = {**objects, **part, **others}
            (loss, (sums, aux)), grads = gradient(*[every[i] for i in range(len(args))])
            _check_aux(aux, objects)
            total, count = sums or (loss, jnp.int32(1))
            return _Part(total, count, grads), aux

        plain, checked = (functools.partial(call, x) for x in (of_part, of_checked))
        (loss, _, grads), aux = _mean(plain, checked, objects, parts, num_parts)
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


# What a loss returns.


def _read(
    out: Any, *, has_aux: bool, has_count: bool, is_check: bool = False
) -> tuple[Any, Any]:
    """The mean loss of a part; its sum and count, if it has them, and the rest."""
    loss, aux = cotangents.pair(out) if has_aux else (out, None)
    if not has_count:
        return loss, (None, aux)
    total, count = _sum_and_count(loss, has_aux)
    if is_check:
        count = _constant(count)
    # Gradients of a mean don't overflow where those of a sum would, in float16.
    wide = _widened(total)
    return wide / _divisor(count).astype(wide.dtype), ((total, count), aux)


def _sum_and_count(loss: Any, has_aux: bool) -> tuple[jax.Array, jax.Array]:
    if isinstance(loss, (tuple, list)) and len(loss) == 2:
        total, count = pair = [flattening.raw_of(x) for x in loss]
        if all(_is_array(x) and not jnp.shape(x) for x in pair):
            total, count = map(jnp.asarray, pair)
            is_real = not any(map(jnp.iscomplexobj, (total, count)))
            if is_real and jnp.issubdtype(total.dtype, jnp.floating):
                return total, count
        got = f"({', '.join(map(_described, pair))})"
    else:
        got = _described(loss)
    raise TypeError(
        errors.message(
            f"{_CALL}: with has_count=True the loss is a pair of real scalars, the sum "
            "of what counts, in floating point, and the count.",
            where=f"the function returned {got}",
            way_out="Return losses.sum(where=mask), mask.sum()"
            + (", in a pair with the second output." if has_aux else "."),
        )
    )


@jax.custom_jvp
def _constant(count: jax.Array) -> jax.Array:
    """The same number, which must not depend on what is differentiated."""
    return count


@_constant.defjvp
def _refuse_dependence(*_: Any) -> Any:
    # JAX asks for the derivative only if there is one.
    raise ValueError(
        errors.message(
            f"{_CALL}: the count depends on what is differentiated, so the gradient of "
            "the mean is not the sum of those of the parts.",
            way_out="If the weights are meant as constants, return "
            "jax.lax.stop_gradient(count). Otherwise use nnx.value_and_grad on the "
            "whole batch.",
        )
    )


# Sums over the parts.


class _Part(NamedTuple):
    """What is computed for a part; also the types of that, and the means in the end.

    Attributes:
        total: The sum of the losses; their mean, where the count is one for each part.
        count: Their count.
        grads: The gradients of the quotient.
    """

    total: Any
    count: Any
    grads: Any


def _mean(
    call: Callable[..., Any],
    checked_call: Callable[..., Any],
    objects: Any,
    parts: Any,
    num_parts: int,
) -> tuple[_Part, Any]:
    """The mean loss of all parts with its gradients; the second outputs, stacked."""
    form, is_settled = _foreseen(checked_call, objects, parts, num_parts)
    sums, outputs = [*map(_zeros, jax.tree.leaves(form.sums))], []
    if num_parts == 1 or not is_settled:
        # It gives the objects the structure that they keep from then on.
        part, aux = call(objects, _part(parts, 0))
        sums = _added(sums, part)
        outputs.append(jax.tree.map(lambda x: jnp.asarray(x)[None], aux))
        parts = jax.tree.map(lambda x: x[:, 1:], parts)

    def step(carry: Any, part: Any) -> Any:
        objects, sums = carry
        one, aux = call(objects, part)
        return (objects, _added(sums, one)), aux

    if len(outputs) < num_parts:
        carry = loop_bodies.Carry
        loop = loops.scan(step, in_axes=(carry, 1), out_axes=(carry, 0))
        (_, sums), aux = loop((objects, sums), parts)
        outputs.append(aux)
    aux = jax.tree.map(lambda *x: jnp.concatenate(x) if x[1:] else x[0], *outputs)
    return _quotients(sums, form.part), aux


def _quotients(sums: Sequence[jax.Array], form: _Part) -> _Part:
    """The sums divided by the count, in the form and the dtypes of a part."""
    total, count, *grads = sums
    divisor = _divisor(count)
    means = [total / count.astype(total.dtype), count]
    means += [x / divisor.astype(x.dtype) for x in grads]
    kinds, treedef = jax.tree.flatten(form)
    cast = [x.astype(kind.dtype) for x, kind in zip(means, kinds, strict=True)]
    return treedef.unflatten(cast)


def _part(parts: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x[:, number], parts)


def _zeros(kind: Any) -> jax.Array:
    x = _jax.as_varying(jnp.zeros(kind.shape, kind.dtype), _jax.varying(kind))
    # A loop goes on with arrays that are divided as before.
    return jax.sharding.reshard(x, kind.sharding) if any(kind.sharding.spec) else x


def _added(sums: Sequence[jax.Array], part: _Part) -> list[jax.Array]:
    return [total + x for total, x in zip(sums, _sums_of(part), strict=True)]


def _sums_of(part: _Part) -> list[jax.Array]:
    """What is summed: the gradients are those of the sum, in float32 or wider."""
    divisor, grads = _divisor(part.count), map(_widened, jax.tree.leaves(part.grads))
    weighted = [x * divisor.astype(x.dtype) for x in grads]
    return [_widened(part.total), _widened(part.count), *weighted]


def _widened(x: Any) -> jax.Array:
    """A number with room for sums: in float32, int32 or wider."""
    x = jnp.asarray(x)
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(
        jnp.promote_types(x.dtype, jnp.float32 if is_inexact else jnp.int32)
    )


def _divisor(count: jax.Array) -> jax.Array:
    """A count to divide by, in float32 or wider; one, if nothing counts."""
    is_inexact = jnp.issubdtype(count.dtype, jnp.inexact)
    count = _widened(count) if is_inexact else count.astype(float)
    return jnp.where(count == 0, jnp.ones_like(count), count)


# The changes that a part makes to the objects.


class _Forms(NamedTuple):
    """The types of what is computed for a part, and of what is summed."""

    part: _Part
    sums: list[Any]


def _foreseen(
    call: Callable[..., Any], objects: Any, parts: Any, num_parts: int
) -> tuple[_Forms, bool]:
    """The types of a part, and whether it leaves all structures as they are.

    Raises:
        ValueError: If later parts change structures too.
    """
    changes: list[Any] = []
    forms: Any = None

    def watched(objects: Any, part: Any) -> None:
        nonlocal forms
        structure = _structure(objects)
        for _ in range(min(num_parts, 2)):
            one, _ = call(objects, part)
            forms = _Forms(*jax.tree.map(jax.typeof, (one, _sums_of(one))))
            before, structure = structure, _structure(objects)
            kinds, identities = map(differences.between, before, structure)
            changes.append(kinds or identities)
            if not changes[-1]:
                break

    recordings.eval_shape(watched, objects, jax.eval_shape(lambda: _part(parts, 0)))
    if changes[-1] and num_parts > 1:
        raise _growth_error(changes[-1])
    _check_devices(forms.part)
    return forms, len(changes) == 1


def _check_devices(form: _Part) -> None:
    """Raises if gradients are sums over devices (`shard_map`), but counts are not."""
    axes = _jax.varying(form.count)
    if all(axes <= _jax.varying(x) for x in jax.tree.leaves(form.grads)):
        return
    names = ", ".join(map(repr, sorted(map(str, axes))))
    raise ValueError(
        errors.message(
            f"{_CALL}: the gradients are those of all devices along {names}, but each "
            "device has a count of its own.",
            way_out="Sum over the devices in the function: "
            f"return jax.lax.psum((loss, count), ({names},)).",
        )
    )


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
            found[*root, *path] = differences.ByIdentity(part)
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
                f"{_CALL} can't split the batch into {count} parts.",
                where="\n".join(wrong) or "no argument has arrays outside of objects",
                way_out="Give each array of the batch a first axis that is a multiple "
                "of micro_batches: pad it, and count what is real (has_count=True). "
                "List arguments that are not batches in whole=.",
            )
        )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (len(x) // count, count, *jnp.shape(x)[1:])), batches
    )


def _described(x: Any) -> str:
    return f"shape {jnp.shape(x)}" if _is_array(x) else f"a {type(x).__name__}"
