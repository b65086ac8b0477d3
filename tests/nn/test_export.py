"""Layers export with dimensions that are not known yet (issue 12, defect 13)."""

import jax
import numpy as np
import pytest
from jax import export

import graftree as nnx
from tests import catalog


def symbolic(inputs):
    """The shapes of the inputs, with a name for the first axis, the same in all."""
    scope = export.SymbolicScope()

    def spec(x):
        shape = export.symbolic_shape("b, ...", like=x.shape, scope=scope)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(spec, inputs)


@pytest.mark.parametrize("row", catalog.LAYERS, ids=lambda row: row.name)
def test_layers_export_with_a_symbolic_batch(row):
    leaves, treedef = jax.tree.flatten(nnx.split(row.make()))
    inputs = row.inputs()

    def call(leaves, *inputs):
        return row(nnx.merge(*treedef.unflatten(leaves)), *inputs)

    exported = export.export(jax.jit(call))(leaves, *symbolic(inputs))
    expected = row(row.make(), *inputs)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        exported.call(leaves, *inputs),
        expected,
    )


def test_stack_exports_with_a_symbolic_batch_and_length():
    def block(rngs):
        attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        return nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), attention)

    stack = nnx.Stack(block, 2, rngs=nnx.Rngs(0))
    shape = export.symbolic_shape("b, t, 4")
    exported = export.export(jax.jit(stack))(jax.ShapeDtypeStruct(shape, np.float32))
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(exported.call(x), stack(x), rtol=1e-5, atol=1e-6)
