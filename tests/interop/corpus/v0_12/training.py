"""Training: keywords of the optimizer, an epoch as one `scan`, `TrainState`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(net, tx=optax.sgd(0.1), wrt=nnx.Param)
grads = nnx.grad(lambda n: n(jnp.ones((1, 1))).sum())(net)
updates = optimizer.update(model=net, grads=grads)
print(updates["bias"], optimizer.step[...])
try:
    nnx.Optimizer(net, optax.sgd(0.1), nnx.Param)
except TypeError as error:
    print("wrt" in str(error))
xs = jnp.linspace(-1, 1, 32).reshape(8, 4, 1)


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def epoch(carry, x):
    net, optimizer = carry
    loss, grads = nnx.value_and_grad(lambda n: jnp.mean((n(x) - 2 * x) ** 2))(net)
    optimizer.update(net, grads)
    return (net, optimizer), loss


_, losses = epoch((net, optimizer), xs)
print(losses.shape, bool(losses[-1] < losses[0]), optimizer.step[...])

graphdef, params = nnx.split(net, nnx.Param)
ts = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
grads = jax.grad(lambda p: ts.apply(p)(jnp.ones((1, 1)))[0].sum())(ts.params)
after = ts.apply_gradients(grads)
print(after.step, after.params["bias"][...] - ts.params["bias"][...])
