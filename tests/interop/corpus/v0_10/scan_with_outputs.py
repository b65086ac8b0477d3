"""`scan` with a carry, inputs, outputs and a model that counts."""

import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.array(0))


axes = nnx.StateAxes({...: nnx.Carry})


@nnx.scan(in_axes=(axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def run(counter, total, x):
    counter.n.value += 1  # deprecated
    return total + x, total * x


counter = Counter()
total, products = run(counter, 0.0, jnp.arange(4.0))
print(total, products, counter.n.value)  # deprecated
