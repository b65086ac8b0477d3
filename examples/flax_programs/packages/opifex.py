"""opifex: a Fourier neural operator learns to smooth functions on a line."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from opifex.neural.operators.fno import FourierNeuralOperator

STEPS = 60
GOAL = 0.06


@nnx.jit
def step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def build():
    model = FourierNeuralOperator(
        in_channels=1,
        out_channels=1,
        hidden_channels=16,
        modes=6,
        num_layers=2,
        rngs=nnx.Rngs(0),
    )
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train(model, optimizer):
    for key in jax.random.split(jax.random.key(1), STEPS):
        x = jax.random.normal(key, (8, 1, 16, 16))
        around = [jnp.roll(x, shift, axis) for shift in (-1, 1) for axis in (2, 3)]
        yield step(model, optimizer, x, (x + sum(around)) / 5)
