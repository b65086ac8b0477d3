"""vjp and jvp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import GRAPH, TREE

PLAIN = [GRAPH, TREE]


class Model(nnx.Module):
    """Its value at x is ``w * x + b``."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.b = nnx.Param(jnp.array(1.0))
        self.name = "model"

    def __call__(self, x):
        return self.w * x + self.b


def loss(model, x):
    return model(x) ** 2


def as_dict(grads):
    return {
        path[0]: float(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(grads))
    }


WHICH = pytest.mark.parametrize("name", ["vjp", "jvp"])


def test_cotangents_are_pulled_back(value_mode):
    out, vjp_fn = nnx.vjp(loss, Model(), 3.0, **value_mode)
    grads, slope = vjp_fn(2.0)
    assert out == 49.0 and type(grads) is Model and grads.name == "model"
    assert as_dict(grads) == {"w": 84.0, "b": 28.0} and slope == 56.0
    assert as_dict(vjp_fn(0.0)[0]) == {"w": 0.0, "b": 0.0}


def test_tangents_are_pushed_forward(value_mode):
    ones = jax.tree.map(jnp.ones_like, Model())
    out, tangent = nnx.jvp(loss, (Model(), 3.0), (ones, 1.0), **value_mode)
    assert out == 49.0 and tangent == 42.0 + 14.0 + 28.0


def test_second_outputs_come_along(value_mode):
    f = lambda m, x: (m(x), {"new": nnx.Param(x * 2)})  # noqa: E731
    out, vjp_fn, aux = nnx.vjp(f, Model(), 3.0, has_aux=True, **value_mode)
    assert (out, vjp_fn(1.0)[1], aux["new"][...]) == (7.0, 2.0, 6.0)
    args = (Model(), 3.0), (jax.tree.map(jnp.zeros_like, Model()), 1.0)
    out, tangent, aux = nnx.jvp(f, *args, has_aux=True, **value_mode)
    assert (out, tangent, aux["new"][...]) == (7.0, 2.0, 6.0)
    for call in (lambda: nnx.vjp(loss, Model(), 3.0, has_aux=True, **value_mode),):
        with pytest.raises(TypeError, match="must return a pair"):
            call()


def test_outputs_may_be_objects(value_mode):
    def f(x):
        model = Model()
        model.w[...], model.b[...] = x**2, 5 * x
        return {"model": model}

    cotangent = {"model": Model()}  # (2, 1)
    out, vjp_fn = nnx.vjp(f, jnp.array(3.0), **value_mode)
    assert as_dict(out["model"]) == {"w": 9.0, "b": 15.0}
    assert vjp_fn(cotangent) == (2 * 6.0 + 1 * 5.0,)
    out, tangent = nnx.jvp(f, (jnp.array(3.0),), (jnp.array(1.0),), **value_mode)
    assert type(tangent["model"]) is Model
    assert as_dict(tangent["model"]) == {"w": 6.0, "b": 5.0}


def test_updates_happen_once_on_the_way_forward(value_mode):
    def f(model, x):
        out = model(x)
        model.b[...] += 1
        return out

    model = Model()
    _, vjp_fn = nnx.vjp(f, model, 3.0, **value_mode)
    assert model.b[...] == 2.0
    vjp_fn(1.0), vjp_fn(1.0)
    tangents = jax.tree.map(jnp.ones_like, model), 1.0
    nnx.jvp(f, (model, 3.0), tangents, **value_mode)
    assert model.b[...] == 3.0 and isinstance(model.b.get_raw_value(), jax.Array)


def test_pullbacks_leave_jit(value_mode):
    vjp_fn = jax.jit(lambda x: nnx.vjp(lambda m, x: m(x), Model(), x, **value_mode)[1])(
        3.0
    )
    assert as_dict(vjp_fn(jnp.array(2.0))[0]) == {"w": 6.0, "b": 2.0}


def test_shared_variables_have_one_gradient_and_one_tangent():
    shared = nnx.Param(jnp.array(3.0))
    f = lambda a, b: a[...] * b["v"][...]  # noqa: E731
    out, vjp_fn = nnx.vjp(f, shared, {"v": shared}, **GRAPH)
    first, second = vjp_fn(1.0)
    assert out == 9.0 and first is second["v"] and first[...] == 6.0
    direction = nnx.Param(jnp.array(1.0))
    tangents = direction, {"v": direction}
    assert nnx.jvp(f, (shared, {"v": shared}), tangents, **GRAPH) == (9.0, 6.0)


@WHICH
def test_tree_mode_names_what_is_shared(name):
    v = nnx.Param(jnp.array(3.0))
    f = lambda a, b: a * b  # noqa: E731
    primals = r"(?s)found at paths.*\.primals\[0\].*\.primals\[1\].*nnx." + name
    with pytest.raises(ValueError, match=primals):
        nnx.vjp(f, v, v, **TREE) if name == "vjp" else nnx.jvp(
            f, (v, v), (v, v), **TREE
        )
    if name == "jvp":
        with pytest.raises(ValueError, match=r"\.tangents\[0\]"):
            nnx.jvp(f, (v, nnx.clone(v)), (v, v), **TREE)
    with pytest.raises(ValueError, match=r"(?s)\.primals\[0\].*- \.out\n"):
        identity = lambda a: a  # noqa: E731
        args = (v,) if name == "vjp" else ((v,), (nnx.clone(v),))
        getattr(nnx, name)(identity, *args, **TREE)


@WHICH
def test_products_refuse_graph_updates_and_bound_methods(name):
    product = getattr(nnx, name)
    for call in (lambda: product(loss), lambda: getattr(nnx.compat, name)(loss)):
        with pytest.raises(NotImplementedError, match="Pass graph=False or"):
            call()
    with pytest.raises(ValueError, match=f"nnx.{name} does not support bound methods"):
        product(Model().__call__, **TREE)
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        nnx.vjp(loss, reduce_axes=("x",), **TREE)


def test_wrong_forms_are_refused(value_mode):
    _, vjp_fn = nnx.vjp(lambda x: nnx.Dict(a=nnx.Param(x)), 3.0, **value_mode)
    with pytest.raises(ValueError, match="the cotangent"):
        vjp_fn(1.0)
    f = lambda v: v * 1  # noqa: E731
    v = nnx.Param(jnp.array(1.0))
    with pytest.raises(TypeError, match="structure of the tangents"):
        nnx.jvp(f, (v,), (nnx.clone(v), 1.0), **value_mode)
    with pytest.raises(TypeError, match="primals of nnx.jvp must be a tuple"):
        nnx.jvp(f, v, v, **value_mode)
    with pytest.raises(TypeError, match="float0"):
        count = nnx.Param(jnp.array(1))
        nnx.jvp(f, (count,), (nnx.clone(count),), **value_mode)


def test_products_have_the_numbers_of_jax(value_mode, float64):
    x, ct, dx = (np.random.default_rng(i).normal(size=3) for i in range(3))
    f = lambda v: jnp.sin(v[...]) * jnp.cumsum(v[...])  # noqa: E731
    raw = lambda x: jnp.sin(x) * jnp.cumsum(x)  # noqa: E731
    v, dv = nnx.Param(jnp.asarray(x)), nnx.Param(jnp.asarray(dx))
    (grad,) = nnx.vjp(f, v, **value_mode)[1](jnp.asarray(ct))
    np.testing.assert_array_equal(grad[...], jax.vjp(raw, x)[1](jnp.asarray(ct))[0])
    _, tangent = nnx.jvp(f, (v,), (dv,), **value_mode)
    np.testing.assert_array_equal(tangent, jax.jvp(raw, (x,), (dx,))[1])
