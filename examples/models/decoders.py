"""What the families have in common: blocks in a row, and caches."""

from typing import Any

import jax

import graftree as nnx


class Decoder(nnx.Module):
    """Says for each token which one follows.

    A family says how tokens go in (`embed_tokens`) and logits come out (`logits`).

    Attributes:
        max_length: The number of positions that it knows.
        heads: How many heads of keys and values a block has, and their size.
        embed: The table of tokens.
        blocks: Each takes ``x``, the positions, and its cache, which its part
            ``attention`` fills.
        norm: Of the last block's output.
    """

    def __init__(self, max_length: int, heads: tuple[int, int]):
        self.max_length = max_length
        self.heads = heads

    def init_cache(
        self, batch: int, max_length: int
    ) -> list[nnx.decoding.KeyValueCache]:
        """Makes what the model keeps of the tokens so far."""
        kv_heads, head_dim = self.heads
        return [
            nnx.decoding.KeyValueCache(
                batch,
                max_length,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=nnx.precision.compute_dtype(block.attention),
            )
            for block in self.blocks
        ]

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        cache: Any = None,
    ) -> jax.Array:
        """Maps tokens ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""
        x = self.embed_tokens(tokens, positions)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, None if cache is None else cache[i])
        return self.logits(self.norm(x))

    def embed_tokens(self, tokens: jax.Array, positions: Any) -> jax.Array:
        """Maps tokens ``[batch, length]`` to ``[batch, length, width]``."""
        return self.embed(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to ``[batch, length, vocab_size]``."""
        return self.embed.attend(x)
