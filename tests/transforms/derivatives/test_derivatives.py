"""`grad`, `value_and_grad`, `vjp` and `jvp`; gradients of what a function wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables, zoo
from tests.contract.test_transforms.matrix import cases
from tests.modes import BY_NAME, GRAPH, GRAPH_UPDATES, TREE


def line(w=2.0, b=1.0):
    """A model of ``w * x + b``."""
    w, b = nnx.Param(jnp.asarray(w), tag="x"), nnx.Param(jnp.asarray(b))
    return zoo.Box(w=w, b=b, name="line")


def value(model, x):
    return model.w * x + model.b


def loss(model, x):
    return value(model, x) ** 2


# d loss / d (w, b) at w=2, b=1, x=3: 2 * 7 * (3, 1)
GRADS = {"w": 42.0, "b": 14.0}


def as_dict(grads):
    flat = nnx.to_flat_state(nnx.state(grads))
    return {path[0]: float(leaf[...]) for path, leaf in flat}


def product(a, b):
    return a * b


# ----------------------------------------------------------------------------- forms


def test_gradients_are_those_of_jax(mode):
    model = line()
    grads = nnx.grad(loss, **mode)(model, 3.0)
    assert as_dict(grads) == GRADS and grads.w.tag == "x"
    if mode == GRAPH_UPDATES:
        assert type(grads) is nnx.State
    else:
        assert type(grads) is zoo.Box and grads.name == "line"
        assert grads is not model and grads.w is not model.w
    found, grads = nnx.value_and_grad(loss, **mode)(model, 3.0)
    assert found == 49.0 and as_dict(grads) == GRADS


def test_second_output_comes_along(mode):
    def f(model, x):
        return loss(model, x), {"aux": x}

    grads, aux = nnx.grad(f, has_aux=True, **mode)(line(), 3.0)
    (found, same), again = nnx.value_and_grad(f, has_aux=True, **mode)(line(), 3.0)
    assert found == 49.0 and aux == same == {"aux": 3.0}
    assert as_dict(grads) == as_dict(again) == GRADS


def test_variables_and_arrays_are_differentiated_as_such(mode):
    args = nnx.BatchStat(jnp.array(2.0)), jnp.array(3.0)
    grads = nnx.grad(product, argnums=(0, 1), **mode)(*args)
    assert type(grads) is tuple and type(grads[0]) is nnx.BatchStat
    assert (grads[0][...], grads[1]) == (3.0, 2.0)


def test_containers_keep_their_form(mode):
    def f(models):
        return value(models[0], 1.0) * value(models[1]["k"], 1.0)

    grads = nnx.grad(f, **mode)([line(), {"k": line()}])
    assert type(grads) is list and as_dict(grads[1]["k"]) == {"w": 3.0, "b": 3.0}


# --------------------------------------------------------------------------- argnums


def test_argnums_choose_arguments(mode):
    f = nnx.grad(lambda x, model, y: loss(model, x) * y, argnums=(2, 0), **mode)
    dy, dx = f(3.0, line(), 1.0)
    assert (dy, dx) == (49.0, 28.0)
    assert nnx.grad(product, argnums=-1, **mode)(2.0, 3.0) == 2.0
    (single,) = nnx.grad(product, argnums=(1,), **mode)(2.0, 3.0)
    assert single == 2.0


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_wrong_argnums_are_refused(mode, name):
    def make(f, **options):
        return getattr(nnx, name)(f, **options, **mode)

    with pytest.raises(TypeError, match=f"nnx.{name} requires at least 3 positional"):
        make(jnp.sin, argnums=2)(1.0)
    with pytest.raises(TypeError, match="at least 2 positional arguments.*only 1"):
        make(jnp.sin, argnums=-2)(1.0)
    with pytest.raises(ValueError, match="argnum 0 is repeated in argnums"):
        make(product, argnums=(0, 0))
    with pytest.raises(ValueError, match="argnum 1 is repeated"):
        make(product, argnums=(1, -1))(1.0, 2.0)
    with pytest.raises(ValueError, match=f"argnums of nnx.{name} is empty"):
        make(jnp.sin, argnums=())
    told = "Graph nodes are not allowed", "Dict", "nnx.DiffState"
    with comparisons.raises(ValueError, *told):
        make(jnp.sin, argnums=nnx.Dict(a=nnx.Param(1)))  # issue 12, §13
    if mode != GRAPH_UPDATES:
        with pytest.raises(ValueError, match="`argnums` cannot contain `DiffSt"):
            make(loss, argnums=nnx.DiffState(0, nnx.Param))


def test_defaults_are_arguments_with_graph_updates():
    f = nnx.grad(lambda x, y=3.0: x * y, argnums=1, **GRAPH_UPDATES)
    assert f(2.0) == 2.0 and f(y=4.0, x=5.0) == 5.0


def test_keywords_are_not_differentiated_without_graph_updates(value_mode):
    def f(x, *, model):
        model.w[...] += 1
        return loss(model, x)

    model = line()
    slope = nnx.grad(f, **value_mode)(3.0, model=model)
    assert slope == 60.0 and model.w[...] == 3.0  # 2 * 10 * 3 with that w


FILTERS = {
    "all parameters": (0, GRADS),
    "a path": (nnx.DiffState(0, nnx.PathContains("b")), {"b": 14.0}),
    "a tag": (nnx.DiffState(0, "x"), {"w": 42.0}),
    "several": (nnx.DiffState(0, ("x", nnx.PathContains("b"))), GRADS),
    "nothing": (nnx.DiffState(0, nnx.BatchStat), {}),
    "from the end": (-2, GRADS),
    "a filter from the end": (nnx.DiffState(-2, "x"), {"w": 42.0}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_select_variables(name):
    argnums, expected = FILTERS[name]
    grads = nnx.grad(loss, argnums=argnums)(line(), 3.0)
    assert type(grads) is nnx.State and as_dict(grads) == expected
    grads, slope = nnx.grad(loss, argnums=(argnums, 1))(line(), 3.0)
    assert as_dict(grads) == expected and slope == 28.0


def test_parameters_are_differentiated_unless_a_filter_says_more():
    model = nnx.Dict(a=nnx.BatchStat(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))

    def f(model):
        return model.a * model.b

    for number in (0, -1):
        assert as_dict(nnx.grad(f, argnums=number)(model)) == {"b": 2.0}
        everything = nnx.DiffState(number, ...)
        assert as_dict(nnx.grad(f, argnums=everything)(model)) == {"a": 3.0, "b": 2.0}


def test_filters_are_relative_to_each_object():
    target = nnx.DiffState(0, lambda path, x: path == ("w",))
    (grads,) = nnx.grad(lambda models: loss(*models, 3.0), argnums=target)([line()])
    assert as_dict(grads) == {"w": 42.0}


# --------------------------------------------------------------------------- sharing


def test_shared_variable_has_one_summed_gradient(graph_mode):
    shared = nnx.Param(jnp.array(3.0))
    model = nnx.Dict(a=shared, b=nnx.Dict(c=shared))
    grads = nnx.grad(lambda model: model.a * model.b.c, **graph_mode)(model)
    if graph_mode == GRAPH_UPDATES:
        assert as_dict(grads) == {"a": 6.0}
    else:
        assert grads.a is grads.b.c and grads.a[...] == 6.0


def test_shared_variable_in_two_arguments(graph_mode):
    shared = nnx.Param(jnp.array(3.0))
    args = nnx.Dict(w=shared), nnx.Dict(w=shared)

    def f(a, b):
        return a.w * b.w

    first, second = nnx.grad(f, argnums=(0, 1), **graph_mode)(*args)
    assert first["w"][...] == 6.0
    if graph_mode == GRAPH_UPDATES:
        assert len(second) == 0
    else:
        assert second["w"] is first["w"]
    for transform in (nnx.grad, nnx.value_and_grad):
        name = transform.__name__
        message = rf"Inconsistent aliasing detected\. .* prefixes in nnx\.{name}:"
        with pytest.raises(ValueError, match=message):
            transform(f, argnums=0, **graph_mode)(*args)


# ------------------------------------------------------------------ what else happens


def test_integers_are_refused_unless_allowed(mode):
    def f(model):
        return model.w * model.n

    counted = nnx.Dict(w=nnx.Param(jnp.array(2.0)), n=nnx.Param(jnp.array(3)))
    with pytest.raises(TypeError):
        nnx.grad(f, **mode)(counted)
    grads = nnx.grad(f, allow_int=True, **mode)(counted)
    assert grads["w"][...] == 3.0
    assert grads["n"].get_raw_value().dtype == jax.dtypes.float0


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
@tables.cases(
    "out, words",
    ((1.0, 2.0), ("returned a tuple", "has_aux=True")),
    ([1.0], ("returned a list", "has_aux=True")),
    ({"loss": 1.0}, ("returned a dict", "Return the loss.")),
    (None, ("returned None", "Return the loss.")),
)
def test_what_has_no_gradient_says_the_way_out(name, out, words, mode):
    gradient = getattr(nnx, name)(lambda m: out, **mode)
    words = "scalar-output functions", f"nnx.{name}", *words
    with comparisons.raises(TypeError, *words):
        gradient(line())


def test_complex_derivatives(mode):
    z = nnx.Param(jnp.array(1.0 + 2.0j))
    grads = nnx.grad(lambda v: v[...] ** 2, holomorphic=True, **mode)(z)
    assert grads[...] == 2.0 + 4.0j


# ----------------------------------------------------------------------- vjp and jvp


def ones_like(model):
    return jax.tree.map(jnp.ones_like, model)


def test_cotangents_are_pulled_back(value_mode):
    out, backward = nnx.vjp(loss, line(), 3.0, **value_mode)
    grads, slope = backward(2.0)
    assert out == 49.0 and type(grads) is zoo.Box and grads.name == "line"
    assert as_dict(grads) == {"w": 84.0, "b": 28.0} and slope == 56.0
    assert as_dict(backward(0.0)[0]) == {"w": 0.0, "b": 0.0}


def test_tangents_are_pushed_forward(value_mode):
    tangents = ones_like(line()), 1.0
    out, tangent = nnx.jvp(loss, (line(), 3.0), tangents, **value_mode)
    assert out == 49.0 and tangent == 42.0 + 14.0 + 28.0


def test_second_outputs_of_products_come_along(value_mode):
    def f(model, x):
        return value(model, x), {"new": nnx.Param(x * 2)}

    options = {"has_aux": True, **value_mode}
    out, backward, aux = nnx.vjp(f, line(), 3.0, **options)
    assert (out, backward(1.0)[1], aux["new"][...]) == (7.0, 2.0, 6.0)
    args = (line(), 3.0), (jax.tree.map(jnp.zeros_like, line()), 1.0)
    out, tangent, aux = nnx.jvp(f, *args, **options)
    assert (out, tangent, aux["new"][...]) == (7.0, 2.0, 6.0)
    with pytest.raises(TypeError, match="must return a pair"):
        nnx.vjp(loss, line(), 3.0, **options)


def test_outputs_of_products_may_be_objects(value_mode):
    def f(x):
        return {"model": line(x**2, 5 * x)}

    out, backward = nnx.vjp(f, jnp.array(3.0), **value_mode)
    assert as_dict(out["model"]) == {"w": 9.0, "b": 15.0}
    assert backward({"model": line(2.0, 1.0)}) == (2 * 6.0 + 1 * 5.0,)
    out, tangent = nnx.jvp(f, (jnp.array(3.0),), (jnp.array(1.0),), **value_mode)
    assert type(tangent["model"]) is zoo.Box
    assert as_dict(tangent["model"]) == {"w": 6.0, "b": 5.0}


def test_pullbacks_leave_jit(value_mode):
    @jax.jit
    def pullback(x):
        return nnx.vjp(value, line(), x, **value_mode)[1]

    assert as_dict(pullback(3.0)(jnp.array(2.0))[0]) == {"w": 6.0, "b": 2.0}


def test_shared_variables_have_one_gradient_and_one_tangent():
    def f(a, b):
        return a[...] * b["v"][...]

    primals, tangents = (
        (v, {"v": v}) for v in (nnx.Param(jnp.array(3.0)), nnx.Param(jnp.array(1.0)))
    )
    out, backward = nnx.vjp(f, *primals, **GRAPH)
    first, second = backward(1.0)
    assert out == 9.0 and first is second["v"] and first[...] == 6.0
    assert nnx.jvp(f, primals, tangents, **GRAPH) == (9.0, 6.0)
    others = tangents[0], {"v": nnx.Param(jnp.array(10.0))}
    with pytest.raises(TypeError, match="An object that occurs twice has one"):
        nnx.jvp(f, primals, others, **GRAPH)


def test_cotangents_share_what_the_outputs_share():
    def outputs(a, b):
        shared = nnx.Param(jnp.asarray(a))
        return zoo.Box(a=shared), [zoo.Box(a=shared, b=nnx.Param(jnp.asarray(b)))]

    _, backward = nnx.vjp(lambda x: outputs(x, x**2), jnp.array(3.0), **GRAPH)
    assert backward(outputs(5.0, 7.0)) == (5.0 + 7.0 * 2 * 3.0,)
    _, backward = nnx.vjp(lambda x: (zoo.Box(a=nnx.Param(x)),) * 2, 3.0, **GRAPH)
    assert backward((zoo.Box(a=nnx.Param(1.0)), None)) == (1.0,)
    with pytest.raises(TypeError, match="An object that occurs twice has one"):
        backward((zoo.Box(a=nnx.Param(1.0)), zoo.Box(a=nnx.Param(1.0))))


@tables.cases("tangent", None, [1.0], {"b": jnp.array(1.0)})
def test_tangents_of_another_structure_are_named(tangent, value_mode):
    box = zoo.Box(a=nnx.Param({"a": jnp.array(3.0)}))
    wrong = zoo.Box(a=nnx.Param(tangent))
    with pytest.raises(TypeError, match=r"same tree structure, but at primals\[0\]\.a"):
        nnx.jvp(lambda box: box.a["a"], (box,), (wrong,), **value_mode)


def test_tangents_of_trees_are_not_shared():
    v = nnx.Param(jnp.array(3.0))
    with pytest.raises(ValueError, match=r"\.tangents\[0\]"):
        nnx.jvp(product, (v, nnx.clone(v)), (v, v), **TREE)


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, nnx.vjp])
def test_reduced_axes_are_refused(transform):
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        transform(loss, reduce_axes=("x",), **TREE)


def test_wrong_forms_are_refused(value_mode):
    _, backward = nnx.vjp(lambda x: nnx.Dict(a=nnx.Param(x)), 3.0, **value_mode)
    for wrong in (1.0, nnx.Dict(b=nnx.Param(1.0))):
        with pytest.raises(ValueError, match="the cotangent") as error:
            backward(wrong)
        assert isinstance(error.value, TypeError)

    def jvp(primals, tangents):
        return nnx.jvp(lambda v: v * 1, primals, tangents, **value_mode)

    v, count = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(1))
    with pytest.raises(TypeError, match="structure of the tangents"):
        jvp((v,), (nnx.clone(v), 1.0))
    with pytest.raises(TypeError, match="primals of nnx.jvp must be a tuple"):
        jvp(v, v)
    with pytest.raises(TypeError, match="float0"):
        jvp((count,), (nnx.clone(count),))


def test_products_have_the_numbers_of_jax(value_mode, float64):
    def f(x):
        return jnp.sin(x[...]) * jnp.cumsum(x[...])

    x, ct, dx = np.random.default_rng(0).normal(size=(3, 3))
    v, dv = nnx.Param(jnp.asarray(x)), nnx.Param(jnp.asarray(dx))
    (grad,) = nnx.vjp(f, v, **value_mode)[1](jnp.asarray(ct))
    np.testing.assert_array_equal(grad, jax.vjp(f, x)[1](ct)[0])
    _, tangent = nnx.jvp(f, (v,), (dv,), **value_mode)
    np.testing.assert_array_equal(tangent, jax.jvp(f, (x,), (dx,))[1])


# -------------------------------------------------------- gradients of what was written


X = np.array([0.5, 1.5], np.float32)


def step(v, x=None):
    """Writes a Variable, and returns a value that depends on it."""
    v[...] = jnp.sin(v[...]) * 2
    return v[...]


@functools.cache
def by_jax(*returns):
    """The gradient of the same steps on arrays, of which some return a value."""

    def loss(x):
        total = 0.0
        for is_returned in returns:
            x = jnp.sin(x) * 2
            total += x.sum() * is_returned
        return total + (x**3).sum()

    return jax.jit(jax.grad(loss))(X)


def check(call, returns, mode):
    """Compares gradients through a call that writes a Variable, and returns values."""

    def loss(v):
        return jnp.sum(call(v)) + (v[...] ** 3).sum()

    found = nnx.grad(loss, **mode)(nnx.Param(jnp.asarray(X)))
    np.testing.assert_allclose(found, by_jax(*returns), rtol=1e-5)


TRANSFORMS = "jit jit_partial grad vjp remat vmap scan fori_loop cond switch".split()


@cases(lambda row: row.transform in TRANSFORMS, without=("compiled", "scan broadcast"))
def test_gradients_go_through_what_was_written(case):
    def call(v):
        out = case(step, v)
        return out if case.row.has_output else 0.0

    check(call, [case.row.has_output], BY_NAME[case.mode])


def test_gradients_go_through_what_each_step_of_a_loop_wrote(mode):
    def call(v):
        nnx.fori_loop(0, 2, lambda i, v: (step(v), v)[1], v, **mode)
        scan = nnx.scan(lambda v, x: (v, step(v)), in_axes=(nnx.Carry, 0), **mode)
        return scan(v, jnp.zeros(2))[1]

    check(call, [0, 0, 1, 1], mode)


def with_rule(bwd, mode):
    f = nnx.custom_vjp(lambda v: step(v).sum(), **mode)

    def fwd(v):
        x = v[...]
        return f(v), x

    f.defvjp(fwd, bwd)
    return f


def bwd_of_output(x, g):
    return (nnx.Param(g * jnp.cos(x) * 2),)


def bwd_with_updates(x, g, *, updates_g):
    return (nnx.Param((g + updates_g[0][...]) * jnp.cos(x) * 2),)


def bwd_of_graph_updates(x, g):
    (v_g,), out_g = g
    return (nnx.Param((out_g + v_g[...]) * jnp.cos(x) * 2),)


OUTER = tables.cases(
    "outer", lambda f, **mode: f, nnx.jit, nnx.remat, ids=["eager", "jit", "remat"]
)


@OUTER
def test_custom_vjp_tells_of_a_gradient_that_its_rule_drops(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)

    def loss(tree):
        return f(tree["v"]) + (tree["v"][...] ** 3).sum()

    told = pytest.warns(nnx.errors.LostUpdateWarning, match="does not take its cot")
    with told as caught:
        nnx.grad(loss, **value_mode)({"v": nnx.Param(jnp.asarray(X))})
    words = "bwd_of_output", "written by <lambda>: args[0]"
    for word in (*words, "`updates_g`", "Return the new value"):
        assert word in str(caught[0].message)


@OUTER
def test_custom_vjp_may_write_what_the_gradient_does_not_need(value_mode, outer):
    f = outer(with_rule(bwd_of_output, value_mode), **value_mode)
    v = nnx.Param(jnp.asarray(X))
    found = nnx.grad(f, **value_mode)(v)[...]
    np.testing.assert_allclose((found, v), (np.cos(X) * 2, np.sin(X) * 2), rtol=1e-6)


@pytest.mark.filterwarnings("error::graftree.errors.LostUpdateWarning")
def test_custom_vjp_may_count_in_a_loop(value_mode):
    def count_and_double(count, x):
        count[...] += 1
        return 2 * x

    double = nnx.custom_vjp(count_and_double, **value_mode)
    double.defvjp(
        lambda count, x: (count_and_double(count, x), None),
        lambda _, g: (None, 2 * g),
    )
    count = nnx.Variable(jnp.array(0))

    def loss(x, count):
        def body(_, carry):
            count, x = carry
            return count, double(count, x)

        return nnx.fori_loop(0, 3, body, (count, x), **value_mode)[1]

    assert nnx.grad(loss, **value_mode)(1.0, count) == 8.0
    assert count[...] == 3


@tables.cases(
    "bwd, mode",
    (bwd_with_updates, GRAPH),
    (bwd_with_updates, TREE),
    (bwd_of_graph_updates, GRAPH_UPDATES),
    ids=["graph", "tree", "graph_updates"],
)
def test_custom_vjp_gives_the_rule_what_was_written(bwd, mode):
    check(with_rule(bwd, mode), [1], mode)
