"""`Optimizer(model, tx, wrt=...)`, and `update(model, grads)`."""

import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
x, y = jnp.eye(2), jnp.array([[1.0], [2.0]])


@nnx.jit
def step(model, optimizer):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return value


for _ in range(50):
    value = step(model, optimizer)
print(f"{value:.4f}", optimizer.step.value)  # deprecated
