"""A model and its optimizer of refs, trained under `jax.jit`.

Not in Flax today.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

with nnx.use_refs(True):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param)
x = jnp.linspace(-1, 1, 8)[:, None]


@jax.jit
def step(model, optimizer):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return jnp.mean((nnx.merge(graphdef, params, rest)(x) - 3 * x) ** 2)

    value, grads = jax.value_and_grad(loss)(nnx.to_arrays(params))
    optimizer.update(model, grads)
    return value


for _ in range(60):
    value = step(model, optimizer)
print(f"{value:.5f}", f"{model.kernel[0, 0]:.2f}")
