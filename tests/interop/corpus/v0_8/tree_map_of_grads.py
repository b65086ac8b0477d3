"""Hand-written SGD over `nnx.State`, with `nnx.update`."""

import jax
import jax.numpy as jnp
from flax import nnx

model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
x = jnp.linspace(0, 1, 8)[:, None]


@nnx.jit
def step(model):
    def loss(model):
        return jnp.mean((model(x) - 2 * x - 1) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
    return value


for _ in range(60):
    value = step(model)
print(f"{model.kernel.value[0, 0]:.2f} {model.bias.value[0]:.2f}")  # deprecated
