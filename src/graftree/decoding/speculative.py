"""Speculative decoding: a small model drafts, the large one checks several at once.

Each round, the draft model makes a few tokens, one by one. The model reads them all in
one call, and keeps those that it could have made itself: its tokens, or its samples,
are as if it were alone. It makes one more itself, in the place of the first draft that
it does not keep. So a round makes from one to ``draft_tokens + 1`` tokens.

What was drafted and not kept stays in the caches, in slots after all tokens, where no
token sees it until the next one takes its place. Only a `KeyValueCache` without a ring
works like this; any other that calls write to is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.core import paths
from graftree.core.graph import traversals
from graftree.decoding import generation, sampling, steps, tasks
from graftree.decoding.generation import Generated
from graftree.decoding.tasks import GREEDY, Task
from graftree.nn import rope
from graftree.transforms.compiled import jit
from graftree.transforms.control_flow import loops

NAME = "nnx.decoding.speculate"


def speculate(
    model: Any,
    draft: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    draft_tokens: int = 4,
    inputs: Any = None,
    sampler: sampling.Sampler = GREEDY,
    key: jax.Array | None = None,
    stop: Sequence[int | Sequence[int]] = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Generated:
    """Continues prompts as `generate` does, with fewer calls of the model.

    Greedy tokens are the same, up to rounding where two tokens are equally likely.
    Drawn ones are others for the same key, with the same distribution: a draft ``x``
    is kept with the probability ``min(1, p(x) / q(x))``, and the first that is not is
    drawn again from ``max(0, p - q)``, normalized, where ``p`` is the distribution of
    the model and ``q`` that of the draft model, each after the sampler.

    Args:
        model: See `generate`. Calls may write only to caches that are a
            `KeyValueCache` without a ring.
        draft: A smaller model of the same kind, for the same tokens.
        prompts: See `generate`.
        max_new_tokens: How many tokens to make for each prompt.
        draft_tokens: How many tokens the draft model makes in each round.
        inputs: See `generate`; both models get them.
        sampler: See `generate`; it is that of both models.
        key: See `generate`.
        stop: See `generate`.
        pad: See `generate`.
        padded_length: See `generate`.

    Returns:
        The new tokens.

    Raises:
        TypeError: See `generate`.
        ValueError: See `generate`; if ``draft_tokens`` is less than 1; if the models
            have different numbers of tokens; if a cache can't forget drafts; or if
            angles of a `RoPE` of the model depend on the length.

    Example:
        >>> class Counts(nnx.Module):  # the next token is one more
        ...     def __init__(self, wrong):
        ...         self.wrong = wrong
        ...     def init_cache(self, batch, max_length):
        ...         return {}
        ...     def __call__(self, tokens, *, positions, cache):
        ...         following = jnp.where(tokens == self.wrong, 0, tokens + 1)
        ...         return jax.nn.one_hot(following, 10)
        >>> model, draft = Counts(wrong=9), Counts(wrong=3)
        >>> nnx.decoding.speculate(model, draft, [[1], [5]], max_new_tokens=4).lists()
        [[2, 3, 4, 5], [6, 7, 8, 9]]

    References:
        Leviathan et al., 2023, "Fast Inference from Transformers via Speculative
        Decoding", algorithm 1. Chen et al., 2023, "Accelerating Large Language Model
        Decoding with Speculative Sampling", algorithm 2.
    """
    tasks.check_static(NAME, draft_tokens=draft_tokens)
    draft_tokens = tasks.whole(NAME, draft_tokens=draft_tokens)
    if draft_tokens < 1:
        raise ValueError(
            f"{NAME}: draft_tokens must be at least 1, got {draft_tokens}."
        )
    _check_ropes(model)
    read = [
        tasks.read(
            f"{NAME}, {name}=",
            of,
            prompts,
            max_new_tokens=max_new_tokens,
            inputs=inputs,
            sampler=sampler,
            key=key,
            stop=stop,
            pad=pad,
            padded_length=padded_length,
        )
        for name, of in (("model", model), ("draft", draft))
    ]
    # Prompts are padded to what both models can take.
    task = min(read, key=lambda task: task.tokens.shape[1])
    *arrays, num_tokens = _generate(model, draft, task, draft_tokens)
    for name, of in (("model", model), ("draft", draft)):
        steps.check_tokens(f"{NAME}, {name}=", of, task, num_tokens)
    return generation.concrete(arrays)


def _check_ropes(model: Any) -> None:
    """Refuses a model for which a draft that it reads counts as length at once."""
    for path, part in traversals.iter_graph(model, graph=True):
        if isinstance(part, rope.RoPE) and rope.depends_on_length(part):
            problem = (
                f"{NAME}: the model reads several drafts in one call, and a RoPE whose "
                "angles depend on the length counts all of them."
            )
            way_out = (
                "Fix the length that counts, RoPE(..., seq_len=...), or use "
                "nnx.decoding.generate."
            )
            where = paths.to_string(path)
            raise ValueError(errors.message(problem, where=where, way_out=way_out))


class _DraftProgress(NamedTuple):
    """What is decoded so far, of ``count`` tokens for each row."""

    round: jax.Array
    token: jax.Array  # the last one of each row, not yet read by the models
    tokens: jax.Array  # int32[batch, count]
    counts: jax.Array  # those that count, int32[batch]
    is_running: jax.Array  # bool[batch]


@jit.jit(static_argnums=3, **steps.GRAPH_MODE)
def _generate(
    model: Any, draft: Any, task: Task, draft_tokens: int
) -> tuple[jax.Array, ...]:
    """Returns tokens, how many count, lengths of stops; how many tokens there are."""
    cache, logits = steps.prefill(model, task)
    draft_cache, guesses = steps.prefill(draft, task)
    _check_same_tokens(logits, guesses)
    steps.check_separate(NAME, (model, draft), (cache, draft_cache))
    task = dataclasses.replace(task, inputs=None)
    zeros = jnp.zeros(task.tokens.shape[0], jnp.int32)
    tokens = jnp.zeros((zeros.shape[0], task.count), jnp.int32)
    zeros, tokens = task.beside((zeros, tokens))
    progress = _DraftProgress(jnp.int32(0), zeros, tokens, zeros, zeros == 0)
    first = task.sampler(logits, jax.random.fold_in(task.key, 0))
    progress = _added(task, progress, first[:, None], zeros + 1)
    carry = progress, model, draft, cache, draft_cache

    def is_unfinished(carry: Any) -> jax.Array:
        return carry[0].is_running.any()

    def advance(carry: Any) -> Any:
        progress, model, draft, cache, draft_cache = carry
        keys = jax.random.split(jax.random.fold_in(task.key, progress.round), 3)
        drafts, guesses = _drafted(
            task, draft, draft_cache, progress, draft_tokens, keys[0]
        )
        read = jnp.concatenate([progress.token[:, None], drafts], axis=1)
        logits = _follow(task, model, cache, read, progress.counts)
        chosen, kept = _checked(task.sampler, logits, drafts, guesses, keys[1:])
        progress = _added(task, progress, chosen, kept + 1)
        return progress, model, draft, cache, draft_cache

    progress = loops.while_loop(is_unfinished, advance, carry, **steps.GRAPH_MODE)[0]
    tokens, counts = progress.tokens, progress.counts
    stops = steps.stop_lengths(tokens, counts, task.stop)
    return tokens, counts, stops, steps.num_tokens(logits)


def _check_same_tokens(logits: jax.Array, guesses: jax.Array) -> None:
    """Raises if the draft model is for other tokens than the model."""
    if logits.shape != guesses.shape:
        raise ValueError(
            errors.message(
                f"{NAME}: the draft model is not for the tokens of the model.",
                where=f"logits of the model {jax.typeof(logits).str_short()}, of the "
                f"draft model {jax.typeof(guesses).str_short()}",
                way_out="Use a draft model with the same vocabulary; cut off logits of "
                "one that pads its vocabulary.",
            )
        )


def _drafted(
    task: Task,
    draft: Any,
    cache: Any,
    progress: _DraftProgress,
    count: int,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Drafts tokens, ``[batch, count]``; returns also the logits they are from."""
    token, tokens, logits = progress.token, [], []
    # One more than is needed, so that the last one is in the cache, too.
    for i in range(count + 1):
        counts = progress.counts + i
        logits.append(_follow(task, draft, cache, token[:, None], counts)[:, 0])
        token = task.sampler(logits[-1], jax.random.fold_in(key, i))
        tokens.append(token)
    return jnp.stack(tokens[:-1], axis=1), jnp.stack(logits[:-1], axis=1)


