"""`use_refs`, `to_refs`, `to_arrays`, and `use_ref=True`, as in 0.11 and 0.12.0.

Not in Flax today.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

with nnx.use_refs(True):
    print(nnx.using_refs())
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
frozen = nnx.to_arrays(model)
print(model.bias.has_ref, frozen.bias.has_ref, nnx.to_refs(frozen).bias.has_ref)
print(nnx.is_array_ref(model.kernel.get_raw_value()))
print(nnx.array_ref is jax.new_ref, nnx.ArrayRef is jax.Ref)
print(nnx.Variable(jnp.array(0), use_ref=True).has_ref)
