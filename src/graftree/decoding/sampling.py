"""Which token comes next."""

from __future__ import annotations

import dataclasses
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
        _check("temperature", self.temperature, lambda x: x >= 0, "at least 0")
        _check("top_k", self.top_k, lambda x: x >= 1, "at least 1")
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
        cut = self._cut(logits / jnp.where(is_greedy, 1.0, self.temperature))
        drawn = jax.random.categorical(key, cut).astype(jnp.int32)
        return jnp.where(is_greedy, likeliest, drawn)

    def _cut(self, logits: jax.Array) -> jax.Array:
        """The logits, those that are out of the question minus infinity."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is None:
            return logits
        ordered = jnp.sort(logits, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        last = jnp.where(before < self.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        return jnp.where(logits < last, -jnp.inf, logits)


def _check(name: str, value: Any, is_right: Any, words: str) -> None:
    if isinstance(value, (int, float)) and not is_right(value):
        raise ValueError(f"The {name} of a Sampler is {words}, got {value}.")
