"""A variational autoencoder of small pictures: bright bars on a dark ground."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SIZE = 8
STEPS = 300
GOAL = 13.0  # nats per picture; a fair coin for each of the 64 pixels takes 44


class Encoder(nnx.Module):
    def __init__(self, hidden: int, latent: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(SIZE * SIZE, hidden, rngs=rngs)
        self.mean = nnx.Linear(hidden, latent, rngs=rngs)
        self.log_std = nnx.Linear(hidden, latent, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden(x))
        mean, std = self.mean(x), jnp.exp(self.log_std(x))
        divergence = 0.5 * (mean**2 + std**2 - 1) - jnp.log(std)
        self.divergence = nnx.Intermediate(divergence.sum(-1).mean())
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


class Decoder(nnx.Module):
    def __init__(self, hidden: int, latent: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(latent, hidden, rngs=rngs)
        self.logits = nnx.Linear(hidden, SIZE * SIZE, rngs=rngs)

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.logits(nnx.relu(self.hidden(z)))


class VAE(nnx.Module):
    def __init__(self, hidden: int, latent: int, *, rngs: nnx.Rngs):
        self.encoder = Encoder(hidden, latent, rngs=rngs)
        self.decoder = Decoder(hidden, latent, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(x))


def pictures(key: jax.Array, count: int) -> jax.Array:
    """Pictures with one horizontal and one vertical bar, ``[count, SIZE * SIZE]``."""
    rows, columns = jax.random.randint(key, (2, count), 0, SIZE)
    bars = (
        jax.nn.one_hot(rows, SIZE)[:, :, None] + jax.nn.one_hot(columns, SIZE)[:, None]
    )
    return jnp.minimum(bars, 1).reshape(count, -1)


@nnx.jit
def step(model: VAE, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def negative_bound(model):
        losses = optax.sigmoid_binary_cross_entropy(model(x), x).sum(-1)
        divergence = nnx.pop(model, nnx.Intermediate)["encoder"]["divergence"][...]
        return losses.mean() + divergence

    loss, grads = nnx.value_and_grad(negative_bound)(model)
    optimizer.update(model, grads)
    return loss


def build():
    model = VAE(128, 8, rngs=nnx.Rngs(0, noise=1))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(2), STEPS):
        yield step(model, optimizer, pictures(key, 64))


if __name__ == "__main__":
    for number, loss in enumerate(train(*build())):
        if number % 50 == 0:
            print(f"step {number}: {loss:.2f} nats")
