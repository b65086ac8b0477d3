"""Refs through transforms that may run a function twice: one write in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import config
from graftree.transforms.crossing import packing, ref_contents


def count_up(ref, x):
    ref[...] += 1
    return jnp.sin(x)


def test_the_function_gets_refs_and_the_transform_does_not():
    kinds = []

    def transform(run):
        def transformed(contents, *taken):
            kinds.append([type(x) for x in jax.tree.leaves((contents, taken))])
            return run(contents, *taken)

        return transformed

    ref = jax.new_ref(jnp.array(0))
    out = ref_contents.by_content(count_up, transform)(ref, 0.0)
    assert out == 0 and ref[...] == 1
    assert not any(issubclass(kind, jax.Ref) for kind in kinds[0])


def test_a_ref_at_two_places_is_one_inside():
    def write(pair):
        pair[0][...] += 1
        pair[1][...] *= 10

    ref = jax.new_ref(jnp.array(1))
    ref_contents.by_content(write, lambda run: run)([ref, ref])
    assert ref[...] == 20


def test_rematerialized_writes_are_done_once(mode):
    variable = nnx.Variable(jnp.array(0.0), ref=True)

    @nnx.remat(**mode)
    def f(x, variable):
        variable[...] += jax.lax.stop_gradient(x)
        return jnp.sin(x) * jax.lax.stop_gradient(variable[...])

    gradient = nnx.grad(f, **mode)(2.0, variable)
    np.testing.assert_allclose(gradient, 2 * np.cos(2.0), rtol=1e-6)
    assert variable[...] == 2
    jax.jit(jax.grad(f))(2.0, variable)
    assert variable[...] == 4


def test_gradients_pass_through_refs_that_are_differentiated(mode):
    def square(x):
        variable = nnx.Variable(x, ref=True)

        @nnx.remat(**mode)
        def double(variable):
            variable[...] = 2 * variable[...]

        double(variable)
        return variable[...] ** 2

    np.testing.assert_allclose(jax.grad(square)(3.0), 8 * 3.0)


def test_refused_refs_are_named():
    args = (nnx.Dict(a=jnp.ones(2)), nnx.Dict(w=nnx.Param(jnp.zeros(2), ref=True)))
    packed = packing.pack((args, {}), config.GRAPH, "example")
    groups = packing.part(packed.values(), packed.signature, [0, 1], 2)
    ref_contents.refuse(groups[:1], "example", "has no refs")
    with pytest.raises(TypeError, match=r"nnx.example has no refs: args\[1\].w") as e:
        ref_contents.refuse(groups, "example", "has no refs")
    assert "nnx.to_arrays" in str(e.value)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "vjp"])
def test_refs_have_no_gradient(name):
    v = nnx.Param(jnp.zeros(2), ref=True)
    with pytest.raises(TypeError, match=r"Ref-typed argument: (args|primals)\[0\]"):
        if name == "vjp":
            nnx.vjp(lambda v: v.sum(), v, graph=False)
        else:
            getattr(nnx, name)(lambda v: v.sum())(v)


@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}])
def test_tangents_of_refs_are_in_other_refs(mode):
    v, tangent = [nnx.Param(jnp.array(x), ref=True) for x in (3.0, 1.0)]

    def f(v):
        v[...] = v[...] ** 2
        return v[...]

    with pytest.raises(ValueError, match="as the tangent of primals"):
        nnx.jvp(f, (v,), (v,), **mode)
    assert v[...] == 3
    y, dy = nnx.jvp(f, (v,), (tangent,), **mode)
    assert (y, dy) == (9, 6) and v[...] == 9


def test_other_errors_of_mapped_functions_have_no_hint():
    def fails():
        raise KeyError("stop")

    with pytest.raises(KeyError) as caught:
        ref_contents.with_hint(fails, ())()
    assert not getattr(caught.value, "__notes__", [])


def test_a_write_to_a_broadcast_ref_in_vmap_is_told_with_its_path():
    """Issue 12, §12."""
    model = nnx.to_refs(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="array ref that is not mapped") as caught:
        nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, jnp.ones((3, 8)))
    message = str(caught.value)
    assert "args[0].rngs.count" in message and "nnx.to_arrays" in message
