"""Prompts in, tokens out: one compiled program for all prompts of similar length.

    generate    _prefill, then _decode to the end, in one program
    stream      _prefill in a first program, then _decode for a few tokens in a second
                one, again and again

`_prefill` reads the prompts, `_decode` is the loop, and a `_Progress` goes from one to
the other. The model keeps the tokens so far in a cache (`caches.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, functional, traversals
from graftree.core.variables.variables import Variable
from graftree.decoding import sampling
from graftree.nn.caches import KeyValueCache
from graftree.transforms.compiled import jit
from graftree.transforms.control_flow import loops

GREEDY = sampling.Sampler(temperature=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generated:
    """Tokens that `generate` returns, and that `stream` yields in parts.

    Its arrays are NumPy's, or JAX's where `generate` is part of a larger program.

    Attributes:
        tokens: ``int32[batch, max_new_tokens]``; zeros follow the end of a sequence. A
            part that `stream` yields has the tokens of that part only.
        lengths: How many of them count, ``int32[batch]``, including the stop.
        stop_lengths: How many tokens the stop that ended the sequence has,
            ``int32[batch]``; 0 if none ended it or, in a part, if it had ended before.

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
            positions after it, or at -1 if there is a `KeyValueCache` that is a ring.
            If the model has an attribute ``max_length``, no sequence gets longer,
            including padding.
        prompts: Tokens, ``int[batch, length]``, or a list of lists of different
            lengths.
        max_new_tokens: How many tokens to make for each prompt.
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
            ``init_cache``, if a processor returns anything but logits, or if an
            argument is traced that decides the program.
        ValueError: If a prompt is empty or too long; if a token is negative, or not an
            int32; if a sampler that draws gets no key; or if a call of the model adds
            or replaces Variables, or changes their shapes. It may write to those that
            it has, as a Dropout in training mode does.

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
    task = _task("nnx.decoding.generate", **locals())
    arrays = _generate(model, task)
    if isinstance(arrays[0], _jax.Tracer):
        return Generated(*arrays)
    return Generated(*map(np.asarray, arrays))


def stream(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    chunk: int = 1,
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
                "nnx.decoding.stream yields tokens as they are made, and a transform "
                "has none before its program runs.",
                way_out="Call nnx.decoding.generate there.",
            )
        )
    task = _task("nnx.decoding.stream", **locals())
    if chunk < 1:
        raise ValueError(f"nnx.decoding.stream: chunk is at least 1, got {chunk}.")
    return _stream(model, task, chunk)


def _stream(model: Any, task: _Task, chunk: int) -> Iterator[Generated]:
    progress = _first(model, task)
    for start in range(0, task.count, chunk):
        progress, arrays, is_running = _next(model, task, progress, start, chunk)
        tokens, counts, stop_lengths = map(np.asarray, arrays)
        size = min(chunk, task.count - start)
        lengths = np.clip(counts - start, 0, size)
        ended = np.where(lengths > 0, stop_lengths, 0)
        yield Generated(tokens[:, :size], lengths, ended)
        if not is_running:
            return


# The arguments of a call.


Stops = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Task:
    """Arguments of a call, without the model."""

    tokens: jax.Array
    lengths: jax.Array
    sampler: sampling.Sampler
    processors: tuple[sampling.Processor, ...]
    key: jax.Array
    count: int = dataclasses.field(metadata={"static": True})
    stop: Stops = dataclasses.field(metadata={"static": True})


def _task(
    call: str,
    *,
    model: Any,
    prompts: Any,
    max_new_tokens: int,
    sampler: sampling.Sampler,
    processors: Sequence[sampling.Processor],
    key: jax.Array | None,
    stop: Any,
    pad: int | None,
    padded_length: int | None,
    **_: Any,
) -> _Task:
    """Checks the arguments of a call."""
    _check_static(
        call, max_new_tokens=max_new_tokens, stop=stop, padded_length=padded_length
    )
    is_traced = isinstance(prompts, _jax.Tracer)
    read = _traced_prompts if is_traced else _prompts
    tokens, lengths, longest = read(call, prompts, pad)
    limit = getattr(model, "max_length", None)
    length = _padded_length(longest, padded_length, limit)
    _check(limit, longest, max_new_tokens)
    if key is None:
        if not sampler.is_greedy:
            raise ValueError(
                f"{call} needs key= for a sampler that draws, such as "
                "jax.random.key(0)."
            )
        key = jax.random.key(0)
    settings = _functions(processors), key, max_new_tokens, _stops(stop)
    _check_model(call, model)
    padding = (0, 0), (0, length - longest)
    tokens = (jnp if is_traced else np).pad(tokens, padding)
    return _Task(jnp.asarray(tokens), jnp.asarray(lengths), sampler, *settings)


