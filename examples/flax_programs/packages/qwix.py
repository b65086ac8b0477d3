"""qwix: a model is trained as if its weights and inputs had eight bits."""

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx

STEPS = 100
GOAL = 0.02


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


@nnx.jit
def step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x)[:, 0] - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def build():
    rule = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    model = qwix.quantize_model(
        Network(nnx.Rngs(0)), qwix.QtProvider([rule]), jnp.ones((1, 4))
    )
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train(model, optimizer):
    x = jax.random.normal(jax.random.key(1), (64, 4))
    for _ in range(STEPS):
        yield step(model, optimizer, x, jnp.sin(x[:, 0]))
