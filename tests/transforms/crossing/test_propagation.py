"""The three modes, and what each lets through (contract `transforms-and-refs`, 1.2)."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import config

MODES = {
    "graph_updates": {"graph": True, "graph_updates": True},
    "graph": {"graph": True, "graph_updates": False},
    "tree": {"graph": False},
}
# How a function is run on a model.
CALLS = {
    "jit": lambda f, **mode: nnx.jit(f, **mode),
    "grad": lambda f, **mode: nnx.grad(loss_of(f), **mode),
    "value_and_grad": lambda f, **mode: nnx.value_and_grad(loss_of(f), **mode),
}


def loss_of(f):
    def loss(model):
        f(model)
        return jnp.array(0.0)

    return loss


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0), tag="x")
        self.b = nnx.Param(jnp.array(2.0))
        self.array = jnp.array(3.0)
        self.static = 1
        self.sub = nnx.Dict(w=nnx.Param(jnp.array(4.0)))


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture(params=CALLS)
def call(request, mode):
    return lambda f, model: CALLS[request.param](f, **mode)(model)


def test_modes_are_two_booleans():
    assert config.propagation(True, True) == config.GRAPH_UPDATES
    assert config.propagation(True, False) == config.GRAPH
    assert config.propagation(False, True) == config.TREE
    assert config.propagation(None, None) == config.GRAPH_UPDATES
    with nnx.set_graph_updates(False):
        assert config.propagation(None, None) == config.GRAPH


def test_mode_is_that_of_the_decoration():
    with nnx.set_graph_updates(False):
        jitted = nnx.jit(lambda m: setattr(m, "static", 2))
    model = Model()
    jitted(model)
    assert model.static == 1


# ---------------------------------------------------------------- in every mode

VALUES = {
    "in place": (lambda m: m.a.__setitem__(..., m.a * 10), 10.0),
    "replaced": (lambda m: m.a.set_value(jnp.full(3, 7.0)), [7.0, 7.0, 7.0]),
    "other dtype": (lambda m: m.a.set_value(jnp.array(3)), 3),
    "added": (lambda m: m.a.__setitem__(..., m.a + m.b[...]), 3.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_reach_the_callers_variables(name, call):
    change, value = VALUES[name]
    model = Model()
    variable = model.a
    call(change, model)
    assert model.a is variable and variable[...].tolist() == value


def test_values_may_change_their_tree_structure(call):
    model = Model()
    call(lambda m: m.a.set_value({"x": jnp.array(1.0), "y": (jnp.array(2.0),)}), model)
    assert model.a.get_value() == {"x": 1.0, "y": (2.0,)}


def test_metadata_reaches_the_callers_variables(call):
    model = Model()
    call(lambda m: m.a.set_metadata(tag="y", new=1), model)
    assert (model.a.tag, model.a.new) == ("y", 1)


def test_unchanged_variables_keep_their_value_object(call):
    model = Model()
    kept = np.array(5.0, np.float32)
    model.b.set_raw_value(kept)
    call(lambda m: m.a.__setitem__(..., m.a * 2), model)
    assert model.b.get_raw_value() is kept


def test_failed_functions_change_nothing(call):
    def fails(m):
        m.a[...] *= 2
        m.static = 5
        m.new = nnx.Param(jnp.array(0.0))
        m.a.set_metadata(tag="y")
        del m.sub
        raise RuntimeError("stop")

    model = Model()
    before, values = dict(vars(model)), jax.tree.leaves(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            call(fails, model)
        assert vars(model) == before and model.a.tag == "x"
        assert all(map(operator.is_, jax.tree.leaves(model), values))
    call(lambda m: m.a.__setitem__(..., m.a * 2), model)
    assert model.a[...] == 2.0


def test_function_that_jax_refuses_changes_nothing(mode):
    def bad(m):
        m.a[...] *= 2
        m.static = 5
        return "no array"

    model = Model()
    with pytest.raises(TypeError):
        nnx.jit(bad, **mode)(model)
    assert model.a[...] == 1.0 and model.static == 1


def test_no_tracer_stays_behind(call):
    model = Model()
    seen = []

    def change(m):
        m.a[...] *= 2
        m.array = m.array + 1
        m.new = nnx.Param(m.b * 2)
        seen.append(m)

    call(change, model)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model))
    assert seen[0] is not model


# ----------------------------------------------------- with graph updates only

STRUCTURE = {
    "array": (lambda m: setattr(m, "array", m.array + 1), lambda m: m.array == 4.0),
    "static": (lambda m: setattr(m, "static", 5), lambda m: m.static == 5),
    "new static": (lambda m: setattr(m, "new", "x"), lambda m: hasattr(m, "new")),
    "new Variable": (
        lambda m: setattr(m, "new", nnx.Param(m.a * 7)),
        lambda m: hasattr(m, "new") and m.new[...] == 7.0,
    ),
    "new module": (
        lambda m: setattr(m, "new", nnx.Dict(x=nnx.Param(jnp.array(1.0)))),
        lambda m: hasattr(m, "new") and m.new.x[...] == 1.0,
    ),
    "deleted": (lambda m: delattr(m, "static"), lambda m: not hasattr(m, "static")),
    "nested": (lambda m: m.sub.__setitem__("n", 1), lambda m: "n" in m.sub),
    "self": (lambda m: setattr(m, "me", m), lambda m: getattr(m, "me", None) is m),
    "alias": (
        lambda m: setattr(m, "c", m.a),
        lambda m: getattr(m, "c", None) is m.a,
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_reaches_the_caller_with_graph_updates_only(name, call, mode):
    change, arrived = STRUCTURE[name]
    model = Model()
    call(change, model)
    assert bool(arrived(model)) is mode.get("graph_updates", False)


def test_swapped_attributes_keep_their_identity(call, mode):
    def swap(m):
        m.a, m.b = m.b, m.a

    model = Model()
    a, b = model.a, model.b
    call(swap, model)
    if mode.get("graph_updates"):
        a, b = b, a
    assert model.a is a and model.b is b


def test_bookkeeping_of_containers_is_never_visible(call):
    model = nnx.Dict(items=nnx.data([nnx.Param(jnp.array(1.0))]))

    def change(m):
        m["items"][0][...] *= 2
        m["items"].append(nnx.Param(jnp.array(3.0)))

    outer = model["items"]
    call(change, model)
    assert len(outer) == 1 and outer[0][...] == 2.0
