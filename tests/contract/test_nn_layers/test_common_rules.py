"""What holds for all layers (contract, section 2), and where they are imported from.

More is in `tests/nn/`; hooks, random streams and
wrong inputs are in `test_errors.py`.
"""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import catalog, meshes, random_arrays, zoo

ones = jnp.ones
# Layers whose constructor takes ``rngs`` and has no default for it.
NEEDS_RNGS = [
    row
    for row in catalog.LAYERS
    if row.has_rngs
    and row.parameters()["rngs"].default is inspect.Parameter.empty
    and not row.wraps
    and not row.builds
]
needs_rngs = pytest.mark.parametrize("row", NEEDS_RNGS, ids=lambda row: row.name)


def params_of(layer):
    return {".".join(map(str, path)): v for path, v in flat(layer, nnx.Param)}


def flat(layer, *filters):
    return nnx.to_flat_state(nnx.state(layer, *filters))


# ----------------------------------------------------------------------- construction


@needs_rngs
def test_rngs_are_required_and_named(row):
    assert row.parameters()["rngs"].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match="rngs"):
        row.cls()(*row.arguments, **row.keywords)


@needs_rngs
@pytest.mark.parametrize("rngs", [0, jax.random.key(0), nnx.RngStream(0, tag="params")])
def test_something_other_than_rngs_is_an_attribute_error_about_params(row, rngs):
    with pytest.raises(AttributeError, match=r"(?s)'params'.*nnx\.Rngs"):
        row.make(rngs=rngs)


@needs_rngs
def test_rngs_without_params_and_default_are_an_attribute_error(row):
    with pytest.raises(AttributeError, match="No RngStream named 'params'"):
        row.make(rngs=nnx.Rngs(dropout=0))


@pytest.mark.parametrize("layer", [nnx.LayerNorm, nnx.BatchNorm, nnx.InstanceNorm])
def test_rngs_of_a_layer_that_draws_nothing_may_be_anything(layer):
    assert layer(3, use_scale=False, use_bias=False, rngs=None).scale is None
    with pytest.raises(TypeError, match="rngs"):
        layer(3, use_scale=False, use_bias=False)


# Constructor, and the names of its initializers with the paths of their Params.
INITIALIZED = {
    "Linear": ((2, 3), {"kernel": "kernel", "bias": "bias"}),
    "LinearGeneral": ((2, 3), {"kernel": "kernel", "bias": "bias"}),
    "Einsum": (("ab,bc->ac", (2, 3), 3), {"kernel": "kernel", "bias": "bias"}),
    "Conv": ((2, 3, 1), {"kernel": "kernel", "bias": "bias"}),
    "ConvTranspose": ((2, 3, 1), {"kernel": "kernel", "bias": "bias"}),
    "Embed": ((2, 3), {"embedding": "embedding"}),
    "BatchNorm": ((2,), {"scale": "scale", "bias": "bias"}),
    "LayerNorm": ((2,), {"scale": "scale", "bias": "bias"}),
    "RMSNorm": ((2,), {"scale": "scale"}),
    "GroupNorm": ((2, 1), {"scale": "scale", "bias": "bias"}),
    "InstanceNorm": ((2,), {"scale": "scale", "bias": "bias"}),
    "MultiHeadAttention": (
        (1, 2),
        {"kernel": "query.kernel", "out_kernel": "out.kernel", "bias": "value.bias"},
    ),
    "GRUCell": ((2, 3), {"kernel": "dense_i.kernel", "bias": "dense_i.bias"}),
}


