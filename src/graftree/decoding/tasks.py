"""What a call asks for: its prompts, stops and processors, read and checked.

Prompts become one array, padded on the right; a `Task` is what the programs get.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftree import _jax, errors
from graftree.core import paths
from graftree.decoding import sampling
from graftree.nn.support import meshes

GREEDY = sampling.Sampler(temperature=0)

Stops = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Task:
    """Arguments of a call, without the model.

    Attributes:
        tokens: The prompts, padded on the right, ``int32[batch, length]``.
        lengths: How many tokens each prompt has, ``int32[batch]``.
        inputs: For ``init_cache``; ``None``: it takes none.
        sampler: Chooses tokens.
        processors: Change logits; all are pytrees.
        key: For the sampler.
        count: How many tokens to make for each prompt.
        stop: What ends a sequence, short ones first.
    """

    tokens: jax.Array
    lengths: jax.Array
    inputs: Any
    sampler: sampling.Sampler
    processors: tuple[sampling.Processor, ...]
    key: jax.Array
    count: int = dataclasses.field(metadata={"static": True})
    stop: Stops = dataclasses.field(metadata={"static": True})

    def beside(self, tree: Any) -> Any:
        """Divides arrays that have a row for each prompt as the prompts are."""
        return meshes.led_by(self.lengths, (0,), tree)

    def repeated(self, times: int) -> Task:
        """Has each prompt and its inputs several times, one after the other."""
        return dataclasses.replace(
            self,
            tokens=repeat(self.tokens, times),
            lengths=repeat(self.lengths, times),
            inputs=jax.tree.map(
                lambda x: repeat(x, times) if jnp.ndim(x) else x, self.inputs
            ),
        )


def repeat(x: jax.Array, times: int, axis: int = 0) -> jax.Array:
    """Repeats each row; unlike ``jnp.repeat`` also if Explicit axes divide them."""
    shape = [*x.shape]
    copies = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1),
        (*shape[: axis + 1], times, *shape[axis + 1 :]),
    )
    return copies.reshape(*shape[:axis], times * shape[axis], *shape[axis + 1 :])


def read(
    call: str,
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    inputs: Any = None,
    sampler: sampling.Sampler = GREEDY,
    processors: Sequence[sampling.Processor] = (),
    key: jax.Array | None = None,
    stop: Any = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Task:
    """Checks the arguments of a call; messages name it as ``call``."""
    check_static(
        call, max_new_tokens=max_new_tokens, stop=stop, padded_length=padded_length
    )
    max_new_tokens = whole(call, max_new_tokens=max_new_tokens)
    if padded_length is not None:
        padded_length = whole(call, padded_length=padded_length)
    is_traced = isinstance(prompts, _jax.Tracer)
    read_tokens = _traced_prompts if is_traced else _prompts
    tokens, lengths, longest = read_tokens(call, prompts, pad)
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
    functions, stops = _functions(processors), _stops(stop)
    _check_model(call, model)
    _check_inputs(call, model, inputs, lengths.shape[0])
    padding = (0, 0), (0, length - longest)
    tokens = (jnp if is_traced else np).pad(tokens, padding)
    tokens, lengths = (_placed(x, prompts) for x in (tokens, lengths))
    return Task(
        tokens=tokens,
        lengths=lengths,
        inputs=inputs,
        sampler=sampler,
        processors=functions,
        key=key,
        count=max_new_tokens,
        stop=stops,
    )


def _placed(x: Any, prompts: Any) -> jax.Array:
    """Puts an array with a row for each prompt where a mesh has their rows."""
    sharding = (
        None if isinstance(prompts, _jax.Tracer) else getattr(prompts, "sharding", None)
    )
    if not isinstance(sharding, NamedSharding) or not sharding.spec[:1]:
        return jnp.asarray(x)
    return jax.device_put(x, sharding.update(spec=PartitionSpec(sharding.spec[0])))


def check_static(call: str, **settings: Any) -> None:
    """Refuses traced values of arguments that decide the program."""
    for name, value in settings.items():
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                errors.message(
                    f"{call}: {name}= is part of the program, so it can't be traced.",
                    way_out="Make it a static argument of the transform, as in "
                    f"jax.jit(..., static_argnames={name!r}), or pass a constant.",
                )
            )


def whole(call: str, **setting: Any) -> int:
    """Returns the value of one setting, which must be a whole number."""
    ((name, value),) = setting.items()
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{call}: {name} must be a whole number, got {value!r}.")
    return operator.index(value)


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
            f"{call} expects prompts of integers, [batch, length], as one array in a "
            f"transform; got {jax.typeof(prompts).str_short()}."
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
            f"{call} expects traced prompts as one array, [batch, length], but got a "
            "list.\nPad the rows to the same length, and name the padding token: pad=0."
        ) from None
    if tokens.ndim == 0 and tokens.dtype.kind in "iu":
        raise TypeError(
            f"{call} expects a batch of prompts, but got the tokens of a single one.\n"
            "Pass [tokens] instead of tokens: [[1, 2, 3]]."
        )
    hint = "\nA tokenizer turns text into tokens." if tokens.dtype.kind == "U" else ""
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(
            f"{call} expects prompts of integers, as an array [batch, length] or a "
            f"list of lists; got a prompt {tokens.dtype}{[*tokens.shape]}.{hint}"
        )
    tokens = tokens[tokens != pad]
    wrong = tokens[(tokens < 0) | (tokens > _LARGEST)]
    if wrong.size:
        raise ValueError(
            f"{call}: {wrong[0]} is not a token: tokens are from 0 to "
            f"{_LARGEST}.\nIf it is the padding token, pass pad={wrong[0]}."
        )
    return tokens.astype(np.int32)


_LARGEST = np.iinfo(np.int32).max


def _check_model(call: str, model: Any) -> None:
    """Raises unless it is an object with the members that are needed."""
    if not isinstance(model, type) and callable(getattr(model, "init_cache", None)):
        return
    got = f"a {type(model).__name__} without that method"
    if isinstance(model, type):
        got = f"the class {model.__name__}, not an instance of it"
    raise TypeError(
        errors.message(
            f"{call} expects a model with a method init_cache(batch, "
            f"max_length), but got {got}.",
            way_out="The model is called as model(tokens, positions=positions, "
            "cache=cache) and returns logits [batch, length, vocabulary].",
        )
    )


def _check_inputs(call: str, model: Any, inputs: Any, batch: int) -> None:
    """Raises unless init_cache takes the inputs, and each prompt has its own."""
    names = "batch, max_length" if inputs is None else "batch, max_length, inputs"
    signature = inspect.signature(model.init_cache)
    try:
        signature.bind(*names.split(", "))
    except TypeError as error:
        raise TypeError(
            errors.message(
                f"{call} {'without' if inputs is None else 'with'} inputs= calls "
                f"init_cache({names}), but the method of {type(model).__name__} "
                "doesn't take these arguments.",
                where=f"init_cache{signature}: {error}",
                way_out="An encoder-decoder defines init_cache(self, batch, "
                "max_length, inputs), runs its encoder there, and needs inputs=. Other "
                "models define init_cache(self, batch, max_length), and take no "
                "inputs=.",
            )
        ) from None
    flat = jax.tree_util.tree_leaves_with_path(inputs)
    wrong = [
        f"{paths.below('inputs', paths.from_jax(path))}: {jax.typeof(x).str_short()}"
        for path, x in flat
        if jnp.ndim(x) and jnp.shape(x)[0] != batch
    ]
    if wrong:
        raise ValueError(
            errors.message(
                f"{call} got {batch} prompts, but inputs= for a different number.",
                where="\n".join(wrong),
                way_out="The first axis of each array in inputs must match the "
                "prompts.",
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
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    total = longest + max_new_tokens
    if limit is not None and total > limit:
        raise ValueError(
            errors.message(
                f"Sequences would have {total} tokens, but the model takes {limit}.",
                where=f"longest prompt {longest}, max_new_tokens={max_new_tokens}",
                way_out="Shorten the prompts, or generate fewer tokens.",
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
            raise ValueError(f"stop={stop!r}: a token must be from 0 to {_LARGEST}.")
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
