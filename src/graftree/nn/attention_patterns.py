"""Which keys the queries of a call see, by the positions of both.

`KeysAndValues` are what queries attend to: those of the call's own tokens, of the
tokens in a cache, or of an encoder. An `AttentionPattern` says which of them a query
sees. As long as tokens are in order, `dot_product_attention` has options for that, and
its kernels know them; where positions decide, the pattern is written out as a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftree import errors
from graftree.annotations import Array, Int, Num
from graftree.core.text import descriptions
from graftree.nn import attention
from graftree.nn.support import arguments

Rule = Callable[[jax.Array, jax.Array], jax.Array]
"""A mask or bias, from the positions of queries and of keys."""


class KeysAndValues(NamedTuple):
    """Keys and values that queries attend to, and where their tokens are.

    Attributes:
        key: ``[*batch, keys, kv_heads, head_dim]``.
        value: ``[*batch, keys, kv_heads, value_head_dim]``.
        positions: Where in its sequence each token is, ``int[*batch, keys]``; negative
            for one that no query sees, such as padding. ``None``: 0, 1, ...
        segment_ids: The number of its sequence, ``int[*batch, keys]``, where several
            are in one row; ``None``: each row is one sequence.

    Example:
        The keys of an encoder are computed once, and each step of a decoder uses them:

        >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> x, encoded = jnp.ones((1, 1, 8)), jnp.ones((1, 5, 8))
        >>> once = layer.project_kv(encoded)
        >>> type(once).__name__, once.key.shape
        ('KeysAndValues', (1, 5, 2, 4))
        >>> jnp.allclose(layer(x, once), layer(x, encoded))
        Array(True, dtype=bool)
    """

    key: Num[Array, "*batch keys kv_heads head_dim"]
    value: Num[Array, "*batch keys kv_heads value_head_dim"]
    positions: Int[Array, "*batch keys"] | None = None
    segment_ids: Int[Array, "*batch keys"] | None = None


@dataclasses.dataclass(frozen=True)
class AttentionPattern:
    """What the queries of a call see, and a bias for it.

    Attributes:
        positions: Those of the queries, ``int[*batch, queries]``; ``None``: 0, 1, ...
        segment_ids: The numbers of their sequences; a query sees keys of its own.
        prefix_lengths: How many tokens at the beginning of a sequence see each other in
            both directions, whatever the window: ``int[*batch]``, or for each query
            ``int[*batch, queries]``.
        is_causal: Whether a query sees no later positions.
        sliding_window: How many it sees, its own included; ``None``: all.
        mask: Which of them it sees, ``[*batch, heads, queries, keys]``; or a function
            of the positions of queries and keys, ``[*batch | 1, queries]`` and
            ``[*batch | 1, keys]``, that returns such a mask.
        bias: Added to the dot products; an array or a function, likewise.
    """

    positions: Any = None
    segment_ids: Any = None
    prefix_lengths: Any = None
    is_causal: bool = True
    sliding_window: int | None = None
    mask: Any = None
    bias: Any = None

    def options(self, query: jax.Array, keys: KeysAndValues) -> dict[str, Any]:
        """The options of `dot_product_attention` that mean the same.

        Raises:
            ValueError: If shapes don't fit, if a window comes without ``is_causal``, or
                if only queries or only keys have segments.
        """
        self._check(keys)
        mask, bias = (self._evaluated(x, query, keys) for x in (self.mask, self.bias))
        options = {"is_causal": self.is_causal, "sliding_window": self.sliding_window}
        # The tokens of the call itself are in order, as those without positions are.
        is_in_order = keys.positions is None or keys.positions is self.positions
        of_tokens = (self.segment_ids, self.prefix_lengths)
        if not is_in_order or any(x is not None for x in of_tokens):
            visible = self._visible(query, keys)
            mask = attention.combine_masks(visible, mask, dtype=bool)
            options = {"is_causal": False}
        return {"mask": mask, **arguments.if_set(bias=bias, **options)}

    def _evaluated(self, x: Any, query: jax.Array, keys: KeysAndValues) -> Any:
        """A mask or bias as an array."""
        return x(*self._places(query, keys)) if is_rule(x) else x

    def _places(
        self, query: jax.Array, keys: KeysAndValues
    ) -> tuple[jax.Array, jax.Array]:
        """The positions of queries and keys, ``[*batch | 1, length]``."""
        queries = _per_token("positions", self.positions, query)
        return queries, _per_token("positions", keys.positions, keys.key)

    def _check(self, keys: KeysAndValues) -> None:
        attention.check_window(self.sliding_window, self.is_causal)
        if self.prefix_lengths is not None and not self.is_causal:
            raise ValueError(
                "Attention: prefix_lengths let causal attention see a prefix in both "
                "directions, so they need is_causal=True."
            )
        if (self.segment_ids is None) == (keys.segment_ids is None):
            return
        have, lack = "queries", "keys"
        way_out = (
            "Pass them for the keys, too: KeyValueCache(..., packed=True), or for an "
            "encoder layer.project_kv(encoded, segment_ids=...)."
        )
        if self.segment_ids is None:
            have, lack, way_out = lack, have, "Pass segment_ids=... in the call."
        raise ValueError(
            errors.message(
                f"Attention: the {have} have segment_ids, but the {lack} have none.",
                way_out=way_out,
            )
        )

    def _visible(self, query: jax.Array, keys: KeysAndValues) -> jax.Array:
        """Which keys each query sees, ``bool[*batch | 1, 1, queries, keys]``."""
        query_positions, key_positions = self._places(query, keys)
        q, k = query_positions[..., :, None], key_positions[..., None, :]
        visible = k >= 0
        if self.is_causal:
            is_before = k <= q
            if self.sliding_window is not None:
                is_before &= q - k < self.sliding_window
            if self.prefix_lengths is not None:
                prefix = _per_query(self.prefix_lengths, query)[..., None]
                is_before |= (q < prefix) & (k < prefix)
            visible &= is_before
        if self.segment_ids is not None:
            own = _per_token("segment_ids", self.segment_ids, query)
            others = _per_token("segment_ids", keys.segment_ids, keys.key)
            visible &= own[..., :, None] == others[..., None, :]
        return visible[..., None, :, :]


def is_rule(x: Any) -> bool:
    """Whether a mask or bias is a function of positions."""
    return callable(x) and not hasattr(x, "shape")


def _per_token(name: str, x: Any, tokens: jax.Array) -> jax.Array:
    """Integers ``[*batch | 1, length]``, for ``[*batch, length, heads, size]``."""
    shape = tokens.shape[:-2]
    x = jnp.arange(shape[-1]) if x is None else jnp.asarray(x)
    full = (1,) * (len(shape) - x.ndim) + x.shape
    fits = len(full) == len(shape) and full[-1:] == shape[-1:]
    fits = fits and all(n in (1, m) for n, m in zip(full, shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"The {name} of attention must be integers, one per token, [*batch, "
            f"length] = {list(shape)}, but got {descriptions.describe(x)}."
        )
    return jnp.reshape(x, full)


def _per_query(prefix_lengths: Any, query: jax.Array) -> jax.Array:
    """Integers ``[*batch, 1 | queries]``."""
    lengths = jnp.asarray(prefix_lengths)
    if lengths.shape == query.shape[:-3]:
        return lengths[..., None]
    return _per_token("prefix_lengths", lengths, query)
