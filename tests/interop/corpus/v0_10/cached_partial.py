"""`cached_partial` fixes the objects of a step."""

import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))


@nnx.jit
def step(model, optimizer, x, y):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(grads)
    return value


cached = nnx.cached_partial(step, model, optimizer)
x = jnp.ones((4, 1))
values = [cached(x, 2 * x) for _ in range(5)]
print(values[0] > values[-1], optimizer.step.value)  # deprecated
