"""Which token comes next."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

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
        _check("temperature", self.temperature, lambda x: 0 <= x < math.inf, finite)
        _check("top_k", self.top_k, lambda x: x >= 1 and x % 1 == 0, count)
        _check("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0, and at most 1")

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


def _check(name: str, value: Any, is_right: Any, words: str) -> None:
    if isinstance(value, (int, float)) and not is_right(value):
        raise ValueError(f"The {name} of a Sampler is {words}, got {value}.")
