"""Linear, LinearGeneral, Einsum, Embed, Conv, LoRA: arguments, hooks, what they refuse.

Their formulas are in `test_formulas.py`, their dtypes in `test_dtypes.py`.
"""

import contextlib
import re
import types
import warnings

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import graftree as nnx
from tests import meshes, programs, tables
from tests.random_arrays import random


def general(*args, **options):
    return nnx.LinearGeneral(*args, rngs=nnx.Rngs(0), **options)


def einsum(*args, **options):
    return nnx.Einsum(*args, rngs=nnx.Rngs(0), **options)


# ----------------------------------------------------------------------------- Linear


def test_bias_is_added_to_what_a_contraction_of_the_users_own_gives():
    class Scaled:
        """A product with its scale beside it, as of a quantized kernel."""

        def __init__(self, product):
            self.product, self.ndim = product, product.ndim

        def __add__(self, other):
            return 10 * self.product + other

    def contract(*args, **options):
        return Scaled(jax.lax.dot_general(*args, **options))

    layer = nnx.Linear(3, 4, dot_general=contract, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(4.0)
    x = random(2, 3)
    expected = 10 * np.float64(x) @ np.float64(layer.kernel[...]) + np.arange(4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_inputs_with_a_shape_that_jax_does_not_know_are_left_to_the_hooks():
    quantized = types.SimpleNamespace(shape=(2, 3), values=random(2, 3))

    def promote(args, *, dtype):
        x, *others = args
        return x.values, *others

    layer = nnx.Linear(3, 4, promote_dtype=promote, rngs=nnx.Rngs(0))
    plain = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(quantized), plain(quantized.values))


# ---------------------------------------------------------------------- LinearGeneral


def test_initializers_get_the_flattened_shapes():
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.ones(shape, dtype)

    options = {"kernel_init": init, "bias_init": init, "batch_axis": {0: 6}}
    general((2, 3), (4, 5), axis=(1, 2), **options)
    assert shapes == [(36, 20), (120,)]
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="kernel")
    kernel = general(2, (3, 4), kernel_init=init).kernel
    assert (kernel.shape, kernel.tag) == ((2, 3, 4), "kernel")


@tables.cases(
    "args, options, error, message",
    (((2, 3), 4), {}, ValueError, r"the same length. Got \(2, 3\) and \(-1,\)"),
    *(
        ((2, 4), {"batch_axis": axes}, ValueError, "leading dimensions starting from 0")
        for axes in ({1: 3}, {-1: 3}, {0: 3, 2: 4})
    ),
    (((2, 2), 4), {"axis": (1, 1)}, TypeError, None),
    (((2, 2), 4), {"axis": (-1, 1)}, TypeError, None),
)
def test_axes_that_do_not_fit_are_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        general(*args, **options)(random(3, 2))


def test_arguments_are_kept_as_tuples_and_an_immutable_mapping():
    layer = general([2], np.int64(4), axis=[-1], batch_axis={0: 3})
    assert (layer.in_features, layer.out_features, layer.axis) == ((2,), (4,), (-1,))
    assert dict(layer.batch_axis) == {0: 3}
    with pytest.raises(TypeError):
        layer.batch_axis[1] = 2


# ----------------------------------------------------------------------------- Einsum


def test_equation_is_kept_without_spaces_and_the_call_may_give_another():
    layer, x = einsum("a b , b c -> a c", (3, 4), 4), random(2, 3)
    assert layer.einsum_str == "ab,bc->ac"
    np.testing.assert_allclose(layer(x, "ab,bc->c a"), layer(x).T, rtol=1e-6)
    np.testing.assert_array_equal(einsum(None, (3, 4), 4)(x, "ab,bc->ac"), layer(x))


@tables.cases(
    "equation, message",
    ("ab,bc", 'must be explicit and include "->"'),
    ("ab->a", "exactly two operands.*instead of 0"),
    ("ab,bc,cd->ad", "exactly two operands.*instead of 2"),
)
def test_equations_of_another_form_are_refused(equation, message):
    with pytest.raises(ValueError, match=message):
        einsum(equation, (3, 4))
    with pytest.raises(ValueError, match=message):
        einsum("ab,bc->ac", (3, 4))(random(2, 3), equation)
    with pytest.raises(ValueError, match="No `einsum_str` argument was provided"):
        einsum(None, (3, 4))(random(2, 3))


# ------------------------------------------------------------------------------ Embed


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.int32])
def test_any_integers_of_any_shape_are_looked_up(dtype):
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    inputs = np.array([[0, 4, 2], [1, 1, 3]], dtype)
    expected = np.asarray(layer.embedding[...])[inputs]
    np.testing.assert_array_equal(layer(inputs), expected)
    assert nnx.eval_shape(layer, jnp.ones((2, 0, 4), dtype)).shape == (2, 0, 4, 3)
    assert nnx.eval_shape(layer, jnp.array(1, dtype)).shape == (3,)
    assert jax.eval_shape(layer.attend, jnp.ones(3)).shape == (5,)


