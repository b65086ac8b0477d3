"""LoRA against NumPy in float64: values, dtypes, base modules, sharding."""

import pickle

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftree as nnx
from graftree.nn import lora

ONES = {"b_initializer": nnx.initializers.ones}


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def numbers(variable):
    return np.float64(variable[...])


@pytest.mark.parametrize("batch", [(), (5,), (2, 0), (2, 3, 4)])
def test_lora_is_a_product_of_two_matrices(batch):
    layer = nnx.LoRA(3, 2, 4, **ONES, rngs=nnx.Rngs(0))
    x = random(*batch, 3)
    expected = np.float64(x) @ numbers(layer.lora_a) @ numbers(layer.lora_b)
    assert layer(x).shape == (*batch, 4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_lora_is_added_to_the_base_module():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(3, 2, 4, base_module=base, **ONES, rngs=nnx.Rngs(1))
    x = random(5, 3)
    change = np.float64(x) @ numbers(layer.lora_a) @ numbers(layer.lora_b)
    np.testing.assert_allclose(layer(x), np.float64(base(x)) + change, rtol=1e-5)
    assert layer.base_module is base


def test_a_new_lora_changes_nothing():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    model = nnx.Sequential(base)
    x = random(5, 3)
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
    x = random(5, 3)
    np.testing.assert_array_equal(layer(x, deterministic=True), layer(x))


def test_base_module_may_be_assigned_later():
    layer = nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0))
    assert layer.base_module is None
    layer.base_module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = random(5, 3)
    np.testing.assert_array_equal(layer(x), layer.base_module(x))


def test_base_module_must_be_callable():
    layer = nnx.LoRA(3, 2, 4, base_module=nnx.Module(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="of LoRA must be callable, got .*Module"):
        layer(jnp.ones((1, 3)))


def test_lora_linear_is_a_linear_plus_lora():
    layer = nnx.LoRALinear(3, 4, lora_rank=2, **ONES, rngs=nnx.Rngs(0))
    x = random(5, 3)
    change = numbers(layer.lora.lora_a) @ numbers(layer.lora.lora_b)
    expected = np.float64(x) @ (numbers(layer.kernel) + change)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert isinstance(layer, nnx.Linear)
    assert layer.lora.base_module is None


def test_lora_linear_draws_as_a_linear_does_and_then_twice():
    rngs = nnx.Rngs(0)
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs)
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel[...], linear.kernel[...])
    assert rngs.default.count[...] == 4
    a = layer.lora.lora_a[...]
    first = [1.1382990, 1.1661402, -0.4495851, -0.7917019]
    np.testing.assert_allclose(a.ravel()[:4], first, rtol=1e-6)
    np.testing.assert_allclose(a.sum(), 1.5041376, rtol=1e-6)


def test_a_is_drawn_before_b():
    rngs = nnx.Rngs(params=5)
    normal = nnx.initializers.normal()
    layer = nnx.LoRA(3, 2, 4, b_initializer=normal, rngs=rngs)
    keys = [jax.random.fold_in(jax.random.key(5), n) for n in range(2)]
    a = nnx.initializers.he_uniform()(keys[0], (3, 2), jnp.float32)
    b = normal(keys[1], (2, 4), jnp.float32)
    np.testing.assert_array_equal(layer.lora_a[...], a)
    np.testing.assert_array_equal(layer.lora_b[...], b)
    assert rngs.params.count[...] == 2


def test_state_of_a_linear_fits():
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(1))
    nnx.update(layer, nnx.state(linear))
    x = random(5, 3)
    np.testing.assert_array_equal(layer(x), linear(x))


def test_parameters_are_params_that_a_filter_tells_apart():
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    _, adapted, frozen = nnx.split(layer, nnx.LoRAParam, nnx.Param)
    paths = [path for path, _ in nnx.to_flat_state(adapted)]
    assert paths == [("lora", "lora_a"), ("lora", "lora_b")]
    assert [path for path, _ in nnx.to_flat_state(frozen)] == [("bias",), ("kernel",)]
    assert issubclass(nnx.LoRAParam, nnx.Param)


def test_lora_param_has_no_registered_name():
    with pytest.raises(ValueError, match="LoRAParam"):
        nnx.variable_name_from_type(nnx.LoRAParam)


def test_class_and_metadata_of_the_variables_may_be_given():
    layer = nnx.LoRALinear(
        3,
        4,
        lora_rank=2,
        lora_param_type=nnx.Cache,
        a_metadata={"a": 1},
        b_initializer=nnx.with_metadata(nnx.initializers.ones, note="b"),
        b_metadata={"b": 2},
        use_bias=False,
        rngs=nnx.Rngs(0),
    )
    assert type(layer.lora.lora_a) is type(layer.lora.lora_b) is nnx.Cache
    assert (layer.lora.lora_a.a, layer.lora.lora_b.b) == (1, 2)
    assert layer.lora.lora_b.note == "b"
    assert layer.bias is None


