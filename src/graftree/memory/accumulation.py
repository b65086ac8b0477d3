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
    plain = grad.read_value_and_grad(f, read, argnums)
    check = functools.partial(read, is_check=True)
    checked = grad.read_value_and_grad(f, check, argnums)

    @decorators.wraps(f)
    def run(*args: Any) -> Any:
        unsplit = _unsplit(args, argnums, whole)
        batches = {i: x for i, x in enumerate(args) if i not in unsplit}
        objects = {i: x for i, x in enumerate(args) if _has_objects(x)}
        # Values that aren't traced in a part, such as flags, stay as they are.
        others = {i: args[i] for i in unsplit if i not in objects}
        split_batch = _split(batches, num_parts)

        def call(gradient: Callable[..., Any], objects: Any, micro_batch: Any) -> Any:
            every = {**objects, **micro_batch, **others}
            (loss, (sums, aux)), grads = gradient(*[every[i] for i in range(len(args))])
            _check_aux(aux, objects)
            total, count = sums or (loss, jnp.int32(1))
            return _PartResult(total, count, grads), aux

        plain_call, checked_call = (
            functools.partial(call, x) for x in (plain, checked)
        )
        (loss, _, grads), aux = _mean(
            plain_call, checked_call, objects, split_batch, num_parts
        )
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
    """Reads the mean loss of a part; its sum and count, if there, and the rest."""
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
            f"{_CALL}: with has_count=True the loss must be a pair of real scalars, "
            "the sum of what counts, in floating point, and the count.",
            where=f"the function returned {got}",
            way_out="Return losses.sum(where=mask), mask.sum()"
            + (", in a pair with the second output." if has_aux else "."),
        )
    )


@jax.custom_jvp
def _constant(count: jax.Array) -> jax.Array:
    """Returns the number, which must not depend on what is differentiated."""
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


