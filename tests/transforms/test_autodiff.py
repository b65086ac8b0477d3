"""grad and value_and_grad (contract, section 2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

UPDATES = {"graph": True, "graph_updates": True}
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}
ALL, PLAIN = [UPDATES, GRAPH, TREE], [GRAPH, TREE]


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
    state = nnx.grad(loss, **UPDATES)(model, 3.0)
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
def test_wrong_argnums_are_refused(mode):
    with pytest.raises(ValueError):
        nnx.grad(lambda a: a, argnums=2, **mode)(1.0)
    with pytest.raises(ValueError, match="repeated"):
        nnx.grad(lambda a, b: a, argnums=(0, 0), **mode)
    with pytest.raises(NotImplementedError):
        nnx.grad(lambda a: a, reduce_axes=("x",), **mode)


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
    grads = nnx.grad(f, **UPDATES)(model)
    assert [float(x) for x in jax.tree.leaves(grads)] == [6.0]
    grads = nnx.grad(f, **GRAPH)(model)
    assert grads.a is grads.b.c and grads.a[...] == 6.0


def test_shared_variable_in_two_arguments():
    shared = nnx.Param(jnp.array(3.0))
    f = lambda a, b: a.w * b.w  # noqa: E731
    args = nnx.Dict(w=shared), nnx.Dict(w=shared)
    first, second = nnx.grad(f, argnums=(0, 1), **UPDATES)(*args)
    assert first["w"][...] == 6.0 and len(second) == 0
    for mode in (UPDATES, GRAPH):
        with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
            nnx.grad(f, argnums=0, **mode)(*args)


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
def test_new_objects_may_be_returned(mode):
    def f(model):
        return loss(model, 3.0), nnx.Dict(new=nnx.Param(model.w * 2))

    _, made = nnx.grad(f, has_aux=True, **mode)(Model())
    assert made.new[...] == 4.0
    made.new[...] += 1
    made.other = 1


def test_returned_inputs_are_the_callers_objects():
    model = Model()
    _, (out, w) = nnx.grad(lambda m: (loss(m, 3.0), (m, m.w)), has_aux=True)(model)
    assert out is model and w is model.w


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
def test_derivatives_nest(mode):
    def slope(v):
        return nnx.grad(lambda v: v[...] ** 3, **mode)(v)[...]

    assert nnx.grad(slope, **mode)(nnx.Param(jnp.array(2.0)))[...] == 12.0


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("outer", [nnx.jit, jax.jit])
def test_derivatives_work_inside_jit(mode, outer):
    options = mode if outer is nnx.jit else {}
    f = outer(lambda m, x: jax.tree.leaves(nnx.grad(loss, **mode)(m, x)), **options)
    assert f(Model(), 3.0) == [14.0, 42.0]


@pytest.mark.parametrize("mode", ALL)
def test_jitted_functions_can_be_differentiated(mode):
    assert as_dict(nnx.grad(nnx.jit(loss, **mode), **mode)(Model(), 3.0)) == GRADS


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
