"""The optimizer sees what the filter chooses; the rest stays."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Sequential(
    nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))
)
head = nnx.All(nnx.Param, nnx.PathContains(1))
optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1, momentum=0.9), wrt=head)
before = jax.tree.map(jnp.copy, nnx.state(model))
grads = nnx.grad(lambda m: m(jnp.ones((1, 2))).sum(), argnums=nnx.DiffState(0, head))(
    model
)
optimizer.update(grads)
same = jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model))
print(
    same["layers"][0]["kernel"].value,  # deprecated
    same["layers"][1]["kernel"].value,  # deprecated
)
print(len(jax.tree.leaves(nnx.state(optimizer, nnx.OptState))))