class _PartResult(NamedTuple):
    """Results of a part; also the types of these, and the means in the end.

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
    split_batch: Any,
    num_parts: int,
) -> tuple[_PartResult, Any]:
    """Computes the mean loss and its gradients; stacks the second outputs."""
    form, is_settled = _trace_part(checked_call, objects, split_batch, num_parts)
    sums, outputs = [*map(_zeros, jax.tree.leaves(form.sums))], []
    if num_parts == 1 or not is_settled:
        # It gives the objects the structure that they keep from then on.
        result, aux = call(objects, _micro_batch(split_batch, 0))
        sums = _added(sums, result)
        outputs.append(jax.tree.map(lambda x: jnp.asarray(x)[None], aux))
        split_batch = jax.tree.map(lambda x: x[:, 1:], split_batch)

    def step(carry: Any, micro_batch: Any) -> Any:
        objects, sums = carry
        result, aux = call(objects, micro_batch)
        return (objects, _added(sums, result)), aux

    if len(outputs) < num_parts:
        carry = loop_bodies.Carry
        loop = loops.scan(step, in_axes=(carry, 1), out_axes=(carry, 0))
        (_, sums), aux = loop((objects, sums), split_batch)
        outputs.append(aux)
    aux = jax.tree.map(lambda *x: jnp.concatenate(x) if x[1:] else x[0], *outputs)
    return _quotients(sums, form.result), aux


def _quotients(sums: Sequence[jax.Array], form: _PartResult) -> _PartResult:
    """Divides the sums by the count, in the form and the dtypes of a part."""
    total, count, *grads = sums
    divisor = _divisor(count)
    means = [total / count.astype(total.dtype), count]
    means += [x / divisor.astype(x.dtype) for x in grads]
    types, treedef = jax.tree.flatten(form)
    cast = [x.astype(aval.dtype) for x, aval in zip(means, types, strict=True)]
    return treedef.unflatten(cast)


def _micro_batch(split_batch: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[:, index], split_batch)


def _zeros(aval: Any) -> jax.Array:
    x = _jax.as_varying(jnp.zeros(aval.shape, aval.dtype), _jax.varying(aval))
    # The carry of a loop must be sharded like what is added to it.
    return jax.sharding.reshard(x, aval.sharding) if any(aval.sharding.spec) else x


def _added(sums: Sequence[jax.Array], result: _PartResult) -> list[jax.Array]:
    return [total + x for total, x in zip(sums, _sums_of(result), strict=True)]


def _sums_of(result: _PartResult) -> list[jax.Array]:
    """Lists what is summed: gradients are those of the sum, in float32 or wider."""
    divisor = _divisor(result.count)
    grads = map(_widened, jax.tree.leaves(result.grads))
    weighted = [x * divisor.astype(x.dtype) for x in grads]
    return [_widened(result.total), _widened(result.count), *weighted]


def _widened(x: Any) -> jax.Array:
    """Widens a number, so that sums have room: to float32, int32 or wider."""
    x = jnp.asarray(x)
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(
        jnp.promote_types(x.dtype, jnp.float32 if is_inexact else jnp.int32)
    )


def _divisor(count: jax.Array) -> jax.Array:
    """Makes a count to divide by, in float32 or wider; one, if nothing counts."""
    is_inexact = jnp.issubdtype(count.dtype, jnp.inexact)
    count = _widened(count) if is_inexact else count.astype(float)
    return jnp.where(count == 0, jnp.ones_like(count), count)


# The changes that a part makes to the objects.


class _Forms(NamedTuple):
    """Types of the results of a part, and of what is summed."""

    result: _PartResult
    sums: list[Any]


def _trace_part(
    call: Callable[..., Any], objects: Any, split_batch: Any, num_parts: int
) -> tuple[_Forms, bool]:
    """Finds the types of a part's results, and whether structures stay the same.

    Raises:
        ValueError: If later parts change structures too.
    """
    changes: list[Any] = []
    forms: Any = None

    def compare(objects: Any, micro_batch: Any) -> None:
        nonlocal forms
        structure = _structure(objects)
        for _ in range(min(num_parts, 2)):
            result, _ = call(objects, micro_batch)
            forms = _Forms(*jax.tree.map(jax.typeof, (result, _sums_of(result))))
            previous, structure = structure, _structure(objects)
            facts, identities = map(differences.between, previous, structure)
            changes.append(facts or identities)
            if not changes[-1]:
                break

    micro_batch = jax.eval_shape(lambda: _micro_batch(split_batch, 0))
    recordings.eval_shape(compare, objects, micro_batch)
    if changes[-1] and num_parts > 1:
        raise _growth_error(changes[-1])
    _check_devices(forms.result)
    return forms, len(changes) == 1


def _check_devices(form: _PartResult) -> None:
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
    """Lists what a loop must leave as it is: facts, and the objects by path."""
    facts: dict[Path, Any] = {}
    identities: dict[Path, Any] = {}
    for position, x in objects.items():
        root = (f"args[{position}]",)
        if config.propagation(None, None).structure:
            facts |= differences.facts(
                functional.graphdef(x), differences.below(root), identity=False
            )
        for path, obj in _objects_in(x):
            identities[*root, *path] = differences.ByIdentity(obj)
            if isinstance(obj, Variable):
                treedef = jax.tree.structure(obj.get_raw_value())
                facts[*root, *path, "value"] = differences.TreeForm(treedef)
    return facts, identities


def _growth_error(changes: Sequence[Any]) -> ValueError:
    lines = differences.in_words(
        changes, "before a part", "after it", signatures.name_of
    )
    return ValueError(
        errors.message(
            f"{_CALL}: each part of the batch changes the structure of an argument, "
            "so the parts can't be computed in a loop.",
            where="\n".join(lines),
            way_out="Keep counts in a Variable; make Variables once, and write to "
            "them; and return sown values as the second output (has_aux=True), with "
            "nnx.pop(model, nnx.Intermediate).",
        )
    )


def _check_aux(aux: Any, objects: Any) -> None:
    """Raises unless the second outputs of the parts can be stacked."""
    argument_ids = {id(x) for _, x in _objects_in(objects)}
    leaves = jax.tree_util.tree_leaves_with_path(aux, is_leaf=nodes.is_graph_node)
    wrong = []
    for path, x in leaves:
        line = f"aux{paths.keystr(path)}: a {type(x).__name__}"
        if not (nodes.is_graph_node(x) or _is_array(x)):
            wrong.append(line)
        elif any(id(obj) in argument_ids for _, obj in _objects_in(x)):
            wrong.append(f"{line} with parts of an argument")
    if wrong:
        raise TypeError(
            errors.message(
                f"{_CALL}: the second output of the function is stacked, with an entry "
                "per part of the batch, so it must consist of arrays.",
                where="\n".join(wrong),
                way_out="Return arrays. What the function writes to its arguments is "
                "kept anyway, without being returned.",
            )
        )


def _objects_in(x: Any) -> list[tuple[Path, Any]]:
    items = traversals.iter_graph(x, graph=True)
    return [(path, obj) for path, obj in items if nodes.is_graph_node(obj)]


def _is_array(x: Any) -> bool:
    return _jax.is_data_type(type(x)) or isinstance(x, bool | int | float | complex)


# The kinds of arguments.


def _unsplit(args: Sequence[Any], argnums: Any, whole: Sequence[int]) -> set[int]:
    """Lists the positions of the arguments that are not batches."""
    name, count = _CALL.removeprefix("nnx."), len(args)
    positions = {*grad.parse_argnums(name, argnums).positions(count)}
    positions |= {cotangents.position(i, count, "whole", name) for i in whole}
    return positions | {i for i, x in enumerate(args) if _has_objects(x)}


def _has_objects(x: Any) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=nodes.is_graph_node)
    return any(map(nodes.is_graph_node, leaves))


def _split(batches: dict[int, Any], count: int) -> dict[int, Any]:
    """Splits the batches: their second axis is that of the parts."""
    leaves = jax.tree.leaves_with_path(batches)
    wrong = [
        f"args{paths.keystr(path)}: {_described(x)}"
        for path, x in leaves
        if not (_is_array(x) and jnp.shape(x)) or len(x) % count
    ]
    if wrong or not leaves:
        raise ValueError(
            errors.message(
                f"{_CALL} can't split the batch into {count} parts.",
                where="\n".join(wrong) or "no argument has arrays outside of objects",
                way_out="Give each array of the batch a first axis that is a multiple "
                "of micro_batches: pad it, and count the real rows (has_count=True). "
                "List arguments that are not batches in whole=.",
            )
        )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (len(x) // count, count, *jnp.shape(x)[1:])), batches
    )


def _described(x: Any) -> str:
    return f"shape {jnp.shape(x)}" if _is_array(x) else f"a {type(x).__name__}"
