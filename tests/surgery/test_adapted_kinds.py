"""Every kind of weight that can have LoRA, through all that is done with it."""

import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests.surgery.adapted_kinds import (
    CALL,
    KINDS,
    SCALE,
    adapted,
    check,
    counts_as,
    factors_of,
    float64,
    numbers,
    weight_of,
)

surgery = nnx.surgery


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_counts_as_the_sum_and_is_merged_into_it(name):
    kind = KINDS[name]
    model, plain = adapted(kind)
    w = counts_as(kind, model)
    outputs = CALL(model.layer, kind.x)
    check(outputs, kind.expected(kind.x, w), 2e-6)
    for other in (nnx.clone(model), pickle.loads(pickle.dumps(model))):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        check(CALL(other.layer, kind.x), np.float64(outputs), 1e-6)
    taken_off = nnx.clone(model)
    surgery.remove_lora(taken_off)
    assert len(surgery.merge_lora(model)) == 1
    check(weight_of(model)[...], w, 1e-6)
    check(CALL(model.layer, kind.x), kind.expected(kind.x, w), 2e-6)
    for other in (model, taken_off):
        assert nnx.graphdef(other) == nnx.graphdef(plain)
        assert type(other.layer) is type(plain.layer)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_moves_the_factors_along_their_gradients_and_nothing_else(name, mode):
    kind = KINDS[name]
    model, _ = adapted(kind)
    w, a, b = float64(weight_of(model), *factors_of(model))
    shape = kind.expected(kind.x, w).shape
    cost = np.float64(numbers(*shape))
    surgery.freeze(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    sgd = optax.sgd(0.1)
    optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param, graph=mode["graph"])

    @nnx.jit(**mode)
    def step(model, optimizer):
        def loss(model):
            return jnp.sum(model.layer(kind.x) * cost.astype(np.float32))

        optimizer.update(model, nnx.grad(loss, **mode)(model))

    step(model, optimizer)
    # The outputs are linear in the weight: one element at a time gives the gradient.
    ones = np.eye(w.size).reshape(w.size, *w.shape)
    slope = [np.sum(kind.expected(kind.x, one) * cost) for one in ones]
    inputs, of_product = kind.product.split("->")
    of_a, of_b = inputs.split(",")
    slope = SCALE * np.reshape(slope, w.shape)
    moved = factors_of(model)
    expected_a = a - 0.1 * np.einsum(f"{of_product},{of_b}->{of_a}", slope, b)
    expected_b = b - 0.1 * np.einsum(f"{of_product},{of_a}->{of_b}", slope, a)
    check(moved[0][...], expected_a, 2e-6)
    check(moved[1][...], expected_b, 2e-6)
    np.testing.assert_array_equal(weight_of(model)[...], w)


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_a_stack_are_adapted_apart(name):
    kind = KINDS[name]
    stack = nnx.Dict(layer=nnx.Stack(kind.make, 2, rngs=nnx.Rngs(0)))
    plain = nnx.graphdef(stack)
    where = kind.where.replace("layer", "layer.layers")
    surgery.add_lora(stack, where, rank=2, alpha=2 * SCALE, rngs=nnx.Rngs(1))
    a, b = factors_of(stack)
    b[...] = numbers(*b.shape)
    w, a, b = float64(weight_of(stack), a, b)
    apart = kind.product.replace(",", ",z").replace("->", "->z")
    sums = w + SCALE * np.einsum(f"z{apart}", a, b)
    found = stack.layer.each(nnx.jit(lambda layer: layer(kind.x)))
    expected = np.stack([kind.expected(kind.x, w) for w in sums])
    check(found, expected, 2e-6)
    surgery.merge_lora(stack)
    check(weight_of(stack)[...], sums, 1e-6)
    assert nnx.graphdef(stack) == plain


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_peft_go_out_and_in(name, tmp_path):
    kind = KINDS[name]
    model, plain = adapted(kind)
    if kind.line is None:
        line = {"x.weight": kind.where.removesuffix(".kernel") + ".kernel"}
        with pytest.raises(ValueError, match="the table lacks adapted layers"):
            nnx.weights.save_adapter(tmp_path, model, line)
        return
    nnx.weights.save_adapter(tmp_path, model, kind.line)
    paths = nnx.weights.load_adapter(tmp_path, plain, kind.line)
    assert (len(paths) == 1 and nnx.graphdef(plain) == nnx.graphdef(model)) or "Embed"
    for found, expected in zip(factors_of(plain), factors_of(model), strict=True):
        np.testing.assert_array_equal(found[...], expected[...])
    check(CALL(plain.layer, kind.x), np.float64(CALL(model.layer, kind.x)), 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_policies_set_it(name):
    kind = KINDS[name]
    model, _ = adapted(kind)
    w = counts_as(kind, model)
    x = jnp.asarray(kind.x)
    x = x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16)
    for params in (jnp.float32, jnp.bfloat16):
        policy = nnx.precision.Policy(params=params, compute=jnp.bfloat16)
        nnx.precision.set_policy(model, policy, strict=True)
        outputs = CALL(model.layer, x)
        assert outputs.dtype == jnp.bfloat16
        check(outputs, kind.expected(np.asarray(kind.x), w), 4e-2)
        leaves = [weight_of(model), *factors_of(model)]
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(params)}
    nnx.precision.set_policy(model, "params=f32, compute=f32", strict=True)
    surgery.merge_lora(model)
    check(CALL(model.layer, kind.x), kind.expected(kind.x, w), 4e-2)
