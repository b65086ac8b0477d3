"""A generative adversarial network: two models, two optimizers, one step.

The generator learns a ring of eight Gaussians. The loss is how far the mean radius of
its points is from that of the ring.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

RADIUS, NOISE = 2.0, 8
STEPS = 400
GOAL = 0.4


class MLP(nnx.Module):
    def __init__(self, sizes: list[int], *, rngs: nnx.Rngs):
        self.layers = nnx.List(
            nnx.Linear(before, after, rngs=rngs)
            for before, after in itertools.pairwise(sizes)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.leaky_relu(layer(x), 0.2)
        return last(x)


def ring(key: jax.Array, count: int) -> jax.Array:
    place_key, noise_key = jax.random.split(key)
    angles = jax.random.randint(place_key, (count,), 0, 8) * (jnp.pi / 4)
    centers = RADIUS * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    return centers + 0.05 * jax.random.normal(noise_key, centers.shape)


def binary_loss(logits: jax.Array, target: float) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(
        logits, jnp.full_like(logits, target)
    ).mean()


@nnx.jit
def step(generator, critic, generator_optimizer, critic_optimizer, rngs, real):
    first, second = rngs.noise.normal((2, len(real), NOISE))

    def critic_loss(critic, generator):
        fake = generator(first)
        return binary_loss(critic(real), 1.0) + binary_loss(critic(fake), 0.0)

    def generator_loss(generator, critic):
        fake = generator(second)
        return binary_loss(critic(fake), 1.0), fake

    critic_optimizer.update(critic, nnx.grad(critic_loss)(critic, generator))
    grads, fake = nnx.grad(generator_loss, has_aux=True)(generator, critic)
    generator_optimizer.update(generator, grads)
    return jnp.abs(jnp.linalg.norm(fake, axis=1).mean() - RADIUS)


def build():
    rngs = nnx.Rngs(0, noise=1)
    generator = MLP([NOISE, 64, 64, 2], rngs=rngs)
    critic = MLP([2, 64, 64, 1], rngs=rngs)
    optimizers = (
        nnx.Optimizer(model, optax.adam(rate, b1=0.5), wrt=nnx.Param)
        for model, rate in ((generator, 1e-3), (critic, 2e-3))
    )
    return generator, critic, *optimizers, rngs


def train(generator, critic, generator_optimizer, critic_optimizer, rngs):
    trained = generator, critic, generator_optimizer, critic_optimizer, rngs
    for key in jax.random.split(jax.random.key(2), STEPS):
        yield step(*trained, ring(key, 128))


if __name__ == "__main__":
    for number, distance in enumerate(train(*build())):
        if number % 50 == 0:
            print(f"step {number}: the mean radius is {distance:.2f} off")
