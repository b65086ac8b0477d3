"""Chooses the next token: processors change logits, a `Sampler` draws.

Sampler             draws from the distribution that logits stand for
History             the tokens so far, which processors see
RepetitionPenalty   a processor: makes tokens that occurred before less likely
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Array, Bool, Float, Int, PRNGKey
from graftree.nn.support import arguments, meshes


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws tokens from the distribution that logits stand for.

    Logits are divided by the temperature, then cut to the ``top_k`` largest, then to
    the smallest set of tokens whose probabilities sum up to ``top_p``, then to those
    with at least ``min_p`` of the largest probability, in this order. Among equal
    ones the first stay, as with `jax.numpy.argmax`; at least one always stays.

    Args:
        temperature: Below 1, likely tokens become likelier; 0 takes the likeliest one.
        top_k: How many tokens are left to choose from; ``None``: all.
        top_p: The total probability of the tokens left to choose from; ``None``: all
            of it.
        min_p: The least probability of the tokens left to choose from, as a fraction of
            the largest; ``None``: any.

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
        al., 2020, "The Curious Case of Neural Text Degeneration" (top-p). Nguyen et
        al., 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
        Outputs" (min-p).
    """

    temperature: Any = 1.0
    top_k: int | None = None
    top_p: Any = None
    min_p: Any = None

    def __post_init__(self) -> None:
        finite, count = "at least 0 and finite", "an integer of at least 1"
        _check(self, "temperature", lambda x: 0 <= x < math.inf, finite)
        _check(self, "top_k", lambda x: x >= 1 and x % 1 == 0, count)
        _check(self, "top_p", lambda x: 0 < x <= 1, "above 0 and at most 1")
        _check(self, "min_p", lambda x: 0 <= x <= 1, "from 0 to 1")

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the likeliest token: at a temperature of 0."""
        return isinstance(self.temperature, numbers.Real) and self.temperature == 0

    def tree_flatten(self) -> tuple[Any, Any]:
        """Flattens it so that programs are compiled once for all temperatures but 0."""
        temperature = None if self.is_greedy else self.temperature
        return (temperature, self.top_p, self.min_p), (self.top_k, self.is_greedy)

    @classmethod
    def tree_unflatten(cls, static: Any, data: Any) -> Sampler:
        """Accepts anything that JAX puts in the place of numbers."""
        sampler = object.__new__(cls)
        (temperature, top_p, min_p), (top_k, is_greedy) = data, static
        temperature = 0 if is_greedy else temperature
        vars(sampler).update(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        return sampler

    def __call__(
        self, logits: Float[Array, "*batch vocabulary"], key: PRNGKey
    ) -> Int[Array, "*batch"]:
        """Draws a token for each row.

        Args:
            logits: ``[*batch, vocabulary]``.
            key: A random key; not used at temperature 0.

        Returns:
            ``int32[*batch]``.
        """
        logits = wide(logits)
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.is_greedy:
            return likeliest
        is_greedy, temperature = self._temperature()
        left, tokens = self._left(_over(logits, temperature))
        drawn = jax.random.categorical(key, left)
        if tokens is not None:
            drawn = jnp.take_along_axis(tokens, drawn[..., None], axis=-1)[..., 0]
        return jnp.where(is_greedy, likeliest, drawn.astype(jnp.int32))

    def probabilities(
        self, logits: Float[Array, "*batch vocabulary"]
    ) -> Float[Array, "*batch vocabulary"]:
        """Computes the distribution from which a call draws.

        Args:
            logits: ``[*batch, vocabulary]``.

        Returns:
            The probability of each token, ``float[*batch, vocabulary]``; float32 or
            wider.

        Example:
            >>> sampler = nnx.decoding.Sampler(top_k=2)
            >>> logits = jnp.log(jnp.array([0.2, 0.3, 0.3]))
            >>> sampler.probabilities(logits)
            Array([0. , 0.5, 0.5], dtype=float32)
        """
        logits = wide(logits)
        count = logits.shape[-1]
        likeliest = jax.nn.one_hot(
            jnp.argmax(logits, axis=-1), count, dtype=logits.dtype
        )
        if self.is_greedy:
            return likeliest
        is_greedy, temperature = self._temperature()
        left, tokens = self._left(_over(logits, temperature))
        shares = jax.nn.softmax(left, axis=-1)
        if tokens is not None:
            zeros = jnp.zeros_like(logits)
            put = functools.partial(jnp.put_along_axis, axis=-1, inplace=False)
            shares = put(zeros, tokens, shares)
        return jnp.where(is_greedy, likeliest, shares)

    def _temperature(self) -> tuple[jax.Array, jax.Array]:
        """Whether it is 0, and the temperature or, where it is, 1."""
        is_greedy = jnp.asarray(self.temperature) == 0
        return is_greedy, jnp.where(is_greedy, 1.0, self.temperature)

    def _left(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Gives the logits that are left, and of which tokens; ``None``: of all."""
        count, tokens = logits.shape[-1], None
        if self.top_k is not None or self.top_p is not None:
            # Of equal ones the first come first, once -0.0 is 0.0.
            logits = jnp.where(logits == 0, 0.0, logits)
            logits, tokens = jax.lax.top_k(logits, min(int(self.top_k or count), count))
        if self.top_p is not None:
            logits = jnp.where(_reach(logits, self.top_p), logits, -jnp.inf)
        if self.min_p is not None:
            # The largest is 0. Shares of 0.1 and 0.4 are 1 to 4, however rounded.
            is_left = logits >= jnp.log(self.min_p) - 1e-6
            logits = jnp.where(is_left, logits, -jnp.inf)
        return logits, tokens


