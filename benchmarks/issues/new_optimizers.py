"""Hidden recompiles, new optimizers: they are traced again, with the same shapes."""

import jax.numpy as jnp
import optax
from flax import nnx

x = jnp.ones((1, 8))
traces = []


@nnx.jit
def train_step(model, optimizer, x):
    traces.append(optimizer)
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def traces_in_epochs(make_adam):
    traces.clear()
    for seed in range(5):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, make_adam(), wrt=nnx.Param)
        train_step(model, optimizer, x)
    return len(traces)


adam = optax.adam(1e-3)
print(
    "5 epochs, each with its adam, traces:", traces_in_epochs(lambda: optax.adam(1e-3))
)
print("5 epochs with one adam, traces:", traces_in_epochs(lambda: adam))
