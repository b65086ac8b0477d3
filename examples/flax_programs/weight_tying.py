"""A character model whose embedding is also its output layer.

The text is periodic, so the loss can fall to nearly zero.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
STEPS = 150
GOAL = 0.2


class TiedModel(nnx.Module):
    """Causal convolutions between an embedding and its transpose."""

    def __init__(self, vocabulary: int, features: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.layers = nnx.List(
            nnx.Conv(features, features, (4,), padding="CAUSAL", rngs=rngs)
            for _ in range(2)
        )
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = Head(self.embed)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.head(self.norm(x))


class Head(nnx.Module):
    """Logits by the embedding that it shares."""

    def __init__(self, embed: nnx.Embed):
        self.embed = embed

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(x)


def loss_of(model: TiedModel, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@nnx.jit
def step(model: TiedModel, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


def build():
    model = TiedModel(len(LETTERS), 64, rngs=nnx.Rngs(0))
    # One kernel in two places is one parameter.
    assert model.head.embed is model.embed
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    return model, optimizer


def train(model, optimizer):
    data = jnp.array([LETTERS.index(letter) for letter in TEXT])
    starts = jax.random.randint(jax.random.key(1), (STEPS, 16), 0, len(TEXT) - 33)
    for start in starts:
        yield step(model, optimizer, data[start[:, None] + jnp.arange(33)])


if __name__ == "__main__":
    for number, loss in enumerate(train(*build())):
        if number % 25 == 0:
            print(f"step {number}: loss {loss:.3f}")
