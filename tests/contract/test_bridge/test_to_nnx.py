"""Linen Modules as Modules: what is ours to promise beyond the peer."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.interop.bridge.programs_to_nnx import Block, TwoMethods, X, block


class Named(nn.Module):
    name_of: str

    @nn.compact
    def __call__(self, x):
        return x + self.param(self.name_of, nn.initializers.ones, (3,))


class Recording(nn.Module):
    """Sows into a collection under the name of a parameter."""

    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "a", x)
        return x * self.param("a", nn.initializers.ones, (3,))


class WithStatic(nn.Module):
    width: int = 5

    def __call__(self, x):
        return x

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def title(cls):
        return cls.__name__


def test_updates_go_into_the_same_variables():
    model = block(nnx)
    before = model.BatchNorm_0["mean"]
    graphdef = nnx.graphdef(model)
    model(X, train=True, mutable=["batch_stats", "counts"])
    assert model.BatchNorm_0["mean"] is before
    assert (before[...] != 0).any()
    assert nnx.graphdef(model) == graphdef


def test_training_does_not_compile_again():
    model = nnx.bridge.lazy_init(block(nnx), X)
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        return model(x, train=True, mutable=["batch_stats", "counts"])

    for _ in range(4):
        step(model, X)
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["module", "rngs", "to_nnx__rngs", "_pytree__state"])
def test_names_that_it_needs_itself_are_refused(name):
    model = nnx.bridge.ToNNX(Named(name), nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"'{name}'.*needs for itself") as caught:
        model.lazy_init(X)
    assert "Rename" in str(caught.value)
    assert not nnx.bridge.variables.nnx_attrs_to_linen_vars(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    "name", ["sow", "lazy_init", "train", "0", "with space", "__x"]
)
def test_other_names_are_fine(name):
    model = nnx.bridge.ToNNX(Named(name), nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    assert (model(X) == X + 1).all()


def test_a_record_does_not_replace_a_parameter_of_its_name():
    model = nnx.bridge.ToNNX(Recording(), nnx.Rngs(0)).lazy_init(X)
    with pytest.raises(ValueError, match="Found duplicate variable path"):
        model(X, mutable=["intermediates"])
    assert (model.a[...] == 1).all()


def test_static_and_class_methods_are_called_as_they_are():
    model = nnx.bridge.ToNNX(WithStatic(), nnx.Rngs(0))
    assert (model.double(2), model.title()) == (4, "WithStatic")


@pytest.mark.parametrize("bad", [3, lambda x: x, TwoMethods().shifted, nnx.relu])
def test_only_modules_and_their_methods_are_initialized(bad):
    with pytest.raises(ValueError, match="needs to be a method of an NNX Module"):
        nnx.bridge.lazy_init(bad, X)


def test_methods_of_linen_can_initialize():
    model = nnx.bridge.ToNNX(TwoMethods(), nnx.Rngs(0))
    nnx.bridge.lazy_init(model.shifted, X)
    assert model.dense["kernel"].shape == (3, 4)


def test_a_failed_initialization_leaves_no_flag():
    class Fails(nnx.Module):
        def __init__(self):
            self.inner = nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))

        def __call__(self, x):
            assert self._pytree__state.initializing
            assert self.inner._pytree__state.initializing
            raise RuntimeError("in the call")

    model = Fails()
    with pytest.raises(RuntimeError, match="in the call"):
        nnx.bridge.lazy_init(model, X)
    assert not model._pytree__state.initializing
    assert not model.inner._pytree__state.initializing


def test_rngs_are_forked():
    rngs = nnx.Rngs(0)
    model = nnx.bridge.ToNNX(nn.Dense(2), rngs)
    model.lazy_init(X)
    assert rngs.default.count[...] == 1
    assert model.to_nnx__rngs.default.count[...] == 1


@pytest.mark.parametrize("rngs", [None, {"params": jax.random.key(0)}])
def test_other_rngs_are_kept_as_they_are(rngs):
    assert nnx.bridge.ToNNX(nn.Dense(2), rngs).to_nnx__rngs == rngs


def test_keys_by_name_are_passed_on():
    model = nnx.bridge.ToNNX(nn.Dense(2), {"params": jax.random.key(0)}).lazy_init(X)
    same = nnx.bridge.ToNNX(nn.Dense(2), jax.random.key(0))
    same.lazy_init(X, rngs={"params": jax.random.key(0)})
    assert (model.kernel[...] == same.kernel[...]).all()


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, nnx.clone], ids=["deepcopy", "clone"]
)
def test_copies_are_independent(copy_of):
    model = block(nnx)
    copied = copy_of(model)
    copied(X, train=True, mutable=["batch_stats"])
    assert (model.BatchNorm_0["mean"][...] == 0).all()
    assert (copied.BatchNorm_0["mean"][...] != 0).any()


def test_it_can_be_pickled():
    model = nnx.bridge.ToNNX(TwoMethods(), nnx.Rngs(0)).lazy_init(X)
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded(X) == model(X)).all()


def test_it_is_jitted_in_every_mode(graph):
    model = nnx.bridge.ToNNX(Block(), nnx.Rngs(0)).lazy_init(X)

    forward = nnx.jit(lambda model: model(X, mutable=["counts"]), graph=graph)
    out = [forward(model) for _ in range(2)]
    assert (out[0] == out[1]).all()
    assert model.n[...] == 3


def test_writes_in_a_closure_of_a_trace_are_refused():
    model = block(nnx)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda x: model(x, train=True, mutable=["batch_stats"]))(X)
    assert not isinstance(model.BatchNorm_0["mean"][...], jax.core.Tracer)


def test_models_in_refs_are_changed_in_place():
    model = nnx.to_refs(block(nnx))
    jax.jit(lambda model: model(X, train=True, mutable=["batch_stats"]))(model)
    assert (model.BatchNorm_0["mean"][...] != 0).any()


def test_unknown_attributes_are_named():
    with pytest.raises(
        AttributeError, match="'ToNNX' object has no attribute 'nothing'"
    ):
        nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0)).nothing


def test_values_that_are_trees_keep_their_structure():
    class Tree(nn.Module):
        @nn.compact
        def __call__(self, x):
            pair = self.variable("cache", "pair", lambda: (jnp.zeros(2), jnp.ones(2)))
            pair.value = (pair.value[0] + 1, pair.value[1])
            return pair.value[0]

    model = nnx.bridge.ToNNX(Tree(), nnx.Rngs(0)).lazy_init(X)
    assert (model(X, mutable=["cache"]) == 2).all()
    assert len(model.pair.get_value()) == 2


# ------------------------------------------ what goes over the bridge computes the same


def test_a_linen_module_computes_what_it_computes_in_linen():
    model = nnx.bridge.ToNNX(Block(), nnx.Rngs(0)).lazy_init(X)
    attributes = {k: v for k, v in vars(model).items() if k[0].isupper() or k == "n"}
    variables = nnx.bridge.variables.nnx_attrs_to_linen_vars(attributes)
    assert sorted(variables) == ["batch_stats", "counts", "params"]
    np.testing.assert_array_equal(model(X), Block().apply(variables, X))
    options = {"train": True, "mutable": ["batch_stats"]}
    key = jax.random.key(3)
    out = model(X, rngs=nnx.Rngs(dropout=key), **options)
    dropout = {"dropout": nnx.Rngs(dropout=key).dropout()}
    expected, updates = Block().apply(variables, X, rngs=dropout, **options)
    np.testing.assert_array_equal(out, expected)
    for name, value in updates["batch_stats"]["BatchNorm_0"].items():
        np.testing.assert_array_equal(model.BatchNorm_0[name][...], value)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_wrappers_of_wrappers_keep_the_parameters(depth):
    def deeper(make_linen):
        class Inner(nnx.Module):
            def __init__(self, rngs):
                self.inner = nnx.bridge.ToNNX(make_linen(), rngs).lazy_init(X)

            def __call__(self, x):
                return self.inner(x)

        return lambda: nnx.bridge.to_linen(Inner)

    def make():
        return nn.Dense(2)

    for _ in range(depth):
        make = deeper(make)
    variables = make().init(jax.random.key(0), X)
    params = variables["params"]
    for _ in range(depth):
        (params,) = params.values()
    expected = X @ params["kernel"] + params["bias"]
    np.testing.assert_allclose(make().apply(variables, X), expected, rtol=1e-5)


def test_the_modules_of_the_bridge_are_those_of_the_contract():
    for path in "wrappers", "variables", "module", "interop", "initializers":
        assert hasattr(nnx.bridge, path)
    assert nnx.wrappers is nnx.bridge.wrappers
    assert isinstance(nnx.bridge.to_linen(nnx.Linear, 2, 3), nn.Module)
    assert isinstance(nnx.bridge.ToNNX(nn.Dense(2)), nnx.Module)
    assert issubclass(nnx.bridge.Module, nnx.Module)