@pytest.mark.parametrize("name", INITIALIZED)
def test_initializers_are_called_with_three_positional_arguments(name):
    arguments, paths = INITIALIZED[name]
    calls = {argument: [] for argument in paths}

    def initializer(argument):
        def init(*args, **keywords):
            calls[argument].append((args, keywords))
            return jnp.asarray(np.full(args[1], len(argument), args[2]))

        return init

    options = {f"{argument}_init": initializer(argument) for argument in paths}
    make = functools.partial(getattr(nnx, name), *arguments, **options)
    layer = make(param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    for argument, path in paths.items():
        (key, shape, dtype), keywords = calls[argument][0]
        assert (key.shape, dtype, keywords) == ((), jnp.float16, {})
        param = np.asarray(params_of(layer)[path])
        assert (param == len(argument)).all() and param.dtype == jnp.float16
        assert np.prod(shape) == param.size


@pytest.mark.parametrize("name", INITIALIZED)
def test_metadata_reaches_the_param_and_that_of_the_initializer_wins(name):
    arguments, paths = INITIALIZED[name]
    ones = nnx.with_metadata(nnx.initializers.ones, tag="initializer", a=1)
    options = {f"{argument}_init": ones for argument in paths}
    for argument in paths:
        options[f"{argument}_metadata"] = {"tag": "layer", "b": argument}
    layer = getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
    for argument, path in paths.items():
        param = params_of(layer)[path]
        assert (param.tag, param.a, param.b) == ("initializer", 1, argument)
        assert (np.asarray(param) == 1).all()


@pytest.mark.parametrize("name", ["Linear", "Conv", "LayerNorm"])
def test_sharding_in_metadata_needs_a_mesh_unless_it_is_not_eager(name):
    arguments, paths = INITIALIZED[name]
    argument, path = next(iter(paths.items()))
    make = getattr(nnx, name)

    def layer(**metadata):
        options = {f"{argument}_metadata": metadata, "rngs": nnx.Rngs(0)}
        return make(*arguments, **options)

    last = {"Linear": (None, "x"), "Conv": (None, None, "x"), "LayerNorm": ("x",)}
    names = last[name]
    with pytest.raises(ValueError, match="mesh context or metadata is required"):
        layer(out_sharding=names)
    lazy = layer(out_sharding=names, eager_sharding=False)
    assert params_of(lazy)[path].out_sharding == names


NORMS = ("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm")
OPTIONAL = [(name, "scale") for name in (*NORMS, "RMSNorm")]
OPTIONAL += [(name, "bias") for name in NORMS]
OPTIONAL += [(n, "bias") for n in ("Linear", "LinearGeneral", "Conv", "ConvTranspose")]


@pytest.mark.parametrize(("name", "member"), OPTIONAL)
def test_an_absent_param_is_none_and_may_be_assigned_later(name, member):
    options = {f"use_{member}": False, "rngs": nnx.Rngs(0)}
    layer = getattr(nnx, name)(*INITIALIZED[name][0], **options)
    assert getattr(layer, member) is None
    assert member not in params_of(layer)
    x = random_arrays.random(4, 5, 2)
    plain = np.asarray(layer(x))
    size = plain.shape[-1]
    setattr(layer, member, nnx.Param(jnp.asarray(np.full(size, 3, np.float32))))
    expected = plain + 3.0 if member == "bias" else plain * 3.0
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    setattr(layer, member, None)
    np.testing.assert_array_equal(layer(x), plain)


def test_other_absent_members_are_none():
    rngs = nnx.Rngs(0)
    attention = nnx.MultiHeadAttention(1, 2, rngs=rngs)
    members = "query_ln key_ln cached_key cached_value cache_index rngs".split()
    assert [getattr(attention, member) for member in members] == [None] * 6
    assert nnx.Dropout(0.5).rngs is None
    assert nnx.GRUCell(2, 3, rngs=rngs).rngs is None
    assert nnx.RNN(nnx.GRUCell(2, 3, rngs=rngs), rngs=False).rngs is None
    assert nnx.LoRA(2, 1, 3, rngs=rngs).base_module is None
    assert nnx.Conv(2, 3, 1, rngs=rngs).mask is None
    assert nnx.RoPE().cached_sin is nnx.RoPE().cached_cos is None
    layer = nnx.Linear(2, 3, rngs=rngs)
    assert nnx.WeightNorm(layer, use_scale=False, rngs=rngs).scales is None


def test_einsum_takes_a_bias_later():
    layer = nnx.Einsum("ab,bc->ac", (2, 3), rngs=nnx.Rngs(0))
    assert layer.bias is None
    plain = layer(ones((1, 2)))
    layer.bias = nnx.Param(ones(3))
    np.testing.assert_allclose(layer(ones((1, 2))), plain + 1, rtol=1e-6)


# ------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("name", "size", "flag"),
    [("BatchNorm", 2, "use_running_average"), ("Dropout", 0.5, "deterministic")],
)
def test_arguments_of_the_call_override_those_of_the_constructor(name, size, flag):
    def layer(value):
        return getattr(nnx, name)(size, **{flag: value}, rngs=nnx.Rngs(0))

    x = random_arrays.random(8, 2)
    results = {value: layer(value)(x) for value in (True, False)}
    assert (results[True] != results[False]).any()
    for given in (True, False):
        for stored in (True, False, None):
            y = layer(stored)(x, **{flag: given})
            np.testing.assert_array_equal(y, results[given])
    phrase = f"No `{flag}` argument was provided to {name}"
    with pytest.raises(ValueError, match=phrase):
        layer(None)(x)


