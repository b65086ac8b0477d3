"""The smallest model that continues prompts with attention and a cache."""

import jax.numpy as jnp

import graftree as nnx


class Decoder(nnx.Module):
    """A layer of attention for each window; None is one that sees all before."""

    max_length = 48

    def __init__(self, *windows, rngs):
        self.windows = windows
        self.embed = nnx.Embed(40, 8, rngs=rngs)
        self.head = nnx.Linear(8, 40, rngs=rngs)
        self.projections = nnx.List(
            [nnx.LinearGeneral(8, (3, 2, 4), rngs=rngs) for _ in windows]
        )
        self.rope = nnx.RoPE()

    def init_cache(self, batch, max_length):
        sizes = {"kv_heads": 2, "head_dim": 4}
        return [
            nnx.decoding.KeyValueCache(batch, max_length, window=window, **sizes)
            for window in self.windows
        ]

    def __call__(self, tokens, *, positions=None, cache=None):
        x = self.embed(tokens)
        caches = cache or [None] * len(self.windows)
        parts = zip(self.projections, self.windows, caches, strict=True)
        for project, window, held in parts:
            q, k, v = jnp.moveaxis(project(x), -3, 0)
            q, k = (self.rope.rotate_heads(y, positions) for y in (q, k))
            y = nnx.decoding.attend(q, k, v, positions, held, sliding_window=window)
            x = x + y.reshape(x.shape)
        return self.head(x)
