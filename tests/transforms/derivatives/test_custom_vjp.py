"""Functions with gradients that the user defines: rules, and their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables, zoo
from tests.modes import GRAPH, GRAPH_UPDATES


def two(x=1.0, y=2.0):
    return zoo.Box(x=nnx.Param(jnp.array(x)), y=nnx.Param(jnp.array(y)))


def counted(x=2.0):
    count = nnx.BatchStat(jnp.array(0))
    return zoo.Box(x=nnx.Param(jnp.array(x)), count=count, calls=0)


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
    """``sin(x)`` of what `counted` makes, with ten times its gradient."""

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


@tables.cases(
    "wrap",
    lambda f, mode: gradient(f, mode),
    lambda f, mode: nnx.jit(gradient(f, mode), **mode),
    lambda f, mode: gradient(nnx.jit(f, **mode), mode),
    lambda f, mode: gradient(nnx.remat(f, **mode), mode),
    lambda f, mode: nnx.jit(gradient(nnx.remat(f, **mode), mode), **mode),
    ids=["grad", "jit-grad", "grad-jit", "grad-remat", "jit-grad-remat"],
)
def test_updates_propagate_exactly_once(mode, wrap):
    model = counted()
    slope = wrap(sine(mode), mode)(model)
    np.testing.assert_allclose(slope, 10 * np.cos(2.0), rtol=1e-6)
    assert model.count[...] == 1 and model.calls == (mode == GRAPH_UPDATES)


def test_gradients_of_several_calls_add_up(mode):
    def bwd(residual, g):
        model, x = residual
        out_g = g[1] if mode == GRAPH_UPDATES else g
        return answer(model, g, mode, x=10 * x), out_g * model.x

    f = define(lambda model, x: model.x * x, bwd, mode)
    mapped = nnx.vmap(f, in_axes=(None, 0), **mode)
    for total in (
        lambda model: f(model, 1.0) + f(model, 2.0),
        lambda model: mapped(model, jnp.arange(3.0)).sum(),
    ):
        assert gradient(total, mode)(counted()) == 30.0


def test_a_failed_rule_of_the_way_forward_changes_nothing(mode):
    def fwd(model):
        model.count[...] += 1
        model.calls += 1
        raise RuntimeError("stop")

    f = define(lambda model: model.x * 1, lambda *_: (None,), mode, fwd)
    model = counted()
    with comparisons.unchanged(model), pytest.raises(RuntimeError, match="stop"):
        gradient(f, mode)(model)


def test_no_tracer_is_leaked(mode):
    with jax.checking_leaks():
        nnx.jit(gradient(sine(mode), mode), **mode)(counted())
        gradient(nnx.jit(sine(mode), **mode), mode)(counted())


def test_under_jit_the_fwd_rule_may_leave_updates_to_the_function(mode):
    def fun(model):
        model.count[...] += 1
        return jnp.sin(model.x)

    def bwd(model, g):
        return (answer(model, g, mode, x=10.0),)

    f = define(fun, bwd, mode, fwd=lambda model: (jnp.sin(model.x), model))
    assert gradient(nnx.jit(f, **mode), mode)(counted()) == 10.0


def test_under_jit_the_fwd_rule_may_not_write_more(mode):
    def fwd(model):
        model.count[...] += 1
        return model.x * 1, None

    f = define(lambda model: model.x * 1, lambda *_: (None,), mode, fwd=fwd)
    with pytest.raises(TypeError, match=r"fwd writes what.*: args\[0\].count"):
        gradient(nnx.jit(f, **mode), mode)(counted())


# -------------------------------------------------------------------- what bwd is given


def test_states_hold_the_cotangents_of_updates():
    seen = []

    def fun(model, x, v):
        model.y[...] = model.x * x
        return {"out": model.x * v}

    def bwd(residual, g):
        seen.append(g)
        (model_g, _, v_g), _ = g
        return model_g, 0.0, v_g

    def loss(model, x, v):
        return f(model, x, v)["out"] * 3 + model.y * 5 + model.x * 7

    f = define(fun, bwd, GRAPH_UPDATES)
    grads = nnx.grad(loss, argnums=(0, 1, 2))(two(), 4.0, nnx.BatchStat(jnp.array(6.0)))
    (((model_g, x_g, v_g), out_g),) = seen
    assert type(model_g) is nnx.State and model_g["y"][...] == 5.0
    assert x_g is None and type(v_g) is nnx.BatchStat and out_g == {"out": 3.0}
    # What is not written has its gradient from elsewhere, and zero here.
    assert model_g["x"][...] == 0.0 and grads[0]["x"][...] == 7.0


def test_states_have_substate_that_is_not_differentiable_too():
    def bwd(residual, g):
        (model_g,), out_g = g
        assert set(model_g) == {"x", "count"}
        assert model_g["count"].get_raw_value().dtype == jax.dtypes.float0
        return (nnx.State({"x": 9.0 * out_g}),)

    params = nnx.DiffState(0, nnx.Param)
    f = define(lambda m: m.x * 1.0, bwd, GRAPH_UPDATES, nondiff_argnums=(params,))
    assert gradient(f, GRAPH_UPDATES)(counted()) == 9.0


def test_states_stand_for_new_objects_in_the_output_and_for_the_new_structure():
    seen = []

    def fun(model):
        model.new = nnx.Param(model.x * 1)
        return model, two(model.x * 2, 3.0)

    def bwd(residual, g):
        seen.append(g)
        return (None,)

    def loss(model):
        same, made = f(model)
        assert same is model
        return made.x * 5 + made.y * 6 + same.new * 7

    f = define(fun, bwd, GRAPH_UPDATES)
    nnx.grad(loss)(two())
    ((((model_g,), (same_g, made_g))),) = seen
    assert model_g["new"][...] == 7.0 and len(same_g) == 0
    assert (made_g["x"][...], made_g["y"][...]) == (5.0, 6.0)


def test_shared_variables_are_in_the_first_state():
    def bwd(residual, g):
        (a, b), out_g = g
        assert (set(a), set(b)) == ({"x", "y"}, set())
        a["x"][...], a["y"][...] = 4.0 * out_g, 5.0 * out_g
        return a, b

    foo = two()
    f = define(lambda a, b: a.x * b.inner.y, bwd, GRAPH_UPDATES)
    grads = nnx.grad(f, argnums=(0, 1))(foo, nnx.Dict(inner=foo))
    assert grads[0]["x"][...] == 4.0 and len(grads[1]) == 0


@pytest.mark.parametrize("form", ["named", "keywords", "absent"])
def test_updates_are_given_to_rules_that_ask(value_mode, form):
    seen = []

    def fun(foo, w, n):
        foo.x[...] = foo.x * 2
        n[...] += w
        return foo.y * w

    def rule(n, residual, g, updates_g=None):
        seen.append((g, updates_g))
        return nnx.clone(residual[0]), residual[1] * 0

    rules = {
        "named": rule,
        "keywords": lambda n, residual, g, **keys: rule(n, residual, g, **keys),
        "absent": lambda n, residual, g: rule(n, residual, g),
    }
    f = define(fun, rules[form], value_mode, nondiff_argnums=(2,))

    def loss(foo, w, n):
        return f(foo, w, n) * 3 + foo.x * 5 + n * 7

    n = nnx.BatchStat(jnp.array(0.0))
    nnx.grad(loss, argnums=(0, 1), **value_mode)(two(), jnp.array(2.0), n)
    ((g, updates_g),) = seen
    assert g == 3.0 and n[...] == 2.0 and (updates_g is None) is (form == "absent")
    if updates_g:
        foo_g, w_g, n_g = updates_g
        assert type(foo_g) is zoo.Box and foo_g.x[...] == 5.0 and foo_g.y is None
        assert w_g is None and n_g[...] == 7.0


def test_cotangents_of_outputs_are_objects(value_mode):
    def bwd(residual, g):
        assert type(g[0]) is zoo.Box and g[0].y[...] == 6.0
        return (g[0].x[...] * 10,)

    def loss(x):
        (foo,) = f(x)
        return foo.x * 5 + foo.y * 6

    f = define(lambda x: [two(x * 2, 3.0)], bwd, value_mode)
    assert jax.grad(loss)(1.0) == 50.0


def test_symbolic_zeros_are_those_of_jax(mode):
    seen = []

    def fwd(foo, x):
        seen.append((foo.x.get_raw_value().perturbed, x.perturbed))
        return foo.x.get_raw_value().value * x.value, None

    def bwd(_, g):
        seen.append(g[1] if mode == GRAPH_UPDATES else g)
        foo = two(7.0, 0.0)
        return (nnx.state(foo) if mode == GRAPH_UPDATES else foo), None

    f = define(lambda foo, x: foo.x * x, bwd, mode, fwd=fwd, symbolic_zeros=True)
    assert gradient(lambda foo: f(foo, 3.0), mode)(two()) == 7.0
    assert seen == [(True, False), 1.0]


# -------------------------------------------------------------------- nondiff_argnums


def test_static_and_traced_values_may_be_without_gradient(mode):
    def fun(x, scale, function, power, array):
        assert isinstance(power, int)
        return scale * function(x) ** power + array.sum()

    def bwd(function, power, array, x, g):
        assert function is jnp.sin and power == 3 and array.shape == (2,)
        return (g[1] if mode == GRAPH_UPDATES else g) * array[0], None

    def fwd(*args):
        return fun(*args), args[0]

    f = define(fun, bwd, mode, fwd, nondiff_argnums=(2, 3, -1))

    def slope(array):
        return nnx.grad(lambda x: f(x, 1.0, jnp.sin, 3, array), **mode)(1.0)

    array = jnp.array([4.0, 5.0])
    assert slope(array) == jax.jit(slope)(array) == 4.0
    np.testing.assert_array_equal(jax.vmap(slope)(jnp.eye(2)), [1.0, 0.0])


def test_objects_without_gradient_are_updated(value_mode):
    def fun(x, model):
        model.count[...] += 1
        return x * model.x

    def bwd(model, residual, g):
        return (g * model.x * 10,)

    f = define(fun, bwd, value_mode, nondiff_argnums=(1,))
    for wrap in (lambda g: g, lambda g: nnx.jit(g, **value_mode)):
        model = counted()
        assert wrap(nnx.grad(f, **value_mode))(1.0, model) == 20.0
        assert model.count[...] == 1


def test_refs_are_written(mode):
    def fun(model, x):
        model.n[...] += 1.0
        return x * 2

    def bwd(*given):
        return (None, 3.0) if mode == GRAPH_UPDATES else (3.0,)

    nondiff = (nnx.DiffState(0, nnx.Param),) if mode == GRAPH_UPDATES else (0,)
    f = define(fun, bwd, mode, lambda *args: (f(*args), None), nondiff)
    model = nnx.Dict(n=nnx.BatchStat(jnp.array(0.0), ref=True))
    grad = nnx.grad(f, argnums=1, **mode)
    inner = nnx.grad(nnx.jit(f, **mode), argnums=1, **mode)
    for i, function in enumerate([f, grad, nnx.jit(grad, **mode), inner]):
        assert function(model, 2.0) == (3.0 if i else 4.0) and model.n[...] == i + 1


def test_integers_are_not_for_objects_with_graph_updates():
    f = define(lambda a, b: b * 1, lambda *_: (1.0,), GRAPH_UPDATES, None, (0,))
    for obj in (two(), nnx.Param(jnp.array(1.0)), [two()]):
        with pytest.raises(TypeError, match="integers to nondiff_argnums for graph"):
            f(obj, 1.0)


def test_wrong_nondiff_argnums_are_refused(mode):
    def make(*nondiff_argnums):
        return define(lambda x: x, lambda *_: (), mode, None, nondiff_argnums)

    with pytest.raises(ValueError, match="argnum 0 is repeated in nondiff_argnums"):
        make(0, 0)
    with pytest.raises(TypeError, match="nondiff_argnums=3 of nnx.custom_vjp"):
        make(3)(1.0)
    if mode != GRAPH_UPDATES:
        message = "`nondiff_argnums` cannot contain `DiffState` objects"
        with pytest.raises(ValueError, match=message):
            make(nnx.DiffState(0, nnx.Param))


# ------------------------------------------------------------------------ all arguments


def test_keywords_are_positions_and_defaults_are_arguments(mode):
    def bwd(residual, g):
        return 7.0, 8.0

    f = define(lambda x, y=3.0: x * y, bwd, mode)
    assert f(y=4.0, x=2.0) == 8.0 and f(2.0) == 6.0
    assert nnx.grad(lambda x: f(x=x), **mode)(2.0) == 7.0
    assert nnx.grad(lambda x: f(x), **mode)(2.0) == 7.0
    keyword_only = define(lambda x, *, y: x, bwd, mode)
    with pytest.raises(TypeError, match="could not be resolved to positions"):
        keyword_only(1.0, y=2.0)


def test_shared_variables_in_one_argument():
    foo = two()
    foo.y = foo.x

    def bwd(residual, g):
        found = nnx.clone(residual[0])
        found.x[...] = 5 * g
        return (found,)

    grads = nnx.grad(define(lambda foo: foo.x * foo.y, bwd, GRAPH), **GRAPH)(foo)
    assert grads.x is grads.y and grads.x[...] == 5.0


def test_filters_must_agree_on_variables_in_two_arguments():
    v = nnx.Param(jnp.array(3.0))
    f = define(lambda a, b: a * b, lambda residual, g: residual, GRAPH_UPDATES)
    assert f(v, v) == 9.0
    foo = two()
    nondiff = (nnx.DiffState(0, nnx.PathContains("x")),)
    f = define(lambda a, b: a.x * b.y, lambda *_: None, GRAPH_UPDATES, None, nondiff)
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        f(foo, foo)


def test_it_serves_methods(mode):
    class Scale(zoo.Scale):
        @nnx.custom_vjp(**mode)
        def __call__(self, x):
            return self.w * x

    def bwd(residual, g):
        return None, 5.0 * residual[1]

    Scale.__call__.defvjp(lambda self, x: (self(x), (self, x)), bwd)
    assert Scale()(3.0) == 6.0
    assert nnx.grad(lambda m, x: m(x), argnums=1, **mode)(Scale(), 2.0) == 10.0
    assert Scale.__call__.__name__ == "__call__"


# ------------------------------------------------------------------------------- misuse


def test_it_needs_rules(mode):
    f = nnx.custom_vjp(lambda x: x, **mode)
    kind = ValueError if mode == GRAPH_UPDATES else AttributeError
    with pytest.raises(kind, match="No VJP defined for custom_vjp function <lambda>"):
        f(1.0)


def test_rules_must_return_what_is_expected(mode):
    def use(found, fwd=None):
        f = define(lambda foo, x: foo.x * x, lambda residual, g: found, mode, fwd)
        return nnx.grad(f, argnums=1, **mode)(two(), 2.0)

    assert use((None, 5.0)) == 5.0
    with pytest.raises(TypeError, match="fwd rule must produce a pair"):
        use((None, 5.0), fwd=lambda foo, x: x)
    for found in (5.0, (5.0,), (None, 5.0, 6.0)):
        with pytest.raises(TypeError, match="bwd rule <lambda> must produce a tuple"):
            use(found)
    wrong = [nnx.state(zoo.Scale()), two()]
    if mode != GRAPH_UPDATES:
        wrong = [zoo.Scale(), nnx.state(two())]
    for gradient_of_foo in wrong:
        with pytest.raises(TypeError, match="argument 0"):
            use((gradient_of_foo, 5.0))


def test_none_stands_for_an_object_in_a_container(graph_mode):
    def use(found):
        f = define(lambda foos: foos[0].x * 1, lambda *_: (found,), graph_mode)
        return nnx.grad(f, **graph_mode)([two()])

    (grads,) = use([None])
    assert grads["x"][...] == 0.0 if graph_mode == GRAPH_UPDATES else grads.x[...] == 0
    with pytest.raises(TypeError, match="Wrong structure of the cotangent"):
        use([None, None])


def test_states_must_have_the_differentiable_leaves():
    def use(found):
        nondiff = (nnx.DiffState(0, nnx.PathContains("x")),)
        rule = lambda *_: (found,)  # noqa: E731
        f = define(lambda foo: foo.x * 1, rule, GRAPH_UPDATES, None, nondiff)
        return nnx.grad(f)(two())

    assert use(nnx.State({"x": jnp.array(5.0)}))["x"][...] == 5.0
    with pytest.raises(ValueError, match="Expected State or Variable, got Box"):
        use(two())
    with pytest.raises(TypeError, match="(?s)argument 0:.*unexpected: y"):
        use(nnx.state(two()))
    with pytest.raises(TypeError, match="(?s)argument 0:.*missing: x"):
        use(nnx.State({}))
