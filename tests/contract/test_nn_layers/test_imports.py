"""Where programs find the layers, dtypes, initializers (contract, sections 1, 3, 4)."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu"
    " log_sigmoid log_softmax logsumexp one_hot relu identity relu6 selu sigmoid silu"
    " soft_sign softmax softplus standardize swish tanh"
).split()

TOP_LEVEL = (
    "Linear LinearGeneral Einsum Conv ConvTranspose Embed LoRA LoRALinear LoRAParam"
    " PReLU MultiHeadAttention RoPE dot_product_attention"
    " dot_product_attention_with_rope make_attention_mask make_causal_mask"
    " combine_masks BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm SpectralNorm"
    " WeightNorm Dropout RNNCellBase LSTMCell OptimizedLSTMCell SimpleCell GRUCell RNN"
    " Bidirectional avg_pool max_pool min_pool pool logical_axis_rules initializers"
    " Initializer"
).split() + ACTIVATIONS

SUBMODULES = {
    "activations": ["PReLU", *ACTIVATIONS],
    "attention": (
        "MultiHeadAttention RoPE dot_product_attention dot_product_attention_with_rope"
        " dot_product_attention_weights make_attention_mask make_causal_mask"
        " combine_masks"
    ).split(),
    "dtypes": ["canonicalize_dtype", "promote_dtype"],
    "initializers": ["Initializer", "lecun_normal", "ones_init", "zeros_init"],
    "linear": (
        "Linear LinearGeneral Einsum Conv ConvTranspose Embed default_kernel_init"
        " default_bias_init default_embed_init canonicalize_padding"
    ).split(),
    "lora": (
        "LoRA LoRALinear LoRAParam default_a_initializer default_b_initializer"
    ).split(),
    "normalization": (
        "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm SpectralNorm WeightNorm"
    ).split(),
    "recurrent": (
        "RNNCellBase LSTMCell OptimizedLSTMCell SimpleCell GRUCell RNN Bidirectional"
        " flip_sequences RNNBase modified_orthogonal default_kernel_init"
        " default_bias_init"
    ).split(),
    "stochastic": ["Dropout"],
}
# Names of sub-modules that the public namespace does not have.
HIDDEN = (
    "dot_product_attention_weights canonicalize_dtype promote_dtype flip_sequences"
    " RNNBase modified_orthogonal default_kernel_init default_bias_init"
    " default_embed_init canonicalize_padding"
).split()


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_name_is_in_the_public_namespace(name):
    assert hasattr(nnx, name)
    assert name in nnx.__all__


@pytest.mark.parametrize("name", HIDDEN)
def test_name_is_not_in_the_public_namespace(name):
    assert not hasattr(nnx, name)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_submodule_has_its_names(submodule):
    module = importlib.import_module(f"graftree.nn.{submodule}")
    assert getattr(nnx.nn, submodule) is module
    for name in SUBMODULES[submodule]:
        value = getattr(module, name)
        if name in TOP_LEVEL:
            assert value is getattr(nnx, name)


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

INITIALIZERS = (
    "constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform"
    " kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal"
    " truncated_normal uniform variance_scaling xavier_normal xavier_uniform zeros"
).split()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_are_the_objects_of_jax(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


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
