"""Options of `jit`: static arguments, donation, ahead-of-time compilation."""

import jax.numpy as jnp
from flax import nnx

net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))


@nnx.jit(static_argnames=("n",), donate_argnames=("net",))
def f(net, n):
    net.bias[...] += n
    return net.bias[...] * 1


print(f(net, n=2), net.bias[...])
compiled = nnx.jit(lambda m, x: m(x)).lower(net, jnp.ones((1, 1))).compile()
print(compiled(net, jnp.ones((1, 1))).shape)
g = nnx.jit_partial(lambda m, x: m(x), net, graph_updates=False)
print(g(jnp.ones((2, 1))).shape)
