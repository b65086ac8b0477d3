"""Prompts in, tokens out: one compiled program for all prompts of about one length.

Sampler     which token comes next, of logits
generate    prompts and tokens in a loop; the model keeps those so far in `caches`
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.annotations import Path
from graftree.core import paths
from graftree.core.graph import differences, flattening, watches
from graftree.core.variables.variables import Variable
from graftree.transforms.compiled import jit
from graftree.transforms.control_flow import loops

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Key


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws tokens from the distribution that logits stand for.

    Logits are divided by the temperature, then cut to the ``top_k`` largest, then to
    the smallest set of tokens whose probabilities sum up to ``top_p``, in this order.
    Of equal ones the first stay, as `jax.numpy.argmax` has it; one always stays.

    Args:
        temperature: Below 1, likely tokens become likelier; 0 takes the likeliest one.
        top_k: How many tokens are left to choose from; ``None``: all.
        top_p: The probability that those left to choose from have together; ``None``:
            all of it.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> sampler = nnx.decoding.Sampler(temperature=0.8, top_k=2)
        >>> logits = jnp.array([[0.0, 9.0, 8.0, 1.0]])
        >>> tokens = {int(sampler(logits, jax.random.key(i))[0]) for i in range(40)}
        >>> sorted(tokens)
        [1, 2]

    References:
        Fan et al., 2018, "Hierarchical Neural Story Generation" (top-k). Holtzman et
        al., 2020, "The Curious Case of Neural Text Degeneration" (top-p).
    """

    temperature: Any = 1.0
    top_k: int | None = None
    top_p: Any = None

    def __post_init__(self) -> None:
        finite, count = "at least 0, and finite", "an integer of at least 1"
        self._check("temperature", lambda x: 0 <= x < math.inf, finite)
        self._check("top_k", lambda x: x >= 1 and x % 1 == 0, count)
        self._check("top_p", lambda x: 0 < x <= 1, "above 0, and at most 1")

    def _check(self, name: str, is_right: Any, words: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (int, float)) and not is_right(value):
            raise ValueError(f"The {name} of a Sampler is {words}, got {value}.")

    @property
    def is_greedy(self) -> bool:
        """Whether it is known to take the likeliest token always."""
        return isinstance(self.temperature, (int, float)) and self.temperature == 0

    def tree_flatten(self) -> tuple[Any, Any]:
        """A pytree, so that programs are compiled once for all temperatures but 0."""
        temperature = None if self.is_greedy else self.temperature
        return (temperature, self.top_p), (self.top_k, self.is_greedy)

    @classmethod
    def tree_unflatten(cls, static: Any, data: Any) -> Sampler:
        """Takes whatever JAX puts in the place of numbers."""
        sampler = object.__new__(cls)
        top_k, is_greedy = static
        values = {
            "temperature": 0 if is_greedy else data[0],
            "top_p": data[1],
            "top_k": top_k,
        }
        vars(sampler).update(values)
        return sampler

    def __call__(
        self, logits: Float[Array, "*batch vocabulary"], key: Key[Array, ""]
    ) -> Int[Array, "*batch"]:
        """Draws a token for each row.

        Args:
            logits: ``[*batch, vocabulary]``.
            key: A random key; not used at temperature 0.

        Returns:
            ``int32[*batch]``.
        """
        logits = logits.astype(jnp.float32)
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.is_greedy:
            return likeliest
        is_greedy = jnp.asarray(self.temperature) == 0
        temperature = jnp.where(is_greedy, 1.0, self.temperature)
        drawn = self._draw(_over(logits, temperature), key)
        return jnp.where(is_greedy, likeliest, drawn)

    def _draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        count = logits.shape[-1]
        if self.top_k is None and self.top_p is None:
            return jax.random.categorical(key, logits).astype(jnp.int32)
        # Of equal ones the first come first, once -0.0 is 0.0.
        logits = jnp.where(logits == 0, 0.0, logits)
        ordered, tokens = jax.lax.top_k(logits, min(int(self.top_k or count), count))
        if self.top_p is not None:
            ordered = jnp.where(_reach(ordered, self.top_p), ordered, -jnp.inf)
        place = jax.random.categorical(key, ordered)[..., None]
        return jnp.take_along_axis(tokens, place, axis=-1)[..., 0].astype(jnp.int32)


def _over(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """The logits over the temperature, which may be tiny, the largest being zero."""
    largest = logits.max(axis=-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0.0)
    return logits / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)


def _reach(ordered: jax.Array, top_p: Any) -> jax.Array:
    """Which logits, in descending order, are needed for a probability."""
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    # Ten shares of 0.01 are 0.1, however their sum is rounded. All of 1.0 is all.
    is_needed = (before < top_p * (1 - 1e-6)) | jnp.asarray(top_p >= 1)
    return is_needed.at[..., 0].set(True)


