"""grad and value_and_grad."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import GRAPH, GRAPH_UPDATES, TREE

ALL, PLAIN = [GRAPH_UPDATES, GRAPH, TREE], [GRAPH, TREE]


class Model(nnx.Module):
    """Its loss at x is ``w * x + b``."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0), tag="x")
        self.b = nnx.Param(jnp.array(1.0))
        self.name = "model"

    def __call__(self, x):
        return self.w * x + self.b


def loss(model, x):
    return model(x) ** 2


# d loss / d (w, b) at w=2, b=1, x=3: 2 * 7 * (3, 1)
GRADS = {"w": 42.0, "b": 14.0}


def as_dict(grads):
    return {
        path[0]: float(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(grads))
    }


# ----------------------------------------------------------------------------- forms


@pytest.mark.parametrize("mode", ALL)
def test_gradients_are_those_of_jax(mode):
    assert as_dict(nnx.grad(loss, **mode)(Model(), 3.0)) == GRADS
    value, grads = nnx.value_and_grad(loss, **mode)(Model(), 3.0)
    assert value == 49.0 and as_dict(grads) == GRADS


@pytest.mark.parametrize("mode", ALL)
def test_second_output_comes_along(mode):
    def f(model, x):
        return loss(model, x), {"aux": x}

    grads, aux = nnx.grad(f, has_aux=True, **mode)(Model(), 3.0)
    assert as_dict(grads) == GRADS and aux == {"aux": 3.0}
    (value, aux), grads = nnx.value_and_grad(f, has_aux=True, **mode)(Model(), 3.0)
    assert value == 49.0 and as_dict(grads) == GRADS and aux == {"aux": 3.0}


def test_form_of_the_gradient_depends_on_the_mode():
    model = Model()
    state = nnx.grad(loss, **GRAPH_UPDATES)(model, 3.0)
    assert type(state) is nnx.State and state["w"].tag == "x"
    for mode in PLAIN:
        grads = nnx.grad(loss, **mode)(model, 3.0)
        assert type(grads) is Model and grads.name == "model" and grads.w.tag == "x"
        assert grads is not model and grads.w is not model.w


@pytest.mark.parametrize("mode", ALL)
def test_variables_and_arrays_are_differentiated_as_such(mode):
    grads = nnx.grad(lambda v, x: v * x, argnums=(0, 1), **mode)(
        nnx.BatchStat(jnp.array(2.0)), jnp.array(3.0)
    )
    assert type(grads) is tuple and type(grads[0]) is nnx.BatchStat
    assert (grads[0][...], grads[1]) == (3.0, 2.0)


@pytest.mark.parametrize("mode", ALL)
def test_states_are_trees_of_variables(mode):
    state = nnx.state(
        nnx.Dict(a=nnx.Cache(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))
    )
    grads = nnx.grad(lambda s: s["a"] * s["b"], **mode)(state)
    assert type(grads) is nnx.State and type(grads["a"]) is nnx.Cache
    assert as_dict(grads) == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize("mode", ALL)
def test_containers_keep_their_form(mode):
    grads = nnx.grad(lambda ms: ms[0](1.0) * ms[1]["k"](1.0), **mode)(
        [Model(), {"k": Model()}]
    )
    assert type(grads) is list and as_dict(grads[1]["k"]) == {"w": 3.0, "b": 3.0}


# --------------------------------------------------------------------------- argnums


@pytest.mark.parametrize("mode", ALL)
def test_argnums_choose_arguments(mode):
    f = nnx.grad(lambda x, model, y: loss(model, x) * y, argnums=(2, 0), **mode)
    dy, dx = f(3.0, Model(), 1.0)
    assert (dy, dx) == (49.0, 28.0)
    assert nnx.grad(lambda a, b: a * b, argnums=-1, **mode)(2.0, 3.0) == 2.0
    (single,) = nnx.grad(lambda a, b: a * b, argnums=(1,), **mode)(2.0, 3.0)
    assert single == 2.0


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_wrong_argnums_are_refused(mode, name):
    transform = getattr(nnx, name)
    with pytest.raises(TypeError, match=f"nnx.{name} requires at least 3 positional"):
        transform(lambda a: a, argnums=2, **mode)(1.0)
    with pytest.raises(TypeError, match="at least 2 positional arguments.*only 1"):
        transform(lambda a: a, argnums=-2, **mode)(1.0)
    with pytest.raises(ValueError, match="argnum 0 is repeated in argnums"):
        transform(lambda a, b: a, argnums=(0, 0), **mode)
    with pytest.raises(ValueError, match="argnum 1 is repeated"):
        transform(lambda a, b: a, argnums=(1, -1), **mode)(1.0, 2.0)
    with pytest.raises(ValueError, match=f"argnums of nnx.{name} is empty"):
        transform(lambda a: a, argnums=(), **mode)
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        transform(lambda a: a, reduce_axes=("x",), **mode)
    with pytest.raises(ValueError, match=f"nnx.{name} does not support bound methods"):
        transform(Model().__call__, **mode)


