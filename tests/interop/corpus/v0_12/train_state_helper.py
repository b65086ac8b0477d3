"""`nnx.TrainState` holds a model and its optimizer state."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

graphdef, params = nnx.split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Param)
ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))


@jax.jit
def step(ts):
    grads = jax.grad(lambda p: ts.apply(p)(jnp.ones((1, 1)))[0].sum())(ts.params)
    return ts.apply_gradients(grads)


ts = step(step(ts))
print(ts.step, ts.params["bias"][...])
