"""synecdoche: the weights of a network are made by a smaller one, which is trained."""

import jax
import jax.numpy as jnp
import optax
import synecdoche
from flax import nnx

STEPS = 150
GOAL = 0.3


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


def build():
    model = Network(nnx.Rngs(0))
    weights = nnx.state(model, nnx.Param)
    hyper = synecdoche.DCT(weights, embedding_dim=32, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(hyper, optax.adam(1e-2), wrt=nnx.Param)
    return synecdoche.functional(model), hyper, optimizer


def train(apply, hyper, optimizer):
    @nnx.jit
    def step(hyper, optimizer, x, y):
        def loss_fn(hyper):
            return jnp.mean((apply(hyper, x)[:, 0] - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(hyper)
        optimizer.update(hyper, grads)
        return loss

    x = jax.random.normal(jax.random.key(2), (64, 4))
    for _ in range(STEPS):
        yield step(hyper, optimizer, x, jnp.sin(x.sum(-1)))