def test_negative_argnums_keep_the_filter():
    model = nnx.Dict(a=nnx.BatchStat(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))
    f = lambda x, m: m.a * m.b * x  # noqa: E731
    assert as_dict(nnx.grad(f, argnums=-1)(5.0, model)) == {"b": 10.0}
    everything = nnx.DiffState(-1, ...)
    assert set(nnx.grad(f, argnums=everything)(5.0, model)) == {"a", "b"}


def test_defaults_are_arguments_with_graph_updates():
    f = nnx.grad(lambda x, y=3.0: x * y, argnums=1, **GRAPH_UPDATES)
    assert f(2.0) == 2.0 and f(y=4.0, x=5.0) == 5.0


@pytest.mark.parametrize("mode", PLAIN)
def test_keywords_are_not_differentiated_without_graph_updates(mode):
    def f(x, *, model):
        model.w[...] += 1
        return loss(model, x)

    model = Model()
    assert nnx.grad(f, **mode)(3.0, model=model) == 60.0  # w is 3 now: 2 * 10 * 3
    assert model.w[...] == 3.0


def test_diff_state_selects_by_filter():
    model = Model()
    bias = nnx.DiffState(0, nnx.PathContains("b"))
    assert as_dict(nnx.grad(loss, argnums=bias)(model, 3.0)) == {"b": 14.0}
    both = nnx.grad(loss, argnums=(bias, 1))(model, 3.0)
    assert as_dict(both[0]) == {"b": 14.0} and both[1] == 28.0
    assert as_dict(nnx.grad(loss, argnums=nnx.DiffState(0, "x"))(model, 3.0)) == {
        "w": 42.0
    }


def test_diff_state_of_everything_takes_other_types_in():
    model = nnx.Dict(a=nnx.BatchStat(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))
    f = lambda m: m.a * m.b  # noqa: E731
    assert as_dict(nnx.grad(f)(model)) == {"b": 2.0}
    assert as_dict(nnx.grad(f, argnums=nnx.DiffState(0, ...))(model)) == {
        "a": 3.0,
        "b": 2.0,
    }


def test_filters_are_relative_to_each_object():
    target = nnx.DiffState(0, lambda path, x: path == ("w",))
    (grads,) = nnx.grad(lambda models: loss(models[0], 3.0), argnums=target)([Model()])
    assert as_dict(grads) == {"w": 42.0}


@pytest.mark.parametrize("mode", PLAIN)
def test_diff_state_needs_graph_updates(mode):
    with pytest.raises(
        ValueError, match="`argnums` cannot contain `DiffState` objects"
    ):
        nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param), **mode)


def test_nothing_selected_gives_an_empty_state():
    grads = nnx.grad(lambda m: m.s * 1.0)(nnx.Dict(s=nnx.BatchStat(jnp.array(1.0))))
    assert type(grads) is nnx.State and len(grads) == 0


# --------------------------------------------------------------------------- sharing


def test_shared_variable_has_one_summed_gradient():
    shared = nnx.Param(jnp.array(3.0))
    model = nnx.Dict(a=shared, b=nnx.Dict(c=shared))
    f = lambda m: m.a * m.b.c  # noqa: E731
    grads = nnx.grad(f, **GRAPH_UPDATES)(model)
    assert [float(x) for x in jax.tree.leaves(grads)] == [6.0]
    grads = nnx.grad(f, **GRAPH)(model)
    assert grads.a is grads.b.c and grads.a[...] == 6.0


def test_shared_variable_in_two_arguments():
    shared = nnx.Param(jnp.array(3.0))
    f = lambda a, b: a.w * b.w  # noqa: E731
    args = nnx.Dict(w=shared), nnx.Dict(w=shared)
    first, second = nnx.grad(f, argnums=(0, 1), **GRAPH_UPDATES)(*args)
    assert first["w"][...] == 6.0 and len(second) == 0
    for mode in (GRAPH_UPDATES, GRAPH):
        for name in ("grad", "value_and_grad"):
            message = rf"Inconsistent aliasing detected\. .* prefixes in nnx\.{name}:"
            with pytest.raises(ValueError, match=message):
                getattr(nnx, name)(f, argnums=0, **mode)(*args)


# ------------------------------------------------------------------ what else happens


@pytest.mark.parametrize("mode", ALL)
def test_updates_inside_propagate_and_the_gradient_is_of_the_input(mode):
    def f(model, x):
        out = loss(model, x)
        model.w[...] = jnp.array(100.0)
        return out

    model = Model()
    assert as_dict(nnx.grad(f, **mode)(model, 3.0)) == GRADS
    assert model.w[...] == 100.0


