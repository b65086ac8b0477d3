"""Calls of the model: the prompts first, then tokens; and what came out so far."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, traversals
from graftree.core.variables.variables import Variable
from graftree.decoding import sampling
from graftree.decoding.tasks import Stops, Task
from graftree.nn import linear
from graftree.nn.caches import KeyValueCache

# Of all programs, whatever the default: weights may be tied.
GRAPH_MODE: Any = {"graph": True, "graph_updates": True}


def prefill(model: Any, task: Task) -> tuple[Any, jax.Array]:
    """Reads the prompts; returns the cache, and the logits after each prompt."""
    batch, length = task.tokens.shape
    inputs = () if task.inputs is None else (task.inputs,)
    slots, limit = length + task.count, getattr(model, "max_length", None)
    slots = slots if limit is None else min(slots, limit)  # some are for padding
    cache = model.init_cache(batch, slots, *inputs)
    for own in key_value_caches(cache):
        if own.key.ndim == 4:  # of no Stack
            for variable in (own.key, own.value):
                variable.set_value(task.beside(variable.get_value()))
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if key_value_caches(cache):
        # These leave padding out, which else takes slots of a ring, and counts as
        # length in a RoPE. A cache of the model's own may take no negative positions.
        positions = jnp.where(positions < task.lengths[:, None], positions, -1)
    logits = model(task.tokens, positions=positions, cache=cache)
    last = (task.lengths - 1)[:, None, None]
    return cache, jnp.take_along_axis(logits, last, axis=1)[:, 0]


def num_tokens(logits: jax.Array) -> jax.Array:
    """How many tokens the logits are for, as a result of a program."""
    return jnp.int32(logits.shape[-1])


def check_tokens(call: str, model: Any, task: Task, num_tokens: jax.Array) -> None:
    """Raises if a prompt has a token that an `Embed` lacks; not for traced prompts.

    The row of such a token is NaN, and the next token 0. If there are logits for it,
    the model has other tables, or looks up parts of tokens.
    """
    tokens = task.tokens
    if isinstance(tokens, _jax.Tracer) or not tokens.is_fully_addressable:
        return
    largest, sizes = int(np.asarray(tokens).max()), []
    for _, part in traversals.iter_nodes(model, graph=True):
        if isinstance(part, linear.Embed):
            if part.num_embeddings > largest:
                return
            sizes.append(part.num_embeddings)
    if not sizes or isinstance(num_tokens, _jax.Tracer) or largest < num_tokens:
        return
    size = max(*sizes, int(num_tokens))
    raise ValueError(
        errors.message(
            f"{call}: the prompts have a token {largest}, but the tokens of the "
            f"{type(model).__name__} are from 0 to {size - 1}.",
            way_out="Use the tokenizer of the model. If it is the padding token, "
            f"pass pad={largest}.",
        )
    )


def key_value_caches(cache: Any) -> list[KeyValueCache]:
    """Lists the caches of attention layers in the cache of a model."""
    objects = [x for _, x in traversals.iter_graph(cache, graph=True)]
    return [x for x in objects if isinstance(x, KeyValueCache)]


def leaves(cache: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the arrays and Variables in the cache of a model by path."""
    skeleton, leaves = flattening.flatten(cache, True, "nnx.decoding")
    yield from zip(skeleton.paths(), leaves, strict=True)


def values(cache: Any) -> Iterator[tuple[Path, Any]]:
    """Yields their values by path."""
    for path, leaf in leaves(cache):
        yield path, value_of(leaf)


def value_of(leaf: Any) -> Any:
    """Reads the value of an array or Variable."""
    raw = flattening.raw_of(leaf)
    return raw[...] if _jax.is_ref(raw) else raw


def follow(
    model: Any, cache: Any, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
    """Calls the model in a loop: it may change nothing but values."""
    objects = {"model": model, "cache": cache}
    structure = _structure(objects)
    logits = model(tokens, positions=positions, cache=cache)
    _check_unchanged(structure, _structure(objects))
    return logits


def history(
    prompts: jax.Array, lengths: jax.Array, tokens: jax.Array, counts: jax.Array
) -> sampling.History:
    """Joins the prompts and the new tokens, without the padding between.

    Args:
        prompts: ``int32[batch, length]``.
        lengths: How many of these tokens count.
        tokens: ``int32[batch, count]``.
        counts: How many of these count.
    """
    both = jnp.concatenate([prompts, tokens], axis=1)
    indices = jnp.arange(both.shape[1])[None]
    padding = prompts.shape[1] - lengths[:, None]
    indices = jnp.where(indices < lengths[:, None], indices, indices + padding)
    both = jnp.take_along_axis(both, indices, axis=1, mode="clip")
    history = sampling.History(both, lengths + counts, lengths)
    return dataclasses.replace(history, tokens=jnp.where(history.is_token, both, 0))


def stop_lengths(tokens: jax.Array, counts: jax.Array, stop: Stops) -> jax.Array:
    """Computes the length of the longest stop that each row ends with; 0 for none.

    Args:
        tokens: ``int32[batch, count]``.
        counts: How many of these count.
        stop: The stops, short ones first.
    """
    lengths = jnp.zeros_like(counts)
    for length, group in itertools.groupby(stop, len):
        indices = counts[:, None] + jnp.arange(-length, 0)[None]
        last = jnp.take_along_axis(tokens, indices, axis=1, mode="clip")
        is_stop = (last[:, None] == jnp.array([[*group]])).all(-1).any(-1)
        lengths = jnp.where(is_stop & (counts >= length), length, lengths)
    return lengths


def _structure(objects: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Lists the types of arrays and Variables by path; and which Variables."""
    forms, variables = {}, {}
    for path, leaf in leaves(objects):
        raw = flattening.raw_of(leaf)
        form = jax.tree.map(lambda x: jax.typeof(x).str_short(), raw)
        is_variable = isinstance(leaf, Variable)
        forms[path] = f"{type(leaf).__name__ if is_variable else 'array'}({form})"
        if is_variable:
            variables[path] = differences.ByIdentity(leaf)
    return forms, variables


def _check_unchanged(old: Any, new: Any) -> None:
    """Raises if a call changed anything other than values."""
    forms, variables = map(differences.between, old, new)
    if changes := forms or variables:
        lines = differences.in_words(changes, "before a call", "after it", paths.dotted)
        raise ValueError(
            errors.message(
                "nnx.decoding: calling the model adds, replaces or reshapes Variables, "
                "which a compiled loop does not allow.",
                where="\n".join(lines),
                way_out="Make Variables in __init__ or init_cache, with their final "
                "shapes, and write to them: v[...] = x. Silence sow outside of "
                "nnx.capture: sow(..., capture_noop=True).",
            )
        )


def check_separate(call: str, model: Any, cache: Any) -> None:
    """Raises if a Variable is part of both."""
    of_model, of_cache = ({*_structure({"it": x})[1].values()} for x in (model, cache))
    if of_model & of_cache:
        raise ValueError(
            errors.message(
                f"{call}: init_cache returns Variables that are part of the model, but "
                "the cache must be separate.",
                way_out="Make new ones in init_cache, or keep these only in the model "
                "and return {}.",
            )
        )
