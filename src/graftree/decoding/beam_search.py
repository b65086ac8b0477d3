"""Beam search: the likeliest sequences, instead of the likeliest next token.

For each prompt, ``num_beams`` sequences go on. A step considers each of them with each
token of the vocabulary, and the best of these continuations go on; those among them
that a stop ends are put aside, with their score. Each beam has its row of the cache,
``[batch * num_beams, ...]``, and its next row is that of the beam that it continues.

Scores, ends and results are those of ``generate(num_beams=...)`` in `transformers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import functional, updates
from graftree.core.variables.variables import Variable
from graftree.decoding import generation, sampling, steps, tasks
from graftree.decoding.generation import Generated
from graftree.decoding.tasks import Task
from graftree.transforms import recordings
from graftree.transforms.compiled import jit
from graftree.transforms.control_flow import loops

NAME = "nnx.decoding.beam_search"


def beam_search(
    model: Any,
    prompts: Any,
    *,
    num_beams: int,
    max_new_tokens: int,
    inputs: Any = None,
    num_return_sequences: int = 1,
    length_penalty: Any = 1.0,
    early_stopping: bool | Literal["never"] = False,
    processors: Sequence[sampling.Processor] = (),
    stop: Sequence[int | Sequence[int]] = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Generated:
    """Continues prompts with the sequences that are likeliest as a whole.

    The score of a sequence is ``log_probability / new_tokens ** length_penalty``, with
    its stop. It has ended with a stop, or with ``max_new_tokens``. Only continuations
    that are among the best ``num_beams`` can end; as many others go on.

    As `generate`, it is one compiled program, even as part of a larger one. Prompts are
    read once, for all beams; so is an encoder run. What a model's calls write into the
    cache is reordered at each step, along the axis of the batch; what they leave as it
    is, as the keys and values of an encoder, is not.

    Args:
        model: See `generate`. Its cache may be any, if each array that calls write has
            an axis of the size ``batch``.
        prompts: See `generate`.
        num_beams: How many sequences go on for each prompt.
        max_new_tokens: How many tokens to make for each sequence, at most.
        inputs: See `generate`.
        num_return_sequences: How many of the best to return for each prompt; at most
            ``num_beams``.
        length_penalty: The exponent in the score. Above 0, longer sequences are
            preferred more; 0 compares probabilities.
        early_stopping: When the search for a prompt ends, once ``num_beams`` of its
            sequences have ended: ``True``: at once; ``False``: if the best that goes
            on would have a lower score than each of them if it ended now; ``"never"``:
            if it can't get a higher one.
        processors: See `generate`; but they get log probabilities, as in
            `transformers`. What they return is added to the score, and not normalized.
        stop: See `generate`.
        pad: See `generate`.
        padded_length: See `generate`.

    Returns:
        The new tokens and their ``scores``, as `Generated` with
        ``batch * num_return_sequences`` rows: those of the first prompt, the best
        first, then those of the second. If fewer sequences are possible, the others
        are empty, with a score of minus infinity.

    Raises:
        TypeError: See `generate`.
        ValueError: See `generate`; if a setting is out of its range; if an
            array in the cache has no axis of the batch; or if the cache holds Variables
            of the model.

    Example:
        >>> class Pairs(nnx.Module):  # 1 is likelier than 2, but 2 3 than 1 and any
        ...     def init_cache(self, batch, max_length):
        ...         return {}
        ...     def __call__(self, tokens, *, positions, cache):
        ...         rows = [[0, 6, 4, 0], [3, 3, 3, 3], [0, 0, 0, 9], [0, 0, 0, 0]]
        ...         return jnp.log(jnp.array(rows) + 1e-6)[tokens]
        >>> options = {"max_new_tokens": 2}
        >>> nnx.decoding.generate(Pairs(), [[0]], **options).lists()
        [[1, 0]]
        >>> made = nnx.decoding.beam_search(Pairs(), [[0]], num_beams=2, **options)
        >>> made.lists(), round(float(jnp.exp(2 * made.scores[0])), 2)
        ([[2, 3]], 0.4)

    References:
        Wu et al., 2016, "Google's Neural Machine Translation System", section 7, with
        the length itself as penalty.
    """
    tasks.check_static(
        NAME,
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        early_stopping=early_stopping,
    )
    num_beams = tasks.whole(NAME, num_beams=num_beams)
    num_return_sequences = tasks.whole(NAME, num_return_sequences=num_return_sequences)
    _check(num_beams, num_return_sequences, early_stopping)
    task = tasks.read(
        NAME,
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        inputs=inputs,
        processors=processors,
        stop=stop,
        pad=pad,
        padded_length=padded_length,
    )
    settings = _Settings(num_beams, num_return_sequences, early_stopping)
    *arrays, num_tokens = _generate(model, task, settings, length_penalty)
    steps.check_tokens(NAME, model, task, num_tokens)
    return generation.concrete(arrays)


def _check(beams: int, results: int, early_stopping: Any) -> None:
    if beams < 1:
        raise ValueError(f"{NAME}: num_beams must be at least 1, got {beams}.")
    if not 1 <= results <= beams:
        raise ValueError(
            f"{NAME}: num_return_sequences must be from 1 to num_beams={beams}, got "
            f"{results}."
        )
    if early_stopping not in (True, False, "never"):
        raise ValueError(
            f'{NAME}: early_stopping must be True, False or "never", got '
            f"{early_stopping!r}."
        )


@dataclasses.dataclass(frozen=True)
class _Settings:
    beams: int
    results: int
    early_stopping: bool | str


class _Sequences(NamedTuple):
    """New tokens, several sequences for each prompt, the best first."""

    tokens: jax.Array  # int32[batch, beams, count]
    lengths: jax.Array  # int32[batch, beams]
    scores: jax.Array  # float[batch, beams]; -inf: no sequence

    @classmethod
    def empty(cls, batch: int, beams: int, count: int, dtype: Any) -> _Sequences:
        tokens = jnp.zeros((batch, beams, count), jnp.int32)
        lengths = jnp.zeros((batch, beams), jnp.int32)
        return cls(tokens, lengths, jnp.full((batch, beams), -jnp.inf, dtype))

    def best(self, count: int) -> tuple[_Sequences, jax.Array]:
        """Takes those with the highest scores; returns them, and which they are."""
        scores, index = jax.lax.top_k(self.scores, count)
        tokens = jnp.take_along_axis(self.tokens, index[..., None], axis=1)
        lengths = jnp.take_along_axis(self.lengths, index, axis=1)
        return _Sequences(tokens, lengths, scores), index


class _SearchState(NamedTuple):
    """What is found so far."""

    step: jax.Array  # tokens of the beams
    beams: _Sequences  # those that go on; scores are log probabilities
    ended: _Sequences
    is_done: jax.Array  # bool[batch]: no sequence is added any more


@jit.jit(static_argnums=2, **steps.GRAPH_MODE)
def _generate(
    model: Any, task: Task, settings: _Settings, length_penalty: Any
) -> tuple[jax.Array, ...]:
    """Returns tokens, how many count, lengths of stops, scores; how many there are."""
    cache, logits = steps.prefill(model, task)
    num_tokens = steps.num_tokens(logits)
    steps.check_separate(NAME, model, cache)
    axes = _batch_axes(model, task, cache)
    batch, beams, beside = task.tokens.shape[0], settings.beams, task.beside
    cache = _repeated(cache, axes, beams)
    task = dataclasses.replace(task.repeated(beams), inputs=None)

    def continued(search: _SearchState, logits: jax.Array, processors: Any) -> Any:
        log_probs = _log_probs(task, search, logits, processors)
        return _continued(task, settings, length_penalty, search, log_probs)

    def is_unfinished(carry: tuple[_SearchState, Any, Any, Any]) -> jax.Array:
        search, *_ = carry
        return (search.step < task.count) & ~search.is_done.all()

    def advance(carry: tuple[_SearchState, Any, Any, Any]) -> Any:
        search, cache, model, processors = carry
        token = search.beams.tokens[..., search.step - 1].reshape(-1)[:, None]
        at = (task.lengths + search.step - 1)[:, None]
        before = dict(steps.values(cache))
        logits = steps.follow(model, cache, token, at)[:, 0]
        search, parents = continued(search, logits, processors)
        _reorder(cache, axes, before, parents)
        return search, cache, model, processors

    none = _Sequences.empty(batch, beams, task.count, sampling.wide(logits).dtype)
    none, is_done = beside((none, jnp.zeros(batch, bool)))
    # The beams of a prompt are the same as yet: all go on from the first.
    first = none._replace(scores=none.scores.at[:, 0].set(0))
    search = _SearchState(jnp.int32(0), first, none, is_done)
    logits = tasks.repeat(logits, beams)
    search, _ = continued(search, logits, task.processors)
    carry = search, cache, model, task.processors
    search = loops.while_loop(is_unfinished, advance, carry, **steps.GRAPH_MODE)[0]
    results = [x[:, : settings.results] for x in search.ended]
    tokens, lengths, scores = (x.reshape(-1, *x.shape[2:]) for x in results)
    stops = steps.stop_lengths(tokens, lengths, task.stop)
    return tokens, lengths, stops, scores, num_tokens


def _log_probs(
    task: Task, search: _SearchState, logits: jax.Array, processors: Any
) -> jax.Array:
    """Computes what each token adds to the score of each beam."""
    log_probs = jax.nn.log_softmax(sampling.wide(logits))
    if processors:
        tokens = search.beams.tokens.reshape(-1, task.count)
        counts = jnp.full_like(task.lengths, search.step)
        history = steps.history(task.tokens, task.lengths, tokens, counts)
        log_probs = sampling.process(processors, log_probs, history)
    return log_probs.reshape(*search.beams.scores.shape, -1)


def _continued(
    task: Task,
    settings: _Settings,
    length_penalty: Any,
    search: _SearchState,
    log_probs: jax.Array,
) -> tuple[_SearchState, jax.Array]:
    """Adds a token to each beam; returns also which beam each one continues."""
    step, beams, ended, is_done = search
    length, dtype = step + 1, beams.scores.dtype
    candidates, parents = _candidates(task, search, log_probs)
    tokens, lengths, scores = candidates
    stops = steps.stop_lengths(
        tokens.reshape(-1, task.count), lengths.reshape(-1), task.stop
    ).reshape(lengths.shape)
    is_end = (stops > 0) | (length == task.count)

    beams, index = candidates._replace(scores=jnp.where(is_end, -jnp.inf, scores)).best(
        settings.beams
    )
    parents = jnp.take_along_axis(parents, index, axis=1)

    is_best = jnp.arange(scores.shape[1])[None] < settings.beams
    is_new = is_end & is_best & ~is_done[:, None]
    final = jnp.where(is_new, scores / length.astype(dtype) ** length_penalty, -jnp.inf)
    pairs = zip(ended, candidates._replace(scores=final), strict=True)
    both = _Sequences(*(jnp.concatenate(pair, axis=1) for pair in pairs))
    ended, _ = both.best(settings.beams)

    if settings.early_stopping == "never":
        length = jnp.where(jnp.asarray(length_penalty) > 0, task.count, length)
    reachable = beams.scores[:, 0] / length.astype(dtype) ** length_penalty
    worst = ended.scores[:, -1]
    is_done = is_done | ~(reachable > worst)
    if settings.early_stopping is True:
        is_done = is_done | (worst > -jnp.inf)
    return _SearchState(step + 1, beams, ended, is_done), parents


def _candidates(
    task: Task, search: _SearchState, log_probs: jax.Array
) -> tuple[_Sequences, jax.Array]:
    """Takes the best continuations: enough for all beams to go on if any token ends."""
    batch, beams, vocabulary = log_probs.shape
    last_tokens = {stop[-1] for stop in task.stop}
    count = min(beams * max(2, 1 + len(last_tokens)), beams * vocabulary)
    scores = (search.beams.scores[..., None] + log_probs).reshape(batch, -1)
    scores, index = jax.lax.top_k(scores, count)
    parents, token = index // vocabulary, index % vocabulary
    tokens = jnp.take_along_axis(search.beams.tokens, parents[..., None], axis=1)
    tokens = tokens.at[:, :, search.step].set(token)
    lengths = jnp.full_like(token, search.step + 1)
    return _Sequences(tokens, lengths, scores), parents


# The rows of a cache.

Axes = dict[Path, Any]


def _batch_axes(model: Any, task: Task, cache: Any) -> Axes:
    """Finds the axis of the batch in each array: the one that is twice as long.

    That is compared with the cache for each prompt twice; -1: the same for all rows.
    """

    def doubled(model: Any, task: Task) -> list[Any]:
        cache, _ = steps.prefill(model, task.repeated(2))
        return [value for _, value in steps.values(cache)]

    batch = task.tokens.shape[0]
    twice = recordings.eval_shape(doubled, model, task, **steps.GRAPH_MODE)
    axes = {}
    for (path, once), other in zip(steps.values(cache), twice, strict=True):

        def axis(x: Any, y: Any, path: Path = path) -> int:
            return _axis(path, x, y, batch)

        axes[path] = jax.tree.map(axis, once, other)
    return axes


def _axis(path: Path, once: Any, twice: Any, batch: Any) -> int:
    sizes = [*zip(once.shape, twice.shape, strict=True)]
    axes = [i for i, (one, two) in enumerate(sizes) if one != two]
    if not axes:
        return -1
    if len(axes) > 1 or sizes[axes[0]] != (batch, 2 * batch):
        raise _no_rows(path, once, "no axis has the size of the batch")
    return axes[0]


def _no_rows(path: Path, x: Any, problem: str) -> ValueError:
    return ValueError(
        errors.message(
            f"{NAME} must give each beam its rows of the cache, but can't tell which "
            "rows they are.",
            where=f"{paths.below('cache', path)}: {jax.typeof(x).str_short()}, "
            f"{problem}",
            way_out="Give each array in the cache an axis of size batch, as passed to "
            "init_cache(batch, ...), and keep along it what belongs to each prompt.",
        )
    )


def _repeated(cache: Any, axes: Axes, beams: int) -> Any:
    """Makes a cache with each row ``beams`` times, one after the other."""

    def repeat(x: Any, axis: int) -> Any:
        return x if axis < 0 else tasks.repeat(x, beams, axis)

    graphdef, state = functional.split(cache, graph=True)
    leaves = {
        path: jax.tree.map(repeat, x, axes[path]) for path, x in steps.values(cache)
    }
    updates.write_at(state, leaves)
    return functional.merge(graphdef, state)


def _reorder(cache: Any, axes: Axes, before: dict[Path, Any], parents: Any) -> None:
    """Gives each beam the rows of the one that it continues.

    What a call leaves as it is, is the same for all beams of a prompt.
    """

    def pick(path: Path, old: Any, x: Any, axis: int) -> Any:
        if old is x or not x.ndim:
            return x
        if axis < 0:
            raise _no_rows(path, x, "a call writes to it, but it has no such axis")
        shape = *x.shape[:axis], *parents.shape, *x.shape[axis + 1 :]
        index = [1] * len(shape)
        index[axis : axis + 2] = parents.shape
        rows = x.reshape(shape), parents.reshape(index)
        return jnp.take_along_axis(*rows, axis=axis + 1).reshape(x.shape)

    arrays = {}
    for path, leaf in steps.leaves(cache):
        value = steps.value_of(leaf)
        args = before[path], value, axes.get(path, -1)  # a number of Python: no path
        new = jax.tree.map(lambda *x, path=path: pick(path, *x), *args)
        if isinstance(leaf, Variable):
            leaf.set_value(new)
        elif new is not value:
            arrays[path] = new
    updates.write_at(cache, arrays)