def _check_static(call: str, **settings: Any) -> None:
    """Refuses traced values of arguments that decide the program."""
    for name, value in settings.items():
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                errors.message(
                    f"{call}: {name}= decides the program, and can't be traced.",
                    way_out="Make it a static argument of the transform, as in "
                    f"jax.jit(..., static_argnames={name!r}), or write it there.",
                )
            )


def _prompts(
    call: str, prompts: Any, pad: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Reads the tokens of all prompts, their lengths, and the largest of these."""
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)  # in a trace, JAX's own rows would be traced
    rows = prompts if isinstance(prompts, Iterable) else [prompts]
    rows = [_tokens(call, row, pad) for row in rows]
    lengths = np.array([len(row) for row in rows], np.int32)
    if not lengths.size or lengths.min() < 1:
        raise ValueError(f"{call} needs prompts of at least one token.")
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, padded in zip(rows, tokens, strict=True):
        padded[: len(row)] = row
    return tokens, lengths, int(lengths.max())


def _traced_prompts(
    call: str, prompts: jax.Array, pad: int | None
) -> tuple[jax.Array, jax.Array, int]:
    """Reads a traced array like `_prompts`; its length bounds the longest prompt."""
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise TypeError(
            f"{call} takes prompts of integers, [batch, length], and in a transform as "
            f"one array; got {jax.typeof(prompts).str_short()}."
        )
    is_token = jnp.ones(prompts.shape, bool) if pad is None else prompts != pad
    lengths = is_token.sum(axis=1, dtype=jnp.int32)
    first = jnp.argsort(~is_token, axis=1, stable=True)
    tokens = jnp.take_along_axis(prompts, first, axis=1).astype(jnp.int32)
    is_token = jnp.arange(prompts.shape[1])[None] < lengths[:, None]
    return jnp.where(is_token, tokens, 0), lengths, prompts.shape[1]


def _tokens(call: str, row: Any, pad: int | None) -> np.ndarray:
    """Reads the tokens of a prompt."""
    try:
        tokens = np.asarray(row)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            f"{call} takes prompts that are traced as one array, [batch, length], and "
            "got a list.\nGive rows of one length, and name what fills them up: pad=0."
        ) from None
    if tokens.ndim == 0 and tokens.dtype.kind in "iu":
        raise TypeError(
            f"{call} takes a batch of prompts, and got the tokens of a single one.\n"
            "Pass [tokens] instead of tokens: [[1, 2, 3]]."
        )
    hint = "\nA tokenizer turns text into tokens." if tokens.dtype.kind == "U" else ""
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(
            f"{call} takes prompts of integers, as an array [batch, length] or a list "
            f"of lists; got a prompt {tokens.dtype}{[*tokens.shape]}.{hint}"
        )
    tokens = tokens[tokens != pad]
    wrong = tokens[(tokens < 0) | (tokens > _LARGEST)]
    if wrong.size:
        raise ValueError(
            f"{call}: {wrong[0]} is not a token: tokens are from 0 to "
            f"{_LARGEST}.\nIf it fills up the rows, say so: pad={wrong[0]}."
        )
    return tokens.astype(np.int32)


_LARGEST = np.iinfo(np.int32).max


def _check_model(call: str, model: Any) -> None:
    """Raises unless it is an object with the members that are needed."""
    if not isinstance(model, type) and callable(getattr(model, "init_cache", None)):
        return
    got = f"a {type(model).__name__} without that method"
    if isinstance(model, type):
        got = f"the class {model.__name__}, and not an object of it"
    raise TypeError(
        errors.message(
            f"{call} takes a model with a method init_cache(batch, "
            f"max_length), and got {got}.",
            way_out="The model is called as model(tokens, positions=positions, "
            "cache=cache) and gives logits [batch, length, vocabulary].",
        )
    )


def _padded_length(longest: int, length: int | None, limit: int | None) -> int:
    if length is None:
        length = max(16, 1 << (longest - 1).bit_length())
    elif length < longest:
        raise ValueError(
            f"padded_length={length} is less than the longest prompt, {longest} tokens."
        )
    return length if limit is None else max(longest, min(length, limit))


def _check(limit: int | None, longest: int, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1, got {max_new_tokens}.")
    total = longest + max_new_tokens
    if limit is not None and total > limit:
        raise ValueError(
            errors.message(
                f"Sequences would get {total} tokens, and the model takes {limit}.",
                where=f"longest prompt {longest}, max_new_tokens={max_new_tokens}",
                way_out="Cut the prompts, or make fewer tokens.",
            )
        )


def _stops(stop: Any) -> Stops:
    """Reads the stops as sequences, none of them twice."""
    entries = [np.asarray(entry) for entry in stop] if np.iterable(stop) else [stop]
    for entry in map(np.atleast_1d, entries):
        is_right = np.iterable(stop) and entry.ndim == 1 and entry.size
        if not is_right or entry.dtype.kind not in "iu":
            raise TypeError(
                "stop must contain token ids, or lists of token ids, as in stop=[2] or "
                f"stop=[2, [13, 13]]; got {stop!r}."
            )
        if entry.min() < 0 or entry.max() > _LARGEST:
            raise ValueError(
                f"stop={stop!r}: a token is at least 0, and at most {_LARGEST}."
            )
    sequences = {tuple(np.atleast_1d(entry).tolist()) for entry in entries}
    return tuple(sorted(sequences, key=lambda sequence: (len(sequence), sequence)))


def _functions(processors: Any) -> tuple[sampling.Processor, ...]:
    """Makes pytrees of the processors: functions are static, objects have arrays."""
    if not np.iterable(processors) or not all(map(callable, processors)):
        raise TypeError(
            "processors= takes a list of functions (logits, history) -> logits, got "
            f"{processors!r}."
        )
    return tuple(
        jax.tree_util.Partial(x) if jax.tree_util.all_leaves([x]) else x
        for x in processors
    )


# The programs.


class _Progress(NamedTuple):
    """What is decoded so far, of ``count`` tokens for each row."""

    step: jax.Array  # tokens of the rows that run
    token: jax.Array  # the last one of each row, not yet read by the model
    tokens: jax.Array  # int32[batch, count]
    counts: jax.Array  # those that count, int32[batch]
    is_running: jax.Array  # bool[batch]
    cache: Any


@jit.jit
def _generate(model: Any, task: _Task) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Makes all tokens; returns them, how many count, and the lengths of stops."""
    progress = _decode(model, task, _prefill(model, task), task.count)
    return progress.tokens, progress.counts, _stopped(progress, task.stop)


@jit.jit
def _first(model: Any, task: _Task) -> Any:
    """Makes the first token."""
    progress = _prefill(model, task)
    _check_separate(model, progress.cache)
    # No rounds: a call of the model that is not allowed fails before the first one.
    return functional.split(_decode(model, task, progress, 1))


@jit.jit(static_argnums=4, donate_argnums=2)
def _next(
    model: Any, task: _Task, progress: Any, start: Any, chunk: int
) -> tuple[Any, tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Makes tokens until there are ``chunk`` from ``start`` on; returns these."""
    until = jnp.minimum(start + chunk, task.count)
    progress = _decode(model, task, functional.merge(*progress), until)
    tokens = jnp.take(progress.tokens, start + jnp.arange(chunk), axis=1, mode="clip")
    arrays = tokens, progress.counts, _stopped(progress, task.stop)
    return functional.split(progress), arrays, progress.is_running.any()


def _prefill(model: Any, task: _Task) -> _Progress:
    """Reads the prompts, and chooses the first token of each."""
    batch, length = task.tokens.shape
    cache = model.init_cache(batch, length + task.count)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    objects = [x for _, x in traversals.iter_graph(cache, graph=True)]
    if any(isinstance(x, KeyValueCache) and x.is_ring for x in objects):
        # In a ring, padding would take the slots of tokens.
        positions = jnp.where(positions < task.lengths[:, None], positions, -1)
    logits = model(task.tokens, positions=positions, cache=cache)
    last = jnp.take_along_axis(logits, (task.lengths - 1)[:, None, None], axis=1)[:, 0]
    zeros = jnp.zeros(batch, jnp.int32)
    tokens = jnp.zeros((batch, task.count), jnp.int32)
    is_running = jnp.ones(batch, bool)
    progress = _Progress(jnp.int32(0), zeros, tokens, zeros, is_running, cache)
    return _choose(task, task.processors, last, progress)


def _decode(model: Any, task: _Task, progress: _Progress, until: Any) -> _Progress:
    """Makes tokens until there are that many, or all sequences have ended."""

    def is_unfinished(carry: tuple[_Progress, Any, Any]) -> jax.Array:
        progress, *_ = carry
        return (progress.step < until) & progress.is_running.any()

    def advance(carry: tuple[_Progress, Any, Any]) -> tuple[_Progress, Any, Any]:
        progress, model, processors = carry
        at = (task.lengths + progress.step - 1)[:, None]
        objects = {"model": model, "cache": progress.cache}
        structure = _structure(objects)
        logits = model(progress.token[:, None], positions=at, cache=progress.cache)
        _check_unchanged(structure, _structure(objects))
        progress = _choose(task, processors, logits[:, 0], progress)
        return progress, model, processors

    return loops.while_loop(is_unfinished, advance, (progress, model, task.processors))[
        0
    ]


def _choose(
    task: _Task, processors: Any, logits: jax.Array, progress: _Progress
) -> _Progress:
    """Samples the next token of each row, and ends the rows that it stops."""
    step, _, tokens, counts, is_running, cache = progress
    if processors:
        logits = sampling.process(processors, logits, _history(task, progress))
    token = task.sampler(logits, jax.random.fold_in(task.key, step))
    tokens = tokens.at[:, step].set(jnp.where(is_running, token, 0))
    counts = counts + is_running
    progress = _Progress(step + 1, token, tokens, counts, is_running, cache)
    is_stopped = _stopped(progress, task.stop) > 0
    return progress._replace(is_running=is_running & ~is_stopped)


def _history(task: _Task, progress: _Progress) -> sampling.History:
    """Joins the prompts and the new tokens, without the padding between."""
    lengths = task.lengths + progress.counts
    tokens = jnp.concatenate([task.tokens, progress.tokens], axis=1)
    indices = jnp.arange(tokens.shape[1])[None]
    padding = task.tokens.shape[1] - task.lengths[:, None]
    indices = jnp.where(indices < task.lengths[:, None], indices, indices + padding)
    tokens = jnp.take_along_axis(tokens, indices, axis=1, mode="clip")
    history = sampling.History(tokens, lengths, task.lengths)
    return dataclasses.replace(history, tokens=jnp.where(history.is_token, tokens, 0))


def _stopped(progress: _Progress, stop: Stops) -> jax.Array:
    """Computes the length of the longest stop that each row ends with; 0 for none."""
    counts = progress.counts
    lengths = jnp.zeros_like(counts)
    for length, group in itertools.groupby(stop, len):
        indices = counts[:, None] + jnp.arange(-length, 0)[None]
        last = jnp.take_along_axis(progress.tokens, indices, axis=1, mode="clip")
        is_stop = (last[:, None] == jnp.array([[*group]])).all(-1).any(-1)
        lengths = jnp.where(is_stop & (counts >= length), length, lengths)
    return lengths


def _structure(objects: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Lists the types of arrays and Variables by path; and which Variables."""
    forms, variables = {}, {}
    skeleton, leaves = flattening.flatten(objects, None, "nnx.decoding")
    for path, leaf in zip(skeleton.paths(), leaves, strict=True):
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
                way_out="Make Variables in __init__ or init_cache, with the shapes "
                "that they keep, and write to them: v[...] = x. Let sow be silent "
                "outside of nnx.capture: sow(..., capture_noop=True).",
            )
        )


def _check_separate(model: Any, cache: Any) -> None:
    """Raises if a Variable is part of both."""
    of_model, of_cache = ({*_structure({"it": x})[1].values()} for x in (model, cache))
    if of_model & of_cache:
        raise ValueError(
            errors.message(
                "nnx.decoding.stream: init_cache gives Variables that are part of the "
                "model, and a stream keeps its cache apart.",
                way_out="Make new ones in init_cache, or keep these in the model only "
                "and return {}.",
            )
        )
