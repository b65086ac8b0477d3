"""A model as a skeleton and a State, trained by a pure function."""

import jax
import jax.numpy as jnp
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(din, dmid, rngs=rngs)
        self.second = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


graphdef, params = nnx.split(MLP(1, 8, 1, rngs=nnx.Rngs(0)), nnx.Param)
x = jnp.linspace(-1, 1, 16)[:, None]


@jax.jit
def step(params):
    def loss(params):
        return jnp.mean((nnx.merge(graphdef, params)(x) - x**2) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


for _ in range(20):
    value, params = step(params)
print(f"{value:.4f}", isinstance(params, nnx.State), isinstance(graphdef, nnx.GraphDef))