@pytest.mark.parametrize("mode", ALL)
def test_integers_are_refused_unless_allowed(mode):
    counted = nnx.Dict(w=nnx.Param(jnp.array(2.0)), n=nnx.Param(jnp.array(3)))
    f = lambda m: m.w * m.n  # noqa: E731
    with pytest.raises(TypeError):
        nnx.grad(f, **mode)(counted)
    grads = nnx.grad(f, allow_int=True, **mode)(counted)
    assert (
        grads["w"][...] == 3.0 and grads["n"].get_raw_value().dtype == jax.dtypes.float0
    )


@pytest.mark.parametrize("mode", ALL)
def test_value_must_be_a_scalar(mode):
    with pytest.raises(TypeError):
        nnx.grad(lambda m: jnp.ones(2) * m.w, **mode)(Model())
    with pytest.raises(TypeError):
        nnx.grad(lambda m: m.w * 1.0, has_aux=True, **mode)(Model())


@pytest.mark.parametrize("mode", ALL)
def test_streams_may_be_drawn_from(mode):
    def f(w, rngs):
        return (w * rngs.normal((3,))).sum()

    rngs, plain = nnx.Rngs(0), nnx.Rngs(0)
    grads = nnx.grad(f, **mode)(nnx.Param(jnp.ones(3)), rngs)
    assert np.allclose(grads[...], plain.normal((3,))) and rngs.default.count[...] == 1


@pytest.mark.parametrize("mode", ALL)
def test_numbers_are_those_of_calculus_in_float64(mode, float64):
    x = np.random.default_rng(0).normal(size=(3, 4))
    w = np.random.default_rng(1).normal(size=(4, 2))
    f = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 3)  # noqa: E731
    grads = nnx.grad(lambda v, x: f(v[...], x), argnums=(0, 1), **mode)(
        nnx.Param(jnp.asarray(w)), jnp.asarray(x)
    )
    y = np.tanh(x @ w)
    inner = 3 * y**2 * (1 - y**2)
    np.testing.assert_allclose(grads[0][...], x.T @ inner, rtol=1e-13)
    np.testing.assert_allclose(grads[1], inner @ w.T, rtol=1e-13)


@pytest.mark.parametrize("mode", ALL)
def test_derivatives_nest(mode):
    def slope(v):
        return nnx.grad(lambda v: v[...] ** 3, **mode)(v)[...]

    assert nnx.grad(slope, **mode)(nnx.Param(jnp.array(2.0)))[...] == 12.0


@pytest.mark.parametrize("mode", ALL)
def test_gradients_of_both_forms_update_the_model(mode):
    model = Model()
    nnx.update(model, nnx.grad(loss, **mode)(model, 3.0))
    assert (model.w[...], model.b[...]) == (42.0, 14.0)


def test_complex_derivatives():
    z = nnx.Param(jnp.array(1.0 + 2.0j))
    for mode in ALL:
        grads = nnx.grad(lambda v: v[...] ** 2, holomorphic=True, **mode)(z)
        assert grads[...] == 2.0 + 4.0j


# ------------------------------------------------------------------------------- peers


@pytest.mark.peers
@pytest.mark.parametrize("mode", [GRAPH_UPDATES, TREE], ids=["graph_updates", "tree"])
def test_gradients_are_those_of_the_peer(mode):
    peer = pytest.importorskip("flax.nnx")

    def results(nnx):
        def f(model, x):
            model.stat[...] += 1
            return jnp.sum(model.linear(x) ** 2) * model.scale, {"aux": x}

        model = nnx.Dict(
            linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
            scale=nnx.Param(jnp.array(3.0)),
            stat=nnx.BatchStat(jnp.array(0.0)),
        )
        out, grads = nnx.value_and_grad(f, argnums=(0, 1), has_aux=True, **mode)(
            model, jnp.ones((1, 2))
        )
        flat = nnx.to_flat_state(nnx.state(grads[0]))
        return (
            {path: leaf[...] for path, leaf in flat},
            (out, grads[1]),
            model.stat[...],
        )

    ours, theirs = results(nnx), results(peer)
    assert ours[0].keys() == theirs[0].keys()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("make", [nnx.grad, nnx.value_and_grad])
def test_objects_are_no_argnums(make, graph):
    """Issue 12, §13."""
    with pytest.raises(ValueError, match="Graph nodes are not allowed") as caught:
        make(lambda x: x, argnums=nnx.Dict(a=nnx.Param(1)), graph=graph)
    assert "Dict" in str(caught.value) and "nnx.DiffState" in str(caught.value)