def test_negative_numbers_wrap_and_numbers_outside_give_nan():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    table = np.asarray(layer.embedding[...])
    y = np.asarray(layer(jnp.array([-1, -5, -6, 5])))
    np.testing.assert_array_equal(y[:2], table[[4, 0]])
    assert np.isnan(y[2:]).all()


def test_a_single_row_is_given_for_every_number():
    layer = nnx.Embed(1, 3, rngs=nnx.Rngs(0))
    row = np.asarray(layer.embedding[...])[0]
    y = layer(jnp.array([[0, 7], [-3, 1]]))
    np.testing.assert_array_equal(y, np.broadcast_to(row, (2, 2, 3)))


@pytest.mark.parametrize("spec", [("x", None), ("x", "y")])
def test_out_sharding_shards_a_single_row_too(spec):
    layer, x, spec = nnx.Embed(1, 4, rngs=nnx.Rngs(0)), jnp.arange(8), jax.P(*spec)
    expected = layer(x)
    with jax.set_mesh(meshes.mesh_of("Explicit", x=2, y=2)):
        y = jax.jit(lambda m, x: m(x, out_sharding=spec))(layer, x)
        assert jax.typeof(y).sharding.spec == spec
        np.testing.assert_array_equal(y, expected)


# ------------------------------------------------------------------------------- Conv

BOTH = pytest.mark.parametrize("cls", [nnx.Conv, nnx.ConvTranspose])


def conv(*args, **options):
    return nnx.Conv(*args, **options, rngs=nnx.Rngs(0))


def transpose(*args, **options):
    return nnx.ConvTranspose(*args, **options, rngs=nnx.Rngs(0))


@tables.cases(
    "padding, pairs",
    (1, ((1, 1), (1, 1))),
    (np.int64(2), ((2, 2), (2, 2))),
    ([2, 0], ((2, 2), (0, 0))),
    ([1, (0, 2)], ((1, 1), (0, 2))),
    ([[1, 2], [0, 1]], ((1, 2), (0, 1))),
    (np.array([[1, 2], [1, 1]]), ((1, 2), (1, 1))),
)
def test_explicit_padding_has_many_forms(padding, pairs):
    x = random(1, 5, 4, 2)
    y, same = (conv(2, 3, [3, 2], padding=p)(x) for p in (padding, pairs))
    np.testing.assert_array_equal(y, same)


@pytest.mark.parametrize("padding", [(1, 2), ((1, 2, 3),), (None,), 1.5, ("a",), None])
def test_unknown_padding_is_named(padding):
    with pytest.raises(ValueError, match="Invalid padding format.*len 1"):
        conv(2, 3, (3,), padding=padding)(jnp.ones((1, 5, 2)))


def test_names_of_padding_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="FOO"):
        conv(2, 3, (3,), padding="FOO")(jnp.ones((1, 5, 2)))
    with pytest.raises(ValueError, match="Causal padding is only implemented for 1D"):
        conv(2, 3, (3, 3), padding="CAUSAL")(jnp.ones((1, 5, 5, 2)))


@pytest.mark.parametrize("kernel_size", [3, np.int64(3), [3], (np.int32(3),)])
def test_kernel_size_takes_ints_and_sequences(kernel_size):
    layer = conv(4, 6, kernel_size, feature_group_count=2)
    assert layer.kernel_size == (3,) and type(layer.kernel_size[0]) is int
    assert layer.kernel.shape == layer.kernel_shape == (3, 2, 6)
    for wrong in ("ab", 1.5, [1.5]):
        with pytest.raises(TypeError):
            conv(4, 6, wrong)


def test_strides_and_dilations_of_none_mean_one_and_others_are_kept_as_given():
    x = random(1, 5, 2)
    given = conv(2, 3, 3, None, input_dilation=None, kernel_dilation=None)
    np.testing.assert_array_equal(given(x), conv(2, 3, 3)(x))
    layer = conv(2, 3, [3], [2], padding=[1], kernel_dilation=2)
    assert (layer.strides, layer.padding, layer.kernel_dilation) == ([2], [1], 2)


def test_groups_must_divide_the_channels():
    layer = conv(3, 4, 3, feature_group_count=2)
    with pytest.raises(AssertionError, match="feature_group_count=2.*in_features=3"):
        layer(jnp.ones((1, 5, 3)))


@BOTH
def test_any_number_of_batch_and_spatial_axes_which_are_independent(cls):
    for size in [(3,), (3, 2), (2, 2, 2, 2)]:
        layer, space = cls(2, 3, size, rngs=nnx.Rngs(0)), (5, 4, 3, 2)[: len(size)]
        for batch in [(), (3,), (0,), (2, 3)]:
            outputs = nnx.eval_shape(layer, jnp.ones((*batch, *space, 2)))
            assert outputs.shape == (*batch, *space, 3)
    layer, x = cls(2, 3, (3,), rngs=nnx.Rngs(0)), random(2, 3, 5, 2)
    y, one = programs.in_one_program(layer, x), programs.in_one_program(layer, x[1, 2])
    np.testing.assert_allclose(y[1, 2], one, rtol=1e-5, atol=1e-6)