GREEDY = Sampler(temperature=0)


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` returns.

    Attributes:
        tokens: ``int32[batch, max_new_tokens]``; behind a stop token there are zeros.
        lengths: How many of them count, ``int32[batch]``, the stop token included.

    Example:
        >>> tokens, lengths = jnp.array([[4, 5, 0], [6, 7, 8]]), jnp.array([2, 3])
        >>> nnx.decoding.Generated(tokens, lengths).lists()
        [[4, 5], [6, 7, 8]]
    """

    tokens: np.ndarray
    lengths: np.ndarray

    def lists(self) -> list[list[int]]:
        """The tokens that count, a list for each prompt."""
        rows = zip(self.tokens, self.lengths, strict=True)
        return [row[:length].tolist() for row, length in rows]


def generate(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    key: jax.Array | None = None,
    stop: Sequence[int] = (),
    pad: int | None = None,
    padded_length: int | None = None,
) -> Generated:
    """Continues prompts with a language model, all of a batch at once.

    The prompts are read in one call, then tokens are made one by one, within one
    compiled program. It is compiled anew for other numbers of prompts and tokens, and
    for prompts of another padded length, but not for prompts of other lengths. The
    cache is part of the program, and written in place.

    Args:
        model: Has two methods. ``init_cache(batch, max_length)`` makes what it keeps of
            the tokens so far, as a rule a `KeyValueCache` for each layer; and a call
            ``model(tokens, positions=positions, cache=cache)`` takes tokens and their
            positions, ``int[batch, length]`` each, adds them to the cache and returns
            logits, ``[batch, length, vocabulary]``. If it has an attribute
            ``max_length``, no sequence gets longer, padding included.
        prompts: Tokens, ``int[batch, length]``, or a list of lists of different
            lengths.
        max_new_tokens: How many tokens are made for each prompt.
        sampler: How they are chosen: by default always the likeliest one.
        key: A random key, for a sampler that draws.
        stop: Tokens after which a sequence ends.
        pad: A token that is no part of the prompts, but fills up their rows, on either
            side; it is left out.
        padded_length: The length to which prompts are padded; ``None``: the next power
            of two, at least 16. At most the ``max_length`` of the model.

    Returns:
        The new tokens.

    Raises:
        TypeError: If ``prompts`` are no lists of integers, or the model lacks
            ``init_cache``.
        ValueError: If a prompt is empty, or too long; if a token is negative, or is no
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
    rows = [_tokens(row, pad) for row in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    limit = getattr(model, "max_length", None)
    length = _padded_length(lengths, padded_length, limit)
    _check(limit, lengths, max_new_tokens)
    if key is None:
        if not sampler.is_greedy:
            raise ValueError(
                "nnx.decoding.generate needs key= for a sampler that draws, such as "
                "jax.random.key(0)."
            )
        key = jax.random.key(0)
    ends = tuple(map(int, stop))
    if any(end > _LARGEST for end in ends):
        raise ValueError(f"stop={[*ends]}: a token is at most {_LARGEST}.")
    _check_model(model)
    tokens = np.zeros((len(rows), length), np.int32)
    for row, padded in zip(rows, tokens, strict=True):
        padded[: len(row)] = row
    made, counts = _run(
        model,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        sampler,
        key,
        max_new_tokens,
        ends,
    )
    return Generated(np.asarray(made), np.asarray(counts))


def _tokens(row: Any, pad: int | None) -> np.ndarray:
    """The tokens of a prompt."""
    tokens = np.asarray(row)
    if tokens.ndim == 0 and tokens.dtype.kind in "iu":
        raise TypeError(
            "nnx.decoding.generate takes a batch of prompts, and got the tokens of a "
            "single one.\nPass [tokens] instead of tokens: [[1, 2, 3]]."
        )
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(
            "nnx.decoding.generate takes prompts of integers, as an array [batch, "
            f"length] or a list of lists; got a prompt {tokens.dtype}{[*tokens.shape]}."
        )
    tokens = tokens[tokens != pad]
    wrong = tokens[(tokens < 0) | (tokens > _LARGEST)]
    if wrong.size:
        raise ValueError(
            f"nnx.decoding.generate: {wrong[0]} is no token: tokens are from 0 to "
            f"{_LARGEST}.\nIf it fills up the rows, say so: pad={wrong[0]}."
        )
    return tokens.astype(np.int32)


_LARGEST = np.iinfo(np.int32).max


def _check_model(model: Any) -> None:
    """Raises unless it is an object that has what is needed."""
    if not isinstance(model, type) and callable(getattr(model, "init_cache", None)):
        return
    got = f"a {type(model).__name__} without that method"
    if isinstance(model, type):
        got = f"the class {model.__name__}, and not an object of it"
    raise TypeError(
        errors.message(
            "nnx.decoding.generate takes a model with a method init_cache(batch, "
            f"max_length), and got {got}.",
            way_out="The model is called as model(tokens, positions=positions, "
            "cache=cache) and gives logits [batch, length, vocabulary].",
        )
    )


def _padded_length(lengths: np.ndarray, wanted: int | None, limit: int | None) -> int:
    if not lengths.size or lengths.min() < 1:
        raise ValueError("nnx.decoding.generate needs prompts of at least one token.")
    longest = int(lengths.max())
    if wanted is None:
        wanted = max(16, 1 << (longest - 1).bit_length())
    elif wanted < longest:
        raise ValueError(
            f"padded_length={wanted} is less than the longest prompt, {longest} tokens."
        )
    # Padding has positions too. A table of them may have none behind its end but NaN,
    # which no mask takes out again.
    return wanted if limit is None else max(longest, min(wanted, limit))


def _check(limit: int | None, lengths: np.ndarray, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1, got {max_new_tokens}.")
    longest = int(lengths.max()) + max_new_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            errors.message(
                f"Sequences would get {longest} tokens, and the model takes {limit}.",
                where=f"longest prompt {int(lengths.max())}, "
                f"max_new_tokens={max_new_tokens}",
                way_out="Cut the prompts, or make fewer tokens.",
            )
        )


@jit.jit(static_argnums=(5, 6))
def _run(
    model: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    sampler: Sampler,
    key: jax.Array,
    count: int,
    stop: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Reads the prompts, then makes tokens until all sequences have ended."""
    batch, length = tokens.shape
    cache = model.init_cache(batch, length + count)
    positions = jnp.arange(length)[None]
    positions = jnp.where(positions < lengths[:, None], positions, -1)
    logits = model(tokens, positions=positions, cache=cache)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    ends = jnp.array(stop, jnp.int32)

    def choose(logits: jax.Array, step: Any) -> jax.Array:
        return sampler(logits, jax.random.fold_in(key, step))

    def goes_on(carry: Any) -> jax.Array:
        step, _, _, is_running, *_ = carry
        return (step < count) & is_running.any()

    def advance(carry: Any) -> Any:
        step, token, made, is_running, counts, cache, model = carry
        made = made.at[:, step - 1].set(jnp.where(is_running, token, 0))
        counts = counts + is_running
        is_running = is_running & ~jnp.isin(token, ends)
        at = (lengths + step - 1)[:, None]
        before = _structure({"model": model, "cache": cache})
        logits = model(token[:, None], positions=at, cache=cache)[:, 0]
        _check_kept(before, _structure({"model": model, "cache": cache}))
        return step + 1, choose(logits, step), made, is_running, counts, cache, model

    made = jnp.zeros((batch, count), jnp.int32)
    everyone = jnp.ones(batch, bool)
    counts = jnp.zeros(batch, jnp.int32)
    carry = (1, choose(last, 0), made, everyone, counts, cache, model)
    carry = loops.while_loop(goes_on, advance, carry)
    _, token, made, is_running, counts, *_ = carry
    # The last token of those that were never stopped.
    made = made.at[:, count - 1].set(jnp.where(is_running, token, made[:, count - 1]))
    return made, counts + is_running


def _structure(objects: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """The types and forms of arrays and Variables by path; and which Variables."""
    forms, held = {}, {}
    skeleton, leaves = watches.flatten_node(objects, None, "nnx.decoding.generate")
    for path, leaf in zip(skeleton.paths(), leaves, strict=True):
        raw = flattening.raw_of(leaf)
        form = jax.tree.map(lambda x: jax.typeof(x).str_short(), raw)
        is_variable = isinstance(leaf, Variable)
        forms[path] = f"{type(leaf).__name__ if is_variable else 'array'}({form})"
        if is_variable:
            held[path] = differences.Exactly(leaf)
    return forms, held


def _check_kept(before: Any, after: Any) -> None:
    """Raises if a call left something else than new values."""
    forms, held = map(differences.between, before, after)
    if found := forms or held:
        lines = differences.in_words(found, "before a call", "after it", paths.dotted)
        raise ValueError(
            errors.message(
                "nnx.decoding.generate: a call of the model changes what there is, not "
                "only values, and a compiled loop has no room for that.",
                where="\n".join(lines),
                way_out="Make Variables in __init__ or init_cache, with the shapes "
                "that they keep, and write to them: v[...] = x. Let sow be silent "
                "outside of nnx.capture: sow(..., capture_noop=True).",
            )
        )
