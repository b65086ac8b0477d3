"""Any JAX transform with a prefix in and out can be lifted."""

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from graftree.config import GRAPH_UPDATES
from graftree.transforms.crossing import outside
from graftree.transforms.crossing.rows import Prefix, Row


def lift(f, transform, in_prefix, out_prefix):
    inputs = Prefix((in_prefix, 0), "in", "example", GRAPH_UPDATES)
    outputs = Prefix(out_prefix, "out", "example", GRAPH_UPDATES)
    return outside.lift(f, transform, Row("example", GRAPH_UPDATES, inputs, outputs))


def test_the_transform_gets_one_prefix_per_distinct_value():
    seen = []

    def identity(inner, ins, outs):
        seen.append((ins, outs))
        return inner

    f = lift(lambda a, b, c: (c, a), identity, ("x", "y", "x"), ("y", "x"))
    assert f(1.0, 2.0, 3.0) == (3.0, 1.0)
    ((ins, outs),) = seen
    assert set(ins) >= {"x", "y"} and outs[1] == outs[2] == ins


def test_leaves_return_in_their_order_from_several_groups():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.zeros(3)), nnx.BatchStat(jnp.zeros(3))

    axes = nnx.StateAxes({nnx.Param: 0, ...: None})

    def vmap(inner, ins, outs):
        return jax.vmap(inner, in_axes=ins, out_axes=outs)

    def write(pair, x):
        pair.a[...] += x
        pair.b[...] += 1
        return pair

    pair = Pair()
    assert lift(write, vmap, (axes, 0), axes)(pair, jnp.arange(3.0)) is pair
    np.testing.assert_array_equal(pair.a[...], [0, 1, 2])
    np.testing.assert_array_equal(pair.b[...], [1, 1, 1])
