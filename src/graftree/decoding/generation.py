"""Prompts in, tokens out: one compiled program for all prompts of similar length.

    generate    _prefill, then _decode to the end, in one program
    stream      _prefill in a first program, then _decode for a few tokens in a second
                one, again and again

`_prefill` reads the prompts, `_decode` is the loop, and a `_Progress` goes from one to
the other. The model keeps the tokens so far in a cache (`caches.py`). What a call asks
for is in `tasks.py`, the calls of the model are in `steps.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.core.graph import functional
from graftree.decoding import sampling, steps, tasks
from graftree.decoding.tasks import GREEDY, Stops, Task
from graftree.transforms.compiled import jit
from graftree.transforms.control_flow import loops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generated:
    """Tokens that `generate` and `beam_search` return, and `stream` yields in parts.

    Its arrays are NumPy's, or JAX's where `generate` is part of a larger program.

    Attributes:
        tokens: ``int32[batch, max_new_tokens]``; zeros follow the end of a sequence. A
            part that `stream` yields has the tokens of that part only.
        lengths: How many of them count, ``int32[batch]``, including the stop.
        stop_lengths: How many tokens the stop that ended the sequence has,
            ``int32[batch]``; 0 if none ended it or, in a part, if it had ended before.
        scores: The scores of sequences, float ``[batch]``, of `beam_search` only.

    Example:
        >>> tokens, lengths = jnp.array([[4, 5, 0], [6, 7, 8]]), jnp.array([2, 3])
        >>> generated = nnx.decoding.Generated(tokens, lengths, jnp.array([1, 0]))
        >>> generated.lists()
        [[4, 5], [6, 7, 8]]
        >>> generated.lists(with_stop=False)
        [[4], [6, 7, 8]]
    """

    tokens: Any
    lengths: Any
    stop_lengths: Any = 0
    scores: Any = None

    def lists(self, *, with_stop: bool = True) -> list[list[int]]:
        """Lists the tokens that count, for each prompt.

        Args:
            with_stop: Whether to include the stop that ended a sequence.
        """
        lengths = self.lengths if with_stop else self.lengths - self.stop_lengths
        rows = zip(np.asarray(self.tokens), np.maximum(lengths, 0), strict=True)
        return [row[:length].tolist() for row, length in rows]


def generate(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    inputs: Any = None,
    sampler: sampling.Sampler = GREEDY,
    processors: Sequence[sampling.Processor] = (),
    key: jax.Array | None = None,
    stop: Sequence[int | Sequence[int]] = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Generated:
    """Continues prompts with a language model, all of a batch at once.

    One compiled program reads the prompts in one call, then makes tokens one by one. It
    is recompiled for other numbers of prompts and tokens, for prompts of another padded
    length, and for other stops and other functions as processors, but not for prompts
    of other lengths. The cache is part of the program, which writes it in place.

    Inside a transform, such as ``jax.jit``, or in a program to export, it is part of
    that program. Then model, prompts, key and sampler may be traced, and nothing is
    checked that depends on the tokens themselves: prompts must not be empty.

    Args:
        model: Has two methods. ``init_cache(batch, max_length)`` makes its memory of
            the tokens so far, usually a `KeyValueCache` for each layer. A call
            ``model(tokens, positions=positions, cache=cache)`` takes tokens and their
            positions, ``int[batch, length]`` each, adds them to the cache and returns
            logits, ``[batch, length, vocabulary]``. Padding follows a prompt, at the
            position -1, or at those after it if there is no `KeyValueCache`.
            If the model has an attribute ``max_length``, no sequence gets longer,
            including padding. An encoder-decoder takes ``inputs`` too.
        prompts: Tokens, ``int[batch, length]``, or a list of lists of different
            lengths.
        max_new_tokens: How many tokens to make for each prompt.
        inputs: What an encoder-decoder reads besides the prompts: any pytree, where the
            first axis of each array is that of the prompts. The model is asked for
            ``init_cache(batch, max_length, inputs)``, once: there it runs its encoder,
            and puts what the decoder needs of it into the cache.
        sampler: How they are chosen: by default always the likeliest one.
        processors: Functions that change the logits before the sampler gets them, one
            after the other: ``processor(logits, history)`` takes float logits,
            ``[batch, vocabulary]``, and a `History`, and returns new logits. A function
            is part of the program, with everything it closes over; put arrays that may
            change into a pytree or Module with a ``__call__``, such as
            `RepetitionPenalty`.
        key: A random key, for a sampler that draws.
        stop: Tokens that end a sequence, or sequences of tokens that do if the model
            makes them one after the other. The prompt is never part of a stop.
        pad: A token that is not part of the prompts but fills up their rows, on either
            side; it is left out.
        padded_length: The length to which prompts are padded; ``None``: the next power
            of two, at least 16. At most the ``max_length`` of the model.

    Returns:
        The new tokens.

    Raises:
        TypeError: If ``prompts`` are not lists of integers, if the model lacks
            ``init_cache`` or has one that doesn't go with ``inputs``, if a processor
            returns anything but logits, or if an argument is traced that decides the
            program.
        ValueError: If a prompt is empty or too long; if ``inputs`` are not as many as
            prompts; if a token is negative, not an int32, or not in the `nnx.Embed` of
            the model; if a sampler that draws gets no key; or if a call of the model
            adds or replaces Variables, or changes their shapes. It may write to those
            that it has, as a Dropout in training mode does.

    Example:
        >>> class Counts(nnx.Module):  # the next token is one more
        ...     def init_cache(self, batch, max_length):
        ...         return {}
        ...     def __call__(self, tokens, *, positions, cache):
        ...         return jax.nn.one_hot(tokens + 1, 10)
        >>> prompts = [[1, 2, 3], [5]]
        >>> nnx.decoding.generate(Counts(), prompts, max_new_tokens=3, stop=[7]).lists()
        [[4, 5, 6], [6, 7]]
    """
    task = tasks.read(
        "nnx.decoding.generate",
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        inputs=inputs,
        sampler=sampler,
        processors=processors,
        key=key,
        stop=stop,
        pad=pad,
        padded_length=padded_length,
    )
    *arrays, num_tokens = _generate(model, task)
    steps.check_tokens("nnx.decoding.generate", model, task, num_tokens)
    return concrete(arrays)


def concrete(arrays: Sequence[jax.Array]) -> Generated:
    """Copies what a program made from the device; but not in a larger program."""
    if isinstance(arrays[0], _jax.Tracer):
        return Generated(*arrays)
    return Generated(*map(np.asarray, arrays))


def stream(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    chunk: int = 1,
    inputs: Any = None,
    sampler: sampling.Sampler = GREEDY,
    processors: Sequence[sampling.Processor] = (),
    key: jax.Array | None = None,
    stop: Sequence[int | Sequence[int]] = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Iterator[Generated]:
    """Yields the tokens of `generate` as they are made.

    The tokens are the same, for the same arguments. Two programs are compiled: one
    reads the prompts, the other makes ``chunk`` tokens. Each part costs a call of the
    second and a copy from the device, so larger chunks are faster.

    You may use the model between two parts; its values then make the next tokens.
    If you need no more tokens, just leave the loop: the Variables of the model then
    hold the values that the parts so far wrote.

    Args:
        model: See `generate`.
        prompts: See `generate`.
        max_new_tokens: How many tokens to make for each prompt, at most.
        chunk: How many tokens of each sequence to yield at once.
        inputs: See `generate`.
        sampler: See `generate`.
        processors: See `generate`.
        key: See `generate`.
        stop: See `generate`. A stop of several tokens may have begun in an earlier
            part.
        pad: See `generate`.
        padded_length: See `generate`.

    Yields:
        The next ``chunk`` tokens of each sequence, or the rest of
        ``max_new_tokens``, until all sequences have ended.

    Raises:
        TypeError: See `generate`; or inside a transform, where nothing can be yielded.
        ValueError: See `generate`; if ``chunk`` is less than 1; or if the cache holds
            Variables of the model.

    Example:
        >>> class Counts(nnx.Module):  # the next token is one more
        ...     def init_cache(self, batch, max_length):
        ...         return {}
        ...     def __call__(self, tokens, *, positions, cache):
        ...         return jax.nn.one_hot(tokens + 1, 10)
        >>> prompts = [[1, 2, 3], [5]]
        >>> parts = nnx.decoding.stream(Counts(), prompts, max_new_tokens=3, stop=[7])
        >>> for part in parts:
        ...     print(part.lists())
        [[4], [6]]
        [[5], [7]]
        [[6], []]
    """
    if _jax.current_trace() is not _jax.no_trace:
        raise TypeError(
            errors.message(
                "nnx.decoding.stream yields tokens as they are made, but in a "
                "transform there are none before the program runs.",
                way_out="Call nnx.decoding.generate instead.",
            )
        )
    task = tasks.read(
        "nnx.decoding.stream",
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        inputs=inputs,
        sampler=sampler,
        processors=processors,
        key=key,
        stop=stop,
        pad=pad,
        padded_length=padded_length,
    )
    chunk = tasks.whole("nnx.decoding.stream", chunk=chunk)
    if chunk < 1:
        raise ValueError(f"nnx.decoding.stream: chunk must be at least 1, got {chunk}.")
    return _stream(model, task, chunk)


def _stream(model: Any, task: Task, chunk: int) -> Iterator[Generated]:
    progress, num_tokens = _first(model, task)
    steps.check_tokens("nnx.decoding.stream", model, task, num_tokens)
    task = dataclasses.replace(task, inputs=None)  # the cache has what is needed
    for start in range(0, task.count, chunk):
        progress, arrays, is_running = _next(model, task, progress, start, chunk)
        tokens, counts, stop_lengths = map(np.asarray, arrays)
        size = min(chunk, task.count - start)
        lengths = np.clip(counts - start, 0, size)
        ended = np.where(lengths > 0, stop_lengths, 0)
        yield Generated(tokens[:, :size], lengths, ended)
        if not is_running:
            return


# The programs.


class _Progress(NamedTuple):
    """What is decoded so far, of ``count`` tokens for each row."""

    step: jax.Array  # tokens of the rows that run
    token: jax.Array  # the last one of each row, not yet read by the model
    tokens: jax.Array  # int32[batch, count]
    counts: jax.Array  # those that count, int32[batch]
    is_running: jax.Array  # bool[batch]
    cache: Any


@jit.jit(**steps.GRAPH_MODE)
def _generate(model: Any, task: Task) -> tuple[jax.Array, ...]:
    """Returns tokens, how many count, lengths of stops; how many tokens there are."""
    progress, num_tokens = _prefill(model, task)
    progress = _decode(model, task, progress, task.count)
    return *_arrays(progress, task.stop), num_tokens


def _arrays(progress: _Progress, stop: Stops) -> tuple[Any, Any, Any]:
    """Gives the tokens, how many of them count, and the lengths of stops."""
    tokens, counts = progress.tokens, progress.counts
    return tokens, counts, steps.stop_lengths(tokens, counts, stop)


@jit.jit(**steps.GRAPH_MODE)
def _first(model: Any, task: Task) -> Any:
    """Makes the first token, and says how many there are to choose from."""
    progress, num_tokens = _prefill(model, task)
    steps.check_separate("nnx.decoding.stream", model, progress.cache)
    # No rounds: a call of the model that is not allowed fails before the first one.
    return functional.split(_decode(model, task, progress, 1), graph=True), num_tokens


@jit.jit(static_argnums=4, donate_argnums=2, **steps.GRAPH_MODE)
def _next(
    model: Any, task: Task, progress: Any, start: Any, chunk: int
) -> tuple[Any, tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Makes tokens until there are ``chunk`` from ``start`` on; returns these."""
    until = jnp.minimum(start + chunk, task.count)
    progress = _decode(model, task, functional.merge(*progress), until)
    tokens, *rest = _arrays(progress, task.stop)
    tokens = jnp.take(tokens, start + jnp.arange(chunk), axis=1, mode="clip")
    arrays = tokens, *rest
    return functional.split(progress, graph=True), arrays, progress.is_running.any()


