"""State of the optimizer and the model, split and merged as one."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
graphdef, state = nnx.split((model, optimizer))


@jax.jit
def step(state, x):
    model, optimizer = nnx.merge(graphdef, state)
    grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))


for _ in range(3):
    state = step(state, jnp.ones((1, 2)))
nnx.update((model, optimizer), state)
print(
    optimizer.step.value,  # deprecated
    f"{jnp.sum(model(jnp.ones((1, 2))) ** 2):.4f}",  # deprecated
)
