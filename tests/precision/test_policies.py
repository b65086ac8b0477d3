"""What a policy is, and how its text is read."""

import jax.numpy as jnp
import pytest

import graftree as nnx

Policy = nnx.precision.Policy


@pytest.mark.parametrize(
    "text",
    ["params=f32, compute=bf16, output=f32", "output = f32,compute=bf16 , params=f32"],
)
def test_a_text_names_parts_in_any_order(text):
    policy = Policy.parse(text)
    assert policy == Policy(jnp.float32, jnp.bfloat16, "f32")
    assert hash(policy) == hash(Policy("f32", "bf16", "f32"))
    assert str(policy) == "params=float32, compute=bfloat16, output=float32"
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not of the form"),
        ("f32", "'f32' is not of the form"),
        ("params=f32, ", "'' is not of the form"),
        ("compute=", "'compute=' is not of the form"),
        ("param=f32", "no part 'param' (did you mean 'params'?)"),
        ("params=f32, params=bf16", "params is given twice"),
        ("compute=bf61", "no floating dtype of a policy (did you mean 'bf16'?)"),
        ("compute=int8", "'int8' is no floating dtype"),
        ("compute=f64", "64-bit types switched off"),
    ],
)
def test_a_text_that_cannot_be_read_says_why(text, told):
    with pytest.raises(ValueError) as caught:
        Policy.parse(text)
    assert told in str(caught.value)


def test_a_policy_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="got int"):
        Policy.parse(32)
    with pytest.raises(ValueError, match="no floating dtype"):
        Policy(params=jnp.int32)


def test_float64_is_taken_where_jax_has_it(float64):
    assert Policy(compute="f64").compute == jnp.float64


@pytest.mark.parametrize(
    ("text", "told"),
    [("compute=f32", "lacks params"), ("output=f32", "lacks params and compute")],
)
def test_the_policy_of_a_model_needs_params_and_compute(text, told):
    with pytest.raises(ValueError, match=told):
        nnx.precision.set_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), text)


def test_a_policy_without_an_output_has_none():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    applied = nnx.precision.set_policy(layer, "params=f32, compute=f16")
    assert applied.policy.output is None
