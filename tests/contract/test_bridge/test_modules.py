"""Modules in the style of Linen: what is ours to promise beyond the peer."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.interop.bridge.programs_modules import X, dense, mlp

Dense, MLP = dense(nnx), mlp(nnx)
Module, compact = nnx.bridge.Module, nnx.bridge.compact


def test_a_parameter_may_have_a_second_name():
    class Net(Module):
        def setup(self):
            self.a = self.param("scale", nn.initializers.normal(), (3,))

        def __call__(self, x):
            return x * self.a

    v = Net().init(0, X)
    (name,) = v["params"]
    assert (Net().apply(v, X) == X * v["params"][name]).all()


def test_a_submodule_called_twice_has_its_variables_once():
    class Net(Module):
        @compact
        def __call__(self, x):
            inner = MLP()
            return inner(x), inner(x)

    v = Net().init(0, X)
    (first, second), new = Net().apply(v, X, mutable=True)
    assert list(v["params"]) == ["MLP_0"]
    assert (first == second).all()
    assert new["counts"]["MLP_0"]["n"] == v["counts"]["MLP_0"]["n"] + 2


@pytest.mark.parametrize("method", ["explicit", "nested"])
def test_a_name_given_twice_is_an_error(method):
    class Net(Module):
        @compact
        def explicit(self, x):
            return Dense(3, name="a")(x) + Dense(3, name="a")(x)

        @compact
        def nested(self, x):
            y = Dense(2)(x)
            return y + self.inner(x)

        @compact
        def inner(self, x):
            return Dense(2)(x)

    with pytest.raises(ValueError, match="has made a submodule named"):
        Net().init(0, X, method=method)


def test_a_name_for_two_kinds_of_variables_is_an_error():
    class Net(Module):
        @compact
        def __call__(self, x):
            self.param("a", nn.initializers.ones, (3,))
            self.variable("cache", "a", jnp.zeros, (3,))

    with pytest.raises(ValueError, match="Net.a can't be a Cache: .* a Param already"):
        Net().init(0, X)


@pytest.mark.parametrize("rngs", [None, 0])
@pytest.mark.parametrize("given", [{}, {"params": {"kernel": jnp.ones((3, 2))}}])
def test_missing_parameters_are_errors_of_linen(given, rngs):
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        Dense(2).apply(given, X, rngs=rngs)


def test_missing_parameters_are_named_with_their_path():
    v = MLP().init(0, X)
    del v["params"]["out"]["bias"]
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match='"bias".*"/out"'):
        MLP().apply(v, X)


def test_missing_parameters_that_may_change_are_made():
    out, v = Dense(2).apply({}, X, rngs=0, mutable=["params"])
    assert (out == Dense(2).apply(v, X)).all()


def test_a_parameter_of_another_shape_is_an_error_of_linen():
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones((1,))}
    with pytest.raises(flax.errors.ScopeParamShapeError, match="bias"):
        Dense(2).apply({"params": params}, X)


def test_variables_assigned_in_setup_take_what_is_given():
    class Net(Module):
        def setup(self):
            self.total = nnx.BatchStat(jnp.ones(2))

        def __call__(self):
            self.total[...] += 1
            return self.total[...]

    given = {"batch_stats": {"total": jnp.full(2, 5.0)}}
    out, v = Net().apply(given, mutable=True)
    assert (out == 6).all()
    assert (v["batch_stats"]["total"] == 6).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_records_accumulate_when_given_back():
    class Net(Module):
        @compact
        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x)

    _, v = Net().apply(Net().init(0, X), X, mutable=True)
    assert len(v["intermediates"]["h"]) == 2


def test_lists_of_this_library_hold_bridge_modules_too():
    class Net(Module):
        def setup(self):
            self.layers = nnx.List([Dense(2), Dense(2)])
            self.named = nnx.Dict(last=Dense(1))

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.named["last"](x)

    out, v = Net().init_with_output(0, X)
    assert list(v["params"]["layers"]) == [0, 1]
    assert (Net().apply(v, X) == out).all()


def test_arrays_in_fields_are_no_variables():
    class Net(Module):
        scale: jax.Array

        @compact
        def __call__(self, x):
            return Dense(2)(x) * self.scale

    model = Net(jnp.array(2.0))
    out, v = model.init_with_output(0, X)
    assert list(v) == ["params"]
    assert (model.apply(v, X) == out).all()


def test_boxes_of_linen_are_taken_apart_from_the_start():
    class Net(Module):
        @compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "a"))
            return x @ self.param("kernel", init, (3, 2))

    out, v = Net().init_with_output(0, X)
    assert isinstance(v["params"]["kernel"], nn.Partitioned)
    np.testing.assert_allclose(out, Net().apply(v, X))
    np.testing.assert_allclose(out, jnp.tile(X.sum(1, keepdims=True), 2), rtol=1e-5)


@pytest.mark.parametrize("function", ["nnx_in_bridge_mdl", "linen_in_bridge_mdl"])
def test_other_modules_need_a_bridge_module_around_them(function):
    make = getattr(nnx.bridge, function)
    with pytest.raises(ValueError, match="only needed inside bridge Module"):
        make(nn.Dense(2))


def test_missing_parameters_of_other_modules_are_errors():
    class Net(Module):
        @compact
        def __call__(self, x):
            make = lambda rngs: nnx.Linear(3, 2, rngs=rngs)  # noqa: E731
            return nnx.bridge.nnx_in_bridge_mdl(make)(x)

    v = Net().init(0, X)
    del v["params"]["Linear_0"]["bias"]
    error, phrase = flax.errors.ScopeParamNotFoundError, '"bias".*"/Linear_0"'
    for rngs in None, 0:
        with pytest.raises(error, match=phrase):
            Net().apply(v, X, rngs=rngs)


def test_other_modules_are_made_once_for_calls_of_one_module():
    class Inner(Module):
        @compact
        def __call__(self, x):
            norm = nnx.bridge.nnx_in_bridge_mdl(
                lambda rngs: nnx.BatchNorm(3, rngs=rngs)
            )
            return norm(nnx.bridge.linen_in_bridge_mdl(nn.Dense(3))(x))

    class Net(Module):
        @compact
        def __call__(self, x):
            inner = Inner()
            return inner(inner(x))

    out, v = Net().init_with_output(0, X)
    assert sorted(v["params"]["Inner_0"]) == ["BatchNorm_0", "Dense_0"]
    assert v["params"]["Inner_0"]["Dense_0"]["kernel"].shape == (3, 3)
    assert Net().apply(v, X).shape == out.shape


def test_modules_that_refer_to_themselves_are_fine():
    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(3, 3, rngs=rngs)
            self.again = self

        def __call__(self, x):
            return self.again.lin(x)

    class Net(Module):
        @compact
        def __call__(self, x):
            return nnx.bridge.nnx_in_bridge_mdl(Loop)(x)

    out, v = Net().init_with_output(0, X)
    assert list(v["params"]) == ["Loop_0"]
    assert (Net().apply(v, X) == out).all()


def test_a_module_from_outside_is_not_initializing_afterwards():
    outside = nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))

    class Net(Module):
        @compact
        def __call__(self, x):
            return nnx.bridge.nnx_in_bridge_mdl(lambda rngs: outside)(x)

    v = Net().init(0, X)
    assert list(v["params"]) == ["ToNNX_0"]
    kernel = outside.kernel[...]
    outside(X)
    assert (outside.kernel[...] == kernel).all()


def test_modules_of_one_call_do_not_stay_in_the_object():
    model = MLP()
    v = model.init(0, X)
    model.apply(v, X, mutable=True)
    assert not nnx.to_flat_state(nnx.state(model))
    assert model.scope is None


def test_the_stack_is_empty_after_an_exception():
    class Net(Module):
        @compact
        def __call__(self, x):
            raise RuntimeError("in the call")

    with pytest.raises(RuntimeError, match="in the call"):
        Net().init(0, X)
    assert nnx.bridge.current_module() is None


def test_bridge_modules_are_graph_nodes_and_not_pytrees():
    model = Dense(2)
    assert jax.tree.leaves(model) == [model]
    graphdef, state = nnx.split(model, graph=True)
    assert nnx.merge(graphdef, state).features == 2


def test_a_functional_needs_init_first():
    with pytest.raises(ValueError, match="call `init` first"):
        nnx.bridge.functional(nnx.Linear)(3, 4).apply({})


class Named(Module):
    name: str = "default"
    width: int = 2

    @compact
    def __call__(self):
        return self.name, self.param("w", nn.initializers.ones, (self.width,)).sum()


class Inherits(Named):
    depth: int = 1


class Takes(Module):
    def __init__(self, name):
        self.name = name

    def __call__(self):
        return self.name, 0


@pytest.mark.parametrize("cls", [Named, Inherits, Takes])
@pytest.mark.parametrize("how", ["compact", "setup"])
def test_a_field_called_name_is_set_and_names_the_module(cls, how):
    class Compact(Module):
        @compact
        def __call__(self):
            part = cls(name="part")
            return part()[0], self.part is part

    class Setup(Module):
        def setup(self):
            self.part = cls(name="part")

        def __call__(self):
            return self.part()[0], True

    net = {"compact": Compact, "setup": Setup}[how]()
    (name, is_placed), v = net.init_with_output(0)
    assert name == "part" and is_placed
    assert list(v.get("params", {"part": 0})) == ["part"]
    assert cls(name="outside").name == "outside"


def test_a_field_called_name_may_be_left_out_or_given_by_position():
    class Net(Module):
        @compact
        def __call__(self):
            return [Named()()[0], Named("own")()[0], Named(name=None)()[0]]

    names, v = Net().init_with_output(0)
    assert names == ["default", "own", "default"]
    assert list(v["params"]) == ["Named_0", "Named_1", "Named_2"]


def test_a_class_without_such_a_field_is_only_placed():
    class Keeps(Module):
        def __init__(self, **options):
            self.options = options

    class Net(Module):
        @compact
        def __call__(self):
            return Keeps(name="part").options, hasattr(self, "part")

    assert Net().apply({}) == ({}, True)