# A layer, its inputs, how it is called, and the axis of the output to split.
SHARDED = {
    "Linear": ((2, 8), ones((3, 2)), "__call__", 1),
    "LinearGeneral": ((2, (8, 3)), ones((3, 2)), "__call__", 1),
    "Einsum": (("ab,bc->ac", (2, 8), 8), ones((3, 2)), "__call__", 1),
    "Conv": ((2, 8, 1), ones((1, 4, 2)), "__call__", 2),
    "Embed": ((5, 8), jnp.array([0, 1]), "__call__", 1),
    "Embed.attend": ((8, 2), ones((3, 2)), "attend", 1),
}


@pytest.mark.parametrize("name", SHARDED)
def test_out_sharding_is_that_of_the_result(name):
    arguments, inputs, method, axis = SHARDED[name]
    layer = getattr(nnx, name.split(".")[0])(*arguments, rngs=nnx.Rngs(0))
    shape = jax.eval_shape(getattr(layer, method), inputs)
    spec = P(*(None,) * axis, "x", *(None,) * (shape.ndim - axis - 1))
    with jax.set_mesh(meshes.mesh_of("Explicit", x=4)):
        call = lambda m, s: getattr(m, method)(inputs, out_sharding=s)  # noqa: E731
        call = jax.jit(call, static_argnums=1)
        sharded, free = call(layer, spec), call(layer, None)
    assert jax.typeof(sharded).sharding.spec == spec
    assert jax.typeof(free).sharding.is_fully_replicated
    np.testing.assert_allclose(sharded, free, rtol=1e-5)


def test_closing_over_a_layer_that_writes_is_an_error_before_it_writes():
    block, x = zoo.Block(), ones((4, 2))
    before = catalog.state_of(block)
    message = "Cannot mutate BatchStat from a different trace level"
    with pytest.raises(nnx.errors.TraceContextError, match=message):
        jax.jit(lambda x: block(x))(x)
    after = catalog.state_of(block)
    assert all((before[path] == after[path]).all() for path in before)


def test_shapes_of_a_layer_that_writes_are_evaluated_as_of_a_function():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert nnx.eval_shape(layer, ones((2, 3))).shape == (2, 3)
    assert (layer.mean[...] == 0).all()


# ------------------------------------------------------------------------------ imports

ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu"
    " log_sigmoid log_softmax logsumexp one_hot relu identity relu6 selu sigmoid silu"
    " soft_sign softmax softplus standardize swish tanh"
)

# Of each sub-module the names that are public, and those that are found there alone.
SUBMODULES = {
    "activations": (f"PReLU {ACTIVATIONS}", ""),
    "attention": (
        "MultiHeadAttention RoPE dot_product_attention dot_product_attention_with_rope"
        " make_attention_mask make_causal_mask combine_masks",
        "dot_product_attention_weights",
    ),
    "dtypes": ("", "canonicalize_dtype promote_dtype"),
    "initializers": ("Initializer", ""),
    "linear": (
        "Linear LinearGeneral Einsum Conv ConvTranspose Embed",
        "default_kernel_init default_bias_init default_embed_init canonicalize_padding",
    ),
    "lora": ("LoRA LoRALinear LoRAParam", ""),
    "normalization": (
        "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm SpectralNorm WeightNorm",
        "",
    ),
    "recurrent": (
        "RNNCellBase LSTMCell OptimizedLSTMCell SimpleCell GRUCell RNN Bidirectional",
        "flip_sequences RNNBase modified_orthogonal default_kernel_init"
        " default_bias_init",
    ),
    "stochastic": ("Dropout", ""),
}


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_submodule_has_its_names(submodule):
    module = importlib.import_module(f"graftree.nn.{submodule}")
    assert getattr(nnx.nn, submodule) is module
    public, hidden = map(str.split, SUBMODULES[submodule])
    assert {*public} <= {*nnx.__all__}
    for name in public:
        assert getattr(nnx, name) is getattr(module, name)
    for name in hidden:
        assert hasattr(module, name) and not hasattr(nnx, name)


