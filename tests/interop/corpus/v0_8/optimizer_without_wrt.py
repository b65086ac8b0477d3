"""`Optimizer(model, tx)` says what to write today."""

import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
try:
    nnx.Optimizer(model, optax.sgd(0.1))
except TypeError as error:
    print(
        "Missing required argument `wrt`" in str(error),
        "ModelAndOptimizer" in str(error),
    )
optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 1)))))(model)
before = model.bias[0]
optimizer.update(grads)
print(optimizer.model is model, f"{model.bias[0] - before:.2f}")
