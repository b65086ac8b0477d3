"""Functions with gradients that the user defines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import GRAPH_UPDATES


class Foo(nnx.Module):
    def __init__(self, x=1.0, y=2.0):
        self.x = nnx.Param(jnp.array(x))
        self.y = nnx.Param(jnp.array(y))


class Counted(nnx.Module):
    def __init__(self, x=2.0):
        self.x = nnx.Param(jnp.array(x))
        self.count = nnx.BatchStat(jnp.array(0))
        self.calls = 0


def define(fun, bwd, mode, fwd=None, nondiff_argnums=(), **options):
    """A custom_vjp whose fwd rule calls it and keeps its arguments as the residual."""
    f = nnx.custom_vjp(fun, nondiff_argnums=nondiff_argnums, **mode)
    f.defvjp(fwd or (lambda *args: (f(*args), args)), bwd, **options)
    return f


def answer(model, g, mode, **gradients):
    """A cotangent for a model, in the form of the mode, and that of the output."""
    if mode == GRAPH_UPDATES:
        (found, *_), g = g
    else:
        found = nnx.clone(model)
    for name, scale in gradients.items():
        leaf = found[name] if mode == GRAPH_UPDATES else getattr(found, name)
        leaf[...] = scale * g
    return found


def sine(mode):
    """``sin(x)`` of a Counted, with ten times its gradient."""

    def fun(model):
        model.count[...] += 1
        model.calls += 1
        return jnp.sin(model.x)

    def bwd(residual, g):
        (model,) = residual
        return (answer(model, g, mode, x=10 * jnp.cos(model.x)),)

    return define(fun, bwd, mode)


def gradient(f, mode):
    """The gradient of f by the ``x`` of a model."""
    options = {"argnums": nnx.DiffState(0, nnx.Param)} if mode == GRAPH_UPDATES else {}
    grad = nnx.grad(f, allow_int=True, **options, **mode)
    return lambda model: nnx.state(grad(model))["x"][...]


# ------------------------------------------------------- updates, under all transforms


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f, mode: gradient(f, mode),
        lambda f, mode: nnx.jit(gradient(f, mode), **mode),
        lambda f, mode: gradient(nnx.jit(f, **mode), mode),
        lambda f, mode: gradient(nnx.remat(f, **mode), mode),
        lambda f, mode: nnx.jit(gradient(nnx.remat(f, **mode), mode), **mode),
    ],
    ids=["grad", "jit-grad", "grad-jit", "grad-remat", "jit-grad-remat"],
)
def test_updates_propagate_exactly_once(mode, wrap):
    model = Counted()
    slope = wrap(sine(mode), mode)(model)
    np.testing.assert_allclose(slope, 10 * np.cos(2.0), rtol=1e-6)
    assert model.count[...] == 1
    assert model.calls == (mode == GRAPH_UPDATES)


def test_derivatives_nest(mode):
    f = sine(mode)

    def value(v):
        model = nnx.Dict(x=v, count=nnx.BatchStat(jnp.array(0)), calls=nnx.static(0))
        return f(model)

    first = nnx.grad(value, **mode)
    second = nnx.grad(lambda v: first(v)[...], **mode)(nnx.Param(jnp.array(2.0)))
    np.testing.assert_allclose(second[...], -10 * np.sin(2.0), rtol=1e-6)


def test_rules_are_mapped(mode):
    def bwd(residual, g):
        model, x = residual
        out_g = g[1] if mode == GRAPH_UPDATES else g
        return answer(model, g, mode, x=10 * x), out_g * model.x

    f = define(lambda model, x: model.x * x, bwd, mode)
    mapped = nnx.vmap(f, in_axes=(None, 0), **mode)
    slope = gradient(lambda model: mapped(model, jnp.arange(3.0)).sum(), mode)
    assert slope(Counted()) == 30.0


@pytest.mark.parametrize("place", ["fun", "fwd", "bwd"])
def test_a_failed_rule_changes_nothing(mode, place):
    def body(model, name):
        model.count[...] += 1
        model.calls += 1
        if place == name:
            raise RuntimeError(place)
        return model.x * 1

    def bwd(residual, g):
        raise RuntimeError(place)

    f = define(
        lambda model: body(model, "fun"),
        bwd,
        mode,
        fwd=lambda model: (body(model, "fwd"), model),
    )
    model = Counted()
    with pytest.raises(RuntimeError, match=place):
        (f if place == "fun" else gradient(f, mode))(model)
    assert model.count[...] == 0 and model.calls == 0
    for variable in (model.x, model.count):
        assert not isinstance(variable.get_raw_value(), jax.core.Tracer)


def test_no_tracer_is_leaked(mode):
    with jax.checking_leaks():
        for wrap in (
            lambda f: nnx.jit(gradient(f, mode), **mode),
            lambda f: gradient(nnx.jit(f, **mode), mode),
        ):
            wrap(sine(mode))(Counted())


def test_under_jit_the_fwd_rule_may_leave_updates_to_the_function(mode):
    def fun(model):
        model.count[...] += 1
        return jnp.sin(model.x)

    def bwd(model, g):
        return (answer(model, g, mode, x=10.0),)

    f = define(fun, bwd, mode, fwd=lambda model: (jnp.sin(model.x), model))
    assert gradient(nnx.jit(f, **mode), mode)(Counted()) == 10.0


def test_under_jit_the_fwd_rule_may_not_write_more(mode):
    def fwd(model):
        model.count[...] += 1
        return model.x * 1, None

    f = define(lambda model: model.x * 1, lambda *_: (None,), mode, fwd=fwd)
    with pytest.raises(TypeError, match=r"fwd wrote what.*: args\[0\].count"):
        gradient(nnx.jit(f, **mode), mode)(Counted())


# -------------------------------------------------------------------- what bwd is given


def test_states_hold_the_cotangents_of_updates():
    seen = []

    def fun(model, x, v):
        model.y[...] = model.x * x
        return {"out": model.x * v}

    def bwd(residual, g):
        seen.append(g)
        updates, _ = g
        return updates[0], 0.0, updates[2]

    f = define(fun, bwd, GRAPH_UPDATES)

    def loss(model, x, v):
        out = f(model, x, v)["out"]
        return out * 3 + model.y * 5 + model.x * 7

    grads = nnx.grad(loss, argnums=(0, 1, 2))(Foo(), 4.0, nnx.BatchStat(jnp.array(6.0)))
    (((model_g, x_g, v_g), out_g),) = seen
    assert type(model_g) is nnx.State and model_g["y"][...] == 5.0
    assert x_g is None and type(v_g) is nnx.BatchStat and out_g == {"out": 3.0}
    # What is not written has its gradient from elsewhere, and zero here.
    assert model_g["x"][...] == 0.0 and grads[0]["x"][...] == 7.0


def test_gradients_of_two_calls_add_up():
    def bwd(residual, g):
        model, x = residual
        return answer(model, g, GRAPH_UPDATES, x=10 * x), None

    f = define(lambda model, x: model.x * x, bwd, GRAPH_UPDATES)
    slope = gradient(lambda model: f(model, 1.0) + f(model, 2.0), GRAPH_UPDATES)
    assert slope(Counted()) == 30.0


def test_states_have_substate_that_is_not_differentiable_too():
    seen = []

    def bwd(residual, g):
        (model_g,), out_g = g
        seen.append(dict(model_g))
        return (nnx.State({"x": 9.0 * out_g}),)

    params = nnx.DiffState(0, nnx.Param)
    f = define(lambda m: m.x * 1.0, bwd, GRAPH_UPDATES, nondiff_argnums=(params,))
    assert gradient(f, GRAPH_UPDATES)(Counted()) == 9.0
    assert set(seen[0]) == {"x", "count"}
    assert seen[0]["count"].get_raw_value().dtype == jax.dtypes.float0


def test_states_stand_for_new_objects_in_the_output_and_for_the_new_structure():
    seen = []

    def fun(model):
        model.new = nnx.Param(model.x * 1)
        return model, Foo(model.x * 2, 3.0)

    def bwd(residual, g):
        seen.append(g)
        return (None,)

    f = define(fun, bwd, GRAPH_UPDATES)

    def loss(model):
        same, made = f(model)
        assert same is model
        return made.x * 5 + made.y * 6 + same.new * 7

    nnx.grad(loss)(Foo())
    ((((model_g,), (same_g, made_g))),) = seen
    assert model_g["new"][...] == 7.0 and len(same_g) == 0
    assert (made_g["x"][...], made_g["y"][...]) == (5.0, 6.0)


def test_shared_variables_are_in_the_first_state():
    seen = []

    def bwd(residual, g):
        (a, b), out_g = g
        seen.append((set(a), set(b)))
        a["x"][...], a["y"][...] = 4.0 * out_g, 5.0 * out_g
        return a, b

    foo = Foo()
    other = nnx.Dict(inner=foo)
    f = define(lambda a, b: a.x * b.inner.y, bwd, GRAPH_UPDATES)
    grads = nnx.grad(f, argnums=(0, 1))(foo, other)
    assert seen == [({"x", "y"}, set())]
    assert grads[0]["x"][...] == 4.0 and len(grads[1]) == 0


@pytest.mark.parametrize("form", ["named", "keywords", "absent"])
def test_updates_are_given_to_rules_that_ask(value_mode, form):
    seen = []

    def fun(foo, w, n):
        foo.x[...] = foo.x * 2
        n[...] += w
        return foo.y * w

    def rule(n, residual, g, updates_g=None):
        foo, w, _ = residual
        seen.append((g, updates_g))
        return nnx.clone(foo), w * 0

    rules = {
        "named": lambda n, residual, g, updates_g: rule(n, residual, g, updates_g),
        "keywords": lambda n, residual, g, **keys: rule(n, residual, g, **keys),
        "absent": lambda n, residual, g: rule(n, residual, g),
    }
    f = define(fun, rules[form], value_mode, nondiff_argnums=(2,))

    def loss(foo, w, n):
        return f(foo, w, n) * 3 + foo.x * 5 + n * 7

    n = nnx.BatchStat(jnp.array(0.0))
    nnx.grad(loss, argnums=(0, 1), **value_mode)(Foo(), jnp.array(2.0), n)
    ((g, updates_g),) = seen
    assert g == 3.0 and n[...] == 2.0
    if form == "absent":
        assert updates_g is None
    else:
        foo_g, w_g, n_g = updates_g
        assert type(foo_g) is Foo and foo_g.x[...] == 5.0 and foo_g.y is None
        assert w_g is None and n_g[...] == 7.0


def test_cotangents_of_outputs_are_objects(value_mode):
    seen = []

    def bwd(residual, g):
        seen.append(g)
        return (g[0].x[...] * 10,)

    f = define(lambda x: [Foo(x * 2, 3.0)], bwd, value_mode)
    grad = jax.grad(lambda x: (lambda foo: foo.x * 5 + foo.y * 6)(f(x)[0]))(1.0)
    assert grad == 50.0 and type(seen[0][0]) is Foo and seen[0][0].y[...] == 6.0


def test_symbolic_zeros_are_those_of_jax(mode):
    seen = []

    def fwd(foo, x):
        seen.append((foo.x.get_raw_value().perturbed, x.perturbed))
        return foo.x.get_raw_value().value * x.value, None

    def bwd(_, g):
        seen.append(g[1] if mode == GRAPH_UPDATES else g)
        foo = Foo(7.0, 0.0)
        return (nnx.state(foo) if mode == GRAPH_UPDATES else foo), None

    f = define(lambda foo, x: foo.x * x, bwd, mode, fwd=fwd, symbolic_zeros=True)
    assert gradient(lambda foo: f(foo, 3.0), mode)(Foo()) == 7.0
    assert seen == [(True, False), 1.0]
