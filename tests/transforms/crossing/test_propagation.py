"""What the modes are, and cases that the contract's table of all transforms leaves out.

What each mode lets through is in `tests/contract/test_transforms/test_matrix.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import config

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


@every_call
def test_values_may_change_their_shape(call, mode):
    model = nnx.Dict(a=nnx.Param(jnp.array(1.0)))
    variable = model["a"]
    call(lambda m: m["a"].set_value(jnp.full(3, 7.0)), **mode)(model)
    assert model["a"] is variable and variable[...].tolist() == [7.0, 7.0, 7.0]


def test_function_that_jax_refuses_changes_nothing(mode):
    def bad(m):
        m["a"][...] *= 2
        m["static"] = 5
        return "no array"

    model = nnx.Dict(a=nnx.Param(jnp.array(1.0)), static=1)
    with pytest.raises(TypeError):
        nnx.jit(bad, **mode)(model)
    assert model["a"][...] == 1.0 and model["static"] == 1


@every_call
def test_bookkeeping_of_containers_is_never_visible(call, mode):
    model = nnx.Dict(items=nnx.data([nnx.Param(jnp.array(1.0))]))

    def change(m):
        m["items"][0][...] *= 2
        m["items"].append(nnx.Param(jnp.array(3.0)))

    outer = model["items"]
    call(change, **mode)(model)
    assert len(outer) == 1 and outer[0][...] == 2.0


class Fixed(nnx.Module):
    """Only attributes can change in it; two of them hold nothing, or what is fixed."""

    def __init__(self):
        self.layer = nnx.LinearGeneral(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.scale = nnx.data(None)


def containers():
    return nnx.Dict(
        named=nnx.data({"a": nnx.Param(jnp.ones(2)), "b": [jnp.ones(1)]}), size=1
    )


CHANGES = (
    lambda fixed, others: None,
    lambda fixed, others: setattr(fixed, "scale", nnx.Param(jnp.zeros(2))),
    lambda fixed, others: setattr(fixed.layer, "bias", nnx.Param(jnp.zeros(2))),
    lambda fixed, others: setattr(fixed.layer, "kernel", others.named["a"]),
    lambda fixed, others: setattr(fixed.layer, "use_bias", True),
    lambda fixed, others: others.named.update(c=nnx.Param(jnp.zeros(1))),
    lambda fixed, others: others.named.update(a=fixed.layer.kernel),
    lambda fixed, others: others.named["b"].append(jnp.zeros(1)),
    lambda fixed, others: others.named["b"].__setitem__(0, jnp.zeros(1)),
    lambda fixed, others: others.named.pop("a"),
    lambda fixed, others: setattr(others, "size", 2),
    lambda fixed, others: setattr(others, "fixed", fixed),
)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_objects_that_are_built_as_before_hide_no_change_in_others(change, swapped):
    def call(fixed, others):
        fixed.layer.kernel[...] += 1
        change(fixed, others)

    ours, theirs = (Fixed(), containers()), (Fixed(), containers())
    kernel = ours[0].layer.kernel
    call(*theirs)
    if swapped:
        nnx.jit(lambda others, fixed: call(fixed, others))(*ours[::-1])
    else:
        nnx.jit(call)(*ours)
    ours_def, ours_state = nnx.split(ours)
    theirs_def, theirs_state = nnx.split(theirs)
    assert ours_def == theirs_def
    jax.tree.map(np.testing.assert_allclose, ours_state, theirs_state)
    assert (kernel is ours[0].layer.kernel) == (change is not CHANGES[3])
