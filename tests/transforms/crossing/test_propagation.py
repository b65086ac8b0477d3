"""What the modes are, and cases that the contract's table of all transforms leaves out.

What each mode lets through is in `tests/contract/test_transforms/test_matrix.py`.
"""

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import config
from tests import modes

# How a function is run on a model.
CALLS = {
    "jit": nnx.jit,
    "grad": lambda f, **mode: nnx.grad(loss_of(f), **mode),
    "value_and_grad": lambda f, **mode: nnx.value_and_grad(loss_of(f), **mode),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def loss_of(f):
    def loss(model):
        f(model)
        return jnp.array(0.0)

    return loss


def test_modes_are_two_booleans():
    assert config.propagation(True, True) == config.GRAPH_UPDATES
    assert config.propagation(True, False) == config.GRAPH
    assert config.propagation(False, True) == config.TREE
    assert config.propagation(None, None) == config.GRAPH_UPDATES
    with nnx.set_graph_updates(False):
        assert config.propagation(None, None) == config.GRAPH


def test_mode_is_that_of_the_decoration():
    with nnx.set_graph_updates(False):
        jitted = nnx.jit(lambda m: m.__setitem__("static", 2))
    model = nnx.Dict(static=1)
    jitted(model)
    assert model["static"] == 1


@modes.MODES
@every_call
def test_values_may_change_their_shape(call, mode):
    model = nnx.Dict(a=nnx.Param(jnp.array(1.0)))
    variable = model["a"]
    call(lambda m: m["a"].set_value(jnp.full(3, 7.0)), **mode)(model)
    assert model["a"] is variable and variable[...].tolist() == [7.0, 7.0, 7.0]


@modes.MODES
def test_function_that_jax_refuses_changes_nothing(mode):
    def bad(m):
        m["a"][...] *= 2
        m["static"] = 5
        return "no array"

    model = nnx.Dict(a=nnx.Param(jnp.array(1.0)), static=1)
    with pytest.raises(TypeError):
        nnx.jit(bad, **mode)(model)
    assert model["a"][...] == 1.0 and model["static"] == 1


@modes.MODES
@every_call
def test_bookkeeping_of_containers_is_never_visible(call, mode):
    model = nnx.Dict(items=nnx.data([nnx.Param(jnp.array(1.0))]))

    def change(m):
        m["items"][0][...] *= 2
        m["items"].append(nnx.Param(jnp.array(3.0)))

    outer = model["items"]
    call(change, **mode)(model)
    assert len(outer) == 1 and outer[0][...] == 2.0