def called(layer, x):
    """The lines from which a call is warned of; it may fail."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with contextlib.suppress(TypeError, ValueError):
                layer(x)
    assert all(x.category is nnx.errors.OneAxisWarning for x in caught)
    assert all(x.filename == __file__ for x in caught)
    return len(caught)


@BOTH
@pytest.mark.parametrize("shape", [(2, 9, 9, 2), (2, 4, 5, 6, 2)])
def test_an_image_given_to_a_layer_of_one_axis_is_warned_of_once(cls, shape):
    layer, x = cls(2, 3, 3, rngs=nnx.Rngs(0)), jnp.ones(shape)
    assert called(layer, x) == 1
    assert called(nnx.jit(lambda x: layer(x)), x) == 1
    assert called(nnx.Sequential(layer, nnx.relu), x) == 1
    whole = re.escape(str((3,) * (len(shape) - 2)))
    with pytest.warns(nnx.errors.OneAxisWarning, match=f"write kernel_size={whole}"):
        layer(x)


@BOTH
def test_what_can_not_be_a_mistake_or_changes_nothing_is_not_warned_of(cls):
    image = jnp.ones((2, 9, 9, 2))
    for size, strides, x in [
        ((3,), 1, image),
        ((3, 3), 1, image),
        (3, 1, image[0]),
        (3, 1, image[..., :1]),  # is an error
        (1, 1, image),
    ]:
        assert called(cls(2, 3, size, strides, rngs=nnx.Rngs(0)), x) == 0
    assert called(cls(2, 3, 1, 2, rngs=nnx.Rngs(0)), image) == 1


def test_causal_outputs_do_not_see_later_inputs():
    layer = conv(1, 1, 3, padding="CAUSAL", kernel_dilation=2)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x[:, None])[:, 0]))(jnp.ones(6))
    np.testing.assert_array_equal(np.triu(jacobian, 1), np.zeros((6, 6)))


@BOTH
def test_mask_is_multiplied_with_the_kernel_and_is_a_leaf(cls):
    mask = jnp.asarray(np.arange(24).reshape(3, 2, 4) % 3 > 0, float)
    layer, plain = (
        cls(2, 4, 3, mask=m, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones)
        for m in (mask, None)
    )
    kernel = layer.kernel[...]
    plain.kernel[...] = kernel * mask
    x = random(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    assert nnx.state(layer)["mask"] is mask
    layer.mask = jnp.ones((3, 2, 5))
    message = r"Mask needs to have the same shape as weights.*\(3, 2, 5\), \(3, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        layer(x)


# --------------------------------------------------------------------- ConvTranspose


@pytest.mark.parametrize("stride", [None, 1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_outputs_are_strides_times_as_long(stride, padding):
    layer = transpose(2, 3, (4, 3), stride, padding=padding)
    factor = stride or 1
    y = nnx.eval_shape(layer, random(2, 5, 4, 2))
    assert y.shape == (2, 5 * factor, 4 * factor, 3)


@tables.cases(
    "transpose_kernel, expected",
    (False, [3, 2, 1, 0, 0, 0, 0, 0]),
    (True, [2, 3, 0, 0, 0, 0, 0, 1]),
)
def test_circular_example_of_the_contract(transpose_kernel, expected):
    options = {"padding": "CIRCULAR", "transpose_kernel": transpose_kernel}
    layer = transpose(1, 1, 3, 2, **options)
    layer.kernel[...] = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    y = layer(jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 4, 1))
    np.testing.assert_array_equal(y.ravel(), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_circular_outputs_follow_a_rotation_of_the_inputs(size):
    layer, x = transpose(2, 3, size, 2, padding="CIRCULAR"), random(1, 5, 2)
    y = programs.in_one_program(layer, x)
    rotated = programs.in_one_program(layer, jnp.roll(x, 1, axis=1))
    np.testing.assert_allclose(rotated, np.roll(y, 2, axis=1), atol=1e-5)


def test_bias_is_added_once_after_the_fold():
    options = {"padding": "CIRCULAR", "bias_init": nnx.initializers.ones}
    layer = transpose(1, 1, 5, **options)
    np.testing.assert_array_equal(layer(jnp.zeros((1, 3, 1))), jnp.ones((1, 3, 1)))


# --------------------------------------------------------------------------------- LoRA


ONES = {"b_initializer": nnx.initializers.ones}


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def numbers(variable):
    return np.float64(variable[...])


def test_a_new_lora_changes_nothing():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    model = nnx.Sequential(base)
    x = array(5, 3)
    before = model(x)
    model.layers[0] = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model(x), before)


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


@tables.cases(
    "layer",
    nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0)),
    nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)),
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("shape", [(1, 5), (5,), ()])
def test_wrong_number_of_features_is_an_error_that_names_the_layer(layer, shape):
    phrase = "contracting dimensions" if shape else "number of axes"
    with pytest.raises(TypeError, match=f"{phrase}(.|\n)*at {type(layer).__name__}\n"):
        layer(jnp.ones(shape))


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
