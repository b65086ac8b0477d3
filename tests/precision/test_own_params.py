"""Policies and Params that modules of users compute with: in whatever way they read."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables
from tests.comparisons import raises

set_policy = nnx.precision.set_policy
POLICY = "params=f32, compute=bf16"
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.bfloat16)
W = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)

READS = {
    "an operator": lambda self, x: x @ self.w,
    "on the right": lambda self, x: self.w * x.sum(),
    "an index": lambda self, x: x @ self.w[:2].T,
    "all of it": lambda self, x: x @ self.w[...],
    "an attribute": lambda self, x: x @ self.w.T,
    "a method": lambda self, x: x @ self.w.reshape(3, 3),
    "a function": lambda self, x: jnp.dot(x, self.w),
    "the value": lambda self, x: x @ self.w.get_value(),
    "its dtype": lambda self, x: jnp.ones((2, 3), self.w.dtype),
}


class Own(nnx.Module):
    made: list = []

    def __init__(self, how="an operator"):
        self.w = nnx.Param(jnp.asarray(W), out_sharding=None)
        self.how = how

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Own.made.append(cls)

    def __call__(self, x):
        return READS[self.how](self, x)

    def encode(self, x):
        return READS[self.how](self, x)


@pytest.mark.parametrize("how", READS)
@tables.cases("params", "f32", "bf16")
def test_code_computes_as_if_its_params_were_stored_in_the_dtype(how, params, mode):
    model, expected = Own(how), Own(how)
    expected.w = nnx.Param(jnp.asarray(W, jnp.bfloat16))
    set_policy(model, f"params={params}, compute=bf16", strict=True)
    for name in ("__call__", "encode"):
        call = nnx.jit(lambda model, x, name=name: getattr(model, name)(x), **mode)
        outputs = call(model, X)
        assert outputs.dtype == jnp.bfloat16
        np.testing.assert_array_equal(outputs, call(expected, X))
    (leaf,) = nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves
    wanted = {"f32": "float32", "bf16": "bfloat16"}[params]
    assert type(leaf) is nnx.Param and leaf.dtype == jnp.dtype(wanted)


def test_what_is_stored_is_trained_in_its_own_dtype():
    model = Own()
    set_policy(model, POLICY)

    @nnx.jit
    def step(model):
        gradients = nnx.grad(lambda model: model(X).astype(jnp.float32).sum())(model)
        new = jax.tree.map(lambda w, g: w - 0.5 * g, nnx.state(model), gradients)
        nnx.update(model, new)

    step(model)
    expected = np.float64(W) - 0.5 * np.float64(X).sum(0)[:, None]
    stored = nnx.state(model)["w"]
    assert stored.dtype == jnp.float32
    np.testing.assert_allclose(stored[...], expected, atol=2e-2)
    assert nnx.precision.compute_dtype(model) == jnp.bfloat16


def test_the_model_stays_what_it_was_to_everything_else():
    model = Own()
    before, known = nnx.graphdef(model), len(Own.made)
    set_policy(model, POLICY)
    assert isinstance(model, Own) and type(model).__name__ == "Own"
    assert len(Own.made) == known  # hooks of the user's class see no other class
    copies = nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (*copies, nnx.merge(*nnx.split(model))):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        np.testing.assert_array_equal(other(X), model(X))
    with nnx.precision.default(POLICY):
        assert nnx.graphdef(Own()) == nnx.graphdef(model)
    nnx.checkpoints.load_state(model, nnx.state(Own()))
    assert model.w.dtype == jnp.bfloat16
    kept = Own()
    set_policy(kept, POLICY, exceptions={Own: "keep"}, strict=True)
    assert nnx.graphdef(kept) == before


def test_what_a_param_counts_as_is_not_written_but_replaced():
    model = Own()
    set_policy(model, POLICY)
    told = "This Param can't be written", r"vars(module)['name'][...] = value"
    for write in (
        lambda: model.w.set_value(jnp.zeros((3, 3))),
        lambda: model.w.set_raw_value(jnp.zeros((3, 3))),
        lambda: model.w.__setitem__(0, 1.0),
    ):
        with raises(nnx.errors.ImmutableVariableError, *told):
            write()
    vars(model)["w"][...] = jnp.ones((3, 3))
    assert float(model.w[0, 0]) == 1.0
    model.w = nnx.Param(jnp.full((3, 3), 2.0))
    assert model.w.dtype == jnp.bfloat16 and float(model.w[0, 0]) == 2.0
    del model.w
    assert not hasattr(model, "w") and not nnx.state(model)


@tables.cases("change", nnx.surgery.freeze, lambda m: nnx.with_vars(m, ref=True))
def test_frozen_params_and_those_in_refs_are_read_in_the_dtype(change):
    model = Own()
    changed = change(model)
    model = changed if isinstance(changed, Own) else model
    set_policy(model, POLICY, strict=True)
    assert model(X).dtype == jnp.bfloat16
    (leaf,) = nnx.to_flat_state(nnx.state(model)).leaves
    assert leaf.dtype == jnp.float32


def test_abstract_models_and_trees_in_params():
    model = nnx.eval_shape(lambda: Own())
    set_policy(model, POLICY)
    assert model.w.dtype == jnp.bfloat16
    assert nnx.eval_shape(lambda m: m(X), model).dtype == jnp.bfloat16
    tree = Own("all of it")
    tree.w = nnx.Param({"a": jnp.ones(2), "n": jnp.arange(2)})
    set_policy(tree, POLICY)
    assert tree.w["a"].dtype == jnp.bfloat16 and tree.w["n"].dtype == jnp.int32
