"""Refs through transforms that may run a function twice: one write in the end.

What all transforms do with refs is in `tests/contract/test_refs/test_matrix.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo


def ref_param(value):
    return nnx.Param(jnp.array(value), ref=True)


def test_rematerialized_writes_are_done_once(mode):
    @nnx.remat(**mode)
    def f(x, v):
        v[...] += jax.lax.stop_gradient(x)
        return jnp.sin(x) * jax.lax.stop_gradient(v[...])

    v = ref_param(0.0)
    np.testing.assert_allclose(nnx.grad(f, **mode)(2.0, v), 2 * np.cos(2.0), rtol=1e-6)
    assert v[...] == 2
    jax.jit(jax.grad(f))(2.0, v)
    assert v[...] == 4


def test_gradients_pass_through_refs_that_are_differentiated(mode):
    @nnx.remat(**mode)
    def double(v):
        v[...] = 2 * v[...]

    def square(x):
        v = nnx.Variable(x, ref=True)
        double(v)
        return v[...] ** 2

    np.testing.assert_allclose(jax.grad(square)(3.0), 8 * 3.0)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "vjp"])
def test_refs_have_no_gradient(name):
    model, refused = zoo.Box(w=ref_param(0.0)), "Ref-typed argument: "
    with pytest.raises(TypeError, match=refused + r"(args|primals)\[0\]\.w") as error:
        if name == "vjp":
            nnx.vjp(lambda m: m.w.sum(), model, graph=False)
        else:
            getattr(nnx, name)(lambda m: m.w.sum())(model)
    assert f"nnx.{name}" in str(error.value) and "nnx.to_arrays" in str(error.value)


def test_tangents_of_refs_are_in_other_refs(value_mode):
    v, tangent = ref_param(3.0), ref_param(1.0)

    def f(v):
        v[...] = v[...] ** 2
        return v[...]

    with pytest.raises(ValueError, match="as the tangent of primals"):
        nnx.jvp(f, (v,), (v,), **value_mode)
    assert v[...] == 3
    y, dy = nnx.jvp(f, (v,), (tangent,), **value_mode)
    assert (y, dy) == (9, 6) and v[...] == 9


def test_a_write_to_a_broadcast_ref_in_vmap_is_told_with_its_path():
    """Issue 12, §12; other errors have no such hint."""

    def write(m, x):
        m.inner.w[...] += x

    def fails(m, x):
        raise KeyError("stop")

    model = zoo.Box(inner=zoo.Box(w=ref_param(0.0)))
    with pytest.raises(ValueError, match="array ref that is not mapped") as caught:
        nnx.vmap(write, in_axes=(None, 0))(model, jnp.ones(3))
    message = str(caught.value)
    assert "args[0].inner.w" in message and "nnx.to_arrays" in message
    with pytest.raises(KeyError) as caught:
        nnx.vmap(fails, in_axes=(None, 0))(model, jnp.ones(3))
    assert not any("ref" in note for note in getattr(caught.value, "__notes__", []))