def test_defaults_are_those_of_the_contract():
    linear, lora = nnx.nn.linear, nnx.nn.lora
    assert linear.default_bias_init is nnx.initializers.zeros
    assert lora.default_b_initializer is nnx.initializers.zeros
    key, shape = jax.random.key(0), (4, 3)
    for ours, jaxs in (
        (linear.default_kernel_init, jax.nn.initializers.lecun_normal()),
        (lora.default_a_initializer, jax.nn.initializers.he_uniform()),
    ):
        assert (ours(key, shape, "float32") == jaxs(key, shape, "float32")).all()


def test_rnn_base_is_a_protocol():
    assert inspect.isclass(nnx.nn.recurrent.RNNBase)
    assert getattr(nnx.nn.recurrent.RNNBase, "_is_protocol", False)


def test_flattening_of_padding_has_the_name_of_the_peer():
    canonicalize_padding = nnx.nn.linear.canonicalize_padding
    assert canonicalize_padding("SAME", 2) == "SAME"
    assert canonicalize_padding(1, 2) == [(1, 1), (1, 1)]
    assert canonicalize_padding(((0, 1), 2), 2) == [(0, 1), (2, 2)]
    with pytest.raises(ValueError, match="Invalid padding format.*len 2"):
        canonicalize_padding((1,), 2)


# ------------------------------------------------------------------------------- dtypes

dtypes = nnx.nn.dtypes


def promote(*args, **options):
    return dtypes.promote_dtype(args, **options)


INFERRED = [
    ((jnp.ones(1, jnp.int32),), jnp.float32),
    ((jnp.ones(1, bool),), jnp.float32),
    ((jnp.ones(1, jnp.bfloat16), 2.0), jnp.bfloat16),
    ((jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.float16)), jnp.float32),
    ((jnp.ones(1, jnp.complex64), jnp.ones(1)), jnp.complex64),
    ((None, jnp.ones(1, jnp.float16), None), jnp.float16),
    (([1.0, 2.0], 3), jnp.float32),
]


@pytest.mark.parametrize(("args", "expected"), INFERRED)
def test_dtype_is_inferred_from_what_is_there(args, expected):
    assert dtypes.canonicalize_dtype(*args) == expected
    promoted = promote(*args)
    assert isinstance(promoted, tuple)
    for given, x in zip(args, promoted, strict=True):
        assert x is None if given is None else x.dtype == expected


def test_integers_stay_if_they_may():
    integers = jnp.ones(1, jnp.int32)
    assert dtypes.canonicalize_dtype(integers, inexact=False) == jnp.int32
    (x,) = promote(integers, inexact=False)
    assert x.dtype == jnp.int32
    assert dtypes.canonicalize_dtype(1, dtype=jnp.int8, inexact=False) is jnp.int8


@pytest.mark.parametrize("dtype", [jnp.float16, "bfloat16", np.dtype("float32")])
def test_a_given_dtype_is_the_answer_itself(dtype):
    assert dtypes.canonicalize_dtype(jnp.ones(1), dtype=dtype) is dtype
    (x,) = promote(jnp.ones(1), dtype=dtype)
    assert x.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int32, "int8", bool])
def test_a_given_dtype_must_be_inexact(dtype):
    for call in (dtypes.canonicalize_dtype, promote):
        with pytest.raises(ValueError, match="Dtype must be inexact"):
            call(jnp.ones(1), dtype=dtype)


@pytest.mark.parametrize("args", [(), (None,), (None, None)])
def test_nothing_to_infer_from_is_a_value_error(args):
    for call in (dtypes.canonicalize_dtype, promote):
        with pytest.raises(ValueError):
            call(*args)


def test_promote_dtype_takes_one_positional_argument():
    (args, *options) = inspect.signature(dtypes.promote_dtype).parameters.values()
    assert args.kind is inspect.Parameter.POSITIONAL_ONLY
    assert {o.kind for o in options} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        dtypes.promote_dtype(1.0, 2.0)


# ------------------------------------------------------------------------- initializers


@pytest.mark.parametrize(("name", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_ones_and_zeros_are_initializers_and_what_their_factories_give(name, value):
    init = getattr(nnx.initializers, name)
    parameters = [*inspect.signature(init).parameters]
    assert parameters == ["key", "shape", "dtype", "out_sharding"]
    assert init(None, (2,), jnp.bfloat16).tolist() == [value, value]
    assert getattr(nnx.initializers, f"{name}_init")() is init


def test_initializers_and_their_type_have_two_names():
    assert nnx.initializers is nnx.nn.initializers
    assert nnx.Initializer is nnx.initializers.Initializer
