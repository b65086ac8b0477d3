"""Variables: methods and operators, initializers with metadata, plain arrays."""

import jax
import jax.numpy as jnp
from flax import nnx

v = nnx.Param(jnp.ones(2), tag="t")
w = v.replace(jnp.zeros(2))
print(type(w).__name__, w.tag, w.value, v.value)  # deprecated
w.copy_from(v)
u = w.copy()
print(w.value, u is w, u.get_metadata()["tag"])  # deprecated
v.raw_value = jnp.full(2, 3.0)  # deprecated
print(v.raw_value, v.get_raw_value())  # deprecated
print(v.type is nnx.Param, hasattr(v, "nothing"))

a, b = nnx.Param(jnp.arange(3.0)), nnx.Param(jnp.ones(3))
print(a + b, 2 * a, a @ b, -a, a[1:], a.sum(), a.shape, abs(-b), a % 2)
a[1] = 7.0
a[...] += 1
print(a.value, jnp.mean(a), a.T.shape, len(a))  # deprecated

init = nnx.with_metadata(nnx.initializers.zeros_init(), tag="mine")
print(nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0)).kernel.tag)
box = init(jax.random.key(0), (2,), jnp.float32)
print(type(box).__name__, box.metadata["tag"])


class Net(nnx.Module):
    def __init__(self):
        self.scale = jnp.array(2.0)
        self.w = nnx.Param(jnp.array(3.0))


@nnx.jit
def f(net):
    net.scale = net.scale * 2
    return net.scale * net.w


net = Net()
print(f(net), net.scale, sorted(nnx.state(net)))
