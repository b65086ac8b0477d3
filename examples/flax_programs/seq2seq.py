"""Sequence to sequence with recurrent networks: a string of digits is reversed.

The encoder reads both ways; its last carries start the decoder, which gets the
right digits while it is trained and its own when it is tried.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

DIGITS, START, LENGTH, FEATURES = 6, 6, 5, 64
STEPS = 400
GOAL = 0.5


class Seq2Seq(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(DIGITS + 1, FEATURES, rngs=rngs)
        self.encoder = nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(FEATURES, FEATURES, rngs=rngs)),
            nnx.RNN(nnx.GRUCell(FEATURES, FEATURES, rngs=rngs)),
            return_carry=True,
        )
        self.bridge = nnx.Linear(2 * FEATURES, FEATURES, rngs=rngs)
        self.decoder = nnx.RNN(
            nnx.GRUCell(FEATURES, FEATURES, rngs=rngs), return_carry=True
        )
        self.head = nnx.Linear(FEATURES, DIGITS, rngs=rngs)

    def encode(self, digits: jax.Array, lengths: jax.Array) -> jax.Array:
        carries, _ = self.encoder(self.embed(digits), seq_lengths=lengths)
        return nnx.tanh(self.bridge(jnp.concatenate(carries, axis=-1)))

    def decode(self, carry: jax.Array, digits: jax.Array):
        carry, outputs = self.decoder(self.embed(digits), initial_carry=carry)
        return carry, self.head(outputs)


def batch(key: jax.Array, count: int = 64) -> tuple[jax.Array, jax.Array, jax.Array]:
    digits_key, length_key = jax.random.split(key)
    digits = jax.random.randint(digits_key, (count, LENGTH), 0, DIGITS)
    lengths = jax.random.randint(length_key, (count,), 3, LENGTH + 1)
    backwards = (lengths[:, None] - 1 - jnp.arange(LENGTH)) % LENGTH
    return digits, lengths, jnp.take_along_axis(digits, backwards, axis=1)


@nnx.jit
def step(model, optimizer, digits, lengths, wanted):
    def loss_of(model):
        start = jnp.full_like(wanted[:, :1], START)
        given = jnp.concatenate([start, wanted[:, :-1]], axis=1)
        _, logits = model.decode(model.encode(digits, lengths), given)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        counts = jnp.arange(LENGTH) < lengths[:, None]
        return jnp.mean(losses, where=counts)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def reverse(model: Seq2Seq, digits: jax.Array, lengths: jax.Array) -> jax.Array:
    """The digits that the model gives by itself, one after the other."""
    carry = model.encode(digits, lengths)
    digit = jnp.full_like(digits[:, 0], START)
    given = []
    for _ in range(LENGTH):
        carry, logits = model.decode(carry, digit[:, None])
        digit = logits[:, 0].argmax(-1)
        given.append(digit)
    return jnp.stack(given, axis=1)


def build():
    model = Seq2Seq(rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(1), STEPS):
        yield step(model, optimizer, *batch(key))


if __name__ == "__main__":
    model, optimizer = build()
    for number, loss in enumerate(train(model, optimizer)):
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}")
    digits, lengths, wanted = batch(jax.random.key(2), 256)
    right = (reverse(model, digits, lengths) == wanted) | (
        jnp.arange(LENGTH) >= lengths[:, None]
    )
    print(f"whole strings reversed: {right.all(1).mean():.1%}")