def _prefill(model: Any, task: Task) -> tuple[_Progress, jax.Array]:
    """Reads the prompts, and chooses the first token of each, of how many there are."""
    cache, logits = steps.prefill(model, task)
    batch = task.tokens.shape[0]
    tokens = jnp.zeros((batch, task.count), jnp.int32)
    rows = jnp.zeros(batch, jnp.int32), tokens, jnp.ones(batch, bool)
    zeros, tokens, is_running = task.beside(rows)
    progress = _Progress(jnp.int32(0), zeros, tokens, zeros, is_running, cache)
    progress = _choose(task, task.processors, logits, progress)
    return progress, steps.num_tokens(logits)


def _decode(model: Any, task: Task, progress: _Progress, until: Any) -> _Progress:
    """Makes tokens until there are that many, or all sequences have ended."""

    def is_unfinished(carry: tuple[_Progress, Any, Any]) -> jax.Array:
        progress, *_ = carry
        return (progress.step < until) & progress.is_running.any()

    def advance(carry: tuple[_Progress, Any, Any]) -> tuple[_Progress, Any, Any]:
        progress, model, processors = carry
        token, at = progress.token[:, None], task.lengths + progress.step - 1
        logits = steps.follow(model, progress.cache, token, at[:, None])
        progress = _choose(task, processors, logits[:, 0], progress)
        return progress, model, processors

    carry = progress, model, task.processors
    return loops.while_loop(is_unfinished, advance, carry, **steps.GRAPH_MODE)[0]


def _choose(
    task: Task, processors: Any, logits: jax.Array, progress: _Progress
) -> _Progress:
    """Samples the next token of each row, and ends the rows that it stops."""
    step, _, tokens, counts, is_running, cache = progress
    if processors:
        history = steps.history(task.tokens, task.lengths, tokens, counts)
        logits = sampling.process(processors, logits, history)
    token = task.sampler(logits, jax.random.fold_in(task.key, step))
    tokens = tokens.at[:, step].set(jnp.where(is_running, token, 0))
    counts = counts + is_running
    is_running = is_running & (steps.stop_lengths(tokens, counts, task.stop) == 0)
    return _Progress(step + 1, token, tokens, counts, is_running, cache)
