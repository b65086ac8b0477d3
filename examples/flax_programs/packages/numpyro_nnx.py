"""numpyro: a network inside a probabilistic model, fitted by variational inference."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import nnx
from numpyro import infer
from numpyro.contrib.module import nnx_module

STEPS = 100
GOAL = 0.0


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(1, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.norm(self.hidden(x))))


def build():
    network = Network(nnx.Rngs(0))

    def model(x, y):
        mean = nnx_module("network", network)(x)[:, 0]
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    svi = infer.SVI(
        model, lambda x, y: None, numpyro.optim.Adam(0.02), infer.Trace_ELBO()
    )
    x = jnp.linspace(-2, 2, 64)[:, None]
    y = jnp.sin(2 * x[:, 0])
    return svi, svi.init(jax.random.key(1), x, y), x, y


def train(svi, state, x, y):
    update = jax.jit(svi.update)
    for _ in range(STEPS):
        state, loss = update(state, x, y)
        yield loss