def _follow(
    task: Task, model: Any, cache: Any, tokens: jax.Array, counts: jax.Array
) -> jax.Array:
    """Calls a model for tokens, the first being the last of ``counts`` new ones."""
    later = jnp.arange(tokens.shape[1])[None] + counts[:, None] - 1
    positions = jnp.where(later < task.count, task.lengths[:, None] + later, -1)
    before = dict(steps.values(cache))
    logits = steps.follow(model, cache, tokens, positions)
    _check_forgetful(cache, before)
    return logits


def _checked(
    sampler: sampling.Sampler,
    logits: jax.Array,
    drafts: jax.Array,
    guesses: jax.Array,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the next tokens, ``[batch, drafts + 1]``, and how many drafts are kept.

    The token after those that are kept is the model's own; later ones don't count.
    """
    p = sampler.probabilities(logits)
    q = sampler.probabilities(guesses)
    at = drafts[..., None]
    p_of, q_of = (jnp.take_along_axis(x, at, axis=2)[..., 0] for x in (p[:, :-1], q))
    uniform = jax.random.uniform(keys[0], drafts.shape, p.dtype)
    is_kept = uniform * q_of < p_of
    kept = jnp.cumprod(is_kept, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    # After the last draft there is nothing to take off: q is 0.
    rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    rest = jnp.where(rest.any(axis=-1, keepdims=True), rest, p)  # but for rounding
    rest = jnp.take_along_axis(rest, kept[:, None, None], axis=1)[:, 0]
    own = jax.random.categorical(keys[1], jnp.log(rest)).astype(jnp.int32)
    is_draft = jnp.arange(drafts.shape[1] + 1)[None] < kept[:, None]
    return jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), own[:, None]), kept


def _added(
    task: Task, progress: _DraftProgress, new: jax.Array, counts: jax.Array
) -> _DraftProgress:
    """Adds so many of the new tokens to each row, up to the first stop."""
    places = jnp.arange(task.count)[None]
    number, token, tokens, total, is_running = progress
    for i in range(new.shape[1]):
        is_new = is_running & (i < counts)
        is_place = is_new[:, None] & (places == total[:, None])
        tokens = jnp.where(is_place, new[:, i, None], tokens)
        token = jnp.where(is_new, new[:, i], token)
        total = total + is_new
        is_end = (steps.stop_lengths(tokens, total, task.stop) > 0) | (
            total == task.count
        )
        is_running = is_running & ~(is_new & is_end)
    return _DraftProgress(number + 1, token, tokens, total, is_running)


def _check_forgetful(cache: Any, before: dict[Any, Any]) -> None:
    """Raises if a call wrote to something that can't forget tokens."""
    forgetful = {
        id(variable)
        for x in steps.key_value_caches(cache)
        if not x.is_ring
        for variable in (x.key, x.value)
    }
    for path, leaf in steps.leaves(cache):
        if id(leaf) in forgetful or steps.value_of(leaf) is before[path]:
            continue
        raise ValueError(
            errors.message(
                f"{NAME}: a call writes to a cache that can't forget rejected drafts.",
                where=paths.below("cache", path),
                way_out="Use nnx.decoding.KeyValueCache without a window, which keeps "
                "each token in the slot of its position; a mask can hide what is "
                "outside a window.",
            )
        )
