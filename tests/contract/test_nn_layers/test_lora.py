"""LoRA and LoRALinear: their formula, the layer inside, the types of their Params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import exact, meshes
from tests.programs import in_one_program
from tests.random_arrays import random

# --------------------------------------------------------------------------------- LoRA


ONES = {"b_initializer": nnx.initializers.ones}


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_base_module_gets_the_promoted_inputs_and_the_keywords():
    seen = []

    def base(x, **kwargs):
        seen.append((x.dtype, kwargs))
        return x.sum(keepdims=True)

    layer = nnx.LoRA(3, 2, 4, base_module=base, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer(jnp.ones((1, 3)), scale=2)
    assert seen == [(jnp.bfloat16, {"scale": 2})]


def test_keywords_are_ignored_without_a_base_module():
    layer = nnx.LoRA(3, 2, 4, **ONES, rngs=nnx.Rngs(0))
    x = array(5, 3)
    np.testing.assert_array_equal(layer(x, deterministic=True), layer(x))


def test_base_module_may_be_assigned_later_and_must_be_callable():
    layer = nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0))
    layer.base_module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = array(5, 3)
    np.testing.assert_array_equal(layer(x), layer.base_module(x))
    layer.base_module = nnx.Module()
    with pytest.raises(ValueError, match="of LoRA must be callable, got .*Module"):
        layer(jnp.ones((1, 3)))


def test_a_lora_linear_starts_as_a_linear_whose_state_fits():
    linear, other = (nnx.Linear(3, 4, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(layer.kernel[...], other.kernel[...])
    nnx.update(layer, nnx.state(linear))
    x = array(5, 3)
    np.testing.assert_array_equal(layer(x), linear(x))


def test_parameters_are_params_that_a_filter_tells_apart():
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    _, adapted, frozen = nnx.split(layer, nnx.LoRAParam, nnx.Param)
    paths = [path for path, _ in nnx.to_flat_state(adapted)]
    assert paths == [("lora", "lora_a"), ("lora", "lora_b")]
    assert [path for path, _ in nnx.to_flat_state(frozen)] == [("bias",), ("kernel",)]
    assert issubclass(nnx.LoRAParam, nnx.Param)
    with pytest.raises(ValueError, match="LoRAParam"):
        nnx.variable_name_from_type(nnx.LoRAParam)


def test_class_and_metadata_of_the_variables_may_be_given():
    ones = nnx.with_metadata(nnx.initializers.ones, note="b")
    options = {"lora_rank": 2, "lora_param_type": nnx.Cache, "a_metadata": {"a": 1}}
    options |= {"b_initializer": ones, "b_metadata": {"b": 2}, "use_bias": False}
    layer = nnx.LoRALinear(3, 4, **options, rngs=nnx.Rngs(0))
    assert type(layer.lora.lora_a) is type(layer.lora.lora_b) is nnx.Cache
    assert (layer.lora.lora_a.a, layer.lora.lora_b.b) == (1, 2)
    assert layer.lora.lora_b.note == "b" and layer.bias is None


def test_unknown_keywords_are_those_of_linear():
    with pytest.raises(TypeError, match="use_bais"):
        nnx.LoRALinear(3, 4, lora_rank=2, use_bais=False, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("make", ["wrapped", "linear"])
def test_out_sharding_is_that_of_both_terms(make, named):
    mesh = meshes.mesh_of("Explicit", x=2, y=2)
    layer = nnx.LoRALinear(4, 6, lora_rank=3, **ONES, rngs=nnx.Rngs(0))
    if make == "wrapped":
        base = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        layer = nnx.LoRA(4, 3, 6, base_module=base, **ONES, rngs=nnx.Rngs(1))
    x, spec = array(2, 4), jax.P(None, "y")
    expected = layer(x)
    with jax.set_mesh(mesh):
        # Split along what is contracted, JAX has to be told the sharding of products.
        rows, columns = jax.P("x", None), jax.P(None, "x")
        for path, variable in nnx.to_flat_state(nnx.state(layer)):
            if path[-1] in ("kernel", "lora_a"):
                variable.set_value(jax.device_put(variable[...], rows))
        x = jax.device_put(x, columns)
        given = jax.NamedSharding(mesh, spec) if named else spec
        y = jax.jit(lambda m, x: m(x, out_sharding=given))(layer, x)
    assert jax.typeof(y).sharding.spec == spec
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_a_masked_convolution_works_in_refs(kind):
    mask = jnp.arange(12.0).reshape(3, 2, 2) % 2
    layer = kind(2, 2, (3,), mask=mask, rngs=nnx.Rngs(0))
    x = random(1, 4, 2)
    np.testing.assert_array_equal(nnx.to_refs(layer)(x), layer(x))


@exact.in_float64
@pytest.mark.parametrize("batch", [(), (5,), (2, 0), (2, 3, 4)])
def test_lora_is_added_to_its_base(batch):
    linear = exact.make("LoRALinear", 3, 4, lora_rank=2, lora_param_dtype=jnp.float64)
    layer = linear.lora
    x = exact.random(*batch, 3)
    change = x @ exact.value(layer.lora_a) @ exact.value(layer.lora_b)
    base = x @ exact.value(linear.kernel) + exact.value(linear.bias)
    exact.agree(in_one_program(linear, x), base + change)
    exact.agree(in_one_program(layer, x), change)
    layer.base_module = exact.make("Linear", 3, 4)
    base = exact.value(layer.base_module(x))
    exact.agree(in_one_program(layer, x), base + change)
