"""`nnx.debugging.intercept`: what modules return, seen or replaced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.modes import MODES


def model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(2, 3, rngs=rngs), nnx.relu, nnx.Linear(3, 1, rngs=rngs)
    )


def recorder(calls):
    def record(path, module, args, output):
        calls.append((path, type(module).__name__, args, output))

    return record


def test_outputs_are_seen_with_path_and_arguments():
    net, x, calls = model(), jnp.ones((4, 2)), []
    with nnx.debugging.intercept(net, ..., recorder(calls)):
        y = net(x)
    assert [call[:2] for call in calls] == [
        (("layers", 0), "Linear"),
        (("layers", 2), "Linear"),
        ((), "Sequential"),
    ]
    assert calls[0][2] == (x,)
    assert calls[-1][3] is y


def test_filters_choose_modules():
    net, calls = model(), []
    with nnx.debugging.intercept(net, nnx.PathContains(2), recorder(calls)):
        net(jnp.ones((4, 2)))
    assert [path for path, *_ in calls] == [("layers", 2)]


@MODES
def test_outputs_are_replaced(mode):
    net, x = model(), jnp.ones((4, 2))
    f = nnx.jit(lambda net, x: net(x), **mode)
    before = f(net, x)
    f(net, x)
    with nnx.debugging.intercept(net, nnx.Linear, lambda *args: args[-1] * 0 + 7):
        np.testing.assert_array_equal(net(x), jnp.full((4, 1), 7.0))
        np.testing.assert_array_equal(f(net, x), jnp.full((4, 1), 7.0))
    np.testing.assert_array_equal(f(net, x), before)


def test_equal_stacks_under_one_transform_are_all_seen():
    class Towers(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))
            keys = jax.random.split(jax.random.key(0), 3)
            self.left, self.right = make(keys), make(keys)

        def __call__(self, x):
            over_layers = nnx.scan(lambda x, layer: layer(x), out_axes=nnx.Carry)
            return over_layers(over_layers(x, self.left), self.right)

    net, x = Towers(), jnp.ones((1, 2))
    for call in (net, functools.partial(nnx.jit(Towers.__call__), net)):
        calls = []
        with nnx.debugging.intercept(net, nnx.Linear, recorder(calls)):
            call(x)
        assert {path for path, *_ in calls} == {("left",), ("right",)}


def test_a_loop_in_the_context_is_traced_once():
    net, x, calls = model(), jnp.ones((4, 2)), []
    f = nnx.jit(lambda net, x: net(x))
    with nnx.debugging.intercept(net, nnx.Linear, recorder(calls)):
        for _ in range(4):
            f(net, x)
        net(x)
        f(net, x)
    assert len(calls) == 4


def test_other_models_are_left_alone():
    net, other, calls = model(), model(), []
    with nnx.debugging.intercept(net, ..., recorder(calls)):
        other(jnp.ones((4, 2)))
    assert calls == []


def test_methods_end_the_path_and_keywords_have_positions():
    class Scale(nnx.Module):
        def apply(self, x, by=1):
            return x * by

    scale, calls = Scale(), []
    with nnx.debugging.intercept(scale, ..., recorder(calls)):
        scale.apply(2, by=3)
    assert calls == [(("apply",), "Scale", (2, 3), 6)]


def test_contexts_nest_and_end_with_an_exception():
    net, x = model(), jnp.ones((1, 2))
    inner, outer = [], []
    with (
        pytest.raises(RuntimeError),
        nnx.debugging.intercept(net, ..., recorder(outer)),
        nnx.debugging.intercept(net, ..., recorder(inner)),
    ):
        net(x)
        raise RuntimeError
    net(x)
    assert len(inner) == len(outer) == 3


def test_contexts_for_a_model_and_a_part_of_it_nest():
    net, inner, outer = model(), [], []
    part = net.layers[2]
    with (
        nnx.debugging.intercept(net, nnx.Linear, recorder(outer)),
        nnx.debugging.intercept(part, nnx.Linear, recorder(inner)),
    ):
        net(jnp.ones((1, 2)))
    assert [path for path, *_ in inner] == [()]
    assert [path for path, *_ in outer] == [("layers", 0), ("layers", 2)]


def test_what_is_no_model_or_filter_is_refused():
    with (
        pytest.raises(TypeError, match="expects a Module"),
        nnx.debugging.intercept(jnp.ones(2), ..., print),
    ):
        pass
    with (
        pytest.raises(TypeError, match="filter"),
        nnx.debugging.intercept(model(), 3.5, print),
    ):
        pass
