"""Control flow over Modules."""

import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.array(0))


def up(counter):
    counter.n.value += 1  # deprecated


def down(counter):
    counter.n.value -= 1  # deprecated


counter = Counter()
nnx.cond(jnp.array(True), up, down, counter)
nnx.switch(jnp.array(0), [up, down], counter)
print(counter.n.value)  # deprecated


def body(carry):
    counter, i = carry
    counter.n.value += i  # deprecated
    return counter, i + 1


counter, i = nnx.while_loop(lambda c: c[1] < 4, body, (counter, jnp.array(0)))
counter = nnx.fori_loop(0, 3, lambda i, c: (up(c), c)[1], counter)
print(counter.n.value, i)  # deprecated