def _check(
    settings: Any, name: str, is_right: Callable[[Any], bool], words: str
) -> None:
    """Raises if a setting is out of its range; arrays may be traced, and pass."""
    value = getattr(settings, name)
    if isinstance(value, numbers.Real) and not is_right(value):
        class_name = type(settings).__name__
        raise ValueError(f"The {name} of a {class_name} must be {words}, got {value}.")


def _over(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divides logits by the temperature, which may be tiny; the largest becomes 0."""
    largest = logits.max(axis=-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0.0)
    return logits / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)


def _reach(ordered: jax.Array, top_p: Any) -> jax.Array:
    """Whether each logit, in descending order, is needed for a probability."""
    shares = jax.nn.softmax(ordered, axis=-1)
    sum_of_larger = jnp.cumsum(shares, axis=-1) - shares
    # Ten shares of 0.01 are 0.1, however their sum is rounded. 1.0 keeps all.
    is_needed = (sum_of_larger < top_p * (1 - 1e-6)) | jnp.asarray(top_p >= 1)
    return is_needed.at[..., 0].set(True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Tokens so far, as processors of `generate` and `stream` get them.

    Attributes:
        tokens: The prompts and the new tokens, ``int32[batch, size]``; zeros follow the
            last token of a row.
        lengths: How many tokens of each row count, ``int32[batch]``.
        prompt_lengths: How many of these are the prompt, ``int32[batch]``.

    Example:
        >>> tokens = jnp.array([[3, 1, 3], [2, 0, 0]])
        >>> history = nnx.decoding.History(
        ...     tokens, lengths=jnp.array([3, 1]), prompt_lengths=jnp.array([2, 1])
        ... )
        >>> history.last
        Array([3, 2], dtype=int32)
        >>> history.counts(4)
        Array([[0, 1, 0, 2],
               [0, 0, 1, 0]], dtype=int32)
    """

    tokens: Int[Array, "batch size"]
    lengths: Int[Array, " batch"]
    prompt_lengths: Int[Array, " batch"]

    @property
    def is_token(self) -> Bool[Array, "batch size"]:
        """Whether each of ``tokens`` counts."""
        return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]

    @property
    def last(self) -> Int[Array, " batch"]:
        """Last token of each row."""
        last = self.lengths[:, None] - 1
        return jnp.take_along_axis(self.tokens, last, axis=1)[:, 0]

    def counts(self, vocabulary: int) -> Int[Array, "batch vocabulary"]:
        """Counts how often each token of a vocabulary occurs in each row.

        Args:
            vocabulary: The number of tokens in it.

        Returns:
            ``int32[batch, vocabulary]``.
        """
        tokens = jnp.where(self.is_token, self.tokens, vocabulary)
        rows = jnp.arange(len(tokens))[:, None]
        zeros = jnp.zeros((len(tokens), vocabulary), jnp.int32)
        zeros = meshes.led_by(tokens, (0,), zeros)
        options = arguments.if_set(out_sharding=meshes.sharding_of(zeros))
        return zeros.at[rows, tokens].add(1, mode="drop", **options)


Processor: TypeAlias = Callable[[jax.Array, History], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Makes tokens that the prompt or the new text already has less likely.

    A logit ``x`` of such a token becomes ``x / penalty`` if it is positive, otherwise
    ``x * penalty``. How often the token occurs does not matter. It is a processor:
    ``generate(..., processors=[RepetitionPenalty(1.2)])``.

    Args:
        penalty: Above 1, tokens that occurred become less likely; below 1, likelier.

    Raises:
        ValueError: If the penalty is not above 0, or is infinite.

    Example:
        >>> length = jnp.array([2])
        >>> history = nnx.decoding.History(jnp.array([[0, 2]]), length, length)
        >>> logits = jnp.array([[3.0, 2.0, -1.0]])
        >>> nnx.decoding.RepetitionPenalty(2.0)(logits, history)
        Array([[ 1.5,  2. , -2. ]], dtype=float32)

    References:
        Keskar et al., 2019, "CTRL: A Conditional Transformer Language Model for
        Controllable Generation", section 4.1; for negative logits as `transformers`.
    """

    penalty: Any

    def __post_init__(self) -> None:
        _check(self, "penalty", lambda x: 0 < x < math.inf, "above 0 and finite")

    def __call__(
        self, logits: Float[Array, "batch vocabulary"], history: History
    ) -> Float[Array, "batch vocabulary"]:
        """Lowers the logits of the tokens that occur.

        Args:
            logits: ``[batch, vocabulary]``.
            history: The tokens so far.

        Returns:
            New logits, of the same shape and dtype.
        """
        occurs = history.counts(logits.shape[-1]) > 0
        lowered = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return jnp.where(occurs, lowered, logits)


def process(
    processors: Sequence[Processor], logits: jax.Array, history: History
) -> jax.Array:
    """Applies processors one after the other, to logits in float32 or wider."""
    logits = wide(logits)
    for i, processor in enumerate(processors):
        processed = processor(logits, history)
        shape = getattr(processed, "shape", None)
        dtype = getattr(processed, "dtype", bool)
        if shape != logits.shape or not jnp.issubdtype(dtype, jnp.floating):
            got = type(processed).__name__ if shape is None else jax.typeof(processed)
            raise TypeError(
                errors.message(
                    f"processors[{i}] must return logits, {jax.typeof(logits)}, but "
                    f"returned {got}.",
                    way_out="Ban tokens with jnp.where(is_allowed, logits, -jnp.inf).",
                )
            )
        logits = processed
    return logits


def wide(logits: jax.Array) -> jax.Array:
    """Widens logits to float32; leaves wider ones as they are."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
