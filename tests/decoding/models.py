"""Models that decode, for tests of all that is made of them."""

import jax
import jax.numpy as jnp

import graftree as nnx


class Attends(nnx.Module):
    """Embeds tokens, looks at them by positions, and says which comes next."""

    def __init__(self, **options):
        self.embed = nnx.Embed(90, 8, rngs=nnx.Rngs(1))
        self.layer = nnx.MultiHeadAttention(
            2, 8, decode=False, **options, rngs=nnx.Rngs(0)
        )

    def init_cache(self, batch, length):
        return self.layer.make_cache(batch, length)

    def __call__(self, tokens, *, positions, cache):
        x = self.layer(3 * self.embed(tokens), positions=positions, cache=cache)
        return self.embed.attend(x)


# Frequencies that depend on the length of a sequence, from the fourth token on.
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 4}


class Writer(nnx.Module):
    """The next token is one more; what else it does is told by a function."""

    def __init__(self, act):
        self.act = act
        self.calls = nnx.Variable(jnp.array(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(10, rngs=nnx.Rngs(0))

    def init_cache(self, batch, max_length):
        return {"seen": nnx.Variable(jnp.zeros(batch, int))}

    def __call__(self, tokens, *, positions, cache):
        cache["seen"][...] += tokens.shape[1]
        logits = 9 * jax.nn.one_hot(tokens + 1, 10)
        made = self.act(self, logits)
        return logits if made is None else made
