"""`optimizer.update(grads)` says what to write today."""

import optax
from flax import nnx

model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
try:
    optimizer.update(nnx.state(model, nnx.Param))
except TypeError as error:
    print(
        "Missing required argument `grads`" in str(error),
        "ModelAndOptimizer" in str(error),
    )
print(hasattr(optimizer, "model"))
