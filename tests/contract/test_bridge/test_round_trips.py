"""What goes over the bridge computes what it computed before."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.interop.bridge.programs_to_nnx import Block, X


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


def test_a_module_computes_in_linen_what_it_computes():
    model = nnx.bridge.to_linen(nnx.Linear, 3, 4)
    params = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.arange(4.0)}
    expected = np.asarray(X) @ np.arange(12.0).reshape(3, 4) + np.arange(4.0)
    np.testing.assert_allclose(model.apply({"params": params}, X), expected, rtol=1e-5)


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