HALF = jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "inputs", "expected"),
    [
        ({}, jnp.float32, jnp.float32),
        ({}, HALF, jnp.float32),
        ({}, jnp.int32, jnp.float32),
        ({"param_dtype": HALF}, HALF, HALF),
        ({"dtype": HALF}, jnp.float32, HALF),
        ({"dtype": "float16"}, jnp.float32, jnp.float16),
    ],
)
def test_output_dtype(options, inputs, expected):
    layer = nnx.LoRA(3, 2, 4, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((1, 3), inputs)).dtype == expected
    assert layer.lora_a.dtype == options.get("param_dtype", jnp.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora_dtype": HALF}, jnp.float32),
        ({"lora_param_dtype": HALF}, jnp.float32),
        ({"dtype": HALF}, HALF),
        ({"dtype": HALF, "lora_dtype": HALF}, HALF),
        ({"dtype": HALF, "lora_dtype": jnp.float32}, jnp.float32),
        ({"dtype": HALF, "preferred_element_type": jnp.float32}, jnp.float32),
        ({"param_dtype": HALF, "lora_param_dtype": HALF}, jnp.float32),
    ],
)
def test_lora_computes_in_the_dtype_of_the_linear_unless_told_otherwise(
    options, expected
):
    layer = nnx.LoRALinear(3, 4, lora_rank=2, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((1, 3))).dtype == expected
    assert layer.lora.lora_a.dtype == options.get("lora_param_dtype", jnp.float32)


def test_promotion_hook_gets_inputs_and_both_matrices():
    seen = []

    def promote(args, **kwargs):
        seen.append(([x.shape for x in args], kwargs))
        return args

    nnx.LoRA(3, 2, 4, promote_dtype=promote, rngs=nnx.Rngs(0))(jnp.ones((1, 3)))
    assert seen == [([(1, 3), (3, 2), (2, 4)], {"dtype": None})]


@pytest.mark.parametrize(
    "layer",
    [
        nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0)),
        nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("shape", [(1, 5), (5,), ()])
def test_wrong_number_of_features_is_an_error_that_names_the_layer(layer, shape):
    phrase = "contracting dimensions" if shape else "number of axes"
    with pytest.raises(TypeError, match=f"{phrase}(.|\n)*at {type(layer).__name__}\n"):
        layer(jnp.ones(shape))


def test_integer_dtype_is_refused_at_the_call():
    layer = nnx.LoRA(3, 2, 4, dtype=jnp.int32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        layer(jnp.ones((1, 3)))


def test_unknown_keywords_are_those_of_linear():
    with pytest.raises(TypeError, match="use_bais"):
        nnx.LoRALinear(3, 4, lora_rank=2, use_bais=False, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("float64")
def test_gradients_equal_finite_differences():
    base = nnx.Linear(3, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    options = {"param_dtype": jnp.float64, **ONES}
    layer = nnx.LoRA(3, 2, 4, base_module=base, **options, rngs=nnx.Rngs(1))
    graphdef, state = nnx.split(layer)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)

    @jax.jit
    def loss(state, x):
        return jnp.sin(nnx.merge(graphdef, state)(x)).sum()

    jax.test_util.check_grads(loss, (state, x), order=1, modes=["rev"])


def test_adapted_layers_can_be_pickled():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(3, 2, 4, base_module=base, **ONES, rngs=nnx.Rngs(1))
    x = random(5, 3)
    copy = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(copy(x), layer(x))
    assert type(copy.lora_a) is nnx.LoRAParam


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("make", ["wrapped", "linear"])
def test_out_sharding_is_that_of_both_terms(make, named):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    layer = nnx.LoRALinear(4, 6, lora_rank=3, **ONES, rngs=nnx.Rngs(0))
    if make == "wrapped":
        base = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        layer = nnx.LoRA(4, 3, 6, base_module=base, **ONES, rngs=nnx.Rngs(1))
    x, spec = random(2, 4), PartitionSpec(None, "y")
    expected = layer(x)
    with jax.set_mesh(mesh):
        # Split along what is contracted, JAX has to be told the sharding of products.
        rows, columns = PartitionSpec("x", None), PartitionSpec(None, "x")
        for path, variable in nnx.to_flat_state(nnx.state(layer)):
            if path[-1] in ("kernel", "lora_a"):
                variable.set_value(jax.device_put(variable[...], rows))
        x = jax.device_put(x, columns)
        out_sharding = NamedSharding(mesh, spec) if named else spec
        y = jax.jit(lambda m, x: m(x, out_sharding=out_sharding))(layer, x)
    assert jax.typeof(y).sharding.spec == spec
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["LoRA", "LoRALinear", "LoRAParam"])
def test_older_path_has_the_names(name):
    assert getattr(nnx.nn.lora, name) is getattr(nnx, name)
    assert lora.default_b_initializer is nnx.initializers.zeros


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_lora_equals_the_peer(peer, dtype, param_dtype):
    def make(library):
        options = {"dtype": dtype, "param_dtype": param_dtype, **ONES}
        base = library.Linear(6, 5, dtype=dtype, rngs=library.Rngs(1))
        return library.LoRA(6, 2, 5, base_module=base, **options, rngs=library.Rngs(3))

    ours, theirs = make(nnx), make(peer)
    x = random(2, 7, 6)
    np.testing.assert_array_equal(ours.lora_a[...], theirs.lora_a[...])
    assert ours(x).dtype == theirs(x).dtype
    np.testing.assert_array_equal(ours(x), theirs(x))


@pytest.mark.peers
@pytest.mark.parametrize(
    "options", [{}, {"lora_dtype": HALF}, {"dtype": HALF, "lora_dtype": HALF}]
)
def test_lora_linear_equals_the_peer(peer, options):
    options = {"lora_rank": 2, **options, **ONES}
    ours = nnx.LoRALinear(6, 5, **options, rngs=nnx.Rngs(3))
    theirs = peer.LoRALinear(6, 5, **options, rngs=peer.Rngs(3))
    x = random(2, 7, 6)
    assert ours(x).dtype == theirs(x).dtype
    np.testing.assert_array_equal(ours(x), theirs(x))
