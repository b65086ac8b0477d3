"""Twelve layers as one: made by `nnx.vmap`, applied by `nnx.scan` and `nnx.remat`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

LAYERS, FEATURES = 12, 32
STEPS = 200
GOAL = 0.15  # nats per position


class Block(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.mix = nnx.Conv(features, features, (3,), rngs=rngs)
        self.expand = nnx.Linear(features, 2 * features, rngs=rngs)
        self.shrink = nnx.Linear(2 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.02, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.mix(self.norm(x))
        return x + self.dropout(self.shrink(nnx.gelu(self.expand(y))))


class Model(nnx.Module):
    """Says of each position in a string of bits whether the ones so far are odd."""

    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(FEATURES, rngs=rngs)

        self.embed = nnx.Embed(2, FEATURES, rngs=rngs)
        self.blocks = make_blocks(rngs)
        self.head = nnx.Linear(FEATURES, 2, rngs=rngs)

    def __call__(self, bits: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def apply(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.head(apply(self.embed(bits), self.blocks))


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, bits: jax.Array) -> jax.Array:
    def loss_of(model):
        parity = jnp.cumsum(bits, axis=1) % 2
        return optax.softmax_cross_entropy_with_integer_labels(
            model(bits), parity
        ).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def build():
    model = Model(rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(1), STEPS):
        yield step(model, optimizer, jax.random.bernoulli(key, 0.5, (64, 12)) * 1)


if __name__ == "__main__":
    for number, loss in enumerate(train(*build())):
        if number % 25 == 0:
            print(f"step {number}: loss {loss:.3f}")
